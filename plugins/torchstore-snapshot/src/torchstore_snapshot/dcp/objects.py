"""Values that are not tensors: from and to the bytes that planners exchange with storage.

A planner of ``torch.distributed.checkpoint`` gives and takes them as files of ``torch.save``, which
are pickles. A snapshot has msgpack instead. A value that msgpack cannot express is refused, unless
pickle is allowed.
"""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from torchstore_core.clients.values.codec import encode_object
from torchstore_core.errors import UnsafeObjectError, UnsupportedValueError

__all__ = ["encoded", "loaded", "saved", "value_of"]


class _AsGiven(io.BytesIO):
    """What a planner gave instead of a value. A BytesIO of another class is a value."""


def value_of(planner: SavePlanner, item: WriteItem, *, allow_pickle: bool) -> Any:
    """Return the value of a write item that is not a tensor.

    Of torch's own planner this is the object itself. Any other one may have changed what it saves,
    so its bytes are loaded, without running code from them.

    Raises:
        UnsafeObjectError: the bytes cannot be loaded without pickle. With ``allow_pickle``, they
            are returned as they are, and `saved` gives them to planners as they are.
    """
    kind: Any = type(planner)
    if (
        isinstance(planner, DefaultSavePlanner)
        and kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    ):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        return data
    name = item.index.fqn
    try:
        return loaded(name, data.getvalue(), allow_pickle=False)
    except UnsafeObjectError:
        if not allow_pickle:
            raise
        return _AsGiven(data.getvalue())


def encoded(name: str, value: Any, *, allow_pickle: bool) -> tuple[str, bytes]:
    """Return the codec of a value, and its bytes.

    Raises:
        UnsafeObjectError: it needs pickle, which is not allowed.
        UnsupportedValueError: it cannot be pickled either.
    """
    meta, data = encode_object(name, value, allow_pickle=allow_pickle)
    return meta.codec, data


def saved(value: Any) -> io.BytesIO:
    """Return a value as planners load it; what a planner gave instead of one, unchanged."""
    if isinstance(value, _AsGiven):
        return io.BytesIO(value.getvalue())
    made = io.BytesIO()
    torch.save(value, made)
    made.seek(0)
    return made


def loaded(name: str, data: bytes, *, allow_pickle: bool) -> Any:
    """Return a value from a file of ``torch.save``.

    Raises:
        UnsafeObjectError: it needs pickle, which is not allowed.
        UnsupportedValueError: it cannot be rebuilt here.
    """
    if not zipfile.is_zipfile(io.BytesIO(data)) and not allow_pickle:
        raise _unsafe(name)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not allow_pickle)
    except Exception as error:  # whatever an unpickler meets; its errors have no common base
        if allow_pickle:
            raise UnsupportedValueError(
                f"{name!r} cannot be rebuilt here: {error!r}", key=name
            ) from error
        raise _unsafe(name) from error


def _unsafe(name: str) -> UnsafeObjectError:
    return UnsafeObjectError(
        f"{name!r} was saved with pickle, and cannot be loaded without it, which could run code "
        "from the file; give allow_pickle=True if you trust it",
        key=name,
    )
