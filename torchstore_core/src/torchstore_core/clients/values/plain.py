"""Looking at many values at once: which are plain tensors, what they are, and where they lie.

A tensor is *plain* if its bytes are all there is to it: a ``torch.Tensor`` or ``Parameter`` itself,
with at least one element, contiguous, in CPU memory that its storage still holds; neither complex
nor quantized, nor a negative view. What is plain goes through columns, one list for each thing that
is to be known of it. Everything else is looked at one by one, in :mod:`.tensors`, which also knows
what to say of a tensor that cannot be stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from torchstore_core.clients.values.tensors import describe
from torchstore_core.values import TensorMeta

try:
    from torchstore_core._native import look as _native_look
except ImportError:  # built without a compiler
    _native_look = None  # type: ignore[assignment]
_compiled: Callable[..., Any] | None = _native_look

__all__ = ["MANY", "Looked", "look"]

_MAX_KINDS = 4096
#: Fewer values than this are looked at one by one all the same: it takes less time.
MANY = 4


class Looked(NamedTuple):
    """Of each value: what it is, how many bytes it has, and where the first one lies; or None, 0
    and 0, if it is not plain. While ``storages`` are kept, so is the memory, unless it is resized.
    """

    metas: list[TensorMeta | None]
    sizes: list[int]
    addresses: list[int]
    storages: list[Any]


def look(values: list[Any]) -> Looked:
    """Look at every value. Never raises: a value that torch cannot describe counts as not plain.
    Less than :data:`MANY` values are left to be looked at one by one, as if none of them were
    plain.

    >>> look([torch.zeros(3, 2).t(), "x", None, [1]]).sizes
    [0, 0, 0, 0]
    """
    return _look(values) if len(values) >= MANY else _FEW[len(values)]


def _nothing(values: list[Any]) -> Looked:
    """Without the compiled module, or without what it needs of torch: all go one by one, as looking
    at columns of them in Python would take longer.
    """
    none: list[Any] = [None] * len(values)
    zeros = [0] * len(values)
    return Looked(none, zeros, zeros, none)


def _best() -> Callable[[list[Any]], Looked]:
    """The compiled look, if it is there and this torch lets C code look at its tensors."""
    api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if _compiled is None or api is None:
        return _nothing
    tensor: Any = torch.Tensor
    methods = tensor.is_neg, tensor.storage_offset, tensor.untyped_storage
    known: dict[bytes, TensorMeta] = {}
    native = partial(
        _compiled,
        api,
        (tensor, torch.nn.Parameter),
        (*methods, torch.UntypedStorage.nbytes),
        describe,
        known,
    )

    def look_at_all(values: list[Any]) -> Looked:
        if len(known) > _MAX_KINDS:
            known.clear()
        return Looked(*native(values))

    try:
        if look_at_all([torch.zeros(2, device="cpu")]).sizes != [8]:
            return _nothing
    except ValueError:  # another version of DLPack
        return _nothing
    return look_at_all


_look = _best()
_FEW = [_nothing([None] * count) for count in range(MANY)]
