"""The plans of transfers in columns. A tensor is inspected again just before its bytes move."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import add

import torch

from torchstore_core.clients.moving.batches import Columns, Move
from torchstore_core.clients.transfer.columns.sources import TensorColumns
from torchstore_core.clients.transfer.moves import PutBatch
from torchstore_core.clients.transfer.tensor_moves import DeviceColumns, TensorBatch
from torchstore_core.clients.values.new_tensors import new_like, new_tensor, out_of_memory
from torchstore_core.clients.values.overlaps import are_disjoint
from torchstore_core.clients.values.plain import begins_on_device, look, still_there
from torchstore_core.clients.values.tensors import dtype_of
from torchstore_core.errors import TransportError
from torchstore_core.values import TensorMeta

# So many tensors are inspected at a time: meanwhile, those before them are copied.
_AT_ONCE = 2048


class NotPlainError(Exception):
    """Not all destinations are plain tensors of the right kind, each with memory of its own;
    nothing was written. They must be checked one by one, which finds out what is wrong, if
    anything is.
    """


class ColumnsPut(TensorBatch):
    """Tensors to be written to the places that were granted for them, in ascending order."""

    into_segment = True

    def __init__(
        self, volume: int, segment: int, columns: TensorColumns, offsets: list[int]
    ) -> None:
        self.on_device = columns.on_device
        self.volume = volume
        self.segment = segment
        self.nbytes = columns.nbytes
        self._columns = columns
        self._offsets = offsets

    def moves(self, room: int | None) -> Iterator[Move]:
        columns, offsets = self._columns, self._offsets
        outermost = [offsets[0], offsets[-1]]  # they ascend
        _check_room(outermost, columns.sizes[-1:], room, self.segment)
        memory: list[torch.UntypedStorage | None] = []
        # If the ``.data`` of a tensor is replaced during the copy, its memory must stay alive.
        self._memory = memory
        for start in range(0, len(columns), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            addresses, sizes = columns.addresses[part], columns.sizes[part]
            tensors = columns.tensors[part]
            storages = still_there(tensors, addresses, sizes, on_device=self.on_device)
            if storages is not None:
                memory += storages
                if self.on_device:
                    yield DeviceColumns(columns.keys[part], tensors, offsets[part])
                else:
                    yield Columns(addresses, offsets[part], sizes)
                continue
            sources = columns.sources(start, start + _AT_ONCE)
            one_by_one = PutBatch(self.volume, self.segment, sources, offsets[part])
            for move in one_by_one.moves(room):
                memory += one_by_one.take_memory()
                yield move


class ColumnsGet(TensorBatch):
    """Tensors to be read from a segment.

    Args:
        metas, sizes, offsets: of the stored values.
        tensors: the destinations; None: create them.
    """

    into_segment = False

    def __init__(
        self,
        volume: int,
        segment: int,
        metas: list[TensorMeta],
        sizes: list[int],
        offsets: list[int],
        tensors: list[torch.Tensor] | None,
    ) -> None:
        self.volume = volume
        self.segment = segment
        self.nbytes = sum(sizes)
        self._metas = metas
        self._sizes = sizes
        self._offsets = offsets
        self._own = tensors
        self.tensors = tensors
        self.on_device = begins_on_device(tensors)

    def moves(self, room: int | None) -> Iterator[Move]:
        _check_room(self._offsets, self._sizes, room, self.segment)
        if self._own is None:
            if self.tensors is None:  # otherwise this is a retry over another link
                self.tensors = new_tensors(self._metas)
            self._memory = list(map(torch.Tensor.untyped_storage, self.tensors))
            addresses = list(map(torch.Tensor.data_ptr, self.tensors))
        else:
            looked = look(self._own, on_device=self.on_device)
            addresses = looked.addresses
            if looked.metas != self._metas or not are_disjoint(addresses, self._sizes):
                raise NotPlainError
            self._memory = looked.storages
            if self.on_device:
                keys = [""] * len(addresses)  # no tensor changes before it is written to
                yield DeviceColumns(keys, self._own, self._offsets)
                return
        yield Columns(addresses, self._offsets, self._sizes)


def new_tensors(metas: Sequence[TensorMeta]) -> list[torch.Tensor]:
    """A new tensor of each kind."""
    make: dict[int, Callable[[], torch.Tensor]] = {}  # by the identity of their description
    for meta in dict(zip(map(id, metas), metas, strict=True)).values():
        make[id(meta)] = new_like(new_tensor(meta.shape, dtype_of(meta, "")))
    try:
        return [make[id(meta)]() for meta in metas]
    except RuntimeError as error:
        sizes = [dtype_of(meta, "").itemsize * math.prod(meta.shape) for meta in metas]
        raise out_of_memory(sum(sizes), error) from error


def _check_room(offsets: Sequence[int], sizes: Sequence[int], room: int | None, of: int) -> None:
    if room is None or not offsets:
        return
    within = max(offsets) + max(sizes) <= room or max(map(add, offsets, sizes)) <= room
    if min(offsets) < 0 or not within:
        raise TransportError(f"values would lie outside segment {of}")
