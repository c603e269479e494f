"""A disk that takes no more, or fails: what is known of it, and for how long."""

from __future__ import annotations

import os
import queue
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.machine.topology import probe
from torchstore_core.server.index.records import Value
from torchstore_core.server.memory.segment import open_memory
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.spilling.moves import Mover, Site
from torchstore_core.server.spilling.policy import Residency, State, Tracked
from torchstore_core.server.spilling.spill_file import SpillFile
from torchstore_core.server.spilling.threads import SpillThreads
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.volumes.spilling import Extent

_MB = 1 << 20
_FACTS = ClientFacts("host", "host", 1)


@pytest.fixture
def segment() -> Iterator[int]:
    fd = open_memory("test", 4 * _MB)
    yield fd
    os.close(fd)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process can have more than two megabytes, as if the disk were full then."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * _MB, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_has_no_more_room_than_its_disk(tmp_path: Path) -> None:
    file = SpillFile(str(tmp_path), 1 << 60)
    threads = SpillThreads(file, [], lambda call: None)
    site = Site(file.capacity, threads)
    disk = os.statvfs(tmp_path)
    assert site.left <= disk.f_blocks * disk.f_frsize < site.space.free
    small = Site(8192, threads)
    assert small.left == 8192
    assert small.space.reserve(0, 4096) is not None
    assert small.left == 4096
    threads.close()


def test_whoever_waits_has_no_more_written_than_is_needed(segment: int, tmp_path: Path) -> None:
    """What was used last could be ready first, and leave memory before what was used earlier."""
    ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    file = SpillFile(str(tmp_path), None)
    mover = Mover.here(file, [], [segment], ended.put)
    values = Residency()
    mover.begin(values, lambda is_progress: None, lambda tracked: None)
    meta = TensorMeta("uint8", (_MB,))
    for at in range(3):
        value = Value(f"k{at}", meta, _MB, 0, None, at * _MB, _FACTS, uses=1)
        values.add(value, value.key, State.DIRTY)
    mover.write(2 * _MB)
    assert values.bytes_of[State.WRITING] == 2 * _MB
    mover.write(_MB, at_any_price=True)
    assert values.bytes_of[State.WRITING] == 2 * _MB
    ended.get(timeout=30)()
    mover.close()


def test_a_gap_that_was_found_does_not_mean_that_the_disk_takes_more(
    segment: int, tmp_path: Path, small_files: None
) -> None:
    """A write that was begun before another one has failed says nothing of the disk now."""
    ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    file = SpillFile(str(tmp_path), None)
    mover = Mover.here(file, [], [segment], ended.put)
    values = Residency()
    mover.begin(values, lambda is_progress: None, lambda tracked: None)

    def add(key: str, offset: int) -> Tracked:
        meta = TensorMeta("uint8", (_MB,))
        return values.add(Value(key, meta, _MB, 0, None, offset, _FACTS, uses=1), key, State.DIRTY)

    taken = mover.sites[0].space.reserve(0, 2 * _MB)
    assert taken is not None
    beyond = add("beyond", 0)
    mover.write(_MB)
    failed = ended.get(timeout=30)
    mover.sites[0].space.release(taken)
    within = add("within", _MB)
    mover.write(2 * _MB)
    written = ended.get(timeout=30)
    failed()
    assert beyond.state is State.DIRTY
    assert mover.trouble == os.strerror(27)
    written()
    assert within.state is State.CLEAN
    assert mover.trouble == os.strerror(27)
    mover.close()


