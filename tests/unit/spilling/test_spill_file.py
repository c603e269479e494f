"""The spill file: bytes at every position in a page, and nothing of their neighbours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstore_core.server.memory.segment import open_memory
from torchstore_core.server.spilling.checksums import checksum
from torchstore_core.server.spilling.mapped import KEPT, MappedSegment
from torchstore_core.server.spilling.spill_file import PIECE, DamagedError, SpillFile

CAPACITY = 64 << 20
_FILLED = b"\xaa"


@pytest.fixture(scope="module", params=[KEPT, 0], ids=["small", "large"])
def memory(request: pytest.FixtureRequest) -> Iterator[MappedSegment]:
    """A segment whose pages stay mapped, and one that is too large for that."""
    fd = open_memory("test", CAPACITY)
    mapped = MappedSegment(fd, request.param)
    yield mapped
    mapped.close()
    os.close(fd)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpillFile]:
    made = SpillFile(str(tmp_path_factory.mktemp("spill")), None)
    yield made
    made.close()


def _moves(memory: MappedSegment, file: SpillFile, at: int, to: int, nbytes: int) -> None:
    content = os.urandom(nbytes)
    os.pwrite(memory.fd, content, at)
    extent = file.reserve(at % 4096, nbytes)
    assert extent is not None
    assert extent.runs[0][0] % 4096 == 0
    sums = file.write(memory, at, extent)
    start = max(to - 5000, 0)
    before, after = to - start, min(5000, CAPACITY - to - nbytes)
    os.pwrite(memory.fd, _FILLED * (before + nbytes + after), start)
    file.read(memory, to, extent, sums)
    found = os.pread(memory.fd, before + nbytes + after, start)
    assert found == _FILLED * before + content + _FILLED * after
    file.release(extent)
    assert file.used == 0
    tail = file.take_tail()
    assert tail is not None
    assert file.reserve(0, 1) is None
    file.cut(tail)
    file.return_tail(tail)
    assert os.fstat(file.fd).st_blocks == 0
    assert file.take_tail() is None


@given(
    st.integers(0, 200).map(lambda line: line * 64),
    st.integers(0, 200).map(lambda line: line * 64),
    st.integers(1, 20_000),
)
def test_small_values_anywhere(
    memory: MappedSegment, file: SpillFile, at: int, to: int, nbytes: int
) -> None:
    _moves(memory, file, at, (1 << 20) + to, nbytes)


@pytest.mark.parametrize("nbytes", [PIECE - 64, PIECE, PIECE + 1, 2 * PIECE + 4097])
@pytest.mark.parametrize(("at", "to"), [(0, 0), (4096, 8192), (64, 64 + 4096), (4032, 128)])
def test_large_values_anywhere(
    memory: MappedSegment, file: SpillFile, at: int, to: int, nbytes: int
) -> None:
    _moves(memory, file, at, (32 << 20) + to, nbytes)


def test_the_end_of_the_segment(memory: MappedSegment, file: SpillFile) -> None:
    _moves(memory, file, CAPACITY - 6400, CAPACITY - 6400, 6400)


def test_room_in_several_places_is_room(memory: MappedSegment, tmp_path: Path) -> None:
    """Every second value goes; what is then written fills the gaps, across pieces."""
    gaps = [4096, 16 << 10, 5 << 20, PIECE, 12 << 10]
    file = SpillFile(str(tmp_path), sum(gaps) + 4096 * len(gaps))
    try:
        between, freed = [], []
        for nbytes in gaps:
            freed.append(file.reserve(0, nbytes))
            between.append(file.reserve(0, 4096))
        os.pwrite(memory.fd, _FILLED * 4096, 0)
        sums_between = [file.write(memory, 0, one) for one in between if one is not None]
        for one in freed:
            assert one is not None
            file.release(one)
        nbytes = sum(gaps) - 64
        content = os.urandom(nbytes)
        os.pwrite(memory.fd, content, 64)
        extent = file.reserve(64, nbytes)
        assert extent is not None
        assert len(extent.runs) == len(gaps)
        assert file.free == 0
        assert file.reserve(0, 1) is None
        sums = file.write(memory, 64, extent)
        for to in (64, 4096 + 64, 8192):  # in place, and through a buffer
            file.read(memory, to, extent, sums)
            assert os.pread(memory.fd, nbytes, to) == content
        later = SpillFile(str(tmp_path), file.capacity, os.dup(file.fd))  # as after a restart
        later.occupy([extent, *[one for one in between if one is not None]])
        assert later.free == 0
        later.close()
        for one, sums in zip(between, sums_between, strict=True):
            assert one is not None
            file.read(memory, 0, one, sums)
            assert os.pread(memory.fd, 4096, 0) == _FILLED * 4096
            file.release(one)
        file.release(extent)
        assert file.used == 0
    finally:
        file.close()


def test_every_byte_counts(memory: MappedSegment, file: SpillFile) -> None:
    os.pwrite(memory.fd, bytes(20_000), 64)
    extent = file.reserve(64, 20_000)
    assert extent is not None
    sums = file.write(memory, 64, extent)
    name = f"/proc/self/fd/{file.fd}"
    for at in (64, 4096, 20_063):
        with open(name, "r+b", buffering=0) as opened:
            opened.seek(extent.runs[0][0] + at)
            opened.write(b"\1")
            with pytest.raises(DamagedError, match="checksum"):
                file.read(memory, 1 << 20, extent, sums)
            opened.seek(extent.runs[0][0] + at)
            opened.write(b"\0")
            file.read(memory, 1 << 20, extent, sums)
    file.release(extent)


def test_its_capacity_is_a_limit(tmp_path: Path) -> None:
    made = SpillFile(str(tmp_path / "made"), 3 * 4096)
    first, second = made.reserve(64, 4096), made.reserve(0, 4096)
    assert first is not None
    assert first.span == 2 * 4096
    assert second is not None
    assert second.span == 4096
    assert made.free == 0
    assert made.reserve(0, 1) is None
    made.release(first)
    made.release(second)
    assert made.reserve(0, 3 * 4096) is not None
    made.close()


@given(st.binary(min_size=1, max_size=3000), st.data())
def test_a_checksum_tells_what_changed(content: bytes, data: st.DataObject) -> None:
    found = checksum(memoryview(content))
    assert found == checksum(memoryview(bytearray(content)))
    at = data.draw(st.integers(0, len(content) - 1))
    bit = data.draw(st.integers(0, 7))
    changed = bytearray(content)
    changed[at] ^= 1 << bit
    assert checksum(memoryview(changed)) != found
    assert checksum(memoryview(content + b"\0")) != found
    swapped = content[64:128] + content[:64] + content[128:]
    if swapped != content:
        assert checksum(memoryview(swapped)) != found
