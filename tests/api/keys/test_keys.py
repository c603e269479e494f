"""Keys: what is one, and exists, delete, delete_batch, keys."""

from __future__ import annotations

import asyncio
import enum
import threading
from typing import Any

import numpy
import pytest
import torch
from tests.processes import run_script
from tests.support import before_commits

import torchstore_core as ts

T = torch.arange(4.0)
ODD = [
    " ",
    "\x00",
    "\n",
    "a\x00b",
    "/",
    "//",
    "../../etc/passwd",
    "*",
    "%s{}",
    "ключ",
    "鍵",
    "🦊🦊",
    "e\u0301",
    "\u00e9",
    "\U0010ffff",
    "\ufeff",
    "k" * 4096,
    "🦊" * 4096,
]


async def test_odd_keys_are_keys(shared):
    refs = await ts.put_batch({key: at for at, key in enumerate(ODD)})
    assert list(refs) == ODD
    assert await ts.keys() == sorted(ODD)
    for at, key in enumerate(ODD):
        assert await ts.get(key) == at
        assert await ts.get(refs[key]) == at
        assert await ts.exists(key)
        assert (await ts.stat(key)).key == key
        assert await ts.wait(key) == {key: refs[key]}
    await ts.put(ODD[-1], torch.arange(300_000))
    assert torch.equal(await ts.get(ODD[-1]), torch.arange(300_000))
    assert await ts.delete_batch(ODD) == len(ODD)


BAD = {"empty": "", "too long": "k" * 4097, "bytes": b"k", "none": None, "int": 5, "tuple": ("k",)}


@pytest.mark.parametrize("name", BAD)
async def test_bad_keys_are_refused_everywhere(shared, name):
    key = BAD[name]
    for attempt in (
        ts.put(key, 1),
        ts.put_batch({"fine": 1, key: 1}),
        ts.get(key),
        ts.get(ts.Request(key)),
        ts.get_batch([key]),
        ts.get_batch({key: None}),
        ts.delete(key),
        ts.delete_batch([key]),
        ts.exists(key),
        ts.stat(key),
        ts.wait([key]),
    ):
        with pytest.raises(ts.UnsupportedValueError, match=r"a key is a str of 1 to 4096"):
            await attempt
    assert await ts.keys() == []


async def test_keys_that_are_no_unicode_are_a_typed_error(shared):
    await ts.put("k", 1)
    for attempt in (
        ts.put("\ud800", 1),
        ts.get("\ud800"),
        ts.exists("\ud800"),
        ts.delete("\ud800"),
        ts.keys("\ud800"),
        ts.put_batch({"large": torch.ones(1 << 20), "\udfff": 1}),
    ):
        with pytest.raises((ts.UnsupportedValueError, ts.ProtocolError), match="Unicode"):
            await attempt
    assert await ts.keys() == ["k"]
    assert (await ts.status()).volumes[0].unfinished_bytes == 0


class Text(str):
    """As the strings of numpy, or of a parser that notes where it has read them."""


class Member(enum.StrEnum):
    KEY = "member"


@pytest.mark.parametrize(
    "key", [Text("text"), numpy.str_("array"), Member.KEY], ids=["own", "numpy", "enum"]
)
async def test_keys_of_a_class_derived_from_str_are_the_same_text(shared, key):
    plain = str.__str__(key)
    refs = [
        await ts.put(key, 1),
        (await ts.put_batch({key: 2, "other": 2}))[key],
        (await ts.put_batch({key: T, **{f"of many/{i}": T for i in range(40)}}))[key],
    ]
    third = refs[0].version + 2  # others may have put it before
    assert refs == [ts.ObjectRef(plain, version) for version in (third - 2, third - 1, third)]
    hand_made = ts.ObjectRef(key, third)
    for what in (key, plain, hand_made, ts.Request(key)):
        assert torch.equal(await ts.get(what), T)
    assert torch.equal((await ts.get_batch([key, "other"]))[plain], T)
    assert await ts.exists(key)
    assert (await ts.stat(key)).version == third
    assert await ts.keys(key) == [plain]
    assert await ts.versions(key) == [third]
    assert await ts.latest_version(key) == third
    assert await ts.wait(key) == await ts.wait([key]) == {plain: refs[2]}
    assert await ts.wait_any([key, "missing"]) == ([key], ["missing"])
    held = [await ts.hold(key), await ts.hold(hand_made)]
    refs += [ref.ref for ref in held] + [*(await ts.wait(key)).values()]
    assert await ts.free([hand_made]) == 1
    await ts.delete(key)

    pending = await ts.put_state_dict({key: T, "n": {key: 1}}, key, blocking=False)
    refs += [await pending, await ts.put_state_dict({"w": T}, key, participants=1)]
    refs += [await ts.put(key, ts.TorchStoreStateDict.from_state_dict({"w": T}))]
    assert torch.equal((await ts.get_state_dict(key, min_version=third + 3))["w"], T)
    assert {type(ref.key) for ref in refs} == {str}
    assert await ts.delete_batch([key]) == 1


