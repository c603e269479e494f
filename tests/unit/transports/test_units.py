"""How ``tcp`` cuts a batch of copies: every byte once, in order, and never too much done."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstore_core.contracts.transport import Copy
from torchstore_core.errors import ProtocolError, TransportError
from torchstore_transports.tcp.moving.units import Unit, cut
from torchstore_transports.tcp.wire.protocol import (
    EXTENT,
    EXTENTS_MAX,
    Extent,
    check_extents,
    extents_of,
)

copies = st.builds(
    Copy,
    address=st.integers(0, 1 << 40),
    segment=st.integers(0, 2),
    offset=st.integers(1 << 20, 1 << 21),
    nbytes=st.integers(0, 60),
    rows=st.integers(0, 12),
    stride=st.integers(-400, 400),
    step=st.integers(-400, 400),
)
neighbours = st.builds(
    lambda at, size: Copy(at * 1000, 0, at * 64, size),
    st.integers(0, 50),
    st.sampled_from([32, 64]),
)


def _bytes_of(copy: Copy) -> list[tuple[int, int, int]]:
    """Address, segment and offset of every byte."""
    return [
        (copy.address + row * copy.stride + at, copy.segment, copy.offset + row * copy.step + at)
        for row in range(copy.rows)
        for at in range(copy.nbytes)
    ]


def _bytes_in(unit: Unit) -> list[tuple[int, int, int]]:
    here = [
        piece.address + row * piece.stride + at
        for piece in unit.pieces
        for row in range(piece.rows)
        for at in range(piece.nbytes)
    ]
    there = [
        (extent.segment, extent.offset + row * extent.step + at)
        for extent in extents_of(unit.extents)
        for row in range(extent.rows)
        for at in range(extent.nbytes)
    ]
    assert len(here) == len(there) == unit.nbytes
    return [(address, *place) for address, place in zip(here, there, strict=True)]


@given(st.lists(copies | neighbours, max_size=8), st.sampled_from([1, 7, 100, 1000]))
def test_every_byte_once_and_in_order(batch: list[Copy], limit: int) -> None:
    units = list(cut(batch, lambda: limit))
    moved: list[tuple[int, int, int]] = []
    for unit in units:
        moved += _bytes_in(unit)
        # What is complete after this unit is complete indeed.
        complete = sum(copy.nbytes * copy.rows for copy in batch[: unit.following])
        assert complete <= len(moved)
        before = sum(copy.nbytes * copy.rows for copy in batch[: unit.first])
        assert before <= len(moved) - unit.nbytes
        assert unit.nbytes <= limit + max(copy.nbytes for copy in batch)
        assert 0 < len(unit.extents) <= EXTENTS_MAX * EXTENT.size
    assert moved == [byte for copy in batch for byte in _bytes_of(copy)]
    if units:
        assert not any(copy.nbytes * copy.rows for copy in batch[units[-1].following :])


def test_many_pieces_are_several_units() -> None:
    batch = [Copy(at * 100, 0, at * 10, 5) for at in range(3000)]
    assert [len(extents_of(unit.extents)) for unit in cut(batch, lambda: 1 << 20)] == [
        1024,
        1024,
        952,
    ]


def test_every_unit_asks_how_large_it_may_be() -> None:
    sizes = iter([500, 300, 200, 1])
    units = list(cut([Copy(0, 0, 0, 1000)], lambda: next(sizes)))
    assert [unit.nbytes for unit in units] == [500, 300, 200]


def test_neighbours_in_the_segment_are_one_extent() -> None:
    batch = [Copy(at * 100, 0, at * 10, 10) for at in range(100)]
    (unit,) = cut(batch, lambda: 1 << 20)
    assert extents_of(unit.extents) == [Extent(0, 0, 1000, 1, 0)]
    rows = [Copy(0, 0, 0, 10, 100, 20, 10), Copy(5000, 0, 1000, 10)]
    (unit,) = cut(rows, lambda: 1 << 20)
    assert extents_of(unit.extents) == [Extent(0, 0, 1010, 1, 0)]


@pytest.mark.parametrize(
    "copy",
    [Copy(0, 0, 0, -1), Copy(0, 0, -1, 1), Copy(0, 0, 5, 1, 2, 1, -6), Copy(0, 1 << 32, 0, 1)],
)
def test_what_makes_no_sense(copy: Copy) -> None:
    with pytest.raises(TransportError):
        list(cut([copy], lambda: 100))


@given(
    st.integers(0, 200),
    st.integers(0, 200),
    st.integers(0, 5),
    st.integers(-100, 100),
    st.booleans(),
)
def test_a_server_refuses_exactly_what_is_outside(
    offset: int, nbytes: int, rows: int, step: int, right: bool
) -> None:
    extent = Extent(3, offset, nbytes, rows, step)
    starts = [offset + row * step for row in range(rows)]
    inside = (
        bool(starts) and nbytes > 0 and min(starts) >= 0 and max(starts) + nbytes <= 150 and right
    )
    try:
        check_extents([extent], {3: 150}, nbytes * rows + (not right))
    except ProtocolError:
        assert not inside
    else:
        assert inside
