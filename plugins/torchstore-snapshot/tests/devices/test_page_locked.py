"""Snapshots of tensors on a device, with a stand-in for CUDA. On machines without a CUDA device,
nothing else runs that code.

- Copies do not begin before somebody waits for them, so that whoever does not sees what was there
  before. Those to and from memory that is not page-locked have ended when they return.
- What is copied lies inside of one page-locked range, or touches none.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.support import bits, noise
from torch.utils import _pytree as pytree

from torchstore_core import boxes
from torchstore_core.values import TensorSlice
from torchstore_snapshot import Snapshot, SnapshotCorruptError, StateDict
from torchstore_snapshot.committing.files import OpenFiles, Source
from torchstore_snapshot.devices import Devices, with_streams
from torchstore_snapshot.format.hashes import BLOCK, Digest
from torchstore_snapshot.format.manifest import TensorEntry
from torchstore_snapshot.format.safetensors_files import Stored, lay_out
from torchstore_snapshot.restoring.files import Files
from torchstore_snapshot.restoring.reading import Check, execute, plan_reads
from torchstore_snapshot.stopping import Stop, Stopped
from torchstore_snapshot.storage.gathering import STEP
from torchstore_snapshot.storage.local import LocalStorage, LocalWriter
from torchstore_snapshot.taking.strided import data_of

MIB = 1 << 20
_empty = torch.empty


class Work:
    """A stream: what is queued is done when somebody waits for it."""

    def __init__(self, device: object = None) -> None:
        self.device = device
        self.queue: list[Callable[[], object]] = []
        self.done = 0

    def put(self, call: Callable[[], object]) -> None:
        with driver.lock:
            self.queue.append(call)

    def run(self, until: int) -> None:
        with driver.lock:
            while self.done < until:
                self.done += 1
                self.queue[self.done - 1]()

    def synchronize(self) -> None:
        self.run(len(self.queue))

    def wait_stream(self, other: Work) -> None:
        at = len(other.queue)
        self.put(lambda: other.run(at))


class Event:
    def record(self, stream: Work) -> None:
        self.stream, self.at = stream, len(stream.queue)

    def synchronize(self) -> None:
        self.stream.run(self.at)


class Driver:
    """What the runtime of CUDA knows. ``refuses``: it page-locks nothing."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.refuses = False
        self.locked: list[range] = []
        self.kept: list[torch.Tensor] = []  # as torch does
        self.fast = self.slow = 0  # bytes copied, page-locked and not
        self.streams: list[Work] = []
        self.current = threading.local()
        self.default = self.stream()

    def stream(self, device: object = None) -> Work:
        self.streams.append(Work(device))
        return self.streams[-1]

    def current_stream(self, device: object = None) -> Work:
        found: Work = getattr(self.current, "stream", self.default)
        return found

    @contextlib.contextmanager
    def on(self, stream: Work) -> Iterator[None]:
        before, self.current.stream = self.current_stream(), stream
        yield
        self.current.stream = before

    def empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory and self.refuses:
            raise RuntimeError("CUDA error: out of memory")
        made = _empty(*args, **kwargs)
        if pin_memory:
            self.locked.append(range(made.data_ptr(), made.data_ptr() + made.nbytes))
            self.kept.append(made)
        return made

    def is_locked(self, host: torch.Tensor) -> bool:
        memory = range(host.data_ptr(), host.data_ptr() + host.nbytes)
        touched = [one for one in self.locked if one[0] <= memory[-1] and memory[0] <= one[-1]]
        if touched and not (memory[0] in touched[0] and memory[-1] in touched[0]):
            raise RuntimeError("CUDA error: invalid argument")
        if touched:
            self.fast += host.nbytes
        else:
            self.slow += host.nbytes
        return bool(touched)

    def in_flight(self) -> int:
        return sum(len(stream.queue) - stream.done for stream in self.streams)

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.locked))


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
            cls,
            values.shape,
            values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device="meta",
            storage_size=values.untyped_storage().nbytes(),
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        given = {key: value for key, value in (kwargs or {}).items() if key != "device"}
        inference = any(isinstance(one, cls) and one.is_inference() for one in args)
        with torch.inference_mode(False):
            plain = pytree.tree_map_only(cls, lambda one: one.values, args)
            if name.endswith("_"):
                return _queue(op, args, plain, given)
            made = op(*plain, **given)
            if name == "clone":
                source = plain[0]
                made.view(-1).view(torch.uint8).fill_(0x55)
                driver.current_stream().put(lambda: made.copy_(source))
            elif not op.is_view and name != "empty_like":
                raise NotImplementedError(name)
        with torch.inference_mode(inference):
            return pytree.tree_map_only(torch.Tensor, cls, made)


