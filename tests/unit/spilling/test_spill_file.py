"""The spill file: bytes at every position in a page, and nothing of their neighbours."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)
from tests.profiles import half
from tests.unit.copying.native import needs_native

from torchstore_core.server.memory.segment import open_memory
from torchstore_core.server.spilling.checksums import checksum
from torchstore_core.server.spilling.mapped import KEPT, MappedSegment
from torchstore_core.server.spilling.space import PIECE, SpillSpace
from torchstore_core.server.spilling.spill_file import DamagedError, SpillFile
from torchstore_core.wire.volumes.spilling import Extent, spanned

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
    space = SpillSpace(file.capacity)
    extent = space.reserve(at % 4096, nbytes)
    assert extent is not None
    assert extent.runs[0][0] % 4096 == 0
    sums = file.write(memory, at, extent)
    start = max(to - 5000, 0)
    before, after = to - start, min(5000, CAPACITY - to - nbytes)
    os.pwrite(memory.fd, _FILLED * (before + nbytes + after), start)
    file.read(memory, to, extent, sums)
    found = os.pread(memory.fd, before + nbytes + after, start)
    assert found == _FILLED * before + content + _FILLED * after
    space.release(extent)
    assert space.used == 0
    tail = space.take_tail()
    assert tail is not None
    assert space.reserve(0, 1) is None
    file.cut(tail[0])
    space.return_tail(tail)
    assert os.fstat(file.fd).st_blocks == 0
    assert space.take_tail() is None


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
    space = SpillSpace(file.capacity)
    try:
        between, freed = [], []
        for nbytes in gaps:
            freed.append(space.reserve(0, nbytes))
            between.append(space.reserve(0, 4096))
        os.pwrite(memory.fd, _FILLED * 4096, 0)
        sums_between = [file.write(memory, 0, one) for one in between if one is not None]
        for one in freed:
            assert one is not None
            space.release(one)
        nbytes = sum(gaps) - 64
        content = os.urandom(nbytes)
        os.pwrite(memory.fd, content, 64)
        extent = space.reserve(64, nbytes)
        assert extent is not None
        assert len(extent.runs) == len(gaps)
        assert space.free == 0
        assert space.reserve(0, 1) is None
        sums = file.write(memory, 64, extent)
        for to in (64, 4096 + 64, 8192):  # in place, and through a buffer
            file.read(memory, to, extent, sums)
            assert os.pread(memory.fd, nbytes, to) == content
        later = SpillSpace(file.capacity)  # as after a restart
        later.occupy([extent, *[one for one in between if one is not None]], file.size)
        assert later.free == 0
        for one, sums in zip(between, sums_between, strict=True):
            assert one is not None
            file.read(memory, 0, one, sums)
            assert os.pread(memory.fd, 4096, 0) == _FILLED * 4096
            space.release(one)
        space.release(extent)
        assert space.used == 0
    finally:
        file.close()


def test_the_end_of_the_file_of_an_earlier_life_is_cut_off() -> None:
    """However large what is in use of it is."""
    space = SpillSpace(1 << 20)
    first = space.reserve(0, 4096)
    assert first is not None
    later = SpillSpace(1 << 20)
    later.occupy([first], 64 << 10)
    tail = later.take_tail()
    assert tail is not None
    assert tail[0] == 4096
    later.return_tail(tail)
    assert later.take_tail() is None


def test_every_byte_counts(memory: MappedSegment, file: SpillFile) -> None:
    os.pwrite(memory.fd, bytes(20_000), 64)
    extent = SpillSpace(file.capacity).reserve(64, 20_000)
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


def test_its_capacity_is_a_limit() -> None:
    made = SpillSpace(3 * 4096)
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


def test_where_files_have_a_name_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: MappedSegment
) -> None:
    """Without O_TMPFILE a file has one for a moment, in which another server that starts may take
    it for one that was left behind.
    """
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # as kernels see it that do not know it
    make = tempfile.mkstemp
    others: list[int] = []

    def made_and_looked_at(**where: str) -> tuple[int, str]:
        fd, path = make(**where)
        if not others:
            others.append(os.open(path, os.O_RDWR))
            fcntl.flock(others[0], fcntl.LOCK_EX)
        return fd, path

    monkeypatch.setattr(tempfile, "mkstemp", made_and_looked_at)
    file = SpillFile(str(tmp_path), CAPACITY)
    _moves(memory, file, 64, 128, 5000)
    file.close()
    SpillFile(str(tmp_path), CAPACITY).close()
    assert len(os.listdir(tmp_path)) == 1, "which somebody else has"
    os.close(others[0])
    SpillFile(str(tmp_path), CAPACITY).close()
    assert os.listdir(tmp_path) == []


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


class Packs(RuleBasedStateMachine):
    """Small values share pages of a file, are given up one by one, and are read by others' side."""

    values = Bundle("values")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.file = SpillFile(self.folder.name, 48 << 12)
        self.space = SpillSpace(self.file.capacity)
        self.there: dict[int, tuple[Extent, list[int], bytes]] = {}
        self.numbers = itertools.count()

    @rule(target=values, sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=9))
    def write(self, sizes: list[int]) -> MultipleResults[int]:
        room = self.space.reserve_together(sizes)
        if room is None:
            assert len(sizes) > 1 or self.space.free < spanned(0, sizes[0])
            return multiple()
        whole, extents = room
        contents = [random.randbytes(size) for size in sizes]
        sums = self.file.write_together(contents, whole)
        numbers = [next(self.numbers) for _ in sizes]
        self.there |= dict(zip(numbers, zip(extents, sums, contents, strict=True), strict=True))
        return multiple(*numbers)

    @rule(number=consumes(values))
    def release(self, number: int) -> None:
        self.space.release(self.there.pop(number)[0])

    @rule(wanted=st.lists(values, unique=True))
    def read(self, wanted: list[int]) -> None:
        found = self.file.read_together([self.there[number][:2] for number in wanted])
        assert found == [self.there[number][2] for number in wanted]

    @rule(at=values)
    def damage(self, at: int) -> None:
        """Only that value is damaged."""
        extent, _, content = self.there[at]
        start = extent.runs[0][0] + extent.head
        with open(f"/proc/self/fd/{self.file.fd}", "r+b", buffering=0) as opened:
            opened.seek(start)
            opened.write(bytes([content[0] ^ 1]))
            found = self.file.read_together([one[:2] for one in self.there.values()])
            opened.seek(start)
            opened.write(content[:1])
        for number, one in zip(self.there, found, strict=True):
            assert isinstance(one, DamagedError) if number == at else one == self.there[number][2]

    @rule()
    def come_back(self) -> None:
        self.space.occupy([one[0] for one in self.there.values()], self.file.size)

    @invariant()
    def pages_in_use_are_those_of_values(self) -> None:
        runs = [run for extent, _, _ in self.there.values() for run in extent.runs]
        pages = {page for start, size in runs for page in range(start, start + size, 4096)}
        assert self.space.used == 4096 * len(pages)

    def teardown(self) -> None:
        self.file.close()
        self.folder.cleanup()


