"""Copies to and from devices, with a stand-in for CUDA that has its rules for page-locked memory.
On machines without a CUDA device, nothing else runs that code.

- What is copied lies inside of one page-locked range, or touches none.
- A refusal to page-lock stays behind as a pending error, which the next kernel raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import mmap
import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support import bits, running_store
from torch.utils import _pytree as pytree

import torchstore_core as ts
from torchstore_core.clients.moving.batches import CopyPlan, Move
from torchstore_core.clients.moving.staging import adapt
from torchstore_core.clients.moving.windows import by_window
from torchstore_core.clients.transfer import cuda
from torchstore_core.clients.transfer.columns import batches, gets, sources
from torchstore_core.clients.transfer.moves import PutBatch
from torchstore_core.clients.transfer.tensor_moves import (
    DeviceColumns,
    StagedTensor,
    TensorBatch,
    TensorMove,
)
from torchstore_core.clients.values import plain
from torchstore_core.clients.values.tensors import tensor_at
from torchstore_core.contracts.transport import Copy, Window
from torchstore_core.wire.columns import in_a_row

UNIT = 1 << 16
INTEGERS = {torch.uint8, torch.int16, torch.int32, torch.int64}
_KERNELS = {"copy_", "clone", "_to_copy", "new_ones"}


class Driver:
    """What the runtime of CUDA knows. ``refuses``: it page-locks nothing."""

    def __init__(self) -> None:
        self.locked: list[range] = []
        self.refuses = False
        self.pending = False
        self.fast = self.slow = 0  # bytes copied, page-locked and not
        self.copies = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        block = range(address, address + nbytes)
        if self.refuses or any(_touch(block, other) for other in self.locked):
            self.pending = True
            return 1
        self.locked.append(block)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.locked = [block for block in self.locked if block[0] != address]
        return 0

    def copied(self, host: torch.Tensor) -> None:
        """A contiguous tensor on the host has been copied to or from the device."""
        self.copies += 1
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
        elif name == "_foreach_copy_":
            # It computes with other dtypes, or has no kernel for them.
            assert {one.dtype for some in args[:2] for one in some} <= INTEGERS
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
    monkeypatch.setattr(cuda, "_queued", lambda tensors: {one.device: None for one in tensors})
    memory = mmap.mmap(-1, 72 * UNIT)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _copy(target: torch.Tensor, source: torch.Tensor, segment: torch.Tensor) -> None:
    window = Window(segment.data_ptr(), segment.nbytes)
    asyncio.run(cuda.transfer([], [(target, source)], window, into=not target.is_meta))


def _copy_runs(tensors: list[Any], offsets: list[int], segment: torch.Tensor, into: bool) -> None:
    window = Window(segment.data_ptr(), segment.nbytes)
    runs = list(zip(tensors, offsets, strict=True))
    asyncio.run(cuda.transfer(runs, [], window, into=into))


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


KINDS = {
    "of one dtype": [torch.float32] * 10,
    "of a dtype for which torch has no kernel": [torch.uint16] * 10,
    "of a dtype that kernels compute with": [torch.bfloat16] * 10,
    "of several dtypes": [torch.float32, torch.int8, torch.complex128, torch.bool, torch.bfloat16],
    "of several dtypes of more than a byte": [torch.bfloat16, torch.float64, torch.float32] * 3,
}


def _small(dtypes: list[torch.dtype]) -> tuple[list[torch.Tensor], list[int]]:
    """Tensors of different sizes and numbers of dimensions, and offsets of values side by side."""
    values = []
    for number, dtype in enumerate(dtypes):
        shape = [(), (3,), (5, 7), (2, 3, 11)][number % 4]
        count = math.prod(shape) * dtype.itemsize
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
        values.append(raw.view(dtype).view(shape))
    return values, in_a_row(10 * UNIT, [value.nbytes for value in values])


@pytest.mark.parametrize("dtypes", KINDS.values(), ids=KINDS)
def test_what_lies_side_by_side_is_copied_together(segment, dtypes):
    values, offsets = _small(dtypes)
    segment.fill_(7)
    _copy_runs([OnDevice(value) for value in values], offsets, segment, into=True)
    assert driver.copies == 1
    for value, offset in zip(values, offsets, strict=True):
        stored = _stored(segment, offset, value)
        assert torch.equal(bits(stored), bits(value))
    end = offsets[-1] + values[-1].nbytes
    assert (segment[: offsets[0]] == 7).all()
    assert (segment[end:] == 7).all()
    mine = [torch.zeros_like(value) for value in values]
    _copy_runs([OnDevice(one) for one in mine], offsets, segment, into=False)
    assert driver.copies == 2
    for value, one in zip(values, mine, strict=True):
        assert torch.equal(bits(one), bits(value))
    assert not driver.slow


def test_what_is_copied_together_may_lie_in_two_blocks(segment):
    values = [torch.full((UNIT // 4 - 16,), float(number)) for number in range(12)]
    offsets = in_a_row(10 * UNIT + 64, [value.nbytes for value in values])
    _copy_runs([OnDevice(value) for value in values], offsets, segment, into=True)
    assert driver.copies == 2
    for value, offset in zip(values, offsets, strict=True):
        assert torch.equal(_stored(segment, offset, value), value)


@pytest.mark.parametrize("apart", [64, UNIT])
def test_what_lies_between_values_is_left_alone(segment, apart):
    """There may be another value, however small."""
    values = [torch.full((16,), float(number)) for number in range(10)]
    offsets = list(range(10 * UNIT, 10 * UNIT + 10 * (64 + apart), 64 + apart))
    segment.fill_(7)
    for into in (True, False):
        _copy_runs([OnDevice(value.clone()) for value in values], offsets, segment, into=into)
    for value, offset in zip(values, offsets, strict=True):
        stored = _stored(segment, offset, value)
        assert torch.equal(stored, value)
        stored.view(torch.uint8).fill_(7)
    assert (segment == 7).all()


def test_large_tensors_among_small_ones_are_copied_by_themselves(segment, monkeypatch):
    monkeypatch.setattr(cuda, "_SMALL", UNIT)
    monkeypatch.setattr(cuda, "_TOGETHER", 3 * UNIT)
    sizes = [UNIT // 2] * 8 + [2 * UNIT] + [UNIT // 4] * 3 + [UNIT + 4, 16, 16]
    values = [torch.arange(size // 4, dtype=torch.float32) for size in sizes]
    offsets = in_a_row(64, sizes)
    _copy_runs([OnDevice(value) for value in values], offsets, segment, into=True)
    # Six and two small ones, the large one, three small ones, the large one, two small ones.
    assert driver.copies == 1 + 2 + 1 + 1 + 1 + 2
    mine = [torch.zeros_like(value) for value in values]
    _copy_runs([OnDevice(one) for one in mine], offsets, segment, into=False)
    for value, one, offset in zip(values, mine, offsets, strict=True):
        assert torch.equal(_stored(segment, offset, value), value)
        assert torch.equal(one, value)


def test_without_memory_on_the_device_to_gather_in_each_is_copied(segment, monkeypatch):
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda, "_copy_together", refuse)
    values, offsets = _small([torch.float32] * 10)
    _copy_runs([OnDevice(value) for value in values], offsets, segment, into=True)
    assert driver.copies == 10
    for value, offset in zip(values, offsets, strict=True):
        assert torch.equal(bits(_stored(segment, offset, value)), bits(value))


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


@pytest.fixture
def everything_is_on_a_device(segment: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at in columns counts as being on a device, though it is in CPU memory."""
    monkeypatch.setattr(plain, "_DEVICE", plain._CPU)
    for module in (sources, batches, gets):
        monkeypatch.setattr(module, "begins_on_device", lambda values: values is not None)


