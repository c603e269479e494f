"""Values of torch and numpy that are no tensors: the same come back, and nothing is pickled."""

from __future__ import annotations

import array
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from torchstore_core.clients.values.codec import decode_object, encode_object, encode_pieces
from torchstore_core.clients.values.pieces import LARGE, Pieces
from torchstore_core.errors import UnsafeObjectError, UnsupportedValueError
from torchstore_core.values import ObjectMeta


def again(value: Any) -> Any:
    meta, data = encode_object("k", value, allow_pickle=False)
    assert meta == ObjectMeta("msgpack")
    return decode_object("k", meta, data, allow_pickle=False)


OF_TORCH = [
    torch.bfloat16,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.qint8,
    torch.device("cpu"),
    torch.device("cuda", 3),
    torch.device("meta"),
    torch.Size([2, 0, 3]),
    torch.Size([]),
    torch.strided,
    torch.sparse_coo,
    torch.channels_last,
    torch.preserve_format,
]


@pytest.mark.parametrize("value", OF_TORCH, ids=str)
def test_those_of_torch(value: object) -> None:
    for got in (
        again(value),
        again([{"a": (value, 1)}])[0]["a"][0],
        again({value: 1}).popitem()[0],
    ):
        assert got == value
        assert type(got) is type(value)
    if not isinstance(value, torch.Size | torch.device):
        assert again(value) is value


SCALARS = [
    np.float64(1.5),
    np.float32("-inf"),
    np.float16(0.1),
    np.int8(-3),
    np.uint64((1 << 64) - 1),
    np.complex64(1 - 2j),
    np.bool_(True),
    np.longdouble(1) / 3,
    np.datetime64("2026-11-29T09:30", "m"),
    np.timedelta64(7, "ns"),
    np.str_("größer"),
    np.bytes_(b"a\0b"),
]


@pytest.mark.parametrize("value", SCALARS, ids=repr)
def test_scalars_of_numpy(value: Any) -> None:
    twice, again_ = again([value, value])
    assert (twice, again_) == (value, value)
    assert (type(twice), twice.dtype) == (type(value), value.dtype)


ARRAYS = [
    np.arange(7),
    np.arange(6, dtype=">i2").reshape(1, 2, 3),
    np.array(3.5),
    np.zeros((3, 0, 2), np.float32),
    np.array(["a", "longer"]),
    np.array([b"", b"bytes"]),
    np.array(["2026-11-29", "NaT"], "M8[D]"),
    np.array([[True], [False]]),
    np.arange(LARGE, dtype=np.uint8),
    np.arange(LARGE, dtype="m8[s]"),
    np.frombuffer(bytes(2 * LARGE), np.float16),
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_arrays_of_numpy(value: np.ndarray[Any, Any]) -> None:
    for got in (again(value), again({"a": [{"b": (value, "x")}]})["a"][0]["b"][0]):
        assert (got.shape, got.dtype, got.tobytes()) == (value.shape, value.dtype, value.tobytes())
        assert got.dtype.str == value.dtype.str
        assert got.flags.writeable
        assert got.flags.c_contiguous


def test_the_state_of_a_generator() -> None:
    generator = np.random.Generator(np.random.PCG64(1))
    old = np.random.RandomState(5)
    states = again({"new": generator.bit_generator.state, "old": old.get_state()})
    first, other = generator.random(9), old.rand(9)
    generator.bit_generator.state = states["new"]
    old.set_state(states["old"])
    assert (generator.random(9) == first).all()
    assert (old.rand(9) == other).all()


def test_the_memory_of_large_arrays_is_not_copied() -> None:
    array = np.zeros(1 << 20)
    _, pieces = encode_pieces("k", {"a": [array], "b": (array[1:],)}, allow_pickle=False)
    assert isinstance(pieces, Pieces)
    where = [address for address, _, _ in pieces.runs("k", 0)]
    assert {array.ctypes.data, array.ctypes.data + 8} <= {*where}


class _Array(np.ndarray[Any, Any]):
    """Of a class that only this program knows."""


ONE = np.arange(3)


@pytest.mark.parametrize(
    "value",
    [
        [ONE, ONE],
        np.array([{}], object),
        np.zeros(2, [("a", "i4")]),
        np.zeros(2, np.dtype("i4", metadata={"a": 1})),
        np.arange(6).reshape(2, 3).T,
        np.arange(6)[::2],
        np.arange(3).view(_Array),
        np.ma.masked_array([1, 2], [True, False]),
        np.dtype("i4"),
    ],
    ids=repr,
)
def test_what_plain_data_would_change_is_pickled(value: Any) -> None:
    with pytest.raises(UnsafeObjectError):
        encode_object("k", value, allow_pickle=False)
    meta, data = encode_object("k", value, allow_pickle=True)
    assert meta == ObjectMeta("pickle")
    got = decode_object("k", meta, data, allow_pickle=True)
    assert type(got) is type(value)
    assert str(got) == str(value)


@pytest.mark.parametrize(
    "forged",
    [
        ("dtype", ["ones"], None),
        ("dtype", ["float31"], None),
        ("dtype", ["float32", "float64"], None),
        ("layout", ["float32"], None),
        ("load", ["strided"], None),
        ("device", ["nowhere"], None),
        ("Size", ["a"], None),
        ("array", ["|O", 1], bytes(8)),
        ("array", ["<f8", 3], bytes(8)),
        ("array", ["<f8", -1], bytes(8)),
        ("array", ["<f8", 1 << 60], bytes(8)),
        ("array", [], bytes(8)),
        ("scalar", ["|O"], bytes(8)),
        ("scalar", ["<f8"], bytes(7)),
        ("other", ["<f8", 1], bytes(8)),
        ("dtype", "float32"),
        None,
    ],
    ids=repr,
)
def test_what_nobody_has_encoded_is_refused(forged: object) -> None:
    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(8, msgspec.msgpack.encode(forged)))
    with pytest.raises(UnsupportedValueError, match="cannot be rebuilt here"):
        decode_object("k", ObjectMeta("msgpack"), data, allow_pickle=False)


