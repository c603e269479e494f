"""Tensors in columns: what is packed is the same when it is unpacked, and nothing else is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstore_core.clients.moving.entries import entries_of
from torchstore_core.errors import ProtocolError
from torchstore_core.server.memory.allocator import Allocator
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.columns import Kind, in_a_row, kinds_of, pack, rounded_sum, spread, unpack
from torchstore_core.wire.framing import HEADER, decode_request, encode

METAS = [TensorMeta("uint8", (size,)) for size in range(600)]


@given(st.lists(st.integers(0, 599), min_size=1, max_size=700), st.booleans())
def test_every_tensor_keeps_its_kind(chosen: list[int], alike: bool) -> None:
    """However many kinds there are, and whether equal descriptions are one object or several."""
    metas = [METAS[at] if alike else TensorMeta("uint8", (at,)) for at in chosen]
    kinds, of = kinds_of(metas, chosen)
    assert len(kinds) == len(set(chosen))
    columns = m.ItemColumns([f"k{at}" for at in range(len(chosen))], kinds, of)
    put = decode_request(bytes(encode(m.Put(1, 2, [], columns=columns))[HEADER:]))
    assert isinstance(put, m.Put)
    assert put.columns is not None
    assert spread(put.columns.kinds, put.columns.kind_of()) == list(map(Kind, metas, chosen))


def test_many_kinds_take_more_than_a_byte() -> None:
    kinds, of = kinds_of(METAS, range(600))
    assert len(of) == 4 * 600
    assert list(m.ItemColumns(["k"] * 600, kinds, of).kind_of()) == list(range(600))


def test_tensors_of_one_description_but_other_sizes_are_of_other_kinds() -> None:
    """Which only a client that is broken sends; its values must not be taken for larger ones."""
    metas = [TensorMeta("uint8", (4,)) for _ in range(3)]
    kinds, of = kinds_of(metas, [4, 8, 4])
    assert (kinds, list(of)) == ([Kind(metas[0], 4), Kind(metas[0], 8)], [0, 1, 0])


@pytest.mark.parametrize(
    ("kinds", "of", "count"),
    [
        (2, b"\0\1", 3),
        (2, b"\0\1\2", 3),
        (2, b"", 3),
        (0, b"", 3),
        (0, b"\0\0\0", 3),
        (257, b"\0" * 3, 3),
        (257, b"\0" * 11, 3),
        (257, (257).to_bytes(4, "little") * 3, 3),
    ],
)
def test_kinds_of_other_tensors_are_refused(kinds: int, of: bytes, count: int) -> None:
    columns = m.ItemColumns(["k"] * count, [Kind(METAS[1], 1)] * kinds, of)
    with pytest.raises(ProtocolError):
        columns.kind_of()


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_numbers_are_packed(numbers: list[int]) -> None:
    assert unpack(pack(numbers)) == numbers
    if numbers:
        with pytest.raises(ProtocolError):
            unpack(pack(numbers)[1:])


_ONE_SIZE = st.builds(lambda size, count: [size] * count, st.integers(1, 300), st.integers(1, 50))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=50) | _ONE_SIZE)
def test_values_in_a_row_lie_where_the_allocator_puts_them(sizes: list[int]) -> None:
    allocator = Allocator(1 << 20)
    one_by_one = [allocator.allocate(size) for size in [1000, *sizes]]
    assert in_a_row(1024, sizes) == one_by_one[1:]
    assert rounded_sum(sizes) == allocator.used - 1024


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1 << 40)), min_size=1))
def test_entries_in_columns_are_entries(rows: list[tuple[int, int]]) -> None:
    metas, offsets = [METAS[at + 1] for at, _ in rows], [offset for _, offset in rows]
    sizes = [meta.shape[0] for meta in metas]
    versions = list(range(len(rows)))
    columns = m.EntryColumns(*kinds_of(metas, sizes), versions, 5, 0, pack(offsets))
    assert entries_of(columns) == [
        m.Entry(at, meta, nbytes, None, m.Grant(5, 0, offset))
        for at, meta, nbytes, offset in zip(versions, metas, sizes, offsets, strict=True)
    ]
