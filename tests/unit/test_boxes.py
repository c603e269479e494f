"""Box arithmetic against a model that spells boxes out as sets of coordinates."""

from __future__ import annotations

import doctest
import itertools
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstore_core import boxes
from torchstore_core.boxes import Box, Piece, whole

Cells = set[tuple[int, ...]]


# --- the model ---


def cells(box: Box) -> Cells:
    ranges = [range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True)]
    return set(itertools.product(*ranges))


def union(pieces: Iterable[Box]) -> Cells:
    return set().union(*map(cells, pieces))


def disjoint_union(pieces: Iterable[Box]) -> Cells:
    """The cells of the boxes, after checking that they are disjoint and that none is empty."""
    found: Cells = set()
    for piece in pieces:
        own = cells(piece)
        assert own
        assert not own & found
        found |= own
    return found


def runs_of(box: Box, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Runs as one finds them walking over the whole tensor."""
    everything = itertools.product(*map(range, shape))
    wanted = cells(box)
    inside = [cell in wanted for cell in everything]
    runs, start = [], 0
    for flag, group in itertools.groupby(inside):
        length = len(list(group))
        if flag:
            runs.append((start, length))
        start += length
    return runs


# --- what to try ---

NDIMS = st.integers(0, 3)


def some_box(ndim: int) -> st.SearchStrategy[Box]:
    def numbers(most: int) -> st.SearchStrategy[tuple[int, ...]]:
        return st.tuples(*[st.integers(0, most)] * ndim)

    return st.builds(Box, numbers(4), numbers(5))


def some_boxes(*, most: int) -> st.SearchStrategy[list[Box]]:
    """A target and up to ``most`` more boxes, all of the same number of dimensions."""
    return NDIMS.flatmap(lambda n: st.lists(some_box(n), min_size=1, max_size=most + 1))


PAIRS = NDIMS.flatmap(lambda n: st.tuples(some_box(n), some_box(n)))


@st.composite
def boxes_inside(draw: st.DrawFn) -> tuple[Box, tuple[int, ...]]:
    """A box and the shape of a tensor that it lies in."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    starts = [draw(st.integers(0, n)) for n in shape]
    extents = [draw(st.integers(0, n - start)) for start, n in zip(starts, shape, strict=True)]
    return Box(tuple(starts), tuple(extents)), shape


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and uneven shards of it, in any order: empty, dropped and repeated ones too."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    bounds = []
    for n in shape:
        inner = draw(st.lists(st.integers(0, n), max_size=3))
        bounds.append(list(itertools.pairwise([0, *sorted(inner), n])))
    shards = [
        Box(tuple(start for start, _ in ix), tuple(end - start for start, end in ix))
        for ix in itertools.product(*bounds)
    ]
    chosen = draw(st.lists(st.sampled_from(shards), max_size=len(shards)))
    return shape, draw(st.permutations(draw(st.sampled_from([shards, chosen, shards + chosen]))))


def grid(counts: tuple[int, ...], extent: tuple[int, ...]) -> tuple[Box, list[Box]]:
    """A tensor and its even shards, shuffled."""
    shards = [
        Box(tuple(i * n for i, n in zip(ix, extent, strict=True)), extent)
        for ix in itertools.product(*map(range, counts))
    ]
    random.Random(0).shuffle(shards)
    return whole(tuple(c * n for c, n in zip(counts, extent, strict=True))), shards


# --- properties ---


def test_the_examples_in_the_docstrings_run() -> None:
    failed, attempted = doctest.testmod(boxes)
    assert failed == 0
    assert attempted >= 7


@given(PAIRS)
def test_what_a_box_says_of_itself_and_of_another(pair: tuple[Box, Box]) -> None:
    a, b = pair
    assert a.ndim == len(a.shape)
    assert a.numel == len(cells(a))
    assert a.is_empty == (not cells(a))
    if not a.is_empty:
        assert max(cells(a)) == tuple(i - 1 for i in a.end)
        assert min(cells(a)) == a.offset
    if not b.is_empty:
        assert a.contains(b) == (cells(b) <= cells(a))
    assert a.contains(a)


@given(PAIRS)
def test_subtract(pair: tuple[Box, Box]) -> None:
    a, b = pair
    pieces = boxes.missing(a, [b])
    assert disjoint_union(pieces) == cells(a) - cells(b)
    assert len(pieces) <= max(2 * a.ndim, 1)


def check_what_is_missing(target: Box, others: list[Box]) -> None:
    rest = cells(target) - union(others)
    pieces = boxes.missing(target, others)
    assert disjoint_union(pieces) == rest
    assert pieces == sorted(pieces)
    assert boxes.covers(target, others) == (not rest)


def check_the_plan(target: Box, sources: list[Box]) -> list[Piece]:
    plan = boxes.read_plan(target, sources)
    assert disjoint_union(piece.box for piece in plan) == cells(target) & union(sources)
    taken: Cells = set()
    for index, source in enumerate(sources):
        own = [piece.box for piece in plan if piece.source == index]
        assert union(own) == (cells(source) & cells(target)) - taken
        taken |= cells(source)
    assert plan == sorted(plan)
    return plan


@given(some_boxes(most=6))
def test_missing_and_covers(bs: list[Box]) -> None:
    check_what_is_missing(bs[0], bs[1:])


@given(some_boxes(most=6))
def test_read_plan(bs: list[Box]) -> None:
    check_the_plan(bs[0], bs[1:])


@given(grids(), st.data())
def test_shards_of_a_grid(drawn: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, shards = drawn
    target = data.draw(st.one_of(st.just(whole(shape)), some_box(len(shape))), label="target")
    check_what_is_missing(target, shards)
    plan = check_the_plan(target, shards)
    # Shards of a grid are disjoint or equal: one read from each of those which are of use.
    of_use = {frozenset(cells(shard) & cells(target)) for shard in shards} - {frozenset()}
    assert len(plan) == len(of_use)


@given(PAIRS)
def test_relative(pair: tuple[Box, Box]) -> None:
    inner, outer = pair
    if not outer.contains(inner):
        with pytest.raises(ValueError, match="not inside"):
            boxes.relative(inner, outer)
        return
    local = boxes.relative(inner, outer)
    assert local.shape == inner.shape
    assert whole(outer.shape).contains(local)
    back = tuple(i + o for i, o in zip(local.offset, outer.offset, strict=True))
    assert back == inner.offset


@given(boxes_inside())
def test_contiguous_rows(drawn: tuple[Box, tuple[int, ...]]) -> None:
    box, shape = drawn
    found = list(boxes.contiguous_rows(box, shape))
    runs = [(at + n * step, length) for at, length, rows, step in found for n in range(rows)]
    assert runs == runs_of(box, shape)
    assert boxes.is_contiguous(box, shape) == (len(runs) <= 1)


# --- edges ---


def test_a_box_without_dimensions_is_one_element() -> None:
    dot = whole(())
    assert dot == Box((), ())
    assert (dot.numel, dot.ndim, dot.is_empty, dot.end) == (1, 0, False, ())
    assert boxes.missing(dot, [dot]) == []
    assert boxes.missing(dot, []) == [dot]
    assert boxes.covers(dot, [dot])
    assert not boxes.covers(dot, [])
    assert boxes.relative(dot, dot) == dot
    assert list(boxes.contiguous_rows(dot, ())) == [(0, 1, 1, 0)]
    assert boxes.is_contiguous(dot, ())
    assert boxes.read_plan(dot, [dot, dot]) == [Piece(0, dot)]


def test_an_empty_box_needs_nothing_and_gives_nothing() -> None:
    tensor, empty = whole((4, 3)), Box((4, 0), (0, 3))  # as FSDP's last shards may be
    assert empty.is_empty
    assert boxes.missing(tensor, [empty]) == [tensor]
    assert boxes.missing(empty, [tensor]) == []
    assert boxes.covers(empty, [])
    assert not boxes.covers(tensor, [empty])
    assert boxes.read_plan(empty, [tensor]) == []
    assert boxes.read_plan(tensor, [empty, tensor]) == [Piece(1, tensor)]
    assert list(boxes.contiguous_rows(empty, (4, 3))) == []
    assert boxes.is_contiguous(empty, (4, 3))


def test_an_empty_box_still_has_a_place() -> None:
    assert whole((4,)).contains(Box((4,), (0,)))
    assert not whole((4,)).contains(Box((5,), (0,)))
    assert boxes.relative(Box((4,), (0,)), Box((2,), (2,))) == Box((2,), (0,))


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 4), (1, 1, 1)])
def test_a_whole_tensor_is_one_run(shape: tuple[int, ...]) -> None:
    tensor = whole(shape)
    assert list(boxes.contiguous_rows(tensor, shape)) == [(0, tensor.numel, 1, 0)]
    assert boxes.is_contiguous(tensor, shape)


