"""Any Python object to bytes and back, with the same types.

msgpack where that is exact; tuples, sets and the like travel as extensions, so that they come back
as what they were. Pickle only for the rest, only here, only in clients. The server keeps bytes.
"""

from __future__ import annotations

import pickle
from typing import Any

import msgspec

from torchstore_core.errors import UnsafeObjectError, UnsupportedValueError
from torchstore_core.values import ObjectMeta

__all__ = ["decode_object", "encode_object"]

MSGPACK = "msgpack"
PICKLE = "pickle"

_TUPLE, _SET, _FROZENSET, _BYTEARRAY, _COMPLEX, _INTEGER, _PAIRS = range(1, 8)
_MAX_DEPTH = 64
_encoder = msgspec.msgpack.Encoder()


class _NotExactError(Exception):
    """msgpack would not give back the same object."""


def encode_object(key: str, value: Any, *, allow_pickle: bool) -> tuple[ObjectMeta, bytes]:
    """Bytes of ``value`` and how they are encoded.

    Raises:
        UnsafeObjectError: it needs pickle and that is not allowed.
        UnsupportedValueError: it cannot be pickled either.
    """
    try:
        return ObjectMeta(MSGPACK), _encoder.encode(_to_wire(value, set(), 0))
    except (_NotExactError, UnicodeEncodeError):
        if not allow_pickle:
            raise UnsafeObjectError(
                f"{key!r}: a {type(value).__qualname__} needs pickle, which allow_pickle=False "
                "forbids; put tensors, plain containers, numbers, str or bytes",
                key=key,
            ) from None
    try:
        return ObjectMeta(PICKLE), pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise UnsupportedValueError(
            f"{key!r}: a {type(value).__qualname__} cannot be stored: {error}", key=key
        ) from error


def decode_object(
    key: str, meta: ObjectMeta, data: bytes | bytearray, *, allow_pickle: bool
) -> Any:
    """The object that :func:`encode_object` made ``data`` of.

    Raises:
        UnsafeObjectError: it was pickled and that is not allowed.
        UnsupportedValueError: it cannot be rebuilt here (its class is missing, say).
    """
    if meta.codec not in (MSGPACK, PICKLE):
        raise UnsupportedValueError(f"{key!r} is encoded as {meta.codec!r}, unknown here", key=key)
    if meta.codec == PICKLE and not allow_pickle:
        raise UnsafeObjectError(
            f"{key!r} was stored with pickle, which allow_pickle=False forbids to load", key=key
        )
    try:
        if meta.codec == MSGPACK:
            return msgspec.msgpack.decode(data, ext_hook=_extension)
        return pickle.loads(data)
    except Exception as error:
        raise UnsupportedValueError(
            f"{key!r} cannot be rebuilt here: {error!r} (is its class importable?)", key=key
        ) from error


def _to_wire(value: Any, seen: set[int], depth: int) -> Any:
    kind = type(value)
    if value is None or kind is str or kind is bool or kind is float or kind is bytes:
        return value
    if kind is int:
        if -(1 << 63) <= value < 1 << 64:
            return value
        length = value.bit_length() // 8 + 1
        return msgspec.msgpack.Ext(_INTEGER, value.to_bytes(length, "little", signed=True))
    if kind is complex:
        return _packed(_COMPLEX, [value.real, value.imag])
    if depth > _MAX_DEPTH or kind not in (list, tuple, dict, set, frozenset, bytearray):
        raise _NotExactError
    # Two references to one mutable object must stay two references to one object (and a cycle a
    # cycle): that is pickle's business.
    if kind is not tuple and kind is not frozenset:
        if id(value) in seen:
            raise _NotExactError
        seen.add(id(value))
    depth += 1
    if kind is list:
        return [_to_wire(x, seen, depth) for x in value]
    if kind is dict:
        if all(type(k) is str for k in value):
            return {k: _to_wire(v, seen, depth) for k, v in value.items()}
        pairs = [[_to_wire(k, seen, depth), _to_wire(v, seen, depth)] for k, v in value.items()]
        return _packed(_PAIRS, pairs)
    if kind is bytearray:
        return msgspec.msgpack.Ext(_BYTEARRAY, bytes(value))
    tag = _TUPLE if kind is tuple else _SET if kind is set else _FROZENSET
    return _packed(tag, [_to_wire(x, seen, depth) for x in value])


def _packed(tag: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(tag, _encoder.encode(value))


def _extension(tag: int, data: memoryview) -> Any:
    if tag == _BYTEARRAY:
        return bytearray(data)
    if tag == _INTEGER:
        return int.from_bytes(data, "little", signed=True)
    inner = msgspec.msgpack.decode(data, ext_hook=_extension)
    if tag == _TUPLE:
        return tuple(inner)
    if tag == _SET:
        return set(inner)
    if tag == _FROZENSET:
        return frozenset(inner)
    if tag == _COMPLEX:
        return complex(*inner)
    if tag == _PAIRS:
        return dict(inner)
    raise ValueError(f"extension {tag} is unknown here")