def _queue(op: Any, args: Any, plain: Any, kwargs: Any) -> Any:
    """Queue what changes a tensor, or do it now, after all that is queued, if it needs memory of
    the host that is not page-locked.
    """
    stream = driver.current_stream()
    later = True
    for one in args:
        if isinstance(one, torch.Tensor) and not isinstance(one, OnDevice):
            assert all(each.is_contiguous() for each in args[:2])
            later = driver.is_locked(one) and op.overloadpacket.__name__ == "copy_"
            later = later and kwargs.get("non_blocking", False) + (True in plain[2:])

    def call() -> None:
        with torch.inference_mode(False):
            op(*plain)

    stream.put(call)
    if not later:
        stream.synchronize()
    return args[0]


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver that knows nothing yet."""
    global driver
    driver = Driver()
    monkeypatch.setenv("TORCHSTORE_COPY_THREADS", "2")
    monkeypatch.setattr(torch, "empty", driver.empty)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Stream", driver.stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", driver.on)
    monkeypatch.setattr(torch.cuda, "current_stream", driver.current_stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: driver.default)
    return driver


# ---- to the host ----------------------------------------------------------------------------


class Watched(LocalStorage):
    """A folder that says what was in flight when it was written to, and may become full."""

    def __init__(self, path: Path, room: int = 1 << 40) -> None:
        super().__init__(path)
        self.in_flight: list[int] = []
        self.room = room

    def create(self, name: str, nbytes: int) -> LocalWriter:
        watched = self

        class Writer(LocalWriter):
            def write(self, offset: int, data: Any) -> None:
                watched.in_flight.append(driver.in_flight())
                watched.room -= memoryview(data).nbytes
                if watched.room < 0:
                    raise OSError(28, "No space left on device")
                super().write(offset, data)

        return Writer(self._in(name), nbytes)


def _write(
    storage: LocalStorage,
    tensors: Sequence[torch.Tensor],
    threads: int | None = None,
    budget: int | None = None,
    step: int = STEP,
) -> tuple[bytes, list[Digest]]:
    """Write tensors into a file, as takes do; return what is in it, and the hashes."""
    stored = [
        Stored(f"t{i}", "uint8", (each.nbytes,), each.nbytes) for i, each in enumerate(tensors)
    ]
    layout = lay_out(stored)
    devices = Devices(step, budget, threads)
    opened = OpenFiles(
        storage, [("file", layout)], durable=False, threads=threads, step=devices.slot
    )
    order = sorted(range(len(tensors)), key=layout.starts.__getitem__)
    try:
        with devices:
            sources = [Source(0, i, 0, data_of(f"t{i}", tensors[i], devices)) for i in order]
            opened.write(sources)
        (digests,) = opened.close()
    except BaseException:
        opened.abort()
        raise
    finally:
        assert not any(stream.done < len(stream.queue) for stream in driver.streams[1:])
    return storage.read("file"), digests


def _expected(folder: Path, tensors: Sequence[torch.Tensor]) -> tuple[bytes, list[Digest]]:
    """The same from the host."""
    (folder / "host").mkdir(parents=True)
    return _write(LocalStorage(folder / "host"), [each.contiguous() for each in tensors])


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t(),
    "strided": lambda tensor: tensor[1::2, ::3],
    "offset": lambda tensor: tensor[1:],
    "expanded": lambda tensor: tensor[:1].expand(tensor.shape[0], -1),
    "three dimensions": lambda tensor: tensor.view(-1, 5, 100).permute(2, 0, 1),
    "no dimension": lambda tensor: tensor[0, 0],
    "empty": lambda tensor: tensor[:0],
}
DTYPES = [torch.float32, torch.bool, torch.float8_e4m3fn, torch.complex128, torch.bfloat16]
views = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


@functools.cache
def _value(nbytes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A table of 500 columns, which nothing may change."""
    rows = nbytes // (500 * dtype.itemsize)
    raw = noise(rows * 500 * dtype.itemsize).view(rows, -1)
    return (raw & 1 if dtype is torch.bool else raw).view(dtype)


