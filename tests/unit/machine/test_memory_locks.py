"""Locks show whether memory is the same, and registrations are kept accordingly."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstore_core.errors import TransportError
from torchstore_transports.registered.memory_locks import acquire, is_locked, lock, release, unlock
from torchstore_transports.registered.registrations import SMALLEST, Registrations

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_FIXED, _ANONYMOUS = 0x10, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def map_anew(address: int | None, nbytes: int) -> int:
    """Map memory; at an address, instead of what is there."""
    flags = _ANONYMOUS | (_FIXED if address else 0)
    found = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert isinstance(found, int)
    return found


@pytest.fixture
def address() -> Iterator[int]:
    found = map_anew(None, 1 << 20)
    yield found
    _libc.munmap(ctypes.c_void_p(found), 1 << 20)


class Owner:
    """Something that can be weakly referenced."""


def test_a_lock_ends_with_its_mapping(address: int) -> None:
    held = acquire(address + 1, 8 * PAGE)
    assert held is not None
    assert (held.first, held.nbytes) == (address + PAGE, 7 * PAGE)  # whole pages
    assert held.holds()
    assert not is_locked(address)
    map_anew(address, 1 << 20)
    assert not held.holds()
    again = acquire(address + 1, 8 * PAGE)
    assert again is not None
    assert again.holds()
    assert not held.holds()  # although the pages at its place are locked
    release(held)
    assert again.holds()
    release(again)
    assert not is_locked(address + PAGE)


def test_a_lock_is_shared_by_those_who_want_the_same(address: int) -> None:
    first, second = acquire(address, 4 * PAGE), acquire(address, 4 * PAGE)
    assert first is second is not None
    release(first)
    assert second.holds()
    release(second)
    assert not is_locked(address)


@pytest.mark.parametrize(("start", "pages"), [(0, 8), (0, 2), (2, 8), (1, 2), (3, 1)])
def test_other_memory_at_the_place_ends_a_lock(address: int, start: int, pages: int) -> None:
    """Even where all of its pages are locked again, because those are other ones."""
    held = acquire(address, 4 * PAGE)
    assert held is not None
    map_anew(address, 1 << 20)
    other = acquire(address + start * PAGE, pages * PAGE)
    assert other is not None
    assert other.holds()
    assert not held.holds()
    release(held)
    assert other.holds()
    release(other)


def test_somebody_else_s_lock_says_nothing(address: int) -> None:
    assert lock(address, 4 * PAGE)
    assert acquire(address, 4 * PAGE) is None
    unlock(address, 4 * PAGE)


class Book:
    """What is registered, by a number."""

    def __init__(self, *, max_bytes: int = 1 << 30, max_count: int = 99) -> None:
        self.now: dict[int, tuple[int, int]] = {}
        self.next = 0
        self.calls = 0
        self.refuses = 0  # memory of more bytes than that; 0: none
        self.deaths = 0
        self.kept = Registrations(
            self.register,
            self.deregister,
            max_bytes=max_bytes,
            max_count=max_count,
            on_death=self.died,
        )

    def register(self, memory: Sequence[tuple[int, int, object]]) -> list[int]:
        self.calls += 1
        if self.refuses and any(nbytes > self.refuses for _, nbytes, _ in memory):
            raise TransportError("no more can be locked")
        numbers = [self.next + at for at in range(1, len(memory) + 1)]
        self.next += len(memory)
        places = [(address, nbytes) for address, nbytes, _ in memory]
        self.now.update(zip(numbers, places, strict=True))
        return numbers

    def deregister(self, numbers: Sequence[int]) -> None:
        self.calls += 1
        for number in numbers:
            del self.now[number]

    def died(self) -> None:
        self.deaths += 1


def test_a_part_of_a_storage_registers_all_of_it_if_it_is_not_too_little(address: int) -> None:
    book, owner, size = Book(), Owner(), 8 * SMALLEST
    memory = [(address, size, owner)]
    held = book.kept.hold(
        [(address + 5, address + 6), (address + size - 1, address + size + 1)], memory
    )
    assert held.missing == [0, 1]
    assert not book.now
    held = book.kept.hold([(address + 5, address + 5 + SMALLEST)], memory)
    assert held.missing == []
    assert held.registrations == {address: 1}
    assert book.now == {1: (address, size)}
    book.kept.release(held)
    # Once it is registered, little is enough.
    assert book.kept.hold([(address, address + 1)], memory).registrations == {address: 1}


def test_small_memory_and_what_cannot_be_registered_is_missing(address: int) -> None:
    book, owner = Book(), Owner()
    ranges = [(address, address + SMALLEST - 1)]
    assert book.kept.hold(ranges, [(address, SMALLEST - 1, owner)]).missing == [0]
    book.refuses = 1
    assert book.kept.hold(ranges, [(address, SMALLEST, owner)]).missing == [0]
    assert not is_locked(address)
    assert len(book.kept) == book.kept.nbytes == 0


def test_what_a_transfer_uses_is_registered_in_one_call(address: int) -> None:
    """And deregistered in one, when its owners die together."""
    book, owners = Book(), [Owner() for _ in range(8)]
    places = [address + at * SMALLEST for at in range(8)]
    memory = [(at, SMALLEST, owner) for at, owner in zip(places, owners, strict=True)]
    ranges = [(at, at + SMALLEST) for at in places]
    held = book.kept.hold(ranges, memory)
    assert list(held.registrations) == places
    book.kept.release(held)
    book.kept.release(book.kept.hold(ranges, memory))
    assert (book.calls, len(book.now)) == (1, 8)
    owners.clear()
    memory.clear()
    book.kept.sweep()
    assert (book.calls, len(book.now)) == (2, 0)


def test_what_is_refused_keeps_nothing_else_from_being_registered(address: int) -> None:
    book, owners = Book(), [Owner() for _ in range(3)]
    sizes = (SMALLEST, 3 * SMALLEST, SMALLEST)
    places = [address, address + SMALLEST, address + 4 * SMALLEST]
    memory = list(zip(places, sizes, owners, strict=True))
    book.refuses = 2 * SMALLEST
    held = book.kept.hold([(at, at + size) for at, size, _ in memory], memory)
    assert held.missing == [1]
    assert list(held.registrations) == [places[0], places[2]]
    assert [is_locked(at) for at in places] == [True, False, True]
    book.kept.release(held)


def test_no_more_is_kept_than_may_be_and_nothing_in_use_goes(address: int) -> None:
    book, owners = Book(max_count=3), [Owner() for _ in range(6)]
    memory = [(address + at * SMALLEST, SMALLEST, one) for at, one in enumerate(owners)]
    ranges = [(at, at + size) for at, size, _ in memory]
    book.kept.release(book.kept.hold(ranges[:2], memory[:2]))
    held = book.kept.hold(ranges[1:], memory[1:])  # the first one goes, the second is used
    assert held.missing == [3, 4]
    assert sorted(book.now.values()) == [(at, size) for at, size, _ in memory[1:4]]
    book.kept.release(held)


def test_what_is_in_use_is_deregistered_at_its_end(address: int) -> None:
    book, owner = Book(), Owner()
    held = book.kept.hold([(address, address + SMALLEST)], [(address, SMALLEST, owner)])
    del owner
    assert book.deaths == 1
    book.kept.sweep()
    assert len(book.kept) == 0
    assert book.now
    assert is_locked(address)
    book.kept.release(held)
    assert not book.now
    assert not is_locked(address)


def test_an_owner_that_moved_or_changed_its_size_is_registered_anew(address: int) -> None:
    book, owner = Book(), Owner()
    for at, size in ((address, SMALLEST), (address, 2 * SMALLEST), (address + PAGE, SMALLEST)):
        held = book.kept.hold([(at, at + SMALLEST)], [(at, size, owner)])
        assert book.now[held.registrations[at]] == (at, size)
        book.kept.release(held)
    other, before = Owner(), book.next  # at its place, while it lives
    held = book.kept.hold(
        [(address + PAGE, address + PAGE + SMALLEST)], [(address + PAGE, SMALLEST, other)]
    )
    assert held.registrations == {address + PAGE: before + 1}
    book.kept.release(held)
    book.kept.close()
    assert not book.now


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["use", "die", "remap"])), max_size=30)
)
def test_like_a_simple_model(steps: list[tuple[int, str]]) -> None:
    """Whatever happens to memory: a transfer uses what was registered for these very pages."""
    book = Book(max_bytes=4 * SMALLEST, max_count=3)
    base = map_anew(None, 6 * SMALLEST)
    owners: list[Owner | None] = [Owner() for _ in range(6)]
    pages = list(range(6))  # what is mapped: a number that changes with the mapping
    registered: dict[int, int] = {}
    for step, (place, what) in enumerate(steps):
        start = base + place * SMALLEST
        if what == "die":
            owners[place] = None
            owners[place] = Owner()
        elif what == "remap":
            map_anew(start, SMALLEST)
            pages[place] = 100 + step
        else:
            held = book.kept.hold([(start, start + SMALLEST)], [(start, SMALLEST, owners[place])])
            number = held.registrations[start]
            assert registered.setdefault(number, pages[place]) == pages[place]
            assert number in book.now
            book.kept.release(held)
        book.kept.sweep()
        assert book.kept.nbytes == sum(size for _, size in book.now.values()) <= 3 * SMALLEST
    book.kept.close()
    assert not book.now
    assert not any(is_locked(base + place * SMALLEST) for place in range(6))
    _libc.munmap(ctypes.c_void_p(base), 6 * SMALLEST)
