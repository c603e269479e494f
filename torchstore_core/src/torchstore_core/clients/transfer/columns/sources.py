"""Many plain tensors to put, inspected together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, final

import msgspec
import torch

from torchstore_core.clients.transfer.sources import Source, plain_source
from torchstore_core.clients.values.plain import begins_on_device, look
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.columns import FEWEST, LARGE, kinds_of

_STR = {str}


@final
class TensorColumns(msgspec.Struct, frozen=True, gc=False):
    """Plain tensors to put, which are the user's own objects; see ``values.plain``.

    Args:
        keys: their keys, or the names of the entries of a state dict.
        metas, sizes: what each of them is, and its size in bytes.
        addresses: where each of them was when it was inspected.
        nbytes: the total.
        on_device: whether all of them are on CUDA devices; otherwise none is.
    """

    keys: list[str]
    tensors: list[torch.Tensor]
    metas: list[TensorMeta]
    sizes: list[int]
    addresses: list[int]
    nbytes: int
    on_device: bool = False

    def __len__(self) -> int:
        return len(self.keys)

    def wire(self) -> m.ItemColumns:
        """The description that is sent to the server."""
        return m.ItemColumns(self.keys, *kinds_of(self.metas, self.sizes))

    def sources(self, start: int = 0, stop: int | None = None) -> list[Source]:
        """The same, or a part of it, as one source for each tensor."""
        part = slice(start, stop)
        columns = self.keys[part], self.metas[part], self.sizes[part], self.tensors[part]
        return list(map(plain_source, *columns))


def tensor_columns(keys: Collection[Any], values: Collection[Any]) -> TensorColumns | None:
    """Inspect values once. None if they must be inspected one by one, because they are few or
    large, not all of them are plain tensors, or a key is not valid.
    """
    if len(values) < FEWEST or not are_names(keys):
        return None
    tensors = list(values)
    on_device = begins_on_device(tensors)
    looked = look(tensors, memory=False, on_device=on_device)
    sizes = looked.sizes
    if not min(sizes):  # a value is not plain
        return None
    metas: list[Any] = looked.metas
    nbytes = sum(sizes)
    if nbytes >= LARGE * len(sizes):
        return None
    return TensorColumns(list(keys), tensors, metas, sizes, looked.addresses, nbytes, on_device)


def are_names(keys: Collection[Any], longest: int = m.MAX_KEY) -> bool:
    """Whether all are strings of 1 to ``longest`` characters, and not of a subclass."""
    if set(map(type, keys)) != _STR:
        return False
    lengths = set(map(len, keys))
    return min(lengths) > 0 and max(lengths) <= longest


def keys_of(sources: Sequence[Source] | TensorColumns) -> list[str]:
    """The keys of what is to be put."""
    if type(sources) is TensorColumns:
        return sources.keys
    if len(sources) == 1:  # very often
        return [sources[0].key]
    return [source.key for source in sources]


def total(sources: Sequence[Source] | TensorColumns) -> int:
    """The bytes of what is to be put."""
    if type(sources) is TensorColumns:
        return sources.nbytes
    return sum([source.nbytes for source in sources])
