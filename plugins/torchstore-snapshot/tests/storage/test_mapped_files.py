"""Mapped files are read in large requests, also where they are not in the page cache, and nothing
beside what is needed is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import resource
from pathlib import Path

import pytest
import torch

from torchstore_snapshot import Snapshot, StateDict
from torchstore_snapshot.restoring.mappings import MappedFile, address_of
from torchstore_snapshot.restoring.restore import Verify
from torchstore_snapshot.storage.base import Mapping
from torchstore_snapshot.storage.mapping import map_file

_NBYTES = 40 << 20
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


@pytest.fixture
def cold(tmp_path: Path) -> Mapping:
    """A mapping of a file of which nothing is in the page cache."""
    path = tmp_path / "data"
    path.write_bytes(random.Random(1).randbytes(_PAGE) * (_NBYTES // _PAGE))
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        mapping = map_file(file, _NBYTES)
    finally:
        os.close(file)
    if any(cached(mapping)):
        pytest.skip("this file system is in memory")
    return mapping


def cached(mapping: Mapping) -> bytes:
    """For each page of a mapped file, whether it is in the page cache."""
    memory = mapping.memory
    found = ctypes.create_string_buffer(memory.nbytes // _PAGE)
    assert not _libc.mincore(address_of(memory), memory.nbytes, found)
    return bytes(each & 1 for each in found.raw)


def read(mapped: MappedFile, begin: int, end: int, step: int) -> int:
    """Read a range in steps, as several threads do. Returns how often the kernel had to wait."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    for start in range(begin, end, step):
        assert mapped.populate(start, min(start + step, end))
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before


@pytest.mark.parametrize("step", [1 << 20, 4 << 20, 16 << 20])
def test_ranges_are_read_in_large_requests_and_nothing_beside_them(
    cold: Mapping, step: int
) -> None:
    ranges = [(_PAGE, 3 * _PAGE), (3 << 20, (22 << 20) + 5), ((23 << 20) + 77, (31 << 20) + 77)]
    mapped = MappedFile(cold, ranges)
    waits = sum(read(mapped, *each, step) for each in ranges)
    wanted = {page for begin, end in ranges for page in range(begin // _PAGE, -(-end // _PAGE))}
    there = {page for page, each in enumerate(cached(cold)) if each}
    assert there == wanted
    assert waits <= len(wanted) * _PAGE // (64 << 10)  # page by page, there are 16 times as many


def test_what_is_no_range_is_read_in_large_requests_all_the_same(cold: Mapping) -> None:
    """Such as rows that lie apart, each of which has several pages."""
    mapped = MappedFile(cold, [])
    rows = range(0, 16 << 20, 4 << 20)
    waits = sum(read(mapped, begin, begin + (3 << 20), 3 << 20) for begin in rows)
    there = cached(cold)
    assert sum(there) == len(rows) * (3 << 20) // _PAGE
    assert all(all(there[begin // _PAGE :][: (3 << 20) // _PAGE]) for begin in rows)
    assert waits <= sum(there) * _PAGE // (64 << 10)


def test_a_whole_file_is_read_in_large_requests(cold: Mapping) -> None:
    waits = read(MappedFile(cold), 0, _NBYTES, 4 << 20)
    assert all(cached(cold))
    assert waits <= _NBYTES // (64 << 10)


def test_a_file_that_has_become_shorter_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * _PAGE))
    with path.open("rb") as file:
        mapped = MappedFile(map_file(file.fileno(), 4 * _PAGE))
    assert mapped.populate(_PAGE, 4 * _PAGE)
    os.truncate(path, 2 * _PAGE)
    assert mapped.populate(0, 2 * _PAGE)
    assert not mapped.populate(_PAGE, 4 * _PAGE)


@pytest.mark.parametrize("verify", [True, False, "streaming"])
def test_tensors_beside_each_other_are_read_with_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: Verify
) -> None:
    """In whatever order the program has them."""
    count = 300
    names = [f"w{at:03}" for at in range(count)]
    random.Random(2).shuffle(names)
    state = {name: torch.full((1000,), at) for at, name in enumerate(names)}
    snapshot = Snapshot.take(tmp_path / "s", {"model": StateDict(**state)}, fsync=False)
    requests: list[tuple[int, int]] = []
    populate = MappedFile.populate

    def noted(self: MappedFile, begin: int, end: int) -> bool:
        requests.append((begin, end))
        return populate(self, begin, end)

    monkeypatch.setattr(MappedFile, "populate", noted)
    found = {name: torch.zeros(1000, dtype=torch.int64) for name in sorted(names)}
    snapshot.restore({"model": StateDict(**found)}, verify=verify)
    assert all(torch.equal(found[name], state[name]) for name in names)
    assert 1 <= len(requests) <= count // 30
