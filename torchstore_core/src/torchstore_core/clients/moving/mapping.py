"""Zero-copy gets: large, contiguous values are mapped instead of copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torchstore_core.clients.session.links import link_errors
from torchstore_core.contracts.transport import SupportsMap
from torchstore_core.errors import TransportError

# Mappable values that are at most this many bytes apart share one mapping and one lease.
_GROUP_GAP = 1 << 20
T = TypeVar("T")


def map_values(
    link: SupportsMap, segment: int, values: Sequence[tuple[int, int, T]]
) -> tuple[list[tuple[object, list[tuple[T, int]]]], list[tuple[int, int, T]]]:
    """Map values, given as ``(offset, nbytes, value)``. Neighbours share a mapping, as values that
    were put together lie next to each other.

    Returns:
        The owner of each mapping, with its values and where in it they begin; and those that cannot
        be mapped, as they were given.
    """
    mappable = sorted(values, key=lambda item: item[0])
    found: list[tuple[object, list[tuple[T, int]]]] = []
    refused: list[tuple[int, int, T]] = []
    begin = 0
    for i in range(1, len(mappable) + 1):
        if i < len(mappable):
            before, nbytes, _ = mappable[i - 1]
            if mappable[i][0] - (before + nbytes) <= _GROUP_GAP:
                continue
        run = mappable[begin:i]
        begin = i
        first = run[0][0]
        end = max([start + nbytes for start, nbytes, _ in run])
        try:
            with link_errors():
                mapping = link.map(segment, first, end - first)
        except TransportError:  # out of mappings (vm.max_map_count): copying always works
            refused += run
            continue
        inside = [(value, mapping.offset + start - first) for start, _, value in run]
        found.append((mapping.owner, inside))
    return found, refused
