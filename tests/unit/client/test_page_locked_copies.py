"""Copies to and from devices, with a stand-in for CUDA that has its rules for page-locked memory.
On machines without a CUDA device, nothing else runs that code.

- What is copied lies inside of one page-locked range, or touches none.
- A refusal to page-lock stays behind as a pending error, which the next kernel raises.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from torchstore_core.clients.moving.batches import CopyPlan, Move
from torchstore_core.clients.moving.staging import adapt
from torchstore_core.clients.moving.windows import by_window
from torchstore_core.clients.transfer import cuda
from torchstore_core.clients.transfer.moves import PutBatch
from torchstore_core.clients.transfer.tensor_moves import StagedTensor, TensorBatch, TensorMove
from torchstore_core.clients.values.tensors import tensor_at
from torchstore_core.contracts.transport import Copy, Window

UNIT = 1 << 16
_KERNELS = {"copy_", "clone", "_to_copy", "new_ones"}


class Driver:
    """What the runtime of CUDA knows. ``refuses``: it page-locks nothing."""

    def __init__(self) -> None:
        self.locked: list[range] = []
        self.refuses = False
        self.pending = False
        self.fast = self.slow = 0  # bytes copied, page-locked and not

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        block = range(address, address + nbytes)
        if self.refuses or any(_touch(block, other) for other in self.locked):
            self.pending = True
            return 1
        self.locked.append(block)
        return 0

    def copied(self, host: torch.Tensor) -> None:
        """A contiguous tensor on the host has been copied to or from the device."""
        memory = range(host.data_ptr(), host.data_ptr() + host.nbytes)
        touched = [one for one in self.locked if _touch(one, memory)]
        if not touched:
            self.slow += host.nbytes
        elif memory[0] in touched[0] and memory[-1] in touched[0]:
            self.fast += host.nbytes
        else:
            raise RuntimeError("CUDA error: invalid argument")

    def launched(self) -> None:
        """A kernel was launched."""
        if self.pending:
            self.pending = False
            raise RuntimeError("CUDA error: an earlier call was refused")


def _touch(a: range, b: range) -> bool:
    return bool(a) and bool(b) and a[0] <= b[-1] and b[0] <= a[-1]


driver = Driver()


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device (the one that needs no library), and has its values in
    another tensor.
    """

    values: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=values.dtype, device="meta"
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        host = [one for one in args if isinstance(one, torch.Tensor) and not isinstance(one, cls)]
        if name == "copy_" and host:
            driver.copied(host[0].contiguous())
        elif name in _KERNELS:
            driver.launched()
        kept = {key: value for key, value in (kwargs or {}).items() if key != "device"}
        with torch.inference_mode(False):
            plain = pytree.tree_map_only(cls, lambda one: one.values, args)
            result = op(*plain, **kept)
            if name == "copy_":
                return args[0]
            return pytree.tree_map_only(torch.Tensor, cls, result)