def test_rows_merge_only_over_full_inner_dimensions() -> None:
    def rows(box: Box, shape: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
        return list(boxes.contiguous_rows(box, shape))

    assert rows(Box((1, 0, 0), (2, 3, 4)), (5, 3, 4)) == [(12, 24, 1, 0)]
    assert rows(Box((1, 1, 0), (2, 2, 4)), (5, 3, 4)) == [(16, 8, 2, 12)]
    # Rows of all indices of the middle are as far apart as over its end, and others are not.
    assert rows(Box((1, 0, 1), (2, 3, 2)), (5, 3, 4)) == [(13, 2, 6, 4)]
    assert rows(Box((1, 0, 1), (2, 2, 2)), (5, 3, 4)) == [(13, 2, 2, 4), (25, 2, 2, 4)]
    assert not boxes.is_contiguous(Box((1, 1, 0), (2, 2, 4)), (5, 3, 4))
    assert boxes.is_contiguous(Box((1, 1, 0), (1, 2, 4)), (5, 3, 4))


def test_a_missing_column_is_one_box() -> None:
    target, shards = grid((8, 8), (2, 2))
    column = Box((0, 6), (16, 2))
    left = [shard for shard in shards if not column.contains(shard)]
    assert boxes.missing(target, left) == [column]
    assert boxes.read_plan(target, [*left, target])[-1] == Piece(len(left), column)


def test_as_many_elements_are_not_all_elements() -> None:
    overlapping = [Box((0,), (2,)), Box((1,), (2,))]
    assert sum(box.numel for box in overlapping) == 4
    assert not boxes.covers(whole((4,)), overlapping)
    assert boxes.missing(whole((4,)), overlapping) == [Box((3,), (1,))]


def test_boxes_may_come_from_a_generator() -> None:
    target, shards = grid((4,), (2,))
    assert boxes.covers(target, (shard for shard in shards))
    assert boxes.missing(target, (shard for shard in shards)) == []
    assert len(boxes.read_plan(target, (shard for shard in shards))) == 4


TAKES_TWO: list[Callable[[Box, Box], Any]] = [
    lambda a, b: a.contains(b),
    boxes.relative,
    lambda a, b: boxes.missing(a, [b]),
    lambda a, b: boxes.covers(a, [b]),
    lambda a, b: boxes.read_plan(a, [b]),
]


@pytest.mark.parametrize("function", TAKES_TWO)
@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (Box((1,), (3,)), "dimensions"),
        (Box((1, 2), (3,)), "dimensions"),
        (Box((1,), (3, 2)), "dimensions"),
        (Box((1, -2), (3, 4)), "negative"),
        (Box((1, 2), (3, -4)), "negative"),
    ],
)
def test_bad_boxes_are_named(function: Callable[[Box, Box], Any], bad: Box, complaint: str) -> None:
    good = whole((7, 9))
    for pair in ((good, bad), (bad, good)):
        with pytest.raises(ValueError, match=complaint) as caught:
            function(*pair)
        assert str(bad) in str(caught.value)


