"""Python objects: the same types come back; pickle only where it is needed and allowed."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import math
import random
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.processes import run_script
from tests.support import nothing_leased, running_store, until

import torchstore_core as ts

_random = random.Random(7)
BLOB = _random.randbytes(3 << 20)


def same(a: Any, b: Any) -> bool:
    """Equal, of the same types all the way down, to the bit for floats."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return same(list(a), list(b)) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, set | frozenset):
        return a == b and {(type(x), x) for x in a} == {(type(x), x) for x in b}
    return bool(a == b)


#: What msgpack carries exactly, so that nobody has to unpickle anything.
EXACT: dict[str, Any] = {
    "none": None,
    "true": True,
    "false": False,
    "zero": 0,
    "one": 1,
    "negative": -(1 << 63),
    "unsigned": (1 << 64) - 1,
    "big": 1 << 64,
    "big negative": -(1 << 63) - 1,
    "huge": -(3**5000),
    "power of 256": 1 << 4096,
    "floats": [0.0, -0.0, 1e-320, math.inf, -math.inf, math.nan, 0.1, sys.float_info.max],
    "complex": [complex(-0.0, math.inf), 1 + 2j],
    "str": "grüße 🦊 \x00 \U0010ffff",
    "empty str": "",
    "bytes": b"\x00\xff",
    "empty bytes": b"",
    "bytearray": bytearray(b"abc"),
    "empty bytearray": bytearray(),
    "list": [1, "two", 3.0, None, [], [[]]],
    "tuple": (1, (2, (3, ())), [4, (5,)]),
    "one of everything": ((), [], {}, set(), frozenset(), b"", "", 0, 0.0, None, False),
    "set": {1, "a", (2, 3), None, frozenset({4})},
    "frozenset": frozenset({b"x", 1.5, frozenset()}),
    "dict": {"a": 1, "b": {"c": (1, 2)}, "": None},
    "dict order": {"z": 1, "a": 2, "m": 3},
    "int keys": {1: "a", -5: "b", 1 << 70: "c"},
    "mixed keys": {1: 1, "1": 2, (1,): 3, None: 4, b"1": 5, 1.5: 6, frozenset({1}): 7},
    "bool and int": [True, 1, 1.0, False, 0, 0.0],
    "nested": {"steps": [{"lr": 1e-3, "betas": (0.9, 0.95), "tags": {"a", "b"}}] * 1},
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "large bytes": BLOB,
    "large list": [_random.random() for _ in range(200_000)],
    "large dict": {f"layer.{i}": (i, b"x" * 20, {i}) for i in range(40_000)},
}


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Step:
    number: int
    loss: float
    tags: set[str]


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and same(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]


class Words(str):
    __slots__ = ()


#: What only pickle brings back as it was.
PICKLED: dict[str, Any] = {
    "enum": Colour.RED,
    "int enum": Level.LOW,
    "named tuple": Point(1, 2),
    "dataclass": Step(3, 0.5, {"a"}),
    "object": Plain((1, [2])),
    "str subclass": Words("hello"),
    "ordered dict": collections.OrderedDict(b=1, a=2),
    "default dict": collections.defaultdict(list, a=[1]),
    "deque": collections.deque([1, 2], maxlen=5),
    "counter": collections.Counter("abca"),
    "datetime": datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC),
    "range": range(3, 9, 2),
    "slice": slice(1, None, 2),
    "class": Step,
    "function": same,
    "inside": {"config": (Point(1, 2), [Colour.RED])},
    "lone surrogate": "\ud800",
    "ellipsis": ...,
    "large": Plain(BLOB),
}


@pytest.mark.parametrize("name", EXACT)
async def test_exact_values_need_no_pickle(shared, name):
    value = EXACT[name]
    await ts.put("o", value, allow_pickle=False)
    assert same(await ts.get("o", allow_pickle=False), value)
    assert (await ts.stat("o")).meta.codec == "msgpack"