@views
@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_what_is_written_is_what_is_on_the_device(tmp_path, view, dtype):
    """Together with what is on the host, at any place of a file."""
    value = _value(5 * MIB, dtype)
    tensors = [torch.arange(999), view(value), torch.ones(3), view(_value(MIB, dtype))]
    expected = _expected(tmp_path, tensors)
    on_device = [tensors[0], OnDevice(tensors[1]), tensors[2], OnDevice(tensors[3])]
    assert _write(LocalStorage(tmp_path), on_device, step=STEP // 4) == expected
    assert not driver.slow


def test_many_small_tensors_of_a_device_are_written(tmp_path):
    tensors = [noise(i * 7 % 4099) for i in range(3000)]
    expected = _expected(tmp_path, tensors)
    assert _write(LocalStorage(tmp_path), [OnDevice(each) for each in tensors]) == expected


@pytest.mark.parametrize("budget", [1, 300_000, 3 * MIB, 64 * MIB])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_budget_bounds_what_is_page_locked(tmp_path, threads, budget):
    tensors = [_value(11 * MIB), _value(11 * MIB).t()]
    expected = _expected(tmp_path, tensors)
    on_device = [OnDevice(each) for each in tensors]
    assert _write(LocalStorage(tmp_path), on_device, threads, budget) == expected
    assert driver.nbytes <= max(budget, 128 << 10)
    assert driver.nbytes <= threads * 2 * STEP


def test_the_next_bytes_arrive_while_others_are_written(tmp_path):
    tensors = [_value(40 * MIB)]
    storage = Watched(tmp_path)
    _write(storage, [OnDevice(each) for each in tensors], threads=1)
    at_work = [count for count in storage.in_flight if count]
    assert len(at_work) > len(storage.in_flight) / 2


def test_what_the_current_stream_makes_of_a_tensor_is_written(tmp_path):
    tensor = OnDevice(torch.zeros(5 * MIB, dtype=torch.uint8))
    expected = _expected(tmp_path, [torch.full((5 * MIB,), 7, dtype=torch.uint8)])
    with driver.on(driver.stream()):
        tensor.fill_(7)
        assert _write(LocalStorage(tmp_path), [tensor]) == expected


def test_what_another_stream_makes_of_a_tensor_is_written():
    """As a planner of ``torch.distributed.checkpoint`` may, when it is asked for a tensor."""
    tensor = OnDevice(torch.zeros(5 * MIB, dtype=torch.uint8))
    with Devices() as devices, driver.on(driver.stream()):
        tensor.fill_(7)
        devices.follow(tensor.device)
        with contextlib.closing(devices.bytes_of("w", tensor)[9:90].arrivals([])) as nothing:
            assert not list(nothing)
        with contextlib.closing(devices.arrivals([[devices.bytes_of("w", tensor)[9:90]]])) as found:
            assert [bytes(each) for each in found] == [bytes([7] * 81)]


def test_a_refusal_to_page_lock_is_said_once_and_costs_only_time(tmp_path):
    driver.refuses = True
    tensors = [_value(9 * MIB), _value(9 * MIB).t()]
    expected = _expected(tmp_path, tensors)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        on_device = [OnDevice(each) for each in tensors]
        assert _write(LocalStorage(tmp_path), on_device, threads=1) == expected
    assert [one.category for one in said] == [RuntimeWarning]
    assert not driver.fast


def test_when_writing_fails_nothing_is_copied_any_more(tmp_path):
    storage = Watched(tmp_path, room=9 * MIB)
    with pytest.raises(OSError, match="No space left"):
        _write(storage, [OnDevice(_value(40 * MIB))])
    assert driver.fast < 40 * MIB
    assert not storage.list()


def test_a_take_that_is_stopped_copies_no_more(tmp_path):
    stop = Stop()
    tensor = OnDevice(_value(40 * MIB))

    class Stopping(Watched):
        def create(self, name: str, nbytes: int) -> LocalWriter:
            stop.set()
            return super().create(name, nbytes)

    with pytest.raises(Stopped):
        stop.run(lambda: _write(Stopping(tmp_path), [tensor]))
    assert driver.fast < 40 * MIB


# ---- to devices -----------------------------------------------------------------------------


def _restore(
    path: Path,
    target: torch.Tensor,
    check: Check | None,
    part: TensorSlice | None = None,
    budget: int | None = None,
) -> None:
    snapshot = Snapshot(path)
    entry = snapshot.manifest.of_rank(0)["m"]["w"]
    assert isinstance(entry, TensorEntry)
    box = boxes.whole(entry.shape)
    if part is not None:
        box = boxes.Box(part.offsets, part.local_shape)
    with Files(LocalStorage(path), snapshot.manifest) as files:
        execute(files, plan_reads("m/w", entry, target, box), check=check, budget=budget)
    assert not any(stream.done < len(stream.queue) for stream in driver.streams[1:])


CHECKS: list[Check | None] = ["before", "during", "all", None]
PLACES: dict[str, Callable[[int, int, torch.dtype], torch.Tensor]] = {
    "contiguous": lambda rows, columns, dtype: torch.zeros(rows, columns, dtype=dtype),
    "transposed": lambda rows, columns, dtype: torch.zeros(columns, rows, dtype=dtype).t(),
    "every other row": lambda rows, columns, dtype: torch.zeros(2 * rows, columns, dtype=dtype)[
        ::2
    ],
    "inner block": lambda rows, columns, dtype: torch.zeros(rows + 2, columns + 2, dtype=dtype)[
        1:-1, 1:-1
    ],
}
places = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


@places
@pytest.mark.parametrize(
    ("check", "budget"),
    [*((check, None) for check in CHECKS), ("during", 1), ("before", 3 * MIB)],
    ids=str,
)
def test_what_is_restored_is_what_was_taken(tmp_path, place, check, budget):
    value = _value(19 * MIB)
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=value)}, fsync=False)
    mine = place(*value.shape, value.dtype)
    _restore(tmp_path / "s", OnDevice(mine), check, budget=budget)
    assert torch.equal(bits(mine), bits(value))
    if mine._base is not None:
        mine.zero_()
        assert not mine._base.any(), "written outside of the view"
    assert not driver.slow
    if budget is not None:
        assert driver.nbytes <= max(budget // 2, 128 << 10), "the rest is for what is read"


@places
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_any_dtype_is_restored(tmp_path, place, dtype):
    value = _value(5 * MIB, dtype)
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=value)}, fsync=False)
    mine = place(*value.shape, dtype)
    _restore(tmp_path / "s", OnDevice(mine), "during")
    assert torch.equal(bits(mine), bits(value))


