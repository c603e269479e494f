"""Copies between CUDA tensors and segments, on a side stream, page-locked if the driver allows.

Never executed where torch has no CUDA: its tests carry the ``gpu`` marker, or stand in for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

import torch

from torchstore_core.clients.calls.thread_loops import in_thread
from torchstore_core.clients.values.tensors import byte_like, tensor_at
from torchstore_core.contracts.transport import Window
from torchstore_core.machine import copying
from torchstore_core.machine.tasks import wait_ended
from torchstore_core.machine.virtual_memory import before_unmap, populate_write
from torchstore_core.wire.columns import ALIGNMENT

T = TypeVar("T")
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
#: Contiguous tensors on devices, each with the offset of its bytes in a window. What lies side
#: by side there is best given one after the other.
Runs = Sequence[tuple[torch.Tensor, int]]

# Memory is page-locked in aligned blocks of this many bytes, counted from the start of the
# window, and each block only once in the life of the process.
_BLOCK = 16 << 20
# Tensors of up to so many bytes are copied together with others, if there are so many, and up to so
# many bytes at a time: a copy of its own takes some 20 µs, as long as the bytes of a megabyte.
_SMALL = 256 << 10
_FEW = 3
_TOGETHER = 8 << 20
# What the kernel for many tensors takes them as, by the size of their elements. It has none for
# some dtypes, and computes with those of 16 bits: not every NaN would stay what it was.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}

_lock = threading.Lock()
_pinned: dict[int, int] = {}  # address of a block -> pid of the process that locked it
_pinning_works = True
_streams: dict[int, torch.cuda.Stream] = {}


async def transfer(runs: Runs, pairs: Pairs, window: Window, *, into: bool) -> None:
    """Copy runs into ``window``, or out of it, and ``(target, source)`` pairs: one tensor is on a
    device, the other inside ``window``.

    When this returns, the copies are complete. They run after any work that is already queued on
    the caller's current streams.
    """
    devices = _Devices(chain(map(_first, runs), map(_on_device, pairs)))
    await _populate(runs, window)
    await devices.finish(lambda: _transfer(devices, runs, pairs, window, into))


async def _populate(runs: Runs, window: Window) -> None:
    """Fill the page tables of blocks that will be page-locked, on the copy threads: one thread
    takes longer for it than the copies do.
    """
    blocks: set[int] = set()
    for tensor, offset in runs:
        blocks.update(range(offset // _BLOCK, (offset + tensor.nbytes - 1) // _BLOCK + 1))
    starts = [block * _BLOCK for block in sorted(blocks)]
    fresh = [start for start in starts if window.address + start not in _pinned]
    if _pinning_works and len(fresh) > 1:
        await copying.run(map(partial(_populated, window), fresh), _BLOCK * len(fresh))


def _populated(window: Window, at: int) -> copying.Task:
    """A task that fills the page tables of a block. If that fails, page-locking will say so."""

    def task() -> None:
        populate_write(window.address + at, min(_BLOCK, window.nbytes - at))

    return task


async def copy(pairs: Pairs) -> None:
    """Copy pairs of which one tensor is on a device, and the other in any memory of the host."""
    devices = _Devices(map(_on_device, pairs))
    await devices.finish(lambda: _copy(devices, pairs))


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


async def finished(task: asyncio.Task[None]) -> None:
    """Wait for ``task`` to end, even if the caller is cancelled; then re-raise the cancellation."""
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await wait_ended(task)
        raise


def _first(run: tuple[torch.Tensor, int]) -> torch.Tensor:
    return run[0]


def _on_device(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    target, source = pair
    return source if target.is_cpu else target


class _Devices:
    """The devices of some tensors, and what is queued for these on the caller's streams."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._queued = _queued(tensors)
        self._used: set[torch.cuda.Stream] = set()

    async def finish(self, work: Callable[[], None]) -> None:
        """Do work that uses :meth:`on`, to the end even if this is cancelled: the memory must not
        be released during a running copy.
        """
        await finished(asyncio.create_task(in_thread(lambda: self._work(work))))

    @torch.inference_mode()  # where tensors of that mode may be written to, too
    def _work(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:  # after a failure as well: earlier copies may still be running
            for stream in self._used:
                stream.synchronize()

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Copies go to a stream of this device, after what was queued. Tensors of another kind of
        device than CUDA's are copied as they come.
        """
        if device not in self._queued:
            yield
            return
        stream = _stream(device)
        stream.wait_event(self._queued[device])
        self._used.add(stream)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield


def _copy(devices: _Devices, pairs: Pairs) -> None:
    for device, some in _by_device(pairs, map(_on_device, pairs)).items():
        with devices.on(device):
            for target, source in some:
                target.copy_(source)


def _transfer(devices: _Devices, runs: Runs, pairs: Pairs, window: Window, into: bool) -> None:
    """Start the copies of runs and pairs, device by device."""
    for device, some in _by_device(runs, map(_first, runs)).items():
        with devices.on(device):
            _copy_runs(some, window, into)
    for device, others in _by_device(pairs, map(_on_device, pairs)).items():
        with devices.on(device):
            for target, source in others:
                _copy_in_window(target, source, window)


def _by_device(what: Iterable[T], tensors: Iterable[torch.Tensor]) -> dict[torch.device, list[T]]:
    """What belongs to tensors of each device."""
    found: dict[torch.device, list[T]] = {}
    for one, tensor in zip(what, tensors, strict=True):
        found.setdefault(tensor.device, []).append(one)
    return found


def _copy_in_window(target: torch.Tensor, source: torch.Tensor, window: Window) -> None:
    """Start the copy of one pair. Only contiguous bytes cross between host and device; they are
    cast and arranged on the device.
    """
    if not (target if target.is_cpu else source).is_contiguous():
        target.copy_(source)  # torch goes through host memory of its own, which is not page-locked
    elif target.is_cpu:
        offset = target.data_ptr() - window.address
        _copy_run(source.to(target.dtype).contiguous(), offset, window, into=True)
    else:
        offset = source.data_ptr() - window.address
        as_it_is = target.is_contiguous() and target.dtype is source.dtype
        arrived = target if as_it_is else target.new_empty(source.shape, dtype=source.dtype)
        _copy_run(arrived, offset, window, into=False)
        if arrived is not target:
            target.copy_(arrived)


def _copy_runs(runs: Runs, window: Window, into: bool) -> None:
    """Start the copies of runs: of small ones that lie side by side in the window as one, which is
    gathered or scattered on the device.
    """
    for some in _side_by_side(runs):
        if len(some) >= _FEW:
            try:
                _copy_together(some, window, into)
                continue
            except torch.OutOfMemoryError:  # on the device; this takes none of it
                pass
        for tensor, offset in some:
            _copy_run(tensor, offset, window, into)


def _side_by_side(runs: Runs) -> Iterator[Runs]:
    """Divide runs into those that are copied together."""
    first = start = end = 0
    for at, (tensor, offset) in enumerate(runs):
        nbytes = tensor.nbytes
        follows = end <= offset < end + ALIGNMENT and offset + nbytes - start <= _TOGETHER
        if nbytes > _SMALL or not follows:
            if at > first:
                yield runs[first:at]
            first, start = at, offset
        # Nothing follows a run that is not small.
        end = offset + nbytes if nbytes <= _SMALL else -ALIGNMENT
    if runs:
        yield runs[first:]


def _copy_together(runs: Runs, window: Window, into: bool) -> None:
    """Start one copy for all runs, which lie side by side in the window. The bytes between them
    belong to no value, and become zeros.
    """
    start = runs[0][1]
    word = _WORDS[min([tensor.itemsize for tensor, _ in runs])]
    tensors = [tensor.view(-1).view(word) for tensor, _ in runs]
    itemsize = word.itemsize
    sizes: list[int] = []  # of each tensor and of what lies behind it, in elements
    end = start
    for tensor, (_, offset) in zip(tensors, runs, strict=True):
        sizes += (offset - end) // itemsize, tensor.numel()
        end = offset + tensor.numel() * itemsize
    nbytes = end - start
    staged = tensors[0].new_zeros(nbytes // itemsize)
    parts = staged.split_with_sizes(sizes)[1::2]
    if into:
        torch._foreach_copy_(parts, tensors)
        _copy_run(staged, start, window, into)
    else:
        _copy_run(staged, start, window, into)
        torch._foreach_copy_(tensors, parts)


def _copy_run(tensor: torch.Tensor, offset: int, window: Window, into: bool) -> None:
    """Start copies of parts that each lie in one block: CUDA refuses to copy what is page-locked in
    several pieces, or in part.
    """
    tensor = byte_like(tensor)
    end = offset + tensor.nbytes
    at = offset
    while at < end:
        block = at // _BLOCK * _BLOCK
        stop = min(end, block + _BLOCK)
        if stop - at < tensor.nbytes:
            if tensor.dtype is not torch.uint8 or tensor.dim() != 1:
                tensor = tensor.view(-1).view(torch.uint8)
            part = tensor[at - offset : stop - offset]
        else:
            part = tensor
        _pin(window.address + block, min(_BLOCK, window.nbytes - block), tensor)
        stored = tensor_at(window.address + at, tuple(part.shape), part.dtype)
        if into:
            stored.copy_(part, non_blocking=True)
        else:
            part.copy_(stored, non_blocking=True)
        at = stop


def _pin(block: int, nbytes: int, on_device: torch.Tensor) -> None:
    """Page-lock one block, for copies of a tensor. A failure (memlock limit, end of mapping) only
    causes one warning: copies are slower without page-locking, but still correct.
    """
    global _pinning_works
    if block in _pinned:
        return
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
