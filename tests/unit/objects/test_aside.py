"""Objects whose large arrays and tensors keep the memory that they are decoded from."""

from __future__ import annotations

import array
import contextlib
import ctypes
import pickle
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchstore_core.clients.values.codec import (
    decode_object,
    encode_object,
    encode_pieces,
    has_aside,
)
from torchstore_core.clients.values.pieces import (
    LARGE,
    Pieces,
    address_of,
    with_aside,
    without_aside,
)
from torchstore_core.errors import UnsafeObjectError, UnsupportedValueError
from torchstore_core.values import ObjectMeta

COUNT = LARGE // 8


class Holder:
    def __init__(self, content: Any) -> None:
        self.content = content


def encoded(value: Any, *, allow_pickle: bool = True) -> tuple[ObjectMeta, bytearray]:
    meta, pieces = encode_pieces("k", value, allow_pickle=allow_pickle, aside=True)
    data = pieces if isinstance(pieces, bytes) else pieces.joined()
    assert len(data) == len(pieces)
    return meta, bytearray(data)


def addresses(value: Any) -> list[int]:
    """Of the memory of all arrays, tensors and views in a value."""
    match value:
        case Holder():
            return addresses(value.content)
        case dict():
            return [at for x in value.values() for at in addresses(x)]
        case list() | tuple():
            return [at for x in value for at in addresses(x)]
        case torch.Tensor():
            return [value.data_ptr()]
        case np.ndarray():
            return [value.ctypes.data]
        case memoryview():
            return [np.frombuffer(value, np.uint8).ctypes.data]
    return []


