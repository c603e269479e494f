"""Work that would keep an event loop from others."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable
from typing import TypeVar

from torchstore_core.machine.copying import DIRECT_MAX
from torchstore_core.machine.tasks import wait_ended

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run it in a thread. It has ended when this returns or raises, even if cancelled."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled = await wait_ended(running)
    done = running.result()
    if cancelled:
        raise asyncio.CancelledError
    return done


async def where_it_fits(nbytes: int, work: Callable[[], T]) -> T:
    """Copy so many bytes: a few on the event loop, because another thread would cost as much; more
    in a thread, which has ended when this returns or raises, even if cancelled.
    """
    return work() if nbytes <= DIRECT_MAX else await in_thread(work)


_TORCH = "torch"


def is_torch_unfinished() -> bool:
    """Return whether a thread is importing torch, which takes seconds: there is a module already,
    without all of its classes. As soon as there is such a module, the engine asks of all memory
    whether it is a tensor, and fails until it has them; and no message of the engine's is encoded
    or decoded before the import has ended.
    """
    spec = getattr(sys.modules.get(_TORCH), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))  # what an import statement looks at


def finish_torch() -> None:
    """Wait until no other thread is importing torch; imports nothing itself. Blocks."""
    if is_torch_unfinished():
        importlib.import_module(_TORCH)
