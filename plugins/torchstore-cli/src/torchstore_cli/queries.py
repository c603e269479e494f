"""The requests behind ``status``, ``ls``, ``stat``, ``rm`` and ``drain``. Torch-free."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Sequence

import msgspec

from torchstore_cli import reports
from torchstore_cli.connection import open_store
from torchstore_cli.doctor.plugin_check import check_plugins
from torchstore_core.errors import StoreTimeoutError, in_seconds
from torchstore_core.machine import topology
from torchstore_core.plugins.installed import OBSERVERS
from torchstore_core.plugins.ranking import Policy
from torchstore_core.plugins.registry import Registry
from torchstore_core.reports.repairs import check_drain
from torchstore_core.wire import messages as m

__all__ = ["ask_key", "ask_keys", "ask_refs", "ask_status", "drain", "remove"]

_PAUSE_S = 0.2


async def ask_status(address: str | None, timeout: float) -> reports.StatusReport:
    """Return the status of one store."""
    async with open_store(address, timeout) as store:
        status = (await store.call(m.StatusReply, m.Status)).status
    errors = {**await _observer_errors(), **status.plugin_errors}
    me = (os.getpid(), topology.probe().hostname)
    fields = msgspec.structs.asdict(status)
    fields["sessions"] = [s for s in status.sessions if (s.pid, s.hostname) != me]
    fields["operations"] = dict(sorted(status.operations.items()))
    fields["plugin_errors"] = dict(sorted(errors.items()))
    return reports.StatusReport(address=store.address, **fields)


async def ask_refs(address: str | None, timeout: float) -> reports.RefsReport:
    """Which versions are held, and by whom; the largest first."""
    async with open_store(address, timeout) as store:
        refs = (await store.call(m.RefsReply, m.Refs)).refs
    ordered = sorted(refs, key=lambda ref: (-ref.nbytes, ref.key, ref.version))
    return reports.RefsReport(store.address, ordered)


async def _observer_errors() -> dict[str, str]:
    """Return the errors of the observers installed here, which only clients load."""
    block = Policy.unchecked().block
    names = [(OBSERVERS, name) for name in Registry(block=block).names(OBSERVERS)]
    checked = await check_plugins(names, block)
    return {f"{group}:{n}": o.error for (group, n), o in checked.items() if o.error is not None}


async def ask_keys(address: str | None, timeout: float, prefix: str) -> reports.KeyReport:
    """List the keys that start with ``prefix``, one page at a time."""
    entries: list[reports.KeyLine] = []
    pending: list[m.Pending] = []
    async with open_store(address, timeout) as store:
        after, more = "", True
        while more:
            page = await store.call(m.Listing, m.List, prefix, after)
            entries += map(reports.KeyLine.make, page.entries)
            pending += page.pending
            more = page.more
            last = [e.key for e in page.entries[-1:]] + [p.key for p in page.pending[-1:]]
            after = max(last, default="")
    return reports.KeyReport(store.address, prefix, entries, pending)


async def ask_key(address: str | None, timeout: float, key: str) -> reports.KeyDetails:
    """Return everything that is known about one key. Raises KeyNotFoundError."""
    async with open_store(address, timeout) as store:
        return reports.KeyDetails.make((await store.call(m.StatReply, m.Stat, key)).found)


async def remove(
    address: str | None, timeout: float, keys: Sequence[str], *, prefix: bool
) -> reports.Removed:
    """Delete keys, or (``prefix``) all keys that start with one of ``keys``.

    Raises:
        KeyNotFoundError: a key does not exist; nothing was deleted.
    """
    async with open_store(address, timeout) as store:
        if not prefix:
            names = list(dict.fromkeys(keys))
        else:
            found: set[str] = set()
            for start in keys:
                found.update((await store.call(m.KeyList, m.Keys, start)).keys)
            names = sorted(found)
        count = 0
        if names:
            count = (await store.call(m.Deleted, m.Delete, names, not prefix)).count
    return reports.Removed(store.address, count, names)


async def drain(
    address: str | None, timeout: float, volume: str, *, undo: bool, wait: float | None
) -> reports.Drained:
    """Drain a volume, or put it back in service.

    Args:
        timeout: seconds for each answer.
        wait: seconds until it must be empty; None: any time; 0: do not wait.

    Raises:
        DrainError: something cannot be moved, or somebody else has put it back in service.
        StoreTimeoutError: it takes longer.
        ConfigurationError: there is no such volume, or it is lost.
    """
    until = math.inf if wait is None else time.monotonic() + wait
    async with open_store(address, timeout) as store:
        what = "undo" if undo else "begin"
        while True:
            report = (await store.call(m.DrainReply, m.Drain, volume, what)).report
            if undo or wait == 0 or report.done:
                return reports.Drained.of(store.address, report)
            check_drain(report, "--undo")
            if time.monotonic() >= until:
                raise StoreTimeoutError(
                    f"{report} after {in_seconds(wait)}; it goes on",
                    details=msgspec.structs.asdict(report),
                )
            what = "look"
            await asyncio.sleep(_PAUSE_S)
