"""Objects come back as what they were: same types, same values, all the way down."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import enum
import math
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchstore_core.clients.values.codec import decode_object, encode_object, encode_pieces
from torchstore_core.clients.values.pieces import Pieces
from torchstore_core.errors import OutOfMemoryError, UnsafeObjectError, UnsupportedValueError
from torchstore_core.values import ObjectMeta, ObjectRef


def exact(value: Any) -> Any:
    """A form in which two objects are equal exactly if types and contents are, bit for bit."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("d", value)
    if kind is complex:
        return kind, struct.pack("dd", value.real, value.imag)
    if kind in (list, tuple):
        return kind, [exact(x) for x in value]
    if kind in (set, frozenset):
        return kind, sorted((exact(x) for x in value), key=repr)
    if kind is dict:  # order counts
        return kind, [(exact(k), exact(v)) for k, v in value.items()]
    return kind, value


def through(value: Any, *, allow_pickle: bool = True) -> tuple[str, Any]:
    """The codec that was used, and what came back."""
    meta, data = encode_object("k", value, allow_pickle=allow_pickle)
    assert type(data) is bytes
    # Larger objects arrive in a bytearray that is reused by nobody.
    return meta.codec, decode_object("k", meta, bytearray(data), allow_pickle=allow_pickle)


Scalar = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=6)
    | st.binary(max_size=6)
)
Hashable = st.recursive(
    Scalar,
    lambda x: st.lists(x, max_size=3).map(tuple) | st.frozensets(x, max_size=3),
    max_leaves=6,
)
Object = st.recursive(
    Scalar | st.binary(max_size=6).map(bytearray) | Hashable,
    lambda x: (
        st.lists(x, max_size=4)
        | st.lists(x, max_size=4).map(tuple)
        | st.sets(Hashable, max_size=4)
        | st.frozensets(Hashable, max_size=4)
        | st.dictionaries(st.text(max_size=4), x, max_size=4)
        | st.dictionaries(Hashable, x, max_size=4)
    ),
    max_leaves=20,
)


@given(Object)
def test_plain_objects_are_exact_without_pickle(value: Any) -> None:
    codec, result = through(value, allow_pickle=False)
    assert codec == "msgpack"
    assert exact(result) == exact(value)


@given(Object, Object)
def test_pickle_is_used_exactly_where_it_is_needed(plain: Any, other: Any) -> None:
    """One reference used twice, deep inside otherwise plain objects, is enough."""
    shared = [other]
    for value in ([shared, plain, shared], {"a": shared, "b": (plain, shared)}):
        codec, result = through(value)
        assert codec == "pickle"
        assert exact(result) == exact(value)
        first, second = (
            (result[0], result[2])
            if type(value) is list
            else (
                result["a"],
                result["b"][1],
            )
        )
        assert first is second
        with pytest.raises(UnsafeObjectError):
            encode_object("k", value, allow_pickle=False)


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        2**63 - 1,
        2**63,
        2**64 - 1,
        2**64,
        -(2**63),
        -(2**63) - 1,
        10**400,
        True,
        0.0,
        -0.0,
        math.inf,
        5e-324,
        complex(-0.0, math.nan),
        "",
        "\0",
        "ü\U0001f600",
        b"",
        bytearray(b"x"),
        (),
        [],
        {},
        set(),
        frozenset(),
        ((),),
        {1, "1", 1.5, (1,), None},
        {True: 1, "True": 2},
        {1: "a", (2, 3): {"b": {4}}},
        {None: None},
        {"": {"": {"": []}}},
        {frozenset({(1, 2)}): bytearray(b"")},
        [[1, 2], (1, 2), {1, 2}, frozenset({1, 2}), {1: 2}],
    ],
    ids=lambda value: type(value).__name__,  # a set's repr differs between processes
)
def test_edges_are_exact_without_pickle(value: Any) -> None:
    codec, result = through(value, allow_pickle=False)
    assert codec == "msgpack"
    assert exact(result) == exact(value)