@pytest.mark.parametrize("bad", [Box((1,), (2, 3)), Box((-1,), (2,)), Box((0,), (-1,))])
def test_a_bad_target_is_refused_without_any_boxes(bad: Box) -> None:
    for function in (boxes.missing, boxes.covers, boxes.read_plan):
        with pytest.raises(ValueError, match=r"negative|dimensions"):
            function(bad, [])


def test_a_bad_box_behind_good_ones_is_refused() -> None:
    for function in (boxes.missing, boxes.covers, boxes.read_plan):
        with pytest.raises(ValueError, match="dimensions"):
            function(whole((4,)), [whole((4,)), whole((4, 1))])


def test_a_negative_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        whole((2, -1))


@pytest.mark.parametrize("box", [Box((3,), (2,)), Box((5,), (0,)), Box((0, 0), (1, 1))])
def test_a_box_outside_its_tensor_has_no_runs(box: Box) -> None:
    # At the call, not at the first step of an iterator that may be used elsewhere.
    with pytest.raises(ValueError, match=r"inside|dimensions"):
        boxes.contiguous_rows(box, (4,))
    with pytest.raises(ValueError, match=r"inside|dimensions"):
        boxes.is_contiguous(box, (4,))


# --- many boxes ---

GRIDS = [(1000,), (1, 1000), (25, 40), (10, 10, 10)]