Packs.TestCase.settings = half()
TestPacks = Packs.TestCase


def _sum_of(content: bytes) -> int:
    """The checksum of the compiled module as it is defined, lane by lane."""
    mask, prime = (1 << 64) - 1, 0x9E3779B1
    keys = (
        0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072,
        0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82, 0x8E2443F7744608B8, 0x4C263A81E69035E0,
    )  # fmt: skip
    lanes = list(keys)

    def stripe(words: bytes, turn: int) -> None:
        numbers = struct.unpack("<8Q", words)
        for at, number in enumerate(numbers):
            mixed = number ^ (keys[at] + turn & mask)
            product = (mixed & 0xFFFFFFFF) * (mixed >> 32)
            lanes[at] = lanes[at] + product + numbers[at ^ 1] & mask

    def scramble() -> None:
        for at, lane in enumerate(lanes):
            lanes[at] = (lane ^ lane >> 47 ^ keys[at]) * prime & mask

    whole = len(content) // 64
    for begin in range(0, whole, 16):
        for turn in range(min(16, whole - begin)):
            words = content[64 * (begin + turn) :][:64]
            stripe(words, turn * 0xC2B2AE3D27D4EB4F & mask)
        scramble()
    stripe(content[64 * whole :].ljust(64, b"\0"), 1)
    scramble()
    total = len(content) * 0x9E3779B185EBCA87 & mask
    for lane in lanes:
        total ^= lane
        total = (total ^ total >> 29) * 0xBF58476D1CE4E5B9 & mask
        total ^= total >> 32
    return total


@needs_native
@given(st.integers(0, 5000), st.integers(0, 70), st.integers(0, 1 << 32))
def test_the_checksum_is_the_same_on_every_processor(nbytes: int, at: int, seed: int) -> None:
    """Where registers are wide, several lanes are summed at once."""
    content = random.Random(seed).randbytes(at + nbytes)
    assert checksum(memoryview(content)[at:]) == _sum_of(content[at:])
