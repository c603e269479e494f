"""Batches: atomic puts, gets that are one consistent cut, all or nothing."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tests.processes import Script

import torchstore_core as ts

SIZES = pytest.mark.parametrize("numel", [16, 200_000], ids=["small", "large"])


@SIZES
async def test_a_batch_of_everything(shared, numel):
    values = {
        "tensor": torch.arange(numel),
        "strided": torch.arange(2 * numel)[::2],
        "empty": torch.empty(0),
        "object": (1, [2], {3}),
        "large object": bytes(numel),
        "none": None,
    }
    refs = await ts.put_batch(values)
    assert list(refs) == list(values)
    assert all(ref.key == key and ref.version > 0 for key, ref in refs.items())
    got = await ts.get_batch(list(values))
    assert list(got) == list(values)
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(got[key], value), key
        else:
            assert got[key] == value, key
    assert list(await ts.get_batch(reversed(values))) == list(reversed(values))


async def test_ways_to_ask(shared):
    matrix = torch.arange(12.0).view(3, 4)
    refs = await ts.put_batch({"a": matrix, "b": matrix * 2, "c": "object"})
    row = ts.TensorSlice((1, 0), (1, 4), (3, 4))
    mine = torch.zeros(3, 4)

    got = await ts.get_batch([refs["a"], ts.Request("b", tensor_slice=row), "c"])
    assert torch.equal(got["a"], matrix)
    assert torch.equal(got["b"], matrix[1:2] * 2)
    assert got["c"] == "object"

    got = await ts.get_batch({"a": mine, "b": row, "c": None})
    assert got["a"] is mine
    assert torch.equal(mine, matrix)
    assert torch.equal(got["b"], matrix[1:2] * 2)
    assert got["c"] == "object"

    assert list(await ts.get_batch(key for key in ("b", "a"))) == ["b", "a"]
    assert list(await ts.get_batch(("a",))) == ["a"]
    assert list(await ts.get_batch(["a", "a"])) == ["a"]


async def test_one_key_in_two_ways_is_refused(shared):
    """The result has one value per key: silently losing the other one would be a trap."""
    ref = await ts.put("a", torch.arange(6))
    first, second = (ts.TensorSlice((at,), (3,), (6,)) for at in (0, 3))
    for wanted in (
        [ts.Request("a", tensor_slice=first), ts.Request("a", tensor_slice=second)],
        ["a", ts.Request("a", tensor_slice=first)],
        ["a", ref],
    ):
        with pytest.raises(ts.ConfigurationError, match="'a' is asked for twice"):
            await ts.get_batch(wanted)


async def test_nothing_to_do(shared):
    assert await ts.put_batch({}) == {}
    assert await ts.get_batch([]) == {}
    assert await ts.get_batch({}) == {}
    assert await ts.keys() == []


async def test_not_a_batch(shared):
    await ts.put("a", 1)
    with pytest.raises(ts.UnsupportedValueError, match="one str"):
        await ts.get_batch("a")
    for wrong in (None, 1):
        with pytest.raises(ts.UnsupportedValueError, match="a list of keys or a dict"):
            await ts.get_batch(wrong)
    for wrong in ([("a", 2)], {"a"}, "a"):
        with pytest.raises(ts.UnsupportedValueError, match="dict"):
            await ts.put_batch(wrong)
    assert await ts.get("a") == 1


@SIZES
async def test_all_missing_keys_are_named(shared, numel):
    await ts.put_batch({"here": torch.ones(numel), "here too": 1})
    wanted = ["gone 1", "here", "gone 2", "here too", "gone 3"]
    for what in (wanted, dict.fromkeys(wanted), [ts.Request(key) for key in wanted]):
        with pytest.raises(ts.KeyNotFoundError) as caught:
            await ts.get_batch(what)
        assert caught.value.details["missing"] == ["gone 1", "gone 2", "gone 3"]
        assert all(repr(key) in str(caught.value) for key in ("gone 1", "gone 2", "gone 3"))
    assert (await ts.status()).volumes[0].leased_bytes == 0


@SIZES
async def test_one_stale_ref_fails_the_batch(shared, numel):
    old = await ts.put("a", torch.zeros(numel))
    await ts.put_batch({"a": torch.ones(numel), "b": torch.ones(numel)})
    mine = torch.zeros(numel)
    with pytest.raises(ts.VersionGoneError):
        await ts.get_batch(["b", old])
    with pytest.raises(ts.VersionGoneError):
        await ts.get_batch([old, "missing"])
    assert not mine.any()
    assert (await ts.status()).volumes[0].leased_bytes == 0


async def test_a_batch_that_fails_puts_nothing(shared):
    await ts.put("a", 1)
    for bad in (torch.empty(2, device="meta"), (x for x in ())):
        with pytest.raises(ts.UnsupportedValueError) as caught:
            await ts.put_batch({"a": 2, "large": torch.ones(1 << 20), "bad": bad})
        assert caught.value.key == "bad"
    with pytest.raises(ts.UnsupportedValueError):
        await ts.put_batch({"a": 3, "": 1})
    assert await ts.keys() == ["a"]
    assert await ts.get("a") == 1
    volume = (await ts.status()).volumes[0]
    assert volume.unfinished_bytes == 0


async def test_thousands_of_keys(shared):
    values = {f"layer.{i}.weight": torch.full((i % 7, 3), i) for i in range(3000)}
    await ts.put_batch(values)
    got = await ts.get_batch(list(values))
    assert list(got) == list(values)
    assert all(torch.equal(got[key], value) for key, value in values.items())
    destinations = {key: torch.zeros_like(value) for key, value in values.items()}
    await ts.get_batch(destinations)
    assert all(torch.equal(destinations[key], value) for key, value in values.items())


WRITER = """
    numel = {numel}
    n = 0
    while not await ts.exists("stop"):
        n += 1
        tensor = torch.full((numel,), n)
        await ts.put_batch({{"a": tensor, "b": n, "c": tensor.view(2, -1).t(), "d": tensor[:1]}})
    print(n)
