"""From copies to the library's descriptor lists: a pure function, done with arrays.

A batch may have many thousand pieces, so nothing here loops over them in Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from torchstore_core.contracts.transport import Copy
from torchstore_core.errors import TransportError
from torchstore_rdma.protocol import Exposed

__all__ = ["PART", "Part", "lacking", "part_size", "parts", "ranges", "spans", "table"]

#: Bytes of a part: what cannot be interrupted on one host. A row counts as some bytes, too.
PART = 64 << 20
# The same where a network may be slow. Only the end of a part shows that bytes move, so a batch has
# several, and even one of megabytes a second reaches the next one soon.
_MOST_SLOW, _LEAST_SLOW, _OF_BATCH = 16 << 20, 1 << 20, 16
_ROW = 4096
_PAGE = 4096

# The columns of a table.
_ADDRESS, _SEGMENT, _OFFSET, _NBYTES, _ROWS, _STRIDE, _STEP, _COPY = range(8)
_COLUMNS = 7
_fields = attrgetter("address", "segment", "offset", "nbytes", "rows", "stride", "step")

Table = np.ndarray[Any, np.dtype[np.int64]]


class Part(NamedTuple):
    """Descriptors of a transfer: rows of ``address, nbytes, 0, stride, count``, and an index for
    each piece. ``first``: which copy it begins with. All copies before that are in earlier parts.
    """

    first: int
    local: np.ndarray[Any, Any]
    remote: np.ndarray[Any, Any]
    indices: np.ndarray[Any, Any]


def table(copies: Sequence[Copy], exposed: Mapping[int, Exposed]) -> Table:
    """The copies that move anything, as an array, in their order.

    Raises:
        TransportError: a copy is not inside of its segment, or is of a device.
    """
    if any(copy.device for copy in copies):
        raise TransportError("this transport only moves host memory")
    try:
        flat = chain.from_iterable(map(_fields, copies))
        plain = np.fromiter(flat, np.int64, len(copies) * _COLUMNS).reshape(-1, _COLUMNS)
    except (OverflowError, ValueError, TypeError) as error:
        raise TransportError("a copy is outside of its segment") from error
    made = np.column_stack([plain, np.arange(len(plain))])
    limits = np.zeros(len(made), dtype=np.int64)
    for segment, found in exposed.items():
        limits[made[:, _SEGMENT] == segment] = found.nbytes
    # As floats: exact for what is inside of a segment, and without overflow for what is not.
    numbers = made.astype(np.float64)
    within = (numbers[:, _ROWS] - 1) * numbers[:, _STEP]
    low = numbers[:, _OFFSET] + np.minimum(within, 0)
    high = numbers[:, _OFFSET] + np.maximum(within, 0) + numbers[:, _NBYTES]
    backwards = (made[:, [_ADDRESS, _NBYTES, _ROWS, _STRIDE, _STEP]] < 0).any(axis=1)
    wrong = (low < 0) | (high > limits) | backwards
    if wrong.any():
        copy = copies[int(np.argmax(wrong))]
        raise TransportError(
            f"[{copy.offset}, +{copy.nbytes}) × {copy.rows} is outside of segment {copy.segment}"
        )
    made = made[(made[:, _NBYTES] > 0) & (made[:, _ROWS] > 0)]
    single = made[:, _ROWS] == 1
    made[single, _STRIDE] = made[single, _STEP] = made[single, _NBYTES]
    return made


def lacking(made: Table, exposed: Mapping[int, Exposed]) -> int:
    """How far into a segment the copies reach if that is beyond what is registered; else 0."""
    ends = made[:, _OFFSET] + np.maximum((made[:, _ROWS] - 1) * made[:, _STEP], 0)
    ends += made[:, _NBYTES]
    beyond = np.zeros(len(made), dtype=bool)
    for segment, found in exposed.items():
        beyond |= (made[:, _SEGMENT] == segment) & (ends > found.end)
    return int(ends[beyond].max(initial=0))


def part_size(made: Table, *, slow: bool) -> int:
    """How many bytes a part of this batch should have, if the network may be slow or is not."""
    if not slow:
        return PART
    return max(_LEAST_SLOW, min(int(_weights(made).sum()) // _OF_BATCH, _MOST_SLOW))


def parts(made: Table, exposed: Mapping[int, Exposed], size: int = PART) -> Iterator[Part]:
    """Divide the copies into parts of about ``size`` bytes, in their order."""
    made = _split(made, size)
    if not len(made):
        return
    weights = _weights(made)
    numbers = (np.cumsum(weights) - weights) // size
    cuts = np.flatnonzero(np.diff(numbers)) + 1
    for some in np.split(made, cuts):
        yield _part(some, exposed)


def _weights(made: Table) -> Any:
    return made[:, _ROWS] * (made[:, _NBYTES] + _ROW)


def ranges(made: Table) -> list[tuple[int, int]]:
    """The local memory of each copy, as its first address and its end."""
    ends = made[:, _ADDRESS] + (made[:, _ROWS] - 1) * made[:, _STRIDE] + made[:, _NBYTES]
    return list(zip(made[:, _ADDRESS].tolist(), ends.tolist(), strict=True))


def spans(made: Table) -> list[tuple[int, int]]:
    """The local memory of the copies as ``(address, nbytes)``: whole pages, neighbours merged."""
    starts = made[:, _ADDRESS] // _PAGE * _PAGE
    ends = made[:, _ADDRESS] + (made[:, _ROWS] - 1) * made[:, _STRIDE] + made[:, _NBYTES]
    ends = -(-ends // _PAGE) * _PAGE
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    fresh = np.flatnonzero(np.concatenate(([True], starts[1:] > ends[:-1]))[: len(starts)])
    lasts = np.append(fresh[1:], len(starts)) - 1
    return [(int(starts[a]), int(ends[b] - starts[a])) for a, b in zip(fresh, lasts, strict=True)]


def _split(made: Table, size: int) -> Table:
    """The same bytes, with no entry larger than a part, and no rows that overlap: the library
    refuses those.
    """
    overlapping = np.minimum(made[:, _STRIDE], made[:, _STEP]) < made[:, _NBYTES]
    apart = overlapping | (made[:, _NBYTES] > size)
    made = _repeat(made, np.where(apart, made[:, _ROWS], 1), 1, size)
    several = made[:, _ROWS] > 1
    rows = np.maximum(size // (made[:, _NBYTES] + _ROW), 1)
    made = _repeat(made, np.where(several, -(-made[:, _ROWS] // rows), 1), rows, size)
    return _repeat(made, None, 0, size)


def _repeat(made: Table, times: Any, rows: Any, size: int) -> Table:
    """Divide each entry by rows (``times`` pieces of at most ``rows`` rows), or by ``size`` bytes
    if ``times`` is None.
    """
    by_bytes = times is None
    if by_bytes:
        times = np.where(made[:, _ROWS] == 1, -(-made[:, _NBYTES] // size), 1)
    if not (times > 1).any():
        return made
    which = np.repeat(np.arange(len(made)), times)
    turn = np.arange(len(which)) - np.repeat(np.cumsum(times) - times, times)
    out, cut = made[which], (times > 1)[which]
    if by_bytes:
        at = turn * size
        out[:, _ADDRESS] += at
        out[:, _OFFSET] += at
        out[cut, _NBYTES] = np.minimum(out[:, _NBYTES] - at, size)[cut]
    else:
        rows = np.broadcast_to(rows, len(made))[which]
        out[:, _ADDRESS] += turn * rows * out[:, _STRIDE]
        out[:, _OFFSET] += turn * rows * out[:, _STEP]
        out[cut, _ROWS] = np.minimum(out[:, _ROWS] - turn * rows, rows)[cut]
    single = out[:, _ROWS] == 1
    out[single, _STRIDE] = out[single, _STEP] = out[single, _NBYTES]
    return out


def _part(some: Table, exposed: Mapping[int, Exposed]) -> Part:
    bases = np.zeros(len(some), dtype=np.int64)
    for segment, found in exposed.items():
        bases[some[:, _SEGMENT] == segment] = found.address
    nothing = np.zeros(len(some), dtype=np.int64)
    nbytes, rows = some[:, _NBYTES], some[:, _ROWS]
    sides = (some[:, _ADDRESS], some[:, _STRIDE]), (bases + some[:, _OFFSET], some[:, _STEP])
    local, remote = (
        np.stack([start, nbytes, nothing, step, rows], axis=1).astype(np.uint64)
        for start, step in sides
    )
    return Part(int(some[0, _COPY]), local, remote, np.arange(int(rows.sum()), dtype=np.int32))
