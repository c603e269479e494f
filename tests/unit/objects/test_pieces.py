"""Objects in pieces: large buffers are not copied, and the bytes are the same as in one piece."""

from __future__ import annotations

import ctypes
import gc
import pickle
import sys
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest

from torchstore_core.clients.values.codec import decode_object, encode_object, encode_pieces
from torchstore_core.clients.values.pieces import LARGE, Pieces, address_of
from torchstore_core.errors import UnsupportedValueError
from torchstore_core.values import ObjectMeta

_PATTERN = bytes(range(256))


def _large(kind: type, nbytes: int = 3 * LARGE) -> Any:
    data = _PATTERN * (nbytes // 256)
    return data.decode("latin-1").replace("\xff", "e") if kind is str else kind(data)


class Holder:
    """Pickled, like every class."""

    def __init__(self, *members: Any) -> None:
        self.members = members

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Holder) and self.members == other.members

    def __hash__(self) -> int:
        return 0


MIXED = (
    _large(bytes),
    [1, "short", {"b": _large(bytearray), "s": (_large(str), b"after")}],
    {3: _large(bytes, 5 * LARGE), (4, "x" * LARGE): {"a" * LARGE, 2.5}},
    frozenset((_large(bytes), "é" * LARGE, (1, b"z" * LARGE))),
    {"k" * LARGE: bytearray(LARGE), "at the end": bytearray(LARGE - 1)},
)
IN_MSGPACK = [_large(bytes), _large(str), _large(bytearray), [_large(bytes)], MIXED, *MIXED]
IN_MSGPACK += ["x" * LARGE]


def _bytes_of(pieces: Pieces) -> bytes:
    """The bytes as a transfer finds them."""
    found, end = [], 7
    for address, offset, nbytes in pieces.runs("k", 7):
        assert offset == end
        end = offset + nbytes
        found.append(ctypes.string_at(address, nbytes))
    assert end - 7 == len(pieces)
    return b"".join(found)


@pytest.mark.parametrize("at", range(len(IN_MSGPACK)))
@pytest.mark.parametrize("wrap", [lambda value: value, Holder], ids=["msgpack", "pickle"])
def test_pieces_are_the_bytes_of_the_object(at, wrap):
    value = wrap(IN_MSGPACK[at])
    meta, pieces = encode_pieces("k", value, allow_pickle=True)
    assert meta.codec == ("pickle" if wrap is Holder else "msgpack")
    assert isinstance(pieces, Pieces)
    assert len(pieces.runs("k", 0)) > 1
    data = _bytes_of(pieces)
    assert encode_object("k", value, allow_pickle=True) == (meta, data)
    if wrap is Holder:  # what earlier versions stored
        assert data == pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    assert decode_object("k", meta, memoryview(data), allow_pickle=True) == value


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (_large(bytes), _large(bytes)),
        (_large(str), _large(str)),
        ([_large(bytes), "x", _large(str)], [_large(bytes), "x", _large(str)]),
        (_large(bytearray), msgspec.msgpack.Ext(4, _large(bytes))),
        (
            ("a", {"b": (_large(bytes),)}),
            msgspec.msgpack.Ext(
                1,
                msgspec.msgpack.encode(
                    [
                        "a",
                        {"b": msgspec.msgpack.Ext(1, msgspec.msgpack.encode([_large(bytes)]))},
                    ]
                ),
            ),
        ),
    ],
    ids=["bytes", "str", "list", "bytearray", "tuple"],
)
def test_the_bytes_are_what_msgpack_writes_in_one_piece(value, plain):
    """Values that an earlier version stored are read as before, and the other way round."""
    meta, data = encode_object("k", value, allow_pickle=False)
    assert meta == ObjectMeta("msgpack")
    assert data == msgspec.msgpack.encode(plain)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(100_000),
        np.asfortranarray(np.arange(90_000.0).reshape(300, 300)),
        np.arange(90_000.0).reshape(300, 300)[::2, ::3],
        np.frombuffer(_large(bytes), np.uint8),
    ],
    ids=["plain", "fortran", "strided", "read-only"],
)
def test_arrays_come_back_as_they_were(array):
    value = {"before": Holder(1), "array": array, "after": [array, "x"]}
    meta, pieces = encode_pieces("k", value, allow_pickle=True)
    got = decode_object("k", meta, _bytes_of(pieces), allow_pickle=True)
    assert np.array_equal(got["array"], array)
    assert got["array"].flags.f_contiguous == array.flags.f_contiguous or array.ndim == 1
    assert got["after"][0] is got["array"]


@pytest.mark.parametrize("make", [bytes, bytearray], ids=["bytes", "bytearray"])
@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: {"a": [x]}, Holder], ids=["alone", "nested", "pickled"]
)
def test_large_buffers_are_not_copied(make, wrap):
    large = make(4 << 20)
    value = wrap(large)
    _, pieces = encode_pieces("k", value, allow_pickle=True)
    where = address_of(large if make is bytes else memoryview(large))
    assert where in [address for address, _, _ in pieces.runs("k", 0)]


def test_nor_is_text_that_is_ascii():
    """Its bytes in UTF-8 are its own memory, which lives as long as the pieces."""
    text = "x" * (4 << 20)
    tracemalloc.start()
    try:
        _, pieces = encode_pieces("k", [text], allow_pickle=False)
        assert tracemalloc.get_traced_memory()[1] < len(text) // 16
    finally:
        tracemalloc.stop()
    before = sys.getrefcount(text)
    assert isinstance(pieces, Pieces)
    assert _bytes_of(pieces).endswith(text.encode())
    del pieces
    gc.collect()
    assert sys.getrefcount(text) == before - 1


def test_nor_are_those_of_arrays():
    array = np.zeros(1 << 20)
    _, pieces = encode_pieces("k", Holder(array), allow_pickle=True)
    assert array.ctypes.data in [address for address, _, _ in pieces.runs("k", 0)]


def test_a_string_that_looks_like_a_frame_of_pickle_is_just_copied():
    value = Holder(b"\x95" + (3 * LARGE).to_bytes(8, "little") + b"_main__" + bytes(3 * LARGE - 7))
    meta, data = encode_object("k", value, allow_pickle=True)
    assert decode_object("k", meta, data, allow_pickle=True) == value


def test_a_bytearray_is_only_kept_from_being_resized_while_it_is_copied():
    first, second = _large(bytearray), _large(bytearray)
    _, pieces = encode_pieces("k", [first, second], allow_pickle=True)
    assert pieces.runs("k", 0)
    with pytest.raises(BufferError):
        first.append(1)
    pieces.release()
    first.append(1)
    with pytest.raises(UnsupportedValueError, match="'k': a bytearray was resized"):
        pieces.runs("k", 0)
    pieces.release()
    second.append(1)
