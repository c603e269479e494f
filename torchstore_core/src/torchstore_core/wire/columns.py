"""Many tensors of one message in columns: every distinct kind once, and the rest as packed numbers.

A state dict of 18,000 small tensors has few kinds of them. As a list of items, each with its own
description, it takes longer to encode and to decode than its bytes take to copy.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeVar, final

import msgspec

from torchstore_core.errors import ProtocolError
from torchstore_core.values import TensorMeta

#: Every value in a segment starts at a multiple of this: one cache line, enough for any dtype.
ALIGNMENT = 64
#: Fewer entries than this are sent one by one.
FEWEST = 32
#: Values of this many bytes on average, or more, are sent one by one: readers map them, and columns
#: would save little beside the time that their bytes take.
LARGE = 64 << 10
#: A reply in columns is a single frame. One with more entries than this is sent one by one.
MOST = 1 << 16
# With this many kinds, or fewer, the kind of an entry is one byte.
_BYTE = 1 << 8
T = TypeVar("T")


class Kind(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What tensors of one kind have in common: dtype and shape, and the size in bytes."""

    meta: TensorMeta
    nbytes: int


class ItemColumns(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Whole tensors to be put, each to be granted a place.

    Args:
        keys: their keys, or the names of the entries of a state dict.
        kinds: each kind once.
        of: the index of each tensor's kind, as :func:`kinds_of` packs it.
    """

    keys: list[str]
    kinds: list[Kind]
    of: bytes

    def kind_of(self) -> Sequence[int]:
        """The index of each tensor's kind.

        Raises:
            ProtocolError: it is no list of kinds of so many tensors.
        """
        return _indices(self.of, len(self.kinds), len(self.keys))


@final
class EntryColumns(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Located tensors, each of them whole and in one segment of one volume, to be read there.

    Args:
        kinds, of: as in :class:`ItemColumns`.
        versions: one for each tensor, or a single one if it is the same for all.
        offsets: in the segment, in bytes, packed by :func:`pack`.
    """

    kinds: list[Kind]
    of: bytes
    versions: list[int]
    volume: int
    segment: int
    offsets: bytes

    def __len__(self) -> int:
        return len(self.offsets) // 8

    def kind_of(self) -> Sequence[int]:
        """The index of each tensor's kind; see ``ItemColumns.kind_of``."""
        return _indices(self.of, len(self.kinds), len(self))

    def places(self) -> list[int]:
        """The offset of each tensor.

        Raises:
            ProtocolError: they are not packed offsets.
        """
        return unpack(self.offsets)

    def version_of(self) -> Sequence[int]:
        """The version of each tensor."""
        if len(self.versions) == 1:
            return self.versions * len(self)
        return self.versions


def kinds_of(metas: Sequence[TensorMeta], sizes: Sequence[int]) -> tuple[list[Kind], bytes]:
    """The kinds of tensors, and the index of each tensor's kind as a column. Tensors whose
    description is the same object are of one kind.

    >>> meta = TensorMeta("uint8", (4,))
    >>> kinds, of = kinds_of([meta, TensorMeta("uint8", (2,)), meta], [4, 2, 4])
    >>> [kind.nbytes for kind in kinds], list(of)
    ([4, 2], [0, 1, 0])
    """
    if metas and _are_equal(metas) and _are_equal(sizes):
        return [Kind(metas[0], sizes[0])], b""
    ids = list(map(id, metas))
    described = dict(zip(ids, metas, strict=True))
    nbytes = dict(zip(ids, sizes, strict=True))
    kinds: dict[Kind, int] = {}
    index: dict[int, int] = {}
    for one, meta in described.items():
        kind = Kind(meta, nbytes[one])
        index[one] = kinds.setdefault(kind, len(kinds))
    of = map(index.__getitem__, ids)
    if len(kinds) == 1:
        return list(kinds), b""
    return list(kinds), bytes(of) if len(kinds) <= _BYTE else _packed("I", of)


def _indices(of: bytes, kinds: int, count: int) -> Sequence[int]:
    if not of and kinds == 1:
        return bytes(count)
    if kinds <= _BYTE:
        found: Sequence[int] = of
    elif len(of) % 4:
        found = ()
    else:
        found = _unpacked("I", of)
    if len(found) != count or max(found, default=-1) >= kinds:
        raise ProtocolError(f"these are not the kinds of {count} tensors")
    return found


def pack(numbers: Sequence[int]) -> bytes:
    """Pack numbers of at most 63 bits.

    >>> unpack(pack([0, 1 << 40]))
    [0, 1099511627776]
    """
    return _packed("q", numbers)


def unpack(data: bytes) -> list[int]:
    """The numbers that :func:`pack` has packed. Raises ProtocolError if these are none."""
    if len(data) % 8:
        raise ProtocolError(f"{len(data)} bytes are not packed numbers")
    return _unpacked("q", data).tolist()


def _packed(code: str, numbers: Sequence[int] | Iterator[int]) -> bytes:
    made = array(code, numbers)
    if sys.byteorder == "big":
        made.byteswap()
    return made.tobytes()


def _unpacked(code: str, data: bytes) -> array[int]:
    made = array(code)
    made.frombytes(data)
    if sys.byteorder == "big":
        made.byteswap()
    return made


def in_a_row(start: int, sizes: Sequence[int]) -> list[int]:
    """The offsets of values that lie one after the other from ``start`` on.

    >>> in_a_row(128, [100, 1, 64])
    [128, 256, 320]
    """
    if sizes and sizes[0] and _are_equal(sizes):
        step = (sizes[0] + ALIGNMENT - 1) & -ALIGNMENT
        return list(range(start, start + step * len(sizes), step))
    steps = [(size + ALIGNMENT - 1) & -ALIGNMENT for size in sizes]
    return list(accumulate(steps[:-1], initial=start))


def running_totals(sizes: Sequence[int]) -> Sequence[int]:
    """The bytes of each value and all before it.

    >>> list(running_totals([100, 1, 64])), list(running_totals([8, 8]))
    ([100, 101, 165], [8, 16])
    """
    if sizes and sizes[0] and _are_equal(sizes):
        return range(sizes[0], sizes[0] * len(sizes) + 1, sizes[0])
    return list(accumulate(sizes))


def rounded_sum(sizes: Sequence[int]) -> int:
    """The bytes that values of these sizes take up in a segment.

    >>> rounded_sum([100, 1, 64])
    256
    """
    if sizes and _are_equal(sizes):
        return ((sizes[0] + ALIGNMENT - 1) & -ALIGNMENT) * len(sizes)
    return sum([(size + ALIGNMENT - 1) & -ALIGNMENT for size in sizes])


def _are_equal(column: Sequence[T]) -> bool:
    """Whether all items of a column, which is not empty, are equal. This is common, and much faster
    to find out than to compute something for each of them.
    """
    return column[0] == column[-1] and column.count(column[0]) == len(column)


def spread(column: Sequence[T], of: Sequence[int]) -> list[T]:
    """One item for each tensor, of a column with one for each kind."""
    if len(column) == 1:
        return [column[0]] * len(of)
    return list(map(column.__getitem__, of))
