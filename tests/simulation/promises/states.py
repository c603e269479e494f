"""The state of a controller as plain data, so that it can be compared with that of another life."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from torchstore_core.server.controller import Controller
from torchstore_core.server.keeping.recorded_holds import HOLDS
from torchstore_core.server.keeping.state import CATALOG

__all__ = ["OF_A_LIFE", "state_of"]

# Times are those of a log, which are a little later.
_TIMES = ("created", "closed")
#: What a new life begins anew: what is due, and who is connected. (Of leases that were ended before
#: they began, a log does not say whether they have been asked for and refused since.)
OF_A_LIFE = (*_TIMES, "due", "is_hurried", "channels", "met", "meets", "ending", "opened")
OF_A_LIFE += ("handshakes_weight", "ended_early")


def state_of(controller: Controller, without: Collection[str] = _TIMES) -> Any:
    """All of its state as plain data; of what several refer to, where it came first.

    Args:
        without: names of fields that are left out.
    """
    catalog = controller.catalog
    holds = controller.holds
    accounts = [(v.allocator.free_ranges(), v.allocator.used) for v in controller.volumes]
    accounts += [(v.inline, v.leased, v.unfinished) for v in controller.volumes]
    due = [] if "due" in without else [what for _, _, what in sorted(holds._deadlines)]
    roots = [
        dict(sorted(catalog.newest.items())),
        vars(catalog.timelines),
        *(getattr(catalog, name) for name in CATALOG),
        {name: getattr(holds, name) for name in HOLDS if name not in ("_deadlines", "_counter")},
        due,
        {key: one[:2] for key, one in catalog.evictions.remembered.items()},
        controller.spilling.values.cached(),
        controller.spilling.evicted,
    ]
    sessions = dict(sorted(controller.sessions.items()))
    return _plain([*roots, sessions, accounts], {}, without)


def _plain(one: Any, seen: dict[int, int], without: Collection[str]) -> Any:
    if isinstance(one, msgspec.Struct) and one.__struct_config__.frozen:
        return one
    if isinstance(one, msgspec.Struct | dict | list | set):
        if id(one) in seen:
            return ("as", seen[id(one)])
        seen[id(one)] = len(seen)
    if isinstance(one, msgspec.Struct):
        names = [name for name in one.__struct_fields__ if name not in without]
        return (type(one), [_plain(getattr(one, name), seen, without) for name in names])
    if isinstance(one, dict):
        names = [getattr(key, "token", key) for key in one]
        parts = [_plain(value, seen, without) for value in one.values()]
        return list(zip(names, parts, strict=True))
    if isinstance(one, set):
        parts = sorted(one, key=lambda x: getattr(x, "token", x))
        return [_plain(child, seen, without) for child in parts]
    if isinstance(one, list | tuple):
        return [_plain(child, seen, without) for child in one]
    return one
