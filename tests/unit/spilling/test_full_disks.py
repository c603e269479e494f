"""A disk that takes no more: what is known of it, and for how long."""

from __future__ import annotations

import os
import queue
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.server.index.records import Value
from torchstore_core.server.memory.segment import open_memory
from torchstore_core.server.spilling.moves import Mover
from torchstore_core.server.spilling.policy import Residency, State, Tracked
from torchstore_core.server.spilling.spill_file import SpillFile
from torchstore_core.values import TensorMeta

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
    disk = os.statvfs(tmp_path)
    assert file.left <= disk.f_blocks * disk.f_frsize < file.free
    small = SpillFile(str(tmp_path), 8192)
    assert small.left == 8192
    assert small.reserve(0, 4096) is not None
    assert small.left == 4096
    file.close()
    small.close()


def test_a_gap_that_was_found_does_not_mean_that_the_disk_takes_more(
    segment: int, tmp_path: Path, small_files: None
) -> None:
    """A write that was begun before another one has failed says nothing of the disk now."""
    ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    file = SpillFile(str(tmp_path), None)
    mover = Mover(file, [], [segment], ended.put)
    values = Residency()
    mover.begin(values, lambda is_progress: None, lambda tracked: None)

    def add(key: str, offset: int) -> Tracked:
        meta = TensorMeta("uint8", (_MB,))
        return values.add(Value(key, meta, _MB, 0, None, offset, _FACTS, uses=1), key, State.DIRTY)

    taken = file.reserve(0, 2 * _MB)
    assert taken is not None
    beyond = add("beyond", 0)
    mover.write(_MB)
    failed = ended.get(timeout=30)
    file.release(taken)
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