def test_a_disk_that_is_full_again_and_again_is_logged_once(
    segment: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each get from a full disk may find it full, and then have room again."""
    ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    mover = Mover.here(SpillFile(str(tmp_path), _MB), [], [segment], ended.put)
    values = Residency()
    mover.begin(values, lambda is_progress: None, lambda tracked: None)
    meta = TensorMeta("uint8", (_MB,))
    clean = None
    for at in range(3):
        value = Value(f"k{at}", meta, _MB, 0, None, at * _MB, _FACTS, uses=1)
        values.add(value, value.key, State.DIRTY)
        if clean is not None:
            mover.write(_MB)
            assert "is used up" in mover.trouble
            mover.forget(clean)
            assert not mover.trouble
        mover.write(_MB)
        ended.get(timeout=30)()
        assert not mover.trouble
        clean = values.remove(values.oldest(State.CLEAN, _MB)[0].value)
        assert clean is not None
    assert [one.message for one in caplog.records] == [
        f"cannot spill to {tmp_path}: its capacity of 1.0 MiB is used up (see spill_capacity=)"
    ]
    mover.close()


class _Failing(SpillFile):
    """A file for which there is no memory, as long as that is so."""

    fails = True

    def _write(self, view: memoryview, extent: Extent, at: int) -> None:
        if self.fails:
            raise MemoryError
        super()._write(view, extent, at)

    def _read(self, view: memoryview, extent: Extent, at: int) -> None:
        if self.fails:
            raise MemoryError
        super()._read(view, extent, at)


@pytest.mark.parametrize("nbytes", [1000, 40 * _MB // 16])
def test_a_value_goes_back_to_where_it_was(segment: int, tmp_path: Path, nbytes: int) -> None:
    """If there is no memory to write it, or to read it."""
    ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    file = _Failing(str(tmp_path), None)
    info = m.VolumeInfo("v", 0, 1, probe(), 4 * _MB, {})
    volume = VolumeRecord(info, SimpleNamespace(touched=lambda end: None), None)  # type: ignore[arg-type]
    mover = Mover.here(file, [volume], [segment], ended.put)
    values = Residency()
    mover.begin(values, lambda is_progress: None, lambda tracked: None)
    meta = TensorMeta("uint8", (nbytes,))
    os.pwrite(segment, b"x" * nbytes, 0)
    tracked = values.add(Value("k", meta, nbytes, 0, None, 0, _FACTS, uses=1), "k", State.DIRTY)

    def until(state: State) -> None:
        while tracked.state is not state:
            ended.get(timeout=30)()

    mover.write(nbytes)
    assert tracked.state is State.WRITING
    until(State.DIRTY)
    assert (mover.trouble, mover.used) == ("MemoryError", 0)
    file.fails, mover.sites[0].paused_until = False, 0.0
    mover.write(nbytes)
    until(State.CLEAN)
    assert not mover.trouble
    values.move(tracked, State.ON_DISK)
    file.fails = True
    assert mover.read([tracked])
    until(State.ON_DISK)
    assert (tracked.failure, volume.allocator.used) == ("MemoryError", 0)
    assert not tracked.is_damaged
    file.fails, tracked.failure = False, ""
    assert mover.read([tracked])
    until(State.CLEAN)
    assert os.pread(segment, nbytes, tracked.value.offset) == b"x" * nbytes
    mover.close()


def test_who_gives_up_a_copy_does_not_look_at_all(segment: int, tmp_path: Path) -> None:
    """Of however many copies there are, only as many as make room."""

    def steps(count: int) -> int:
        file = SpillFile(str(tmp_path), count * 8192)
        mover = Mover.here(file, [], [segment], lambda call: None)
        values = Residency()
        mover.begin(values, lambda is_progress: None, lambda tracked: None)
        meta = TensorMeta("uint8", (8192,))
        for at in range(count + 1):
            value = Value(f"k{at}", meta, 8192, 0, None, 8192 * at, _FACTS, uses=1)
            tracked = values.add(value, value.key, State.DIRTY)
            if at < count:
                tracked.extent = mover.sites[0].space.reserve(0, 8192)
                values.move(tracked, State.CLEAN)
        assert (values.copied[0], mover.free) == (count * 8192, 0)
        calls: list[str] = []
        sys.setprofile(lambda frame, event, what: calls.append(event))
        try:
            mover.write(8192, at_any_price=True)
        finally:
            sys.setprofile(None)
        assert values.count_of[State.CLEAN] == count - 1
        assert values.copied[0] == (count - 1) * 8192
        mover.close()
        return len(calls)

    steps(10)
    assert steps(400) < steps(20) + 100
