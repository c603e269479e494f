"""The requests behind ``drain``. Torch-free."""

from __future__ import annotations

import asyncio
import math
import time

import msgspec

from torchstore_cli import reports
from torchstore_cli.connection import open_store
from torchstore_core.errors import StoreTimeoutError, in_seconds
from torchstore_core.reports.repairs import check_drain
from torchstore_core.wire import messages as m

__all__ = ["drain"]

_PAUSE_S = 0.2


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