class Colour(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Config:
    rate: float
    names: list[str]


class Text(str):
    """A subclass is not its base."""


@pytest.mark.parametrize(
    "value",
    [
        Colour.RED,
        Point(1, 2),
        Config(0.1, ["a"]),
        Text("x"),
        collections.OrderedDict(a=1),
        collections.defaultdict(list, a=[1]),
        collections.Counter("abca"),
        collections.deque([1, 2], maxlen=3),
        range(3),
        slice(1, 2),
        datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        ObjectRef("k", 3),
        ValueError("x"),
        int,
        "\ud800",
        {"\ud800": 1},
        [("deep", {"\udfff"})],
        {"key": Point(1, 2)},
        [Colour.RED],
        {Text("a"): 1},
    ],
    ids=ascii,
)
def test_what_msgpack_would_change_is_pickled(value: Any) -> None:
    codec, result = through(value)
    assert codec == "pickle"
    assert type(result) is type(value)
    assert repr(result) == repr(value)
    if isinstance(value, (list, dict)):
        assert [type(x) for x in result] == [type(x) for x in value]
    with pytest.raises(UnsafeObjectError, match=r"'k'.*allow_pickle=False"):
        encode_object("k", value, allow_pickle=False)


def test_a_cycle_stays_a_cycle() -> None:
    value: list[Any] = [1]
    value.append({"self": value})
    codec, result = through(value)
    assert codec == "pickle"
    assert result[1]["self"] is result


def test_immutable_objects_may_be_shared() -> None:
    part = (1, frozenset({2}))
    codec, result = through([part, part, {"x": part}], allow_pickle=False)
    assert codec == "msgpack"
    assert result == [part, part, {"x": part}]


def graph(levels: int, kind: str, leaf: Any) -> Any:
    """``2 ** levels`` leaves for who walks all paths, but only some objects a level."""
    value = leaf
    for _ in range(levels):
        value = frozenset({value, (value,)}) if kind == "sets" else (value, value)
    return value


LEAVES = {"short": (1,), "str": "x" * 300, "bytes": b"x" * 300, "int": (1 << 3000,)}


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize("kind", ["tuples", "sets"])
@pytest.mark.parametrize("levels", [21, 60, 200])
def test_what_is_shared_is_encoded_once(kind: str, leaf: Any, levels: int) -> None:
    before = time.process_time()
    value = graph(levels, kind, leaf)
    for wrapped in (value, [value], {"a": value, "b": value}, {"k": (value, {"n": [value]})}):
        meta, data = encode_object("k", wrapped, allow_pickle=True)
        assert meta.codec == "pickle"
        assert len(data) < 100 * levels + 1000
        with pytest.raises(UnsafeObjectError, match="in two places"):
            encode_object("k", wrapped, allow_pickle=False)
    assert time.process_time() - before < 2


LARGE = {"str": "x" * (1 << 20), "bytes": b"x" * (1 << 20), "tuple": (1,) * 9999}


@pytest.mark.parametrize("leaf", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("kind", [list, tuple])
def test_large_values_that_are_shared_are_encoded_once(kind: type, leaf: Any) -> None:
    """A list of references to one of them would be terabytes."""
    codec, result = through(kind([leaf] * 50_000))
    assert codec == "pickle"
    assert result[0] == leaf
    assert result[0] is result[-1]
    name = "n" * (1 << 20)
    meta, data = encode_object("k", [{name: i} for i in range(1000)], allow_pickle=True)
    assert (meta.codec, len(data) < 2 << 20) == ("pickle", True)


def test_what_is_shared_and_small_needs_no_pickle() -> None:
    betas, empty, name = (0.9, 0.95), (), "x" * 1000
    value = [{"betas": betas, "e": empty, "names": (name, betas)} for _ in range(3000)]
    codec, result = through(value, allow_pickle=False)
    assert codec == "msgpack"
    assert exact(result) == exact(value)
    large = tuple(range(1000))
    codec, result = through([large, large, {"x": (large,)}], allow_pickle=False)
    assert (codec, result) == ("msgpack", [large, large, {"x": (large,)}])


def test_a_shared_tuple_with_something_mutable_in_it_is_pickled() -> None:
    """However large it is, and whatever was encoded before."""
    for size in (1, 1000):
        inner = [0] * size
        part = (tuple(range(size)), (inner,))
        for value in ([part, part], [(part, part)], (part, {"x": part}), {"a": (part,), "b": part}):
            codec, result = through(value)
            assert codec == "pickle"
            assert exact(result) == exact(value)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_nesting_is_exact_however_deep(kind: type) -> None:
    value: Any = 1
    codecs = []
    for _ in range(100):
        value = {"x": value} if kind is dict else kind([value])
        codec, result = through(value)
        codecs.append(codec)
        depth = 0
        while type(result) is kind:
            result = result["x"] if kind is dict else result[0]
            depth += 1
        assert (result, depth) == (1, len(codecs))
    assert codecs[:60] == ["msgpack"] * 60
    assert codecs[-1] == "pickle"


def test_what_cannot_be_stored_says_so() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (threading.Lock(), (x for x in ()), deep):
        with pytest.raises(UnsupportedValueError, match=r"'k'.*cannot be stored") as caught:
            encode_object("k", value, allow_pickle=True)
        assert caught.value.key == "k"
    while deep:  # a recursive destructor of this depth is not for every interpreter
        deep = deep.pop()


def test_bytes_that_are_too_long_for_msgpack_need_pickle() -> None:
    """They raised an error of msgspec."""
    long = bytes(1 << 32)  # zeros, which take no memory until somebody writes them
    for value in (long, {"a": [long]}):
        with pytest.raises(UnsafeObjectError, match=r"'k'.*less than 4 GiB"):
            encode_object("k", value, allow_pickle=False)


class Endless:
    def __reduce__(self) -> Any:
        return bytes, (bytes(1 << 62),)


def test_an_object_that_takes_more_memory_than_there_is_can_be_stored_elsewhere() -> None:
    """It was called an object that cannot be stored."""
    with pytest.raises(MemoryError):
        encode_object("k", Endless(), allow_pickle=True)


def test_a_pickled_object_is_not_loaded_against_the_users_word() -> None:
    """Loading runs code, so it is refused before anything is looked at."""

    meta, data = encode_object("k", Trap(), allow_pickle=True)
    Trap.sprung = False
    with pytest.raises(UnsafeObjectError, match="'k'"):
        decode_object("k", meta, data, allow_pickle=False)
    assert not Trap.sprung
    decode_object("k", meta, data, allow_pickle=True)
    assert Trap.sprung


class Trap:
    """Tells when it is loaded."""

    sprung = False

    def __reduce__(self) -> Any:
        return spring, ()


def spring() -> None:
    Trap.sprung = True


Extension = st.builds(
    msgspec.msgpack.Ext, st.integers(-128, 127) | st.integers(0, 9), st.binary(max_size=12)
)


@given(
    st.binary(max_size=30)
    | st.recursive(st.none() | st.integers(0, 300) | Extension, st.lists, max_leaves=6).map(
        msgspec.msgpack.encode
    )
)
def test_bytes_that_nobody_encoded_give_a_typed_error_or_an_object(data: bytes) -> None:
    """From a client of another version, say."""
    with contextlib.suppress(UnsupportedValueError):
        value = decode_object("k", ObjectMeta("msgpack"), data, allow_pickle=False)
        _, again = through(value, allow_pickle=False)
        assert type(again) is type(value)


@pytest.mark.parametrize(
    ("codec", "data"),
    [
        ("msgpack", b""),
        ("msgpack", b"\x91"),
        ("msgpack", b"\xc1"),
        ("msgpack", b"\xa1\xff"),
        ("msgpack", b"\xc0\xc0"),
        ("msgpack", msgspec.msgpack.encode(msgspec.msgpack.Ext(99, b"\x90"))),
        ("msgpack", msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"\x01"))),
        ("msgpack", msgspec.msgpack.encode(msgspec.msgpack.Ext(2, b"\x91\x90"))),
        ("pickle", b""),
        ("pickle", b"cno_such_module\nName\n."),
        ("zip", b""),
    ],
)
def test_what_cannot_be_rebuilt_says_so(codec: str, data: bytes) -> None:
    with pytest.raises(UnsupportedValueError, match=r"'k'.*(here)") as caught:
        decode_object("k", ObjectMeta(codec), data, allow_pickle=True)
    assert caught.value.key == "k"