class _Stream:
    def wait_event(self, event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


async def test_what_is_queued_on_a_device_ends_before_a_link_reaches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A link that takes addresses in a device's memory knows nothing of streams."""
    done: list[tuple[torch.device, int]] = []

    def current(device: torch.device) -> SimpleNamespace:
        event = SimpleNamespace(synchronize=lambda: done.append((device, threading.get_ident())))
        return SimpleNamespace(record_event=lambda: event)

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    here, devices = threading.get_ident(), [torch.device("cuda:0"), torch.device("cuda:1")]
    tensors: list[Any] = [SimpleNamespace(device=one) for one in (*devices, devices[0])]
    batch = PutBatch(0, 0, [], [])
    batch.prepared = plan = CopyPlan()
    plan.copies = [Copy(4096, 0, 0, 8, device="cuda:0")]
    moves = [TensorMove("k", tensor, 0, (1,), torch.uint8) for tensor in tensors]
    plan.direct = [(range(4096, 4104), move) for move in moves]
    await adapt(plan, batch, rows=True, devices=frozenset(("cuda",)))
    assert [device for device, _ in sorted(done, key=str)] == devices
    assert all(thread != here for _, thread in done)  # the event loop goes on meanwhile
    assert [copy.device for copy in plan.copies] == ["cuda:0"]


@pytest.fixture
def segment(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The memory of a window, beside a driver that knows nothing yet."""
    global driver
    driver = Driver()
    stream = _Stream()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(cuda, "_BLOCK", 16 * UNIT)
    monkeypatch.setattr(cuda, "_pinned", {})
    monkeypatch.setattr(cuda, "_pinning_works", True)
    monkeypatch.setattr(cuda, "_streams", {})
    memory = mmap.mmap(-1, 72 * UNIT)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _copy(target: torch.Tensor, source: torch.Tensor, segment: torch.Tensor) -> None:
    window = Window(segment.data_ptr(), segment.nbytes)
    ready: Any = {torch.device("meta"): None}
    cuda._copy([(target, source)], window, ready)


def _stored(segment: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return segment[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


def _put(segment: torch.Tensor, offset: int, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    stored = _stored(segment, offset, tensor.to(dtype))
    _copy(stored, OnDevice(tensor), segment)
    assert torch.equal(stored, tensor.to(dtype))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t(),
    "strided": lambda tensor: tensor[::2, ::3],
    "expanded": lambda tensor: tensor[:1].expand(375, -1),
    "no dimension": lambda tensor: tensor[0, 0],
    "empty": lambda tensor: tensor[:0],
}
VALUE = torch.arange(187_500, dtype=torch.float32).view(375, 500)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_puts_beside_memory_that_is_page_locked(segment, view, dtype):
    _put(segment, 17 * UNIT, VALUE[:125], torch.float32)  # in a block, the second one
    _put(segment, 10 * UNIT, view(VALUE), dtype)
    assert not driver.slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["contiguous", "transposed"])
def test_gets_beside_memory_that_is_page_locked(segment, name, dtype):
    view = VIEWS[name]
    _put(segment, 17 * UNIT, VALUE[:125], torch.float32)
    stored = _stored(segment, 10 * UNIT, VALUE).copy_(VALUE)
    for part in (stored, stored[3:170], stored[:1]):
        mine = view(torch.zeros(view(part).shape, dtype=dtype))
        _copy(OnDevice(mine), part, segment)
        assert torch.equal(mine, part.to(dtype))
    assert not driver.slow


def test_columns_of_what_is_stored(segment):
    stored = _stored(segment, 10 * UNIT, VALUE).copy_(VALUE)
    mine = torch.zeros(375, 200)
    _copy(OnDevice(mine), stored[:, 3:203], segment)
    assert torch.equal(mine, VALUE[:, 3:203])


def test_tensors_of_inference_mode_are_filled_and_cast(segment):
    stored = _stored(segment, 10 * UNIT, VALUE).copy_(VALUE)
    with torch.inference_mode():
        mine = OnDevice(torch.zeros(375, 500, dtype=torch.bfloat16))
    assert mine.is_inference()
    _copy(mine, stored, segment)
    assert torch.equal(mine.values, VALUE.bfloat16())


def test_a_refusal_to_page_lock_is_said_once_and_not_raised_by_a_kernel(segment):
    driver.refuses = True
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for view in VIEWS.values():
            _put(segment, 10 * UNIT, view(VALUE), torch.bfloat16)
    assert [one.category for one in said] == [RuntimeWarning]
    assert driver.slow
    assert not driver.fast


class _Moves(TensorBatch):
    """A batch of moves that have been planned."""

    volume = segment = 0
    on_device = True

    def __init__(self, moves: list[TensorMove], *, into: bool) -> None:
        self.into_segment = into
        self.nbytes = sum([move.tensor.nbytes for move in moves])
        self._moves = moves

    def moves(self, room: int | None) -> Iterator[Move]:
        yield from self._moves


class _Windowed:
    """A link whose window is the segment."""

    def __init__(self, segment: torch.Tensor) -> None:
        self._window = Window(segment.data_ptr(), segment.nbytes)

    def window(self, segment: int) -> Window:
        return self._window

    def prepare(self, segment: int, offset: int, nbytes: int, *, fresh: bool) -> None:
        pass


async def test_moves_of_a_device_are_made_together_in_both_directions(segment):
    values = [VALUE[:9].clone(), VALUE[9:20].clone()]
    link: Any = _Windowed(segment)

    def moves(on_device: list[OnDevice]) -> list[TensorMove]:
        places = zip(on_device, (UNIT, 3 * UNIT), strict=True)
        return [TensorMove("k", one, at, tuple(one.shape), torch.float32) for one, at in places]

    await by_window(link, _Moves(moves([OnDevice(value) for value in values]), into=True))
    assert torch.equal(_stored(segment, UNIT, values[0]), values[0])
    back = [OnDevice(torch.zeros_like(value)) for value in values]
    await by_window(link, _Moves(moves(back), into=False))
    for one, value in zip(back, values, strict=True):
        assert torch.equal(one.values, value)


async def test_what_is_staged_for_a_device_is_copied_in_both_directions():
    source = OnDevice(VALUE.clone())
    staged = StagedTensor("k", source, torch.zeros_like(VALUE))
    assert staged.on_device
    await staged.on_devices([staged], pack=True)
    assert torch.equal(staged.memory, VALUE)
    source.values.zero_()
    await staged.on_devices([staged], pack=False)
    assert torch.equal(source.values, VALUE)


async def test_what_a_link_was_to_reach_on_a_device_is_staged_for_one_that_cannot():
    """Of two tensors, those bytes of each that have not arrived."""
    tensors = [torch.arange(100), torch.arange(100, 200)]
    batch = _Moves([], into=True)
    plan = CopyPlan()
    for tensor in tensors:
        start = tensor.data_ptr()
        move = TensorMove("k", tensor, 0, (100,), torch.int64)
        plan.direct.append((range(start, start + 800), move))
        plan.copies.append(Copy(start + 80, 0, 640, 40, device="cuda:0"))
    await adapt(plan, batch, rows=True, devices=frozenset())
    assert [(one.offset, one.nbytes, one.device) for one in plan.copies] == [(640, 40, "")] * 2
    for one, tensor in zip(plan.copies, tensors, strict=True):
        assert torch.equal(tensor_at(one.address, (5,), torch.int64), tensor[10:15])
