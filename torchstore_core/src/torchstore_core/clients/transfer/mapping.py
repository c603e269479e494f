"""Zero-copy gets: large, contiguous values are mapped instead of copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchstore_core.clients.session.link_errors import link_errors
from torchstore_core.clients.transfer.moves import GetBatch, contiguous_start
from torchstore_core.clients.transfer.targets import MAP_MIN, Target, TargetPiece
from torchstore_core.clients.values.tensors import from_buffer
from torchstore_core.contracts.transport import SupportsMap
from torchstore_core.errors import TransportError

# Mappable values that are at most this many bytes apart share one mapping and one lease.
_GROUP_GAP = 1 << 20


class Mapped(NamedTuple):
    """A private mapping, and the tensors on it, all of which keep ``owner`` alive."""

    owner: object
    tensors: list[tuple[Target, torch.Tensor]]


def map_runs(link: SupportsMap, batch: GetBatch) -> tuple[Sequence[Mapped], GetBatch]:
    """Map large, contiguous values. Neighbours share a mapping, as values that were put together
    lie next to each other. Returns the mappings, and a batch of what is left to be copied.
    """
    rest: list[tuple[Target, TargetPiece]] = []
    mappable: list[tuple[int, Target]] = []
    for target, piece in batch.jobs:
        start = None
        if (
            target.tensor is None
            and target.codec is None
            and piece.into is None
            and piece.nbytes >= MAP_MIN
        ):
            start = contiguous_start(piece, target.dtype.itemsize)
        if start is None:
            rest.append((target, piece))
        else:
            mappable.append((start, target))
    if not mappable:
        return (), batch
    mappable.sort(key=lambda item: item[0])
    found: list[Mapped] = []
    begin = 0
    for i in range(1, len(mappable) + 1):
        if i < len(mappable):
            before, previous = mappable[i - 1]
            if mappable[i][0] - (before + previous.nbytes) <= _GROUP_GAP:
                continue
        run = mappable[begin:i]
        begin = i
        first = run[0][0]
        end = max([start + target.nbytes for start, target in run])
        try:
            with link_errors():
                mapping = link.map(batch.segment, first, end - first)
        except TransportError:  # out of mappings (vm.max_map_count): copying always works
            for _, target in run:
                rest.append((target, target.pieces[0]))
            continue
        made = [
            (
                target,
                from_buffer(
                    mapping.owner, mapping.offset + start - first, target.shape, target.dtype
                ),
            )
            for start, target in run
        ]
        found.append(Mapped(mapping.owner, made))
    left = GetBatch(batch.volume, batch.segment, batch.results, rest, batch.plain, batch.offsets)
    return found, left