@pytest.mark.usefixtures("everything_is_on_a_device")
@pytest.mark.parametrize("count", [40, 3000])
async def test_many_small_tensors_of_a_device_are_put_and_filled_together(count):
    values = {f"k{number}": torch.arange(number % 7 + 1) + number for number in range(count)}
    mine = {key: torch.zeros_like(value) for key, value in values.items()}
    took = []
    original = cuda._copy_together

    def counted(runs: cuda.Runs, window: Window, into: bool) -> None:
        took.append(len(runs))
        original(runs, window, into)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_copy_together", counted)
        async with running_store():
            await ts.put("a", 1)  # a first put has no columns
            await ts.put_batch(values)
            got = await ts.get_batch(mine)
            assert all(got[key] is mine[key] for key in values)
            await ts.put_state_dict(values, "state dict")
            again = {key: torch.zeros_like(value) for key, value in values.items()}
            await ts.get_state_dict("state dict", again)
            new = await ts.get_state_dict("state dict")
    for key, value in values.items():
        assert torch.equal(mine[key], value)
        assert torch.equal(again[key], value)
        assert torch.equal(new[key], value)
    assert sum(took) == 4 * count


@pytest.mark.usefixtures("everything_is_on_a_device")
async def test_wrong_destinations_among_many_of_a_device_are_refused():
    values = {f"k{number}": torch.arange(5) + number for number in range(40)}
    async with running_store():
        await ts.put_batch(values)
        for wrong in (torch.zeros(4, dtype=torch.int64), torch.zeros(5)):
            mine = {key: torch.zeros_like(value) for key, value in values.items()}
            mine["k20"] = wrong
            with pytest.raises(ts.LayoutMismatchError, match="k20"):
                await ts.get_batch(mine)
            assert not any(tensor.any() for tensor in mine.values())
        memory = torch.zeros(6, dtype=torch.int64)
        mine = {key: torch.zeros_like(value) for key, value in values.items()}
        mine["k1"], mine["k2"] = memory[:5], memory[1:]
        with pytest.raises(ts.LayoutMismatchError, match="overlap"):
            await ts.get_batch(mine)


@pytest.mark.usefixtures("everything_is_on_a_device")
async def test_many_small_tensors_of_a_device_go_over_links_without_a_window():
    values = {f"k{number}": torch.arange(2000) + number for number in range(40)}
    mine = {key: torch.zeros_like(value) for key, value in values.items()}
    staged = []
    original = DeviceColumns.each

    def counted(moves: DeviceColumns) -> list[TensorMove]:
        staged.extend(every := [*original(moves)])
        return every

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceColumns, "each", counted)
        async with running_store(block=["shm", "inline"]):
            await ts.put("a", 1)
            await ts.put_batch(values)
            await ts.get_batch(mine)
    assert len(staged) == 80
    for key, value in values.items():
        assert torch.equal(mine[key], value)


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