class Large:
    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (1 << 62,)


def test_an_object_for_which_there_is_no_memory_says_so() -> None:
    meta, data = encode_object("k", Large(), allow_pickle=True)
    with pytest.raises(OutOfMemoryError, match="'k': this process has no memory") as caught:
        decode_object("k", meta, data, allow_pickle=True)
    assert caught.value.details == {"requested_bytes": len(data)}


# ---- tensors inside of objects --------------------------------------------------------------


def tensors() -> dict[str, torch.Tensor]:
    batch = torch.arange(24.0).reshape(4, 6)
    named = torch.ones(3)
    named.mine = "kept"  # type: ignore[attr-defined]
    return {
        "whole": batch,
        "a row": batch[1],
        "a column": batch[:, 2],
        "transposed": batch.t(),
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "without dimensions": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "expanded": torch.ones(1).expand(1 << 40),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "with a gradient": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(batch),
        "with an attribute": named,
        "bfloat16": batch.to(torch.bfloat16),
        "float8": batch.to(torch.float8_e4m3fn),
    }


@pytest.mark.parametrize("name", tensors())
def test_tensors_inside_of_objects_come_back_as_they_were(name: str) -> None:
    tensor = tensors()[name]
    _, (back, again) = through([tensor, tensor])
    assert back is again
    assert type(back) is type(tensor)
    assert back.dtype is tensor.dtype
    assert back.shape == tensor.shape
    assert back.requires_grad == tensor.requires_grad
    assert back.__dict__ == tensor.__dict__
    if back.numel() < 1 << 20:
        assert torch.equal(back.to(torch.complex64), tensor.to(torch.complex64))
    if name != "a column":  # what lies between the elements of a column stays here
        assert back.stride() == tensor.stride()
    if name != "expanded":
        with torch.no_grad():
            back.zero_()  # it has memory of its own, that may be written to


