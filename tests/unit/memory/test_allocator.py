"""The allocator against a model: one flag for every cache line of the segment."""

from __future__ import annotations

import doctest
import itertools
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torchstore_core.server.memory import allocator
from torchstore_core.server.memory.allocator import ALIGNMENT, Allocator, rounded


class Lines:
    """The model: which lines are taken."""

    def __init__(self, capacity: int) -> None:
        self.taken = [False] * (capacity // ALIGNMENT)
        self.high = 0

    def first_fit(self, lines: int) -> int | None:
        """The lowest line from which ``lines`` free ones follow."""
        run = 0
        for at, taken in enumerate(self.taken):
            run = 0 if taken else run + 1
            if run == lines:
                return at + 1 - lines
        return None

    def set(self, start: int, lines: int, *, taken: bool) -> None:
        for at in range(start, start + lines):
            assert self.taken[at] is not taken
            self.taken[at] = taken
        if taken:
            self.high = max(self.high, start + lines)

    def free_ranges(self) -> list[tuple[int, int]]:
        """Free ranges in bytes, as large as they can be."""
        ranges, at = [], 0
        for taken, group in itertools.groupby(self.taken):
            lines = len(list(group))
            if not taken:
                ranges.append((at * ALIGNMENT, lines * ALIGNMENT))
            at += lines
        return ranges


class AllocatorMachine(RuleBasedStateMachine):
    """Any order of allocations and frees; ``live`` is what is given out: (offset, nbytes)."""

    @initialize(capacity=st.integers(0, 64 * ALIGNMENT))
    def start(self, capacity: int) -> None:
        self.allocator = Allocator(capacity)
        self.model = Lines(capacity)
        self.live: list[tuple[int, int]] = []
        assert self.allocator.capacity == capacity // ALIGNMENT * ALIGNMENT

    def take(self, nbytes: int) -> int | None:
        """Allocate on both sides, and compare."""
        lines = max(1, -(-nbytes // ALIGNMENT))
        expected = self.model.first_fit(lines)
        offset = self.allocator.allocate(nbytes)
        assert offset == (None if expected is None else expected * ALIGNMENT)
        if expected is not None:
            self.model.set(expected, lines, taken=True)
        return offset

    def forget(self, offset: int, nbytes: int) -> None:
        self.model.set(offset // ALIGNMENT, max(1, -(-nbytes // ALIGNMENT)), taken=False)

    @rule(nbytes=st.integers(0, 20 * ALIGNMENT) | st.integers(0, 100 * ALIGNMENT))
    def allocate(self, nbytes: int) -> None:
        offset = self.take(nbytes)
        if offset is not None:
            self.live.append((offset, nbytes))

    @rule(sizes=st.lists(st.integers(1, 5 * ALIGNMENT), min_size=1, max_size=6))
    def allocate_run(self, sizes: list[int]) -> None:
        """As the controller does: one range for many values, which are freed one by one."""
        offset = self.take(sum(map(rounded, sizes)))
        if offset is not None:
            for size in sizes:
                self.live.append((offset, size))
                offset += rounded(size)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """A batch of any ranges, in any order."""
        order = data.draw(st.permutations(range(len(self.live))))
        batch = [self.live[i] for i in order[: data.draw(st.integers(1, len(order)))]]
        self.allocator.free(iter(batch))
        for item in batch:
            self.live.remove(item)
            self.forget(*item)

    @precondition(lambda self: any(nbytes > ALIGNMENT for _, nbytes in self.live))
    @rule(data=st.data())
    def free_part(self, data: st.DataObject) -> None:
        """Any lines of a larger range; what is left stays given out."""
        large = [item for item in self.live if item[1] > ALIGNMENT]
        offset, nbytes = data.draw(st.sampled_from(large))
        lines = rounded(nbytes) // ALIGNMENT
        first = data.draw(st.integers(0, lines - 1))
        count = data.draw(st.integers(1, lines - first))
        part = (offset + first * ALIGNMENT, count * ALIGNMENT)
        self.allocator.free([part])
        self.forget(*part)
        self.live.remove((offset, nbytes))
        end, rest = part[0] + part[1], offset + rounded(nbytes)
        self.live += [(a, b - a) for a, b in ((offset, part[0]), (end, rest)) if b > a]

    @rule()
    def free_everything(self) -> None:
        """Whatever happened before, all of the capacity is one piece again."""
        self.allocator.free(self.live)
        for item in self.live:
            self.forget(*item)
        self.live.clear()
        capacity = self.allocator.capacity
        if capacity:
            assert self.take(capacity) == 0
            self.live.append((0, capacity))
        assert self.allocator.allocate(1) is None

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "allocator"):
            return
        taken = sum(self.model.taken) * ALIGNMENT
        assert self.allocator.used == taken
        assert self.allocator.free_bytes == self.allocator.capacity - taken
        assert self.allocator.high_water == self.model.high * ALIGNMENT
        free = self.model.free_ranges()
        assert self.allocator.free_ranges() == free
        lines = len(self.model.taken)
        idle = next((i for i in range(lines) if self.model.taken[lines - 1 - i]), lines)
        assert self.allocator.used_end == self.allocator.capacity - idle * ALIGNMENT
        assert sum(max(ALIGNMENT, rounded(nbytes)) for _, nbytes in self.live) == taken


TestAllocatorMachine = AllocatorMachine.TestCase


@given(st.integers(0, 1 << 62))
def test_rounded_is_the_next_multiple(nbytes: int) -> None:
    up = rounded(nbytes)
    assert up % ALIGNMENT == 0
    assert nbytes <= up < nbytes + ALIGNMENT


@pytest.mark.parametrize("capacity", [0, 1, ALIGNMENT - 1])
def test_less_than_a_line_holds_nothing(capacity: int) -> None:
    allocator = Allocator(capacity)
    assert allocator.capacity == 0
    assert allocator.allocate(0) is None
    assert allocator.free_ranges() == []


def test_of_two_that_fit_the_lower_address_wins() -> None:
    """Warm pages are used again, even if a tighter hole lies higher."""
    line = ALIGNMENT
    allocator = Allocator(100 * line)
    offsets = [allocator.allocate(n * line) for n in (10, 1, 3, 1)]
    assert offsets == [0, 10 * line, 11 * line, 14 * line]
    allocator.free([(0, 10 * line), (11 * line, 3 * line)])
    assert allocator.allocate(3 * line) == 0
    assert allocator.allocate(8 * line) == 15 * line  # 7 are left of the first hole
    assert allocator.allocate(7 * line) == 3 * line


def test_a_terabyte_of_mixed_sizes() -> None:
    """Far beyond what the model can hold: no overlap, and everything merges again."""
    rng = random.Random(1)
    capacity = 1 << 40
    allocator = Allocator(capacity)
    live: dict[int, int] = {}
    for _ in range(4000):
        if live and rng.random() < 0.45:
            batch = rng.sample(sorted(live), min(len(live), rng.randint(1, 20)))
            allocator.free([(offset, live.pop(offset)) for offset in batch])
        nbytes = int(2 ** rng.uniform(0, 34))
        offset = allocator.allocate(nbytes)
        assert offset is not None
        assert offset % ALIGNMENT == 0
        live[offset] = nbytes
    ends = 0
    for offset in sorted(live):
        assert offset >= ends
        ends = offset + rounded(live[offset])
    assert ends <= capacity
    assert allocator.used == sum(map(rounded, live.values()))
    assert allocator.used + sum(size for _, size in allocator.free_ranges()) == capacity
    allocator.free(live.items())
    assert allocator.free_ranges() == [(0, capacity)]


def test_a_hole_behind_one_that_is_too_small_is_found() -> None:
    """Both are filed under one power of two."""
    line = ALIGNMENT
    allocator = Allocator(20 * line)
    for lines in (5, 1, 7, 1):
        assert allocator.allocate(lines * line) is not None
    assert allocator.allocate(6 * line) == 14 * line
    allocator.free([(0, 5 * line), (6 * line, 7 * line)])
    assert allocator.free_ranges() == [(0, 5 * line), (6 * line, 7 * line)]
    assert allocator.allocate(6 * line) == 6 * line
    assert allocator.allocate(5 * line) == 0


def test_bookkeeping_does_not_grow_with_time() -> None:
    """Entries of the size files go stale; they must not pile up, even where none is looked at
    because a smaller hole of the same power of two lies below.
    """
    line = ALIGNMENT
    allocator = Allocator(1 << 20)
    for lines in (4, 1, 5, 1):
        assert allocator.allocate(lines * line) is not None
    allocator.free([(0, 4 * line)])

    def churn(rounds: int) -> int:
        for _ in range(rounds):
            allocator.free([(5 * line, 5 * line)])
            assert allocator.allocate(5 * line) == 5 * line
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = churn(500)
        after = churn(5000)
    finally:
        tracemalloc.stop()
    assert after - before < 8_000


def test_examples() -> None:
    result = doctest.testmod(allocator)
    assert result.attempted
    assert not result.failed