@pytest.mark.parametrize("name", PICKLED)
async def test_other_values_come_back_through_pickle(shared, name):
    value = PICKLED[name]
    with pytest.raises(ts.UnsafeObjectError, match=r"'o': .*allow_pickle=False"):
        await ts.put("o", value, allow_pickle=False)
    assert not await ts.exists("o")

    await ts.put("o", value)
    assert (await ts.stat("o")).meta.codec == "pickle"
    assert same(await ts.get("o"), value)
    with pytest.raises(ts.UnsafeObjectError, match=r"'o' .*allow_pickle=False"):
        await ts.get("o", allow_pickle=False)
    assert same((await ts.get_batch(["o"]))["o"], value)


async def test_large_objects_lie_in_a_segment_small_ones_in_the_message(shared):
    await ts.put_batch({"large": BLOB})
    await ts.put("small", BLOB[:100])
    assert (await ts.stat("large")).segment >= 0
    assert (await ts.stat("large")).nbytes > 1 << 20
    assert (await ts.stat("small")).segment == -1


async def test_shared_references_stay_shared(shared):
    inner = [1]
    for value in ([inner, inner], {"a": inner, "b": (inner,)}, (inner, {"x": inner})):
        await ts.put("o", value)
        got = await ts.get("o")
        assert got == value
        first, second = list(got.values()) if isinstance(got, dict) else got
        second = second["x"] if isinstance(second, dict) else second
        second = second[0] if isinstance(second, tuple) else second
        assert first is second
        first.append(2)
        assert second == [1, 2]


async def test_cycles_come_back_as_cycles(shared):
    knot: list[Any] = ["start"]
    knot.append({"back": knot})
    await ts.put("list", knot)
    got = await ts.get("list")
    assert got[0] == "start"
    assert got[1]["back"] is got

    mapping: dict[str, Any] = {}
    mapping["self"] = (mapping,)
    await ts.put("dict", mapping)
    got = await ts.get("dict")
    assert got["self"][0] is got


async def test_deep_nesting(shared):
    value: Any = ()
    for _ in range(200):
        value = [value]
    await ts.put("o", value)
    got, depth = await ts.get("o"), 0
    while got:
        got, depth = got[0], depth + 1
    assert (got, depth) == ((), 200)


async def test_what_even_pickle_cannot_take_is_refused(shared):
    bottomless: Any = ()
    for _ in range(100_000):
        bottomless = (bottomless,)
    for value in ((x for x in "a"), {"socket": sys.stdout}, bottomless):
        with pytest.raises(ts.UnsupportedValueError, match=r"'o': .*cannot be stored"):
            await ts.put("o", value)
    while bottomless:  # one by one: its own destructor might recurse
        (bottomless,) = bottomless
    assert await ts.keys() == []


async def test_tensors_inside_objects(shared):
    module = torch.nn.Linear(3, 2)
    value = {"weights": module.state_dict(), "step": 4, "shapes": [torch.Size([1])]}
    await ts.put("o", value)
    got = await ts.get("o")
    assert list(got["weights"]) == ["weight", "bias"]
    assert torch.equal(got["weights"]["weight"], module.weight)
    assert got["shapes"] == [torch.Size([1])]


async def test_a_bare_storage_is_refused(shared):
    """It could be put, but never be got."""
    storage = torch.arange(3.0).untyped_storage()
    for value in (storage, {"a": [storage]}, {"beside": torch.ones(2), "a": storage}):
        with pytest.raises(ts.UnsupportedValueError, match=r"'s': .*UntypedStorage.*set_\(storage"):
            await ts.put("s", value)
    await ts.put("s", torch.empty(0, dtype=torch.uint8).set_(storage))  # as it says
    assert (await ts.get("s")).view(torch.float32).tolist() == [0, 1, 2]


async def test_large_arrays_beside_tensors(shared):
    """Such a value was refused, because a buffer of pickle has no length."""
    rollout = {"observations": np.arange(20_000), "logits": torch.ones(3)}
    await ts.put("o", rollout)
    got = await ts.get("o")
    assert np.array_equal(got["observations"], rollout["observations"])
    assert torch.equal(got["logits"], rollout["logits"])


@pytest.mark.parametrize("count", [1, 5, 40])
async def test_objects_in_pieces_arrive_whole(shared, count):
    """Their buffers are copied from where they lie, several values in one put."""
    values = {
        f"{at}": {
            "bytes": bytes([at]) * 300_000,
            "array": np.full(70_000, at),
            "text": chr(192 + at) * 90_000,
            "plain": Plain(bytearray([at]) * 200_000),
        }
        for at in range(count)
    }
    await ts.put_batch(values)
    got = await ts.get_batch(list(values))
    for name, value in values.items():
        assert np.array_equal(got[name].pop("array"), value.pop("array"))
        assert same(got[name], value)


