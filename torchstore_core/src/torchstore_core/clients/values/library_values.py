"""Values of torch and numpy besides tensors, as plain data: dtypes, devices and sizes, arrays and
scalars; and views of memory. Rebuilding them runs no code that the data names, so they need no
pickle.

State dicts of trainers have them: the state of numpy's generator, the best loss so far as a
``numpy.float64``, the dtype that something was computed in.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

# Singletons of torch, by the name of their type and their own.
_NAMED = ("dtype", "layout", "memory_format")
# Kinds of numpy's dtypes whose elements are nothing but bytes.
_KINDS = frozenset("biufcmMSU")
# What a view of bytes can be made again, see ``memoryview.cast``.
_FORMATS = frozenset("bBchHiIlLqQnNefd?")


class Described(NamedTuple):
    """A value as plain data. ``data``: the memory of an array, or that a view shows, or the bytes
    of a scalar, if it is one of those.
    """

    what: str
    details: Sequence[Any]
    data: memoryview | None = None


class _Stored(msgspec.Struct, array_like=True):
    what: str
    details: list[Any]
    data: memoryview | int | None  # an int: the position of a buffer that is aside


_decode = msgspec.msgpack.Decoder(_Stored).decode


def described(value: object) -> Described | None:
    """A value of torch or numpy, or a view, that plain data describes exactly; None if it is no
    such value.
    """
    kind = type(value)
    if kind is memoryview:
        return _of_view(value)
    match kind.__module__:
        case "torch":
            return _of_torch(kind, value)
        case "numpy":
            return _of_numpy(kind, value)
    return None


def _of_torch(kind: type, value: Any) -> Described | None:
    torch = sys.modules["torch"]
    if kind is torch.Size:
        return Described("Size", list(value)) if all(type(n) is int for n in value) else None
    if kind is torch.device:
        return Described("device", [str(value)])
    for name in _NAMED:
        if kind is getattr(torch, name):
            return Described(name, [str(value).removeprefix("torch.")])
    return None


def _of_numpy(kind: type, value: Any) -> Described | None:
    numpy: Any = sys.modules["numpy"]
    if kind is not numpy.ndarray and not issubclass(kind, numpy.generic):
        return None
    dtype = value.dtype
    if dtype.kind not in _KINDS or dtype.metadata is not None or not dtype.itemsize:
        return None
    if kind is numpy.ndarray:
        if not value.flags.c_contiguous:  # pickle keeps the order
            return None
        # As bytes: memory of dates, for one, is not to be had otherwise.
        flat = value.reshape(-1).view(numpy.uint8)
        return Described("array", [dtype.str, *value.shape], memoryview(flat))
    return Described("scalar", [dtype.str], memoryview(value.tobytes()))


def _of_view(view: Any) -> Described | None:
    try:
        if not (view.c_contiguous and view.nbytes and view.format in _FORMATS):
            return None
    except ValueError:  # it was released
        return None
    return Described("view", [view.format, view.readonly, *view.shape], view.cast("B"))


def rebuilt(data: Any, aside: Sequence[memoryview] = ()) -> Any:
    """The value that the three fields of a :class:`Described` in msgpack are.

    Args:
        aside: memory that arrays and views may keep; instead of it, ``data`` has its position.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError, ImportError: they describe nothing that
            this process has.
    """
    what, details, memory = msgspec.structs.astuple(_decode(data))
    if memory is None:
        return _rebuilt_of_torch(what, details)
    is_aside = isinstance(memory, int)
    if is_aside:
        memory = aside[memory]
    if what == "view":
        form, readonly, *sides = details
        if not is_aside:
            memory = memoryview(bytes(memory) if readonly else bytearray(memory))
        elif readonly:
            memory = memory.toreadonly()
        return memory.cast(form, sides)
    import numpy as np

    name, *shape = details
    dtype = np.dtype(name)
    if dtype.kind not in _KINDS or what not in ("array", "scalar"):
        raise ValueError(f"a {what!r} of {dtype} is not just bytes")
    # In msgspec 0.19, len(memory) is the length of the whole message.
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != memory.nbytes:
        raise ValueError(f"{memory.nbytes} bytes are no {what} of {dtype} and the shape {shape}")
    made = np.ndarray(shape, dtype, memory)
    made = made if is_aside else made.copy()
    return made if what == "array" else made[()]


def _rebuilt_of_torch(what: str, details: list[Any]) -> Any:
    import torch

    if what == "Size":
        return torch.Size(details)
    (name,) = details
    if what == "device":
        return torch.device(name)
    found = getattr(torch, name, None) if what in _NAMED else None
    if found is None or type(found) is not getattr(torch, what):
        raise ValueError(f"torch {torch.__version__} has no {what} {name!r}")
    return found
