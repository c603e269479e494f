"""The state of a controller as plain data, so that it can be compared with that of another life."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from operator import attrgetter
from types import NoneType
from typing import Any

import msgspec

from torchstore_core.server.controller import Controller
from torchstore_core.server.keeping.recorded_holds import HOLDS
from torchstore_core.server.keeping.state import CATALOG
from torchstore_core.server.spilling.policy import State

__all__ = ["OF_A_LIFE", "state_of"]

# Times are those of a log, which are a little later.
_TIMES = ("created", "closed")
#: What a new life begins anew: what is due, and who is connected. (Of leases that were ended before
#: they began, a log does not say whether they have been asked for and refused since.)
OF_A_LIFE = (*_TIMES, "due", "is_hurried", "channels", "met", "meets", "ending", "opened")
OF_A_LIFE += ("handshakes_weight", "ended_early")
_ATOMS = frozenset((NoneType, bool, int, float, str, bytes))


def state_of(controller: Controller, without: tuple[str, ...] = _TIMES) -> Any:
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
        [(t.value, t.key) for t in controller.spilling.values.all() if t.state is State.CACHED],
        controller.spilling.evicted,
    ]
    sessions = dict(sorted(controller.sessions.items()))
    return _Plain(without).of([*roots, sessions, accounts])


class _Plain:
    """Makes plain data. ``without``: names of fields that are left out."""

    def __init__(self, without: tuple[str, ...]) -> None:
        self._without = without
        self._seen: dict[int, int] = {}

    def of(self, one: Any) -> Any:
        """One as plain data."""
        kind = type(one)
        family = _family(kind)
        if family is None:
            return one
        if family is tuple:
            return self._all(one)
        if again := self._again(one):
            return again
        if family is list:
            return self._all(one)
        if family is dict:
            names = [getattr(key, "token", key) for key in one]
            return list(zip(names, self._all(one.values()), strict=True))
        if family is set:
            return self._all(sorted(one, key=lambda x: getattr(x, "token", x)))
        return kind, self._all(_fields(kind, self._without)(one))

    def _all(self, parts: Iterable[Any]) -> list[Any]:
        of = self.of
        return [one if type(one) in _ATOMS else of(one) for one in parts]

    def _again(self, one: Any) -> tuple[str, int] | None:
        """Which one it is of those that came before."""
        seen = self._seen
        number = seen.get(id(one))
        if number is not None:
            return ("as", number)
        seen[id(one)] = len(seen)
        return None


@functools.cache
def _family(kind: type) -> type | None:
    """What objects of a class are, of the kinds of which the parts count; None: of none."""
    if kind in _ATOMS or (issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen):
        return None
    families = (msgspec.Struct, dict, set, list, tuple)
    return next((one for one in families if issubclass(kind, one)), None)


@functools.cache
def _fields(kind: type[msgspec.Struct], without: tuple[str, ...]) -> Callable[[Any], Iterable[Any]]:
    """What gets the fields of objects of a class."""
    names = [name for name in kind.__struct_fields__ if name not in without]
    return attrgetter(*names) if len(names) > 1 else lambda one: [getattr(one, x) for x in names]