@places
@pytest.mark.parametrize("check", CHECKS[:3], ids=str)
@pytest.mark.parametrize("columns", [slice(0, 500), slice(3, 470), slice(0, 1)], ids=str)
def test_parts_are_restored(tmp_path, place, check, columns):
    value = _value(9 * MIB)
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=value)}, fsync=False)
    expected = value[7:4500, columns]
    part = TensorSlice((7, columns.start), tuple(expected.shape), tuple(value.shape))
    mine = place(*expected.shape, value.dtype)
    _restore(tmp_path / "s", OnDevice(mine), check, part)
    assert torch.equal(bits(mine), bits(expected))


def test_small_tensors_go_to_devices_and_to_the_host_in_one_restore(tmp_path):
    state = {f"t{i}": torch.full((i * 7 % 4099,), i) for i in range(900)}
    Snapshot.take(tmp_path / "s", {"m": StateDict(**state)}, fsync=False)
    snapshot = Snapshot(tmp_path / "s")
    mine = {name: torch.zeros_like(each) for name, each in state.items()}
    reads = []
    for number, (name, entry) in enumerate(snapshot.manifest.of_rank(0)["m"].items()):
        assert isinstance(entry, TensorEntry)
        target = OnDevice(mine[name]) if number % 3 else mine[name]
        reads += plan_reads(f"m/{name}", entry, target, boxes.whole(entry.shape))
    with Files(LocalStorage(tmp_path / "s"), snapshot.manifest) as files:
        execute(files, reads, check="during")
    for name, each in state.items():
        assert torch.equal(mine[name], each), name
    assert driver.fast


