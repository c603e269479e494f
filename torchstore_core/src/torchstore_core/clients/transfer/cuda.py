"""Copies between CUDA tensors and segments, on a side stream, page-locked if the driver allows.

Never executed where torch has no CUDA; most of its tests carry the ``gpu`` marker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import warnings
from collections.abc import Iterable, Sequence

import torch

from torchstore_core.clients.calls.thread_loops import in_thread
from torchstore_core.contracts.transport import Window
from torchstore_core.machine.tasks import wait_ended
from torchstore_core.machine.virtual_memory import before_unmap

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]

# Memory is page-locked in aligned blocks of this many bytes, counted from the start of the
# window, and each block only once in the life of the process.
_BLOCK = 16 << 20

_lock = threading.Lock()
_pinned: dict[int, int] = {}  # address of a block -> pid of the process that locked it
_pinning_works = True
_streams: dict[int, torch.cuda.Stream] = {}


async def transfer(pairs: Pairs, window: Window) -> None:
    """Copy ``(target, source)`` pairs: one tensor is on a device, the other inside ``window``.

    When this returns, the copies are complete. They run after any work that is already queued on
    the caller's current streams.
    """
    await _transfer(pairs, window)


async def copy(pairs: Pairs) -> None:
    """The same, for pairs of which one tensor is in any memory of the host."""
    await _transfer(pairs, None)


async def settled(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the work that is queued on the caller's current streams: somebody who knows nothing
    of streams is about to read or write the memory of these tensors.
    """
    events = _queued(tensors).values()

    def wait() -> None:
        for event in events:
            event.synchronize()

    if events:
        await in_thread(wait)


def _queued(tensors: Iterable[torch.Tensor]) -> dict[torch.device, torch.cuda.Event]:
    """Events after what is queued on the caller's current streams of CUDA devices."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}


async def _transfer(pairs: Pairs, window: Window | None) -> None:
    ready = _queued(source if target.is_cpu else target for target, source in pairs)
    # Run to the end even if cancelled: the memory must not be released during a running copy.
    await finished(asyncio.create_task(in_thread(lambda: _copy(pairs, window, ready))))


async def finished(task: asyncio.Task[None]) -> None:
    """Wait for ``task`` to end, even if the caller is cancelled; then re-raise the cancellation."""
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await wait_ended(task)
        raise


@torch.inference_mode()  # where tensors of that mode may be written to, too
def _copy(pairs: Pairs, window: Window | None, ready: dict[torch.device, torch.cuda.Event]) -> None:
    used: set[torch.cuda.Stream] = set()
    try:
        for target, source in pairs:
            device = (source if target.is_cpu else target).device
            if device not in ready:  # of another kind than CUDA's
                target.copy_(source)
                continue
            stream = _stream(device)
            if stream not in used:
                stream.wait_event(ready[device])
                used.add(stream)
            with torch.cuda.device(device), torch.cuda.stream(stream):
                if window is None:
                    target.copy_(source)
                else:
                    _copy_in_window(target, source, window)
    finally:  # after a failure as well: earlier copies may still be running
        for stream in used:
            stream.synchronize()


def _copy_in_window(target: torch.Tensor, source: torch.Tensor, window: Window) -> None:
    """Start the copy of one pair. Only contiguous bytes cross between host and device; they are
    cast and arranged on the device.
    """
    if not (target if target.is_cpu else source).is_contiguous():
        target.copy_(source)  # torch goes through host memory of its own, which is not page-locked
    elif target.is_cpu:
        _copy_bytes(target, source.to(target.dtype).contiguous(), window)
    elif target.is_contiguous() and target.dtype is source.dtype:
        _copy_bytes(target, source, window)
    else:
        arrived = target.new_empty(source.shape, dtype=source.dtype)
        _copy_bytes(arrived, source, window)
        target.copy_(arrived)


def _copy_bytes(target: torch.Tensor, source: torch.Tensor, window: Window) -> None:
    """Start copies of parts that each lie in one block: CUDA refuses to copy what is page-locked in
    several pieces, or in part.
    """
    to, of = target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
    on_host, on_device = (to, of) if to.is_cpu else (of, to)
    start = at = on_host.data_ptr() - window.address
    end = start + to.numel()
    while at < end:
        block = at // _BLOCK * _BLOCK
        stop = min(end, block + _BLOCK)
        _pin(window.address + block, min(_BLOCK, window.nbytes - block), on_device)
        to[at - start : stop - start].copy_(of[at - start : stop - start], non_blocking=True)
        at = stop


def _pin(block: int, nbytes: int, on_device: torch.Tensor) -> None:
    """Page-lock one block, for copies of a tensor. A failure (memlock limit, end of mapping) only
    causes one warning: copies are slower without page-locking, but still correct.
    """
    global _pinning_works
    with _lock:
        if not _pinning_works or block in _pinned:
            return
        runtime = torch.cuda.cudart()
        result = runtime.cudaHostRegister(block, nbytes, 0)
        if int(result) == 0:
            _pinned[block] = os.getpid()
            return
        _pinning_works = False
    # The refusal remains the pending error of this thread, and the next kernel of the thread raises
    # it, whoever that belongs to.
    with contextlib.suppress(RuntimeError):
        on_device.new_ones(1)
    warnings.warn(
        f"the driver does not page-lock shared memory (error {int(result)}); copies to and from "
        "CUDA devices are slower (see ulimit -l)",
        RuntimeWarning,
        stacklevel=2,
    )


def _unpin(address: int, nbytes: int) -> None:
    """Unlock a window before it is unmapped: another one may later be mapped at its address."""
    # Without the lock: in a forked child, it may be held by a thread that does not exist there.
    # No other thread pins a window that is being closed.
    for block in [b for b in _pinned if address <= b < address + nbytes]:
        if _pinned.pop(block, None) == os.getpid():  # only the process that locked it
            torch.cuda.cudart().cudaHostUnregister(block)


before_unmap(_unpin)


def _stream(device: torch.device) -> torch.cuda.Stream:
    index = device.index
    with _lock:
        if index not in _streams:
            _streams[index] = torch.cuda.Stream(device)
        return _streams[index]
