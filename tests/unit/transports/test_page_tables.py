"""``shm`` fills the page tables of what is about to be copied: all that is there, once."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator

import pytest

from torchstore_core.machine.virtual_memory import forget_pages
from torchstore_transports.shm.link import _GRANULE, ShmLink, _Segment

_SIZE = 16 << 20
_PRESENT = 1 << 63
Fixture = tuple[ShmLink, int]


@pytest.fixture
def link() -> Iterator[Fixture]:
    """A link to a segment, and the descriptor of the segment."""
    fd = os.memfd_create("page tables")
    os.ftruncate(fd, _SIZE)
    made = ShmLink({0: _Segment(os.dup(fd), _SIZE)})
    made.window(0)
    yield made, fd
    made.close()
    os.close(fd)


def _pages(link: ShmLink) -> list[bool]:
    """Of each page of the window, whether it is in the page table of this process."""
    first, count = link.window(0).address // mmap.PAGESIZE, _SIZE // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        found = struct.unpack(f"{count}Q", file.read(8 * count))
    return [bool(page & _PRESENT) for page in found]


def _whole(offset: int, nbytes: int) -> list[bool]:
    """The pages of the granules that lie in a range."""
    granules = range(-(-offset // _GRANULE), (offset + nbytes) // _GRANULE)
    per = _GRANULE // mmap.PAGESIZE
    return [at // per in granules for at in range(_SIZE // mmap.PAGESIZE)]


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("offset", [0, 1 << 20, (1 << 20) + 64, (3 << 20) - 4096])
def test_the_pages_of_a_range_and_no_others(link: Fixture, offset: int, fresh: bool) -> None:
    """Others would take memory that nobody has asked for."""
    made, fd = link
    made.prepare(0, offset, 2 << 20, fresh=fresh)
    assert _pages(made) == _whole(offset, 2 << 20)
    assert os.fstat(fd).st_blocks * 512 <= 2 << 20


def test_what_is_filled_is_not_filled_again(link: Fixture) -> None:
    """Also where chunks of a value begin and end anywhere: what they leave out takes page faults
    once, and the rest no time."""
    made, _ = link
    address = made.window(0).address
    chunks = [((1 << 20) + 64 + at * 1_500_000, 1_500_000) for at in range(6)]
    for chunk in chunks:
        made.prepare(0, *chunk, fresh=True)
    forget_pages(address, _SIZE)
    for chunk in chunks:
        made.prepare(0, *chunk, fresh=True)
    assert not any(_pages(made))
    made.prepare(0, 0, _SIZE, fresh=True)  # the granules between them
    left = [not any(page) for page in zip(*(_whole(*chunk) for chunk in chunks), strict=True)]
    assert _pages(made) == left
