"""Gets of many whole tensors: what is asked for, and what is made of a reply in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from torchstore_core.clients.moving.batches import MAP_MIN
from torchstore_core.clients.moving.entries import each_of
from torchstore_core.clients.transfer.columns.batches import ColumnsGet
from torchstore_core.clients.transfer.columns.sources import are_names
from torchstore_core.clients.values.plain import begins_on_device
from torchstore_core.clients.values.tensors import dtype_of
from torchstore_core.errors import ProtocolError, UnsupportedValueError
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.columns import FEWEST

_PLAIN = {torch.Tensor, torch.nn.Parameter}


class Named(msgspec.Struct, frozen=True, gc=False):
    """A request for the newest version of many values, all of them whole.

    Args:
        keys: of the values, or the names of entries of a state dict, each of them once.
        tensors: the destinations; None: new values.
    """

    keys: list[str]
    tensors: list[torch.Tensor] | None

    @property
    def on_device(self) -> bool:
        """Whether the destinations seem to be on CUDA devices."""
        return begins_on_device(self.tensors)


def names_and_tensors(what: Mapping[Any, Any] | Sequence[Any]) -> Named | None:
    """The request for what a caller gave: keys, or a mapping of keys to destinations. None if it
    must be inspected value by value.
    """
    if isinstance(what, str) or len(what) < FEWEST or not are_names(what):
        return None
    if not isinstance(what, Mapping):
        return Named(list(what), None) if len(set(what)) == len(what) else None
    tensors = list(what.values())
    return Named(list(what), tensors) if _PLAIN.issuperset(map(type, tensors)) else None


def batch_of(columns: m.EntryColumns, tensors: list[torch.Tensor] | None) -> ColumnsGet | None:
    """The plan for reading the values of a reply; None if they must be read one by one, because
    some may be mapped, or are not described as what they are.

    Raises:
        ProtocolError: the reply contradicts itself.
    """
    for kind in columns.kinds:
        if (tensors is None and kind.nbytes >= MAP_MIN) or not _is_plain(kind.meta, kind.nbytes):
            return None
    count = len(columns)
    if tensors is not None and len(tensors) != count:
        raise ProtocolError(f"{len(tensors)} values were asked for, the server sent {count}")
    metas, sizes = each_of(columns)
    places = columns.places()
    return ColumnsGet(columns.volume, columns.segment, metas, sizes, places, tensors)


def _is_plain(meta: TensorMeta, nbytes: int) -> bool:
    """Whether a new tensor of this kind is plain, and has so many bytes."""
    if min(meta.shape, default=1) < 1:
        return False
    try:
        size = dtype_of(meta, "").itemsize
    except UnsupportedValueError:
        return False
    for extent in meta.shape:
        size *= extent
    return size == nbytes
