"""Moves the bytes of tensors on CUDA devices to and from this host, through page-locked memory.

The memory is a few slots, which are used again and again: while the bytes in one of them are hashed
and written, those for the next one arrive; while the bytes in one of them leave, the next is
filled. Only contiguous bytes cross, on a stream beside those of the program; tensors of other
strides are arranged on the device. Where the driver does not page-lock memory, the same is done
through memory that is not.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

import torch

from torchstore_core.clients.values.tensors import byte_like, check_storage
from torchstore_core.machine.copying import copy_threads
from torchstore_snapshot.stopping import check
from torchstore_snapshot.storage.gathering import STEP, Elsewhere, Part
from torchstore_snapshot.taking.strided import bytes_of, ranges_of

__all__ = ["DeviceBytes", "Devices", "Lane", "Slot", "flat_bytes", "settle", "with_streams"]

T = TypeVar("T")

# Two of them are what one thread uses: one is filled while the other one is emptied.
_SLOTS = 2
# However small a budget is, a slot has as many bytes.
_SLOT_MIN = 64 << 10
# Seconds after which a thread that waits for slots sees whether its call was stopped.
_LOOK_S = 0.1


class Devices:
    """The copies of one call between this host and devices. They begin after the work that is
    queued on the current streams of the thread that creates it. A context manager, which has ended
    all copies when it is left.

    Args:
        slot: bytes of one slot, a power of two.
        budget: bytes that all slots together may have, though at least two of 64 KiB are needed;
            None: no matter.
        threads: how many threads use them; None: the number of copy threads.

    Attributes:
        slot: bytes of one slot: fewer than asked for if the budget has no room for two of each
            thread. If even the smallest are too many, threads wait for those of others.
    """

    def __init__(
        self, slot: int = STEP, budget: int | None = None, threads: int | None = None
    ) -> None:
        self._most: int | None = None
        if budget is not None:
            count = _SLOTS * (threads or copy_threads())
            while slot > _SLOT_MIN and slot * count > budget:
                slot //= 2
            self._most = max(1, budget // (_SLOTS * slot))
        self.slot = slot
        self._made = 0
        self._free: list[Lane] = []
        self._changed = threading.Condition()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._locking = True
        self._callers: list[torch.cuda.Stream] = []
        if torch.cuda.is_initialized():
            count = torch.cuda.device_count()
            self._callers = [torch.cuda.current_stream(index) for index in range(count)]

    def __enter__(self) -> Devices:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A device that has failed says so again.
        with contextlib.suppress(*(() if error is None else (RuntimeError,))):
            for stream in self._streams.values():
                stream.synchronize()

    def bytes_of(self, path: str, tensor: torch.Tensor) -> DeviceBytes:
        """Return the bytes of a tensor on a device, of any strides, in row-major order.

        Raises:
            UnsupportedValueError: the memory of the tensor was freed.
        """
        check_storage(path, tensor)
        return DeviceBytes(self, path, tensor, 0, tensor.nbytes)

    def follow(self, device: torch.device) -> None:
        """Let what is copied from now on also wait for what this thread, another one than that
        which created this, has queued on its current stream.
        """
        self.stream(device).wait_stream(torch.cuda.current_stream(device))

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of a device that all copies are queued on."""
        with self._changed:
            found = self._streams.get(device)
            if found is None:
                found = self._streams[device] = torch.cuda.Stream(device)
                if self._callers:
                    found.wait_stream(self._callers[device.index or 0])
            return found

    @contextlib.contextmanager
    def lane(self) -> Iterator[Lane]:
        """Give this thread slots of its own for a while."""
        with self._changed:
            while not self._free and self._made == self._most:
                check()
                self._changed.wait(_LOOK_S)
            lane = self._free.pop() if self._free else None
            self._made += lane is None
        try:
            if lane is None:
                lane = Lane(self, [self._memory() for _ in range(_SLOTS)])
            yield lane
        finally:
            with self._changed:
                if lane is None:
                    self._made -= 1
                else:
                    self._free.append(lane)
                self._changed.notify()

    @torch.inference_mode(False)  # other threads write to it, whatever the mode of this one is
    def _memory(self) -> torch.Tensor:
        """New page-locked memory for a slot. It was locked before, if there have been slots of this
        size already: torch keeps it.
        """
        if self._locking:
            try:
                return torch.empty(self.slot, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._locking = False
                warnings.warn(
                    f"the driver does not page-lock memory ({error}); snapshots of tensors on CUDA "
                    "devices take longer (see ulimit -l)",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return torch.empty(self.slot, dtype=torch.uint8, device="cpu")

    def arrivals(self, windows: Iterable[Sequence[Part]]) -> Generator[memoryview, None, None]:
        """Return the same parts in memory of this host, one by one. What is in memory already stays
        where it is; others are in a slot, until the next window is asked for.

        Args:
            windows: parts of at most ``slot`` bytes together. The next one arrives while the one
                before it is used.
        """
        with self.lane() as lane:
            ahead: deque[tuple[Slot, list[memoryview]]] = deque()
            for window in windows:
                ahead.append(lane.fetch(window))
                if len(ahead) == _SLOTS:
                    slot, parts = ahead.popleft()
                    slot.wait()
                    yield from parts
            for slot, parts in ahead:
                slot.wait()
                yield from parts


class Slot:
    """Memory that bytes pass through.

    Attributes:
        memory: its bytes, as a tensor; ``view``: the same as a buffer.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.view = bytes_of("", memory)
        self._events: dict[torch.device, torch.cuda.Event] = {}
        self._pending: list[torch.cuda.Event] = []

    def wait(self) -> None:
        """Wait until the copies to and from the slot have ended."""
        while self._pending:
            self._pending[-1].synchronize()
            self._pending.pop()

    def copied(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        """Copies to or from a device have been queued, all of the slot's for that device."""
        event = self._events.get(device)
        if event is None:
            event = self._events[device] = torch.cuda.Event()
        event.record(stream)
        self._pending.append(event)


class Lane:
    """The slots that one thread uses in turn."""

    def __init__(self, devices: Devices, memory: Sequence[torch.Tensor]) -> None:
        self._devices = devices
        self._slots = deque(Slot(each) for each in memory)

    def slot(self) -> Slot:
        """Return the slot that was used longest ago, when nothing is copied to or from it."""
        slot = self._slots[0]
        slot.wait()
        self._slots.rotate(-1)
        return slot

    def fetch(self, window: Iterable[Part]) -> tuple[Slot, list[memoryview]]:
        """Begin to copy parts into a slot, and return where they are when it has :meth:`Slot.wait`
        behind it.
        """
        slot = self.slot()
        found: list[memoryview] = []
        at = 0
        with _Queue(self._devices, slot) as queue:
            for part in window:
                if isinstance(part, DeviceBytes):
                    queue.on(part.tensor.device)
                    part.copy_to(slot.memory[at : at + part.nbytes])
                    found.append(slot.view[at : at + part.nbytes])
                    at += part.nbytes
                elif isinstance(part, memoryview):
                    found.append(part)
        return slot, found

    def send(self, slot: Slot, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Begin to copy from a slot to devices.

        Args:
            copies: pairs of a target and a contiguous tensor in the slot, of one shape and dtype.
        """
        with torch.inference_mode(), _Queue(self._devices, slot) as queue:
            for target, source in copies:
                queue.on(target.device)
                if target.is_contiguous():
                    target.copy_(source, non_blocking=True)
                else:
                    arrived = torch.empty_like(target, memory_format=torch.contiguous_format)
                    arrived.copy_(source, non_blocking=True)
                    target.copy_(arrived)


class _Queue:
    """While it lasts, copies between a slot and devices are queued on the streams for that. However
    it ends, the slot knows of them.
    """

    def __init__(self, devices: Devices, slot: Slot) -> None:
        self._devices = devices
        self._slot = slot
        self._device: torch.device | None = None
        self._used: dict[torch.device, torch.cuda.Stream] = {}
        self._current = contextlib.ExitStack()

    def __enter__(self) -> _Queue:
        return self

    def on(self, device: torch.device) -> None:
        """The next copies are of a device."""
        if device != self._device:
            self._current.close()
            stream = self._used[device] = self._devices.stream(device)
            # The device first: otherwise, the device of before, which may be one that the program
            # does not use, would get a context when this ends.
            self._current.enter_context(torch.cuda.device(device))
            self._current.enter_context(torch.cuda.stream(stream))
            self._device = device

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._current.close()
        for device, stream in self._used.items():
            self._slot.copied(device, stream)


class DeviceBytes(Elsewhere):
    """A range of the bytes of a tensor on a device, in row-major order.

    Args:
        path: of the tensor, for errors.
        begin, end: the first byte, and the end. Both are ends of elements: tensors begin at
            multiples of the size of theirs in a file, and are cut at multiples of 64.
    """

    def __init__(
        self, devices: Devices, path: str, tensor: torch.Tensor, begin: int, end: int
    ) -> None:
        self._devices = devices
        self._path = path
        self.tensor = tensor
        self._begin, self._end = begin, end

    @property
    def nbytes(self) -> int:
        return self._end - self._begin

    def __getitem__(self, part: slice) -> DeviceBytes:
        start, stop, _ = part.indices(self.nbytes)
        begin = self._begin + start
        end = max(begin, self._begin + stop)
        return DeviceBytes(self._devices, self._path, self.tensor, begin, end)

    def arrivals(self, windows: Iterable[Sequence[Part]]) -> Generator[memoryview, None, None]:
        return self._devices.arrivals(windows)

    def copy_to(self, memory: torch.Tensor) -> None:
        """Queue the copy into bytes of this host, on the current stream."""
        if not self.nbytes:
            return
        if self.tensor.is_contiguous():
            flat = flat_bytes(self._path, self.tensor)[self._begin : self._end]
            memory.copy_(flat, non_blocking=True)
            return
        at = 0
        for view in ranges_of(byte_like(self.tensor), self._begin, self._end):
            flat = flat_bytes(self._path, view.contiguous())
            memory[at : at + flat.nbytes].copy_(flat, non_blocking=True)
            at += flat.nbytes


def flat_bytes(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, as a tensor with its memory.

    Raises:
        UnsupportedValueError: the memory of the tensor was freed.
    """
    check_storage(path, tensor)
    # Where there is one element alone, its stride may be anything.
    return byte_like(tensor).as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for what this thread has queued on its current streams, unless they are those that every
    thread begins with: another thread is about to read these tensors.
    """
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        stream = torch.cuda.current_stream(device)
        if stream != torch.cuda.default_stream(device):
            stream.synchronize()


def with_streams(call: Callable[[], T]) -> Callable[[], T]:
    """Return a call that has the current device and the current streams of this thread, whichever
    thread makes it.
    """
    if not torch.cuda.is_initialized():
        return call
    here = torch.cuda.current_device()
    streams = [torch.cuda.current_stream(i) for i in range(torch.cuda.device_count())]

    def made() -> T:
        with contextlib.ExitStack() as entered:
            for stream in streams:
                if stream != torch.cuda.default_stream(stream.device):
                    entered.enter_context(torch.cuda.device(stream.device))
                    entered.enter_context(torch.cuda.stream(stream))
            entered.enter_context(torch.cuda.device(here))
            return call()

    return made