@pytest.mark.parametrize("check", ["before", "during", "all"])
@pytest.mark.parametrize("budget", [None, 3 * MIB], ids=str)
def test_damage_is_found(tmp_path, check: Literal["before", "during", "all"], budget):
    value = torch.full((BLOCK * 3,), 3, dtype=torch.uint8)
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=value)}, fsync=False)
    (file,) = (tmp_path / "s").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-BLOCK - 9] ^= 1
    file.write_bytes(data)
    mine = torch.zeros_like(value)
    with pytest.raises(SnapshotCorruptError, match="m/w"):
        _restore(tmp_path / "s", OnDevice(mine), check, budget=budget)
    assert not driver.in_flight()
    if check != "during":
        assert not mine.any()


@places
def test_a_file_that_is_truncated_while_it_is_read(tmp_path, monkeypatch, place):
    value = _value(5 * MIB)
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=value)}, fsync=False)
    (file,) = (tmp_path / "s").glob("*.safetensors")
    window = Files.window

    def truncating(self: Files, *arguments: Any) -> memoryview | None:
        found = window(self, *arguments)
        os.truncate(file, 0)
        return found

    monkeypatch.setattr(Files, "window", truncating)
    with pytest.raises(SnapshotCorruptError, match="became shorter"):
        _restore(tmp_path / "s", OnDevice(place(*value.shape, value.dtype)), None)


def test_work_that_reads_a_tensor_comes_before_its_restore(tmp_path):
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=torch.full((5 * MIB,), 2.0))}, fsync=False)
    mine = torch.ones(5 * MIB)
    with driver.on(driver.stream()):
        before = OnDevice(mine).clone()
        _restore(tmp_path / "s", OnDevice(mine), "before")
    assert (mine == 2).all()
    assert (before.values == 1).all()


def test_a_restore_without_page_locked_memory_only_takes_longer(tmp_path):
    driver.refuses = True
    value = _value(9 * MIB)
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=value)}, fsync=False)
    for place in PLACES.values():
        mine = place(*value.shape, value.dtype)
        with pytest.warns(RuntimeWarning, match="page-lock"):
            _restore(tmp_path / "s", OnDevice(mine), "during")
        assert torch.equal(bits(mine), bits(value))
    assert not driver.fast


def test_inference_tensors_are_restored(tmp_path):
    value = _value(5 * MIB)
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=value)}, fsync=False)
    mine = torch.zeros_like(value)
    with torch.inference_mode():
        target = OnDevice(mine)
    assert target.is_inference()
    _restore(tmp_path / "s", target, "during")
    assert torch.equal(bits(mine), bits(value))


def test_snapshots_may_be_taken_and_restored_in_inference_mode(tmp_path):
    """The threads that work for it are not in that mode."""
    value = _value(21 * MIB)
    expected = _expected(tmp_path, [value])
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=value)}, fsync=False)
    mine, columns = torch.zeros_like(value), torch.zeros_like(value.t()).t()
    targets = [OnDevice(mine), OnDevice(columns)]
    with torch.inference_mode():
        assert _write(LocalStorage(tmp_path), [OnDevice(value)]) == expected
        for target in targets:
            _restore(tmp_path / "s", target, "during")
    assert torch.equal(bits(mine), bits(value))
    assert torch.equal(bits(columns), bits(value))


def test_another_thread_has_the_current_device_and_streams_of_this_one(monkeypatch):
    device: list[object] = []

    @contextlib.contextmanager
    def on_device(one: object) -> Iterator[None]:
        device.append(one)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", on_device)
    mine = driver.stream(0)
    found: list[Work] = []
    with driver.on(mine):
        call = with_streams(lambda: found.append(driver.current_stream()))
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert found == [mine]
    assert device[-1] == 0
