"""Inspecting many values at once: which are plain tensors, their metadata and their addresses.

A tensor is *plain* if it is fully described by its bytes: it is a ``torch.Tensor`` or ``Parameter``
itself, not a subclass; it has at least one element, is contiguous, and lies in CPU memory that its
storage still holds; and it is neither complex nor quantized, nor a negative view. Plain tensors are
handled in columns, one list for each property; and so are tensors that would be plain if they were
not, all of them, on CUDA devices. All other values are inspected one by one in :mod:`.tensors`,
which also raises the errors for tensors that cannot be stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from torchstore_core.clients.values.tensors import describe
from torchstore_core.machine.copying import compiled
from torchstore_core.values import TensorMeta

_compiled: Callable[..., Any] | None = compiled("look")
_compiled_still: Callable[..., Any] | None = compiled("still")

_MAX_KINDS = 4096
_TYPES = torch.Tensor, torch.nn.Parameter
_tensor: Any = torch.Tensor
# What the compiled functions call for every tensor.
_METHODS = (
    _tensor.is_neg,
    _tensor.storage_offset,
    _tensor.untyped_storage,
    torch.UntypedStorage.nbytes,
)
#: Fewer values than this are always inspected one by one, because that takes less time.
MANY = 4
# Types of devices, as DLPack numbers them.
_CPU = 1
_DEVICE = 2 if torch.version.hip is None else 10


class Looked(NamedTuple):
    """For each value its metadata, its size in bytes and its address; or None, 0 and 0 if it is not
    plain. Keeping ``storages`` keeps the memory alive, unless a storage is resized; it is empty
    if they were not asked for.
    """

    metas: list[TensorMeta | None]
    sizes: list[int]
    addresses: list[int]
    storages: list[Any]


def look(values: list[Any], *, memory: bool = True, on_device: bool = False) -> Looked:
    """Inspect every value. Never raises: a value that torch cannot describe counts as not plain.
    If there are fewer than :data:`MANY` values, all of them count as not plain, so that they are
    inspected one by one.

    Args:
        memory: must be true when the bytes are about to be moved. Without it this takes half the
            time, and a tensor whose storage was freed may count as plain.
        on_device: tensors on CUDA devices count as plain, and those in CPU memory do not.

    >>> look([torch.zeros(3, 2).t(), "x", None, [1]]).sizes
    [0, 0, 0, 0]
    """
    if len(values) < MANY:
        return _FEW[len(values)]
    return _look(values, memory, _DEVICE if on_device else _CPU)


def begins_on_device(values: Sequence[Any] | None) -> bool:
    """Whether the first of these values is a tensor on a CUDA device, and so perhaps all are. Not
    while a stream is being captured: then they are inspected one by one, and refused.
    """
    first: Any = values[0] if values else None
    on_device = type(first) in _TYPES and first.is_cuda
    return on_device and not torch.cuda.is_current_stream_capturing()


def still_there(
    values: list[torch.Tensor],
    addresses: list[int],
    sizes: list[int],
    *,
    on_device: bool = False,
) -> list[Any] | None:
    """The storages of plain tensors that :func:`look` has seen, if each of them still has as many
    bytes at the same address, and contiguous; else None. Keeping the storages keeps the memory
    alive, unless a storage is resized.

    It finds out no more than must be known just before the bytes are moved, and so takes half the
    time of a second look.
    """
    if _compiled_still is None:
        return None
    storages: list[Any] | None = _compiled_still(
        _exchange_api(), _METHODS, values, addresses, sizes, _DEVICE if on_device else _CPU
    )
    return storages


def _exchange_api() -> Any:
    """How C code inspects the tensors of this torch; None if it does not offer that."""
    return getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


def _nothing(values: list[Any], memory: bool = True, device: int = _CPU) -> Looked:
    """Used without the compiled module, or without the interface of torch that it needs. All values
    are then inspected one by one, as building the columns in Python would take longer.
    """
    none: list[Any] = [None] * len(values)
    zeros = [0] * len(values)
    return Looked(none, zeros, zeros, none)


def _best() -> Callable[..., Looked]:
    """The compiled function, if it was built and this torch lets C code inspect its tensors."""
    api = _exchange_api()
    if _compiled is None or api is None:
        return _nothing
    known: dict[bytes, TensorMeta] = {}
    native = partial(_compiled, api, _TYPES, _METHODS, describe, known)

    def look_at_all(values: list[Any], memory: bool = True, device: int = _CPU) -> Looked:
        if len(known) > _MAX_KINDS:
            known.clear()
        return Looked(*native(values, memory, device))

    try:
        if look_at_all([torch.zeros(2, device="cpu")]).sizes != [8]:
            return _nothing
    except (TypeError, ValueError):  # built from older source than this; another DLPack
        return _nothing
    return look_at_all


_look = _best()
_FEW = [_nothing([None] * count) for count in range(MANY)]