"""


@SIZES
async def test_a_get_is_one_cut_while_another_process_writes(shared, numel):
    """All values of one get come from one put, whichever way they are read."""

    async def one_cut(mine: torch.Tensor | None) -> int:
        got = await ts.get_batch({"c": None, "a": mine, "d": None, "b": None})
        numbers = {got["b"], int(got["d"])}
        for key in ("a", "c"):
            numbers |= {int(x) for x in got[key].aminmax()}
        assert len(numbers) == 1, f"values of several puts in one get: {numbers}"
        return numbers.pop()

    async def read(seen: list[int], mine: torch.Tensor | None) -> None:
        while len(set(seen)) < 50:
            seen.append(await one_cut(mine))
            assert seen == sorted(seen), "went back in time"

    with Script(WRITER.format(numel=numel)) as writer:
        await ts.wait(["a", "b", "c", "d"], timeout=60)
        made: list[int] = []
        filled: list[int] = []
        async with asyncio.timeout(40):
            await asyncio.gather(read(made, None), read(filled, torch.zeros(numel).long()))
        await ts.put("stop", True)
        written = int(await writer.output())
    assert written >= max(made[-1], filled[-1])


async def test_refs_of_one_wait_are_of_one_put(shared):
    """wait() gives refs of one moment too: get_batch of them is all of it or VersionGoneError."""
    with Script(WRITER.format(numel=16)) as writer:
        hits = 0
        apart = None  # earlier tests may have left the two keys at different versions
        async with asyncio.timeout(40):
            while hits < 50:
                refs = await ts.wait(["a", "b"])
                apart = refs["a"].version - refs["b"].version if apart is None else apart
                assert refs["a"].version - refs["b"].version == apart
                try:
                    got = await ts.get_batch(list(refs.values()))
                except ts.VersionGoneError:
                    continue
                hits += 1
                assert int(got["a"][0]) == got["b"]
        await ts.put("stop", True)
        await writer.output()