NUMPY = {
    "float64": np.arange(COUNT, dtype=np.float64),
    "bool": np.arange(LARGE) % 3 == 0,
    "shaped": np.arange(2 * COUNT).reshape(2, -1, 4),
    "dates": np.arange(COUNT).astype("M8[us]"),
    "text": np.array(["some", "text"] * COUNT),
}
TORCH = {
    "float32": torch.arange(2.0 * COUNT),
    "bfloat16": torch.arange(8 * COUNT).to(torch.bfloat16).view(8, -1),
    "bool": torch.arange(8 * COUNT) % 3 == 0,
    "float8": torch.arange(8 * COUNT).float().to(torch.float8_e4m3fn),
    "transposed": torch.arange(4.0 * COUNT).view(-1, 4).t(),
    "parameter": torch.nn.Parameter(torch.arange(2.0 * COUNT)),
}
PICKLED = {
    "fortran": np.asfortranarray(np.arange(2.0 * COUNT).reshape(4, -1)),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        alike = type(one) is type(other) and one.dtype is other.dtype
        return alike and one.stride() == other.stride() and torch.equal(one.float(), other.float())
    alike = type(one) is type(other) and one.dtype == other.dtype
    return alike and one.strides == other.strides and bool((one == other).all())


ALL = NUMPY | TORCH | PICKLED
WRAPS = {"alone": lambda x: x, "nested": lambda x: {"a": [1, (x, "b")]}, "pickled": Holder}
# A tensor alone is no object, and numpy's own pickles copy dates.
PAIRS = [(name, wrap) for wrap in WRAPS for name in (ALL if wrap == "nested" else NUMPY | PICKLED)]
PAIRS = [*PAIRS, *[(name, "pickled") for name in TORCH]]
PAIRS.remove(("dates", "pickled"))


@pytest.mark.parametrize(("name", "wrap"), PAIRS)
def test_they_keep_it(name: str, wrap: str) -> None:
    large, wrapped = ALL[name], WRAPS[wrap](ALL[name])
    meta, data = encoded(wrapped)
    assert has_aside(meta)
    back = decode_object("k", meta, data, allow_pickle=True)
    (at,) = addresses(back)
    assert 0 <= at - address_of(memoryview(data)) < len(data)
    assert (at - address_of(memoryview(data))) % 64 == 0
    while not isinstance(back, torch.Tensor | np.ndarray):
        back = back.content if isinstance(back, Holder) else back["a"][1][0]
    assert same(back, large)
    with torch.no_grad():
        back[...] = back[0].copy() if isinstance(back, np.ndarray) else 0  # it may be written to
    assert memoryview(data).obj is data
    del back
    data.append(0)  # nobody holds it any more


def test_arrays_and_views_need_no_pickle() -> None:
    value = {
        "arrays": [*NUMPY.values()],
        "small": np.arange(3),
        "view": memoryview(np.arange(2 * COUNT).reshape(2, -1)),
        "readonly": memoryview(bytes(LARGE)),
        "bytes": b"b" * LARGE,
        "text": "é" * LARGE,
    }
    meta, data = encoded(value, allow_pickle=False)
    assert meta == ObjectMeta("msgpack+buffers")
    back = decode_object("k", meta, data, allow_pickle=False)
    assert all(map(same, back.pop("arrays"), value.pop("arrays")))
    assert np.array_equal(back.pop("small"), value.pop("small"))
    assert (back["readonly"].readonly, back["view"].readonly) == (True, False)
    assert back["view"].shape == (2, COUNT)
    assert back == value


def test_one_that_occurs_twice_stays_one() -> None:
    array, tensor = np.arange(COUNT), torch.arange(COUNT)
    meta, data = encoded([array, array, tensor, tensor, tensor[1:], Holder(array)])
    assert len(data) < 3.1 * LARGE + 3000
    back = decode_object("k", meta, data, allow_pickle=True)
    assert back[0] is back[1] is back[5].content
    assert back[2] is back[3]
    back[2].zero_()
    assert torch.equal(back[4], tensor[1:])


def test_those_with_values_of_the_program_itself() -> None:
    """Lambdas go by value, and what is pickled by name may be in another pickle."""
    pytest.importorskip("cloudpickle")
    large = torch.arange(COUNT)
    meta, data = encoded({"by value": lambda: 17, "large": large, "array": np.arange(COUNT)})
    assert meta == ObjectMeta("pickle+buffers")
    back = decode_object("k", meta, data, allow_pickle=True)
    assert back["by value"]() == 17
    assert torch.equal(back["large"], large)
    assert all(at % 64 == address_of(memoryview(data)) % 64 for at in addresses(back))


@pytest.mark.parametrize("wrap", [lambda x: [x], Holder], ids=["plain", "pickled"])
def test_what_is_read_only_stays_so(wrap: Any) -> None:
    array = np.arange(COUNT)
    array.flags.writeable = False
    meta, data = encoded(wrap(array))
    back = decode_object("k", meta, data, allow_pickle=True)
    got = back.content if isinstance(back, Holder) else back[0]
    assert np.array_equal(got, array)
    # Plain data has never said it: what a get returns is the reader's own.
    assert got.flags.writeable == isinstance(back, list)


@pytest.mark.parametrize("value", [NUMPY["shaped"], [TORCH["bfloat16"]], Holder(NUMPY["bool"])])
def test_from_memory_that_may_not_be_written_to_they_are_copied(value: Any) -> None:
    meta, data = encoded(value)
    fixed = bytes(data)
    (at,) = addresses(back := decode_object("k", meta, fixed, allow_pickle=True))
    assert not 0 <= at - address_of(fixed) < len(fixed)
    while not isinstance(back, torch.Tensor | np.ndarray):
        back = back.content if isinstance(back, Holder) else back[0]
    back[0] = 0
    assert fixed == data


@pytest.mark.parametrize("large", [NUMPY["shaped"], [TORCH["float32"]], Holder(NUMPY["bool"])])
def test_they_are_not_copied_to_encode_them(large: Any) -> None:
    _, pieces = encode_pieces("k", large, allow_pickle=True, aside=True)
    assert isinstance(pieces, Pieces)
    (where,) = addresses(large)
    assert (where, 0) in [(address, offset) for address, offset, _ in pieces.runs("k", 0)]


@pytest.mark.parametrize(
    "value",
    [
        np.arange(COUNT - 1),
        [torch.arange(9)],
        b"x" * LARGE,
        bytearray(LARGE),
        "x" * LARGE,
        np.arange(COUNT).view(np.recarray),
        np.arange(4 * COUNT)[::2],
    ],
    ids=["small", "small tensor", "bytes", "bytearray", "text", "subclass", "strided"],
)
def test_what_has_no_large_arrays_is_encoded_as_before(value: Any) -> None:
    meta, pieces = encode_pieces("k", value, allow_pickle=True, aside=True)
    before, data = encode_object("k", value, allow_pickle=True)
    assert meta == before
    assert (pieces if isinstance(pieces, bytes) else pieces.joined()) == data


class OwnBytes(bytearray):
    """As in Python's documentation of pickle: it is rebuilt from whatever owns its memory."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.rebuilt, (pickle.PickleBuffer(self),)

    @classmethod
    def rebuilt(cls, data: Any) -> OwnBytes:
        with memoryview(data) as view:
            return cls(view.obj)


class Keeper:
    """Its memory becomes what ``make`` makes of what pickle gives for it."""

    def __init__(self, memory: Any, make: Any) -> None:
        self.memory, self.make = memory, make

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.make, (pickle.PickleBuffer(self.memory),)


def same_object(data: Any) -> Any:
    return data


def array_of(data: Any) -> Any:
    return array.array("q", data)  # a view would be taken for a list of numbers


INTEGERS = array.array("q", range(COUNT))


@pytest.mark.parametrize(
    ("value", "back"),
    [
        (OwnBytes(b"1234" * LARGE), OwnBytes(b"1234" * LARGE)),
        (Keeper(b"b" * LARGE, same_object), b"b" * LARGE),
        (Keeper(bytearray(LARGE), same_object), bytearray(LARGE)),
        (Keeper(memoryview(bytearray(LARGE)), same_object), bytearray(LARGE)),
        (Keeper(INTEGERS, array_of), INTEGERS),
    ],
    ids=["documented", "bytes", "bytearray", "view", "array"],
)
def test_what_is_no_array_is_rebuilt_from_bytes_as_before(value: Any, back: Any) -> None:
    """From a view of the memory of the whole object, some became something else."""
    large = np.arange(COUNT)
    meta, data = encoded([value, large])
    assert has_aside(meta)
    first, second = decode_object("k", meta, data, allow_pickle=True)
    assert (type(first), first) == (type(back), back)
    assert np.array_equal(second, large)


def test_what_is_kept_in_files_is_encoded_as_before() -> None:
    """Earlier releases can read it."""
    for value, codec in ((np.arange(COUNT), "msgpack"), ([torch.arange(COUNT)], "pickle")):
        assert encode_object("k", value, allow_pickle=True)[0] == ObjectMeta(codec)


def test_pickles_are_not_loaded_against_the_users_word() -> None:
    meta, data = encoded([torch.arange(COUNT)])
    with pytest.raises(UnsafeObjectError, match="'k'"):
        decode_object("k", meta, data, allow_pickle=False)


# ---- the bytes --------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=200), max_size=5), st.lists(st.binary(max_size=20), max_size=3))
def test_everything_lies_where_the_table_says(aside: list[bytes], encoded: list[bytes]) -> None:
    data = with_aside(encoded, aside).joined()
    stream, buffers = without_aside(data)
    assert bytes(stream) == b"".join(encoded)
    assert [bytes(buffer) for buffer in buffers] == aside
    start = address_of(data)
    for buffer in buffers:
        if buffer.nbytes:
            at = np.frombuffer(buffer, np.uint8).ctypes.data
            assert (at - start) % 64 == 0


def _bytes(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


@pytest.mark.parametrize("codec", ["msgpack+buffers", "pickle+buffers"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        _bytes(1),
        _bytes(1 << 63),
        _bytes(0, 2),
        _bytes(64, 0, 1),
        bytes(64) + _bytes((1 << 64) - 64, 128, 1),
        bytes(63) + _bytes(64, 0, 1),
        b"\xc0" + _bytes(1, 0) + _bytes(1, 0),
        _bytes(1 << 62, 1 << 62, 1 << 62, 1 << 62, 0, 4),
    ],
    ids=range(10),
)
def test_a_table_that_contradicts_the_bytes_is_refused(codec: str, data: bytes) -> None:
    with pytest.raises(ValueError, match="bytes"):
        without_aside(data)
    with pytest.raises(UnsupportedValueError, match="'k' cannot be rebuilt here"):
        decode_object("k", ObjectMeta(codec), data, allow_pickle=True)


@given(st.data())
def test_a_flipped_byte_gives_a_typed_error_or_an_object(data: st.DataObject) -> None:
    """Of numbers and arrays, and without pickle, whose bytes may be a program."""
    meta, stored = encoded({"a": np.arange(COUNT), "b": [1, "x", np.arange(2 * COUNT)]})
    at = data.draw(st.integers(3 * LARGE, len(stored) - 1))
    stored[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(UnsupportedValueError):
        back = decode_object("k", meta, stored, allow_pickle=False)
        start = address_of(memoryview(stored))
        for where in addresses(back):
            ctypes.string_at(where, 1)
            assert not start + len(stored) <= where
