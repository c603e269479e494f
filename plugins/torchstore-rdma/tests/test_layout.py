"""Descriptor lists: the same bytes as the copies, in parts that can be interrupted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstore_core.contracts.transport import Copy
from torchstore_core.errors import TransportError
from torchstore_rdma import layout
from torchstore_rdma.protocol import Exposed

_SIZE = 1 << 40
_SEGMENTS = {0: Exposed(0, 1 << 44, _SIZE, _SIZE), 3: Exposed(3, 1 << 45, _SIZE, _SIZE)}
_BASES = {segment: one.address for segment, one in _SEGMENTS.items()}


def _rows(copies: list[Copy], size: int = layout.PART) -> list[tuple[int, int, int]]:
    """All rows, those that are larger than a part in pieces."""
    return sorted(
        (
            copy.address + row * copy.stride + at,
            _BASES[copy.segment] + copy.offset + row * copy.step + at,
            min(size, copy.nbytes - at),
        )
        for copy in copies
        for row in range(copy.rows)
        for at in range(0, copy.nbytes, size)
    )


def _described(copies: list[Copy], size: int = layout.PART) -> list[list[tuple[int, int, int]]]:
    parts = []
    for part in layout.parts(layout.table(copies, _SEGMENTS), _SEGMENTS, size):
        rows = []
        pairs = zip(part.local.tolist(), part.remote.tolist(), strict=True)
        for (here, nbytes, device, stride, count), (there, same, device2, step, count2) in pairs:
            assert (nbytes, count, device, device2) == (same, count2, 0, 0)
            assert min(stride, step) >= nbytes  # the library refuses others
            rows += [(here + k * stride, there + k * step, nbytes) for k in range(count)]
        assert part.indices.tolist() == list(range(len(rows)))
        parts.append(rows)
    return parts


_copies = st.lists(
    st.builds(
        Copy,
        address=st.integers(0, 1 << 46),
        segment=st.sampled_from([0, 3]),
        offset=st.integers(0, 1 << 39),
        nbytes=st.sampled_from([0, 1, 7, 4096, 1 << 20, layout.PART - 1, layout.PART + 1])
        | st.integers(0, 3 * layout.PART),
        rows=st.integers(1, 9),
        stride=st.integers(0, 1 << 27),
        step=st.integers(0, 1 << 27),
        device=st.just(""),
    ),
    max_size=12,
)


@given(_copies, st.sampled_from([layout.PART, 16 << 20, (1 << 20) + 5]))
def test_the_parts_have_exactly_the_bytes_of_the_copies(copies: list[Copy], size: int) -> None:
    parts = _described(copies, size)
    assert sorted(row for rows in parts for row in rows) == _rows(copies, size)
    for rows in parts:
        assert rows
        assert sum(nbytes for _, _, nbytes in rows) <= 2 * size


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ([Copy(0, 0, 0, 100)], 1 << 20),
        ([Copy(0, 0, 0, 40 << 20), Copy(0, 0, 0, 24 << 20)], 4 << 20),
        ([Copy(0, 0, 0, 2 << 30)], 16 << 20),
        ([Copy(0, 0, 0, 64, 10_000, 64, 64)], 10_000 * (4096 + 64) // 16),  # rows take time, too
    ],
)
def test_a_slow_network_has_several_parts_a_batch(copies: list[Copy], expected: int) -> None:
    made = layout.table(copies, _SEGMENTS)
    assert abs(layout.part_size(made, slow=True) - expected) < 4096
    assert layout.part_size(made, slow=False) == layout.PART


@given(_copies)
def test_spans_cover_what_is_moved_and_do_not_touch(copies: list[Copy]) -> None:
    made = layout.table(copies, _SEGMENTS)
    spans = layout.spans(made) if len(made) else []
    for at, nbytes in spans:
        assert at % 4096 == nbytes % 4096 == 0
    for (at, nbytes), (after, _) in itertools.pairwise(spans):
        assert at + nbytes < after
    for here, _, nbytes in _rows(copies):
        assert any(at <= here and here + nbytes <= at + size for at, size in spans)


def test_ten_thousand_rows_are_few_entries() -> None:
    made = layout.table([Copy(4096, 0, 0, 64, 10_000, 128, 64)], _SEGMENTS)
    parts = list(layout.parts(made, _SEGMENTS))
    assert sum(len(part.local) for part in parts) <= 2
    assert sum(len(part.indices) for part in parts) == 10_000
    assert parts[0].local.dtype == np.uint64


_HUGE = 1 << 70


@pytest.mark.parametrize(
    "copy",
    [
        Copy(0, 0, _SIZE - 9, 10),
        Copy(0, 0, -1, 10),
        Copy(0, 1, 0, 10),
        Copy(0, 0, 0, -1),
        Copy(-1, 0, 0, 1),
        Copy(0, 0, 0, 10, 2, 10, _SIZE),
        Copy(0, 0, 0, 10, 1 << 62, 10, 1 << 62),
        Copy(0, 0, 100, 10, 20, 10, -10),
        Copy(0, 0, _HUGE, 10),
        Copy(0, 0, 10, _HUGE),
        Copy(0, 0, (1 << 63) - 1, (1 << 63) - 1),
        Copy(0, 0, 0, 10, device="cuda:0"),
    ],
)
def test_what_is_out_of_range_is_refused(copy: Copy) -> None:
    with pytest.raises(TransportError):
        layout.table([Copy(0, 0, 0, 1), copy], _SEGMENTS)


def test_how_far_copies_reach() -> None:
    made = layout.table([Copy(0, 0, 5, 10), Copy(0, 0, 100, 10, 3, 10, 50)], _SEGMENTS)
    part, short = Exposed(0, 0, 209, _SIZE), Exposed(3, 0, 8, 8)
    assert layout.lacking(made, {0: part, 3: short}) == 210
    assert layout.lacking(made, {0: Exposed(0, 0, 210, _SIZE), 3: short}) == 0
    assert layout.lacking(layout.table([], _SEGMENTS), {0: part}) == 0


def test_each_part_says_with_which_copy_it_begins() -> None:
    sizes = [5, 0, 3 * layout.PART, 7, layout.PART // 2, layout.PART // 2, 9]
    copies = [Copy(1 << 30, 0, 0, nbytes) for nbytes in sizes]
    parts = list(layout.parts(layout.table(copies, _SEGMENTS), _SEGMENTS))
    moved = 0
    for part in parts:
        # What earlier parts have moved is at least all copies before its first.
        assert moved >= sum(sizes[: part.first])
        moved += int((part.local[:, 1] * part.local[:, 4]).sum())
    assert moved == sum(sizes)
    assert parts[-1].first > 2
