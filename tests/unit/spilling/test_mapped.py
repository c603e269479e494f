"""A segment that is mapped for spilling: what its pages cost, and what happens without room."""

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
from torchstore_core.server.spilling.mapped import KEPT, MappedSegment
from torchstore_core.server.spilling.moves import Mover
from torchstore_core.server.spilling.policy import Residency, State
from torchstore_core.server.spilling.spill_file import SpillFile
from torchstore_core.values import TensorMeta

_NBYTES = 256 << 20
_PIECE = 8 << 20
_FACTS = ClientFacts("host", "host", 1)


@pytest.fixture
def segment() -> Iterator[int]:
    """The descriptor of a segment with some bytes at the start of its second piece."""
    fd = open_memory("test", _NBYTES)
    os.pwrite(fd, b"there", _PIECE)
    yield fd
    os.close(fd)


def _of_memory(fd: int) -> int:
    """Bytes of a memfd that this process has in its page tables."""
    inode, found = os.fstat(fd).st_ino, 0
    lines = Path("/proc/self/smaps").read_text().splitlines()
    ours = False
    for line in lines:
        fields = line.split()
        if not fields[0].endswith(":"):
            ours = fields[4] == str(inode)
        elif ours and fields[0] == "Rss:":
            found += int(fields[1]) << 10
    return found


def test_pages_of_a_small_segment_stay_until_it_rests(segment: int) -> None:
    mapped = MappedSegment(segment)
    with mapped.piece(_PIECE, _PIECE) as view:
        assert bytes(view[:5]) == b"there"
    assert mapped.is_filled
    assert _of_memory(segment) >= _PIECE
    mapped.rest()
    assert not mapped.is_filled
    assert _of_memory(segment) == 0
    with mapped.piece(_PIECE, _PIECE) as view:
        assert bytes(view[:5]) == b"there"
        view[:5] = b"again"
    assert os.pread(segment, 5, _PIECE) == b"again"
    mapped.close()


def test_pages_of_a_large_segment_do_not_stay(segment: int) -> None:
    mapped = MappedSegment(segment, _NBYTES - 1)
    with mapped.piece(_PIECE, _PIECE) as view:
        assert _of_memory(segment) >= _PIECE
        view[:5] = b"again"
    assert not mapped.is_filled
    assert _of_memory(segment) == 0
    assert os.pread(segment, 5, _PIECE) == b"again"
    mapped.close()


def test_without_address_space_for_all_of_it_pieces_are_mapped(segment: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    mapped = MappedSegment(segment, KEPT)
    resource.setrlimit(resource.RLIMIT_AS, (size + _NBYTES // 2, limits[1]))
    try:
        with mapped.piece(_PIECE, _PIECE) as view:
            assert bytes(view[:5]) == b"there"
            view[:5] = b"again"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert os.pread(segment, 5, _PIECE) == b"again"
    assert not mapped.is_filled
    assert _of_memory(segment) == 0
    mapped.close()


def test_a_piece_beyond_the_segment_is_an_error_and_no_signal(segment: int) -> None:
    mapped = MappedSegment(segment)
    with mapped.piece(0, _PIECE):
        pass
    os.ftruncate(segment, _PIECE)
    with pytest.raises(OSError, match="bytes of a segment"), mapped.piece(_PIECE, _PIECE):
        pass
    mapped.close()


def test_a_server_that_has_spilled_looks_small_again(segment: int, tmp_path: Path) -> None:
    """What is mapped of the segment leaves the page tables with what is unused of the file."""
    ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    mover = Mover.here(SpillFile(str(tmp_path), None), [], [segment], ended.put)
    values = Residency()
    mover.begin(values, lambda is_progress: None, lambda tracked: None)
    meta = TensorMeta("uint8", (_PIECE,))
    spilled = values.add(Value("k", meta, _PIECE, 0, None, 0, _FACTS, uses=1), "k", State.DIRTY)
    mover.write(_PIECE)
    ended.get(timeout=30)()
    assert spilled.state is State.CLEAN
    assert _of_memory(segment) >= _PIECE
    mover.trim()
    ended.get(timeout=30)()
    assert _of_memory(segment) == 0
    mover.trim()  # there is nothing left to do
    assert ended.empty()
    mover.close()