@pytest.mark.parametrize(
    ("codec", "value"),
    [
        ("msgpack", msgspec.msgpack.Ext(99, b"later")),
        ("msgpack", [msgspec.msgpack.Ext(8, msgspec.msgpack.encode(["dtype", ["float3"], None]))]),
        ("later", 1),
    ],
    ids=["type", "dtype", "codec"],
)
def test_what_a_later_release_has_encoded_says_what_to_install(codec: str, value: object) -> None:
    data = msgspec.msgpack.encode(value)
    with pytest.raises(UnsupportedValueError, match="install the torchstore-core") as caught:
        decode_object("k", ObjectMeta(codec), data, allow_pickle=False)
    assert caught.value.key == "k"


VIEWS = [
    memoryview(b"bytes"),
    memoryview(bytearray(b"may be written to")),
    memoryview(bytes(2 * LARGE)),
    memoryview(bytearray(2 * LARGE))[5:],
    memoryview(array.array("d", [1.5, -2.0])),
    memoryview(np.arange(6, dtype=np.int32).reshape(2, 3)),
    memoryview(np.array(7.0)),
]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: f"{view.format}{view.shape}")
def test_views_of_memory(view: memoryview) -> None:
    """They were pickled, and came back as bytes; without cloudpickle they were refused."""
    for got in (again(view), again({"a": [(view, 1)]})["a"][0][0]):
        assert type(got) is memoryview
        assert (got.format, got.shape, got.readonly) == (view.format, view.shape, view.readonly)
        assert got == view
    if not view.readonly:
        again(view).cast("B")[0] = 9
        assert view.tobytes() != b"\t"
    with pytest.raises(UnsafeObjectError):  # two places that share what is written to one
        again([view, view])


def test_views_that_cannot_be_made_again_are_no_plain_data() -> None:
    released = memoryview(b"gone")
    released.release()
    for view in (memoryview(b"abcd")[::2], released, memoryview(b"")):
        with pytest.raises(UnsafeObjectError):
            again(view)
    with pytest.raises(UnsupportedValueError, match="released"):
        encode_object("k", released, allow_pickle=True)