async def test_an_object_without_large_arrays_does_not_keep_its_lease(shared):
    """It is read where it is stored, and nothing of it is left there."""
    await ts.put("o", {"large": BLOB, "array": np.ones(2_000), "text": "x" * 200_000})
    got = await ts.get("o")
    await until(nothing_leased)
    await ts.put("o", 1)
    assert got["large"] == BLOB
    assert (got["array"] == 1).all()


async def test_a_bytearray_can_be_resized_when_its_put_has_ended_however(shared):
    data = bytearray(BLOB)
    await ts.put("o", data)
    data.append(1)
    huge = bytearray(300 << 20)  # a store of the tests has 256 MB
    for value in (huge, Plain(huge)):
        with pytest.raises(ts.StoreFullError) as caught:
            await ts.put("o", value)
        huge.append(1)  # the error, which has the frames of the put, is still there
        assert caught.value.details["requested_bytes"] >= 300 << 20
    assert await ts.get("o") == BLOB


class Bomb:
    """Loading it leaves a mark."""

    fired = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return (_fire, ())


def _fire() -> int:
    Bomb.fired += 1
    return 17


async def test_refused_pickles_are_not_loaded_at_all(shared):
    await ts.put_batch({"bomb": Bomb(), "fine": 1})
    before = Bomb.fired
    with pytest.raises(ts.UnsafeObjectError):
        await ts.get("bomb", allow_pickle=False)
    with pytest.raises(ts.UnsafeObjectError):
        await ts.get_batch(["fine", "bomb"], allow_pickle=False)
    assert Bomb.fired == before
    assert await ts.get("bomb") == 17
    assert Bomb.fired == before + 1


class Unbuildable:
    """An object whose class is not what it was when it was put, say."""

    def __init__(self, nbytes: int) -> None:
        self.state = bytes(nbytes)

    def __setstate__(self, state: object) -> None:
        raise ValueError("of another release")


@pytest.mark.parametrize("tensors", [1, 50])
@pytest.mark.parametrize("count", [3, 100_000], ids=["small tensors", "large tensors"])
@pytest.mark.parametrize("nbytes", [10, 1_000_000], ids=["small object", "large object"])
async def test_an_object_that_cannot_be_rebuilt_leaves_the_destinations_as_they_were(
    shared, nbytes, count, tensors
):
    values = {f"w{i}": torch.ones(count) for i in range(tensors)} | {"o": Unbuildable(nbytes)}
    await ts.put_batch(values)
    await ts.put_state_dict(values, "s")
    for error, how in (
        (ts.UnsupportedValueError, {}),
        (ts.UnsafeObjectError, {"allow_pickle": False}),
    ):
        into = {f"w{i}": torch.zeros(count) for i in range(tensors)}
        with pytest.raises(error, match="'o'"):
            await ts.get_batch({**into, "o": None}, **how)
        mine = {**into, "o": "mine"}
        with pytest.raises(error, match="'o'"):
            await ts.get_state_dict("s", mine, **how)
        assert not any(tensor.any() for tensor in into.values())
        assert mine["o"] == "mine"
    assert (await ts.status()).volumes[0].leased_bytes == 0