def test_tensors_that_were_pickled_before_can_be_read() -> None:
    """Snapshots keep pickles, so what these name has to stay where it is."""
    before = (
        b"\x80\x05\x95\x9f\x00\x00\x00\x00\x00\x00\x00]\x94(\x8c$torchstore_core.clients.values.codec"
        b"\x94\x8c\ttensor_on\x94\x93\x94\x96\x06\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x02\x00"
        b"\x94K\x03\x85\x94\x8c\x05torch\x94\x8c\x05int16\x94\x93\x94\x87\x94R\x94h\x03(\x96\x10\x00\x00"
        b"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x80?\x00\x00\x00@\x00\x00@@\x94K\x02K\x02\x86\x94"
        b"h\x06\x8c\x07float32\x94\x93\x94K\x01K\x02\x86\x94t\x94R\x94e."
    )
    row, transposed = decode_object("k", ObjectMeta("pickle"), before, allow_pickle=True)
    assert torch.equal(row, torch.arange(3, dtype=torch.int16))
    assert torch.equal(transposed, torch.arange(4.0).reshape(2, 2).t())


@pytest.mark.parametrize(
    "of",
    [list, lambda batch: [torch.nn.Parameter(row) for row in batch], lambda batch: [*batch.t()]],
    ids=["rows", "parameters", "columns"],
)
@pytest.mark.parametrize("by_value", [False, True], ids=["by name", "by value"])
def test_parts_of_a_tensor_take_their_own_bytes_and_not_those_of_the_whole(
    of: Callable[[torch.Tensor], list[torch.Tensor]], by_value: bool
) -> None:
    """A list of a batch's rows took the square of their number, in memory and in time."""
    batch = torch.rand(100, 100)
    value = of(batch), (lambda: 1) if by_value else None
    meta, data = encode_object("k", value, allow_pickle=True)
    assert batch.nbytes <= len(data) < 2 * batch.nbytes
    back = decode_object("k", meta, data, allow_pickle=True)[0]
    assert all(map(torch.equal, back, value[0]))


def test_large_tensors_inside_of_objects_are_not_copied_to_encode_them() -> None:
    tensor = torch.zeros(100_000)
    _, data = encode_pieces("k", {"beside": [1], "large": tensor}, allow_pickle=True)
    assert isinstance(data, Pieces)
    tensor.fill_(1)
    before = data.joined()
    tensor.zero_()
    assert data.joined() != before