async def test_one_str_is_not_a_list_of_keys(shared):
    await ts.put_batch({"a": 1, "b": 2})
    with pytest.raises(ts.UnsupportedValueError, match="one str"):
        await ts.delete_batch("ab")
    assert await ts.keys() == ["a", "b"]


async def test_exists(shared):
    assert await ts.exists("k") is False
    await ts.put("k", None)
    assert await ts.exists("k") is True
    assert await ts.exists("K") is False
    await ts.delete("k")
    assert await ts.exists("k") is False


@pytest.mark.parametrize("before", [False, True], ids=["new", "overwritten"])
async def test_what_is_written_and_not_committed_is_not_there(shared, k, before):
    """For nobody who asks in between: no key, no version, no entry without a value."""
    old, new = torch.full((300_000,), 7.0), torch.full((300_000,), 8.0)
    if before:
        await ts.put_state_dict({"w": old}, k)
    seen: list[tuple[Any, ...]] = []

    async def ask() -> None:
        for key in (k, f"{k}/w"):
            waiting = asyncio.create_task(ts.wait(key, min_version=1 + before, timeout=0.2))
            there = await ts.exists(key), await ts.keys(key), await ts.versions(key)
            try:
                value = await ts.get(f"{k}/w")
            except ts.KeyNotFoundError as error:
                value = type(error)
            with pytest.raises(ts.StoreTimeoutError):
                await waiting
            seen.append((*there, value))

    def ask_in_a_thread() -> None:
        thread = threading.Thread(target=lambda: asyncio.run(ask()))
        thread.start()
        thread.join()

    with before_commits(ask_in_a_thread):
        pending = await ts.put_state_dict({"w": new}, k, blocking=False)
    ref = await pending
    entry = f"{k}/w"
    if before:
        assert [one[:3] for one in seen] == [(True, [k, entry], [1]), (True, [entry], [1])]
        assert all(torch.equal(value, old) for *_, value in seen)
    else:
        assert seen == [(False, [], [], ts.PartialPutError)] * 2
    assert ref.version == 1 + before
    assert await ts.versions(k) == [ref.version]
    assert torch.equal(await ts.get(entry), new)


@pytest.mark.parametrize("value", [1, torch.ones(300_000)], ids=["small", "large"])
async def test_delete(shared, value):
    await ts.put_batch({"k": value, "other": value})
    assert await ts.delete("k") is None
    with pytest.raises(ts.KeyNotFoundError, match="'k'"):
        await ts.get("k")
    with pytest.raises(ts.KeyNotFoundError, match="'k'"):
        await ts.stat("k")
    with pytest.raises(ts.KeyNotFoundError) as caught:
        await ts.delete("k")
    assert caught.value.key == "k"
    assert caught.value.details["missing"] == ["k"]
    assert await ts.keys() == ["other"]


async def test_delete_batch_ignores_what_is_missing(shared):
    await ts.put_batch({"a": 1, "b": 2, "c": 3})
    assert await ts.delete_batch(["a", "never there", "c", "a"]) == 2
    assert await ts.delete_batch(["a", "c"]) == 0
    assert await ts.delete_batch([]) == 0
    assert await ts.delete_batch(key for key in ("b",)) == 1
    assert await ts.keys() == []


NAMES = ["a", "a.", "a.b", "a/b", "a/b/c", "ab", "b", "A", "a*", "a%", "ä", "a\u0308", "aa" * 9]
PREFIXES = ["", "a", "a/", "a/b", "a.", ".", "*", "a*", "a.*", "%", "A", "ä", "a\u0308", "c", " "]


@pytest.mark.parametrize("prefix", [*PREFIXES, "a" * 5000, "\x00"], ids=ascii)
async def test_keys_are_as_startswith_sorted(shared, prefix):
    await ts.put_batch(dict.fromkeys(reversed(NAMES), 0))
    assert await ts.keys(prefix) == sorted(key for key in NAMES if key.startswith(prefix))
    assert await ts.keys(prefix=prefix) == await ts.keys(prefix)