async def test_a_batch_with_one_unsafe_value_stores_nothing(shared):
    await ts.put("a", 1)
    with pytest.raises(ts.UnsafeObjectError) as caught:
        await ts.put_batch({"a": 2, "b": Colour.RED}, allow_pickle=False)
    assert caught.value.key == "b"
    assert await ts.get("a") == 1
    assert not await ts.exists("b")


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("made", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
async def test_sparse_tensors_inside_of_objects(shared, made):
    """They were called freed ones, of FSDP."""
    sparse = made(torch.eye(3))
    await ts.put("o", {"optimiser": [sparse]})
    (got,) = (await ts.get("o"))["optimiser"]
    assert got.layout == sparse.layout
    assert torch.equal(got.to_dense(), torch.eye(3))


@pytest.mark.parametrize("wrong", ["no", "0", 0, 1])
async def test_allow_pickle_is_a_bool(shared, wrong):
    """Text that means no would allow it."""
    for call in (
        lambda: ts.put("o", 1, allow_pickle=wrong),
        lambda: ts.put_batch({"o": 1}, allow_pickle=wrong),
        lambda: ts.put_object(1, allow_pickle=wrong),
        lambda: ts.put_state_dict({"o": 1}, "s", allow_pickle=wrong),
        lambda: ts.get("o", allow_pickle=wrong),
        lambda: ts.get_batch(["o"], allow_pickle=wrong),
        lambda: ts.get_state_dict("s", allow_pickle=wrong),
        lambda: ts.connect(shared.address, store_name="other", allow_pickle=wrong),
        lambda: ts.initialize(store_name="other", capacity=1 << 20, allow_pickle=wrong),
    ):
        with pytest.raises(ts.ConfigurationError, match="allow_pickle is a bool"):
            await call()
    assert await ts.keys() == []


async def test_allow_pickle_is_a_default_of_the_client_too():
    async with running_store(store_name="strict", allow_pickle=False) as client:
        with pytest.raises(ts.UnsafeObjectError):
            await ts.put("o", Colour.RED, store_name="strict")
        with pytest.raises(ts.UnsafeObjectError):
            await client.put("o", Colour.RED)
        await client.put("o", Colour.RED, allow_pickle=True)
        with pytest.raises(ts.UnsafeObjectError):
            await client.get("o")
        assert await client.get("o", allow_pickle=True) is Colour.RED
        await client.put_batch({"fine": (1, {2}), "tensor": torch.ones(2)})
        got = await client.get_batch(["fine", "tensor"])
        assert got["fine"] == (1, {2})
        assert got["tensor"].tolist() == [1, 1]


async def test_the_environment_forbids_pickle(monkeypatch):
    monkeypatch.setenv("TORCHSTORE_ALLOW_PICKLE", "0")
    async with running_store(store_name="strict") as client:
        with pytest.raises(ts.UnsafeObjectError):
            await client.put("o", Colour.RED)
    monkeypatch.setenv("TORCHSTORE_ALLOW_PICKLE", "maybe")
    with pytest.raises(ts.ConfigurationError, match="TORCHSTORE_ALLOW_PICKLE"):
        await ts.initialize(store_name="strict")


async def test_another_process(shared):
    """It sees the same types; what only it, or only we, can build by name comes by value."""
    names = ["mixed keys", "tuple", "huge", "bytearray", "complex", "one of everything"]
    await ts.put_batch({name: EXACT[name] for name in names})
    await ts.put("names", tuple(names))
    word = "here"
    await ts.put("function", lambda x: (x, word))
    out = await run_script(
        """
        for name in await ts.get("names"):
            await ts.put("echo " + name, await ts.get(name))

        class Mine:
            def __init__(self, level=1):
                self.level = level

            def more(self):
                return Mine(self.level + 1)

        Mine.__qualname__ = "Mine"
        sys.modules["__main__"].Mine = Mine
        await ts.put("mine", Mine())
        assert type(await ts.get("mine")) is Mine
        await ts.put_state_dict({"w": torch.ones(2), "mine": Mine(5), "f": lambda x: x + 1}, "s")
        function = await ts.get("function")
        assert function(3) == (3, "here")
        sys.modules["cloudpickle"] = None  # as if it were not installed
        await ts.put("by name", Mine())
        print("done")
        """
    )
    assert out == "done\n"
    for name in names:
        assert same(await ts.get("echo " + name), EXACT[name]), name
    assert (await ts.get("mine")).more().level == 2
    assert (await ts.stat("mine")).meta.codec == "pickle"
    got = await ts.get_state_dict("s")
    assert (got["mine"].more().level, got["f"](1)) == (6, 2)
    with pytest.raises(ts.UnsupportedValueError, match=r"'by name' cannot be rebuilt here.*Mine"):
        await ts.get("by name")
    for key in ("mine", "s/f"):
        with pytest.raises(ts.UnsafeObjectError, match="allow_pickle=False"):
            await ts.get(key, allow_pickle=False)