@pytest.mark.parametrize("counts", GRIDS)
def test_a_grid_of_a_thousand(counts: tuple[int, ...]) -> None:
    target, shards = grid(counts, (2,) * len(counts))
    assert boxes.covers(target, shards)
    assert boxes.missing(target, shards) == []
    assert boxes.read_plan(target, shards) == [Piece(i, s) for i, s in enumerate(shards)]
    lost = shards.pop()
    assert not boxes.covers(target, shards)
    assert boxes.missing(target, shards) == [lost]
    replicas = boxes.read_plan(target, [*shards, *reversed(shards), target])
    assert replicas == [*(Piece(i, s) for i, s in enumerate(shards)), Piece(2 * 999, lost)]


def lines_run(function: Callable[[], object]) -> int:
    """How much work a call is: lines of Python executed. Unlike time, the same on any machine."""
    count = 0

    def trace(frame: object, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    ("few", "many"), [((250,), (1000,)), ((1, 250), (1, 1000)), ((16, 16), (32, 32))]
)
@pytest.mark.parametrize("function", [boxes.covers, boxes.missing, boxes.read_plan])
def test_work_grows_with_the_number_of_shards(
    function: Callable[[Box, list[Box]], object], few: tuple[int, ...], many: tuple[int, ...]
) -> None:
    extent = (2,) * len(few)
    small, large = (lines_run(lambda c=c: function(*grid(c, extent))) for c in (few, many))
    # Four times the shards: 4 is linear, 8 would be n ** 1.5, 16 quadratic.
    assert large < 5.5 * small


@pytest.mark.parametrize(("few", "many"), [((250,), (1000,)), ((1, 250), (1, 1000))])
def test_work_grows_with_the_number_of_holes(few: tuple[int, ...], many: tuple[int, ...]) -> None:
    def find_holes(counts: tuple[int, ...]) -> None:
        target, shards = grid(counts, (2,) * len(counts))
        assert len(boxes.missing(target, sorted(shards)[::2])) == max(counts) // 2

    small, large = (lines_run(lambda c=c: find_holes(c)) for c in (few, many))
    assert large < 5.5 * small


def test_too_few_shards_are_a_quick_no() -> None:
    # Asked after each shard that comes in: the answer must not cost a search for the holes.
    target, shards = grid((500,), (2,))
    few = shards[:250]
    quick = lines_run(lambda: boxes.covers(target, few))
    assert quick < 0.6 * lines_run(lambda: boxes.missing(target, few))


def test_overlapping_neighbours_are_as_cheap() -> None:
    def plan(n: int) -> list[Piece]:
        halos = [Box((2 * i,), (3,)) for i in range(n)]
        random.Random(0).shuffle(halos)
        return boxes.read_plan(whole((2 * n,)), halos)

    assert len(plan(300)) == 300
    assert lines_run(lambda: plan(400)) < 5.5 * lines_run(lambda: plan(100))