async def test_keys_of_the_library_are_hidden(shared):
    hidden = [".torchstore-part/1", ".torchstore-part/2"]
    names = [".torchstore", ".torchstore.x", "a", *hidden]
    await ts.put_batch(dict.fromkeys(names, 0))
    assert await ts.keys() == await ts.keys("") == [".torchstore", ".torchstore.x", "a"]
    assert await ts.keys(".torchstore") == [".torchstore", ".torchstore.x"]
    assert await ts.keys(".torchstore-") == hidden
    assert await ts.get(hidden[0]) == 0


async def test_all_keys(shared):
    assert await ts.keys() == []
    await ts.put_batch(dict.fromkeys(reversed(NAMES), 0))
    assert await ts.keys() == await ts.keys(None) == await ts.keys("") == sorted(NAMES)
    for wrong in (5, b"a", ["a"]):
        with pytest.raises(ts.UnsupportedValueError, match="prefix"):
            await ts.keys(wrong)


async def test_many_keys(shared):
    names = [f"layers.{i}" for i in range(20_000)]
    await ts.put_batch(dict.fromkeys(names, 0))
    assert await ts.keys() == sorted(names)
    assert len(await ts.keys("layers.19")) == 1 + 10 + 100 + 1000
    assert await ts.delete_batch(names) == 20_000


async def test_other_processes_see_the_same_keys(shared):
    await ts.put_batch({"ключ/1": 1, "ключ/2": 2, "x": 3})
    out = await run_script(
        """
        assert await ts.keys("ключ/") == ["ключ/1", "ключ/2"]
        assert await ts.exists("x")
        await ts.delete("x")
        assert await ts.delete_batch(["ключ/1", "y"]) == 1
        await ts.put("🦊", 4)
        print("done")
        """
    )
    assert out == "done\n"
    assert await ts.keys() == ["ключ/2", "🦊"]


@pytest.mark.parametrize("call", ["wait", "delete_batch", "wait_any", "free", "get_batch"])
async def test_what_is_iterable_in_name_only_is_refused(shared, call):
    """A tensor without dimensions has the method, which raises a TypeError."""
    with pytest.raises(ts.UnsupportedValueError, match=r"list of .*, not tensor"):
        await getattr(ts, call)(torch.tensor(1))


ALIKE = {
    "a letter too many": ("policy/layer.0.weightt", "policy/layer.0.weight"),
    "two letters changed": ("policy/layer.0.wieght", "policy/layer.0.weight"),
    "another state dict": ("polizy/layer.1.bias", "policy/layer.1.bias"),
    "the name of an entry alone": ("layer.1.bias", "policy/layer.1.bias"),
    "a state dict": ("Policy", "policy"),
    "a key": ("optimiser", "optimizer"),
}


@pytest.fixture
async def few_names(shared):
    layers = {f"layer.{i}.{name}": i for i in range(40) for name in ("weight", "bias")}
    await ts.put_state_dict(layers, "policy")
    hidden = ".torchstore-optimiser"
    await ts.put_batch({"optimizer": 1, hidden: 2, "far/from/all": 3})
    yield
    await ts.delete(hidden)


@pytest.mark.parametrize("case", ALIKE)
async def test_a_missing_key_is_told_of_names_like_it(few_names, case):
    key, meant = ALIKE[case]
    for call in (ts.get(key), ts.stat(key), ts.get_batch([key, "optimizer"])):
        with pytest.raises(ts.KeyNotFoundError) as caught:
            await call
        assert f"no such key: {key!r}; did you mean {meant!r}" in str(caught.value)
        assert caught.value.details["similar"][0] == meant
        assert not [name for name in caught.value.details["similar"] if name.startswith(".")]
    with pytest.raises(ts.KeyNotFoundError, match=f"{meant!r}.* instead of the first") as caught:
        await ts.get_batch([key, "there is none"])
    assert caught.value.details["missing"] == [key, "there is none"]


async def test_what_is_like_no_other_key_is_only_missing(few_names):
    for key in ("nothing", "policies of others/w", "k" * 4096):
        with pytest.raises(ts.KeyNotFoundError) as caught:
            await ts.get(key)
        assert caught.value.message == f"no such key: {key!r}"
        assert caught.value.details == {"missing": [key]}
