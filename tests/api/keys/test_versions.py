"""Overwrites and the versions that refs name."""

from __future__ import annotations

import asyncio
import copy
import pickle

import msgspec
import pytest
import torch
from tests.processes import run_script
from tests.support import turn

import torchstore_core as ts

#: Values of every kind, with and without a place in a segment.
KINDS = {
    "small tensor": torch.arange(4),
    "large tensor": torch.arange(140_000),
    "other shape": torch.arange(140_000).view(140, 1000),
    "other dtype": torch.arange(140_000).to(torch.bfloat16),
    "no element": torch.empty(0, 3),
    "no dimension": torch.tensor(5),
    "object": {"a": (1, 2)},
    "large object": b"x" * (9 << 17),
    "none": None,
}


def _equal(a: object, b: object) -> bool:
    if isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


async def test_an_overwrite_may_change_everything(shared, k):
    version = 0
    for before in KINDS.values():
        for after in KINDS.values():
            for value in (before, after):
                ref = await ts.put(k, value)
                version += 1
                assert ref == ts.ObjectRef(k, version)
                assert _equal(await ts.get(k), value)
                assert _equal(await ts.get(ref), value)
    assert await ts.keys() == [k]


async def test_versions_count_from_one_and_only_grow(shared):
    assert [(await ts.put("a", n)).version for n in range(5)] == [1, 2, 3, 4, 5]
    refs = await ts.put_batch({"a": 0, "b": 0})
    assert refs == {"a": ts.ObjectRef("a", 6), "b": ts.ObjectRef("b", 1)}
    assert (await ts.stat("a")).version == 6


@pytest.mark.parametrize("numel", [4, 300_000], ids=["small", "large"])
async def test_a_ref_gives_exactly_its_version(shared, numel, k):
    first = await ts.put(k, torch.zeros(numel))
    assert torch.equal(await ts.get(first), torch.zeros(numel))
    second = await ts.put(k, torch.ones(numel))
    destination = torch.full((numel,), -1.0)
    for attempt in (
        ts.get(first),
        ts.get(first, destination),
        ts.get(ts.Request(k, first.version)),
        ts.get_batch([first]),
        ts.get_batch([k, ts.Request(k, first.version)][1:]),
    ):
        with pytest.raises(ts.VersionGoneError, match=f"version 1 of '{k}' is gone") as caught:
            await attempt
        assert caught.value.key == k
        assert caught.value.details == {"current": 2}
    assert torch.equal(destination, torch.full((numel,), -1.0))
    assert torch.equal(await ts.get(second), torch.ones(numel))
    assert torch.equal((await ts.get_batch([second]))[k], torch.ones(numel))


async def test_one_version_that_is_put_twice_at_once(shared, k):
    """As by ranks that all put the same: the error says which key, and what to do."""
    large = torch.zeros(2_000_000)
    both = await asyncio.gather(
        *(ts.put_state_dict({"w": large}, k, version=7) for _ in range(2)), return_exceptions=True
    )
    (put,) = [one for one in both if not isinstance(one, BaseException)]  # whichever came first
    assert put == ts.ObjectRef(k, 7)
    (refused,) = [one for one in both if isinstance(one, ts.ConfigurationError)]
    assert f"another call is putting version 7 of '{k}'" in refused.message
    assert "pass participants=" in refused.message
    assert refused.key == k


async def test_versions_that_never_were(shared, k):
    await ts.put(k, 1)
    for version in (0, -1, 2, 99, 1 << 62, 1 << 70):
        with pytest.raises(ts.VersionGoneError):
            await ts.get(ts.ObjectRef(k, version))
        with pytest.raises(ts.VersionGoneError):
            await ts.get(ts.Request(k, version))
    with pytest.raises(ts.VersionGoneError):
        await ts.get(ts.ObjectRef("never put", 1))
    assert await ts.get(ts.ObjectRef(k, 1)) == 1


async def test_malformed_refs_are_refused_without_harm_to_others(shared, k):
    await ts.put(k, 1)
    waiting = asyncio.create_task(ts.wait("later", timeout=30))
    await turn()
    malformed = (k, "1"), (k, True), (5, 1), ("", 1)
    for ref in [ts.ObjectRef(*fields) for fields in malformed]:
        with pytest.raises(ts.UnsupportedValueError):
            await ts.get(ref)
        with pytest.raises(ts.UnsupportedValueError):
            await ts.get(ts.Request(ref.key, ref.version))
    await ts.put("later", 1)
    assert await waiting == {"later": ts.ObjectRef("later", 1)}


async def test_no_version_is_used_twice_whatever_is_deleted(shared, k):
    seen: set[ts.ObjectRef] = set()
    for step in range(60):
        key = f"{k}{step % 3}"
        ref = await ts.put(key, step)
        assert ref not in seen, "this version existed before"
        assert all(ref.version > old.version for old in seen if old.key == key)
        seen.add(ref)
        match step % 4:
            case 1:
                await ts.delete(key)
            case 3:
                await ts.delete_batch([f"{k}0", f"{k}1", f"{k}2"])
    for ref in seen:
        try:
            value = await ts.get(ref)
        except ts.VersionGoneError:
            continue
        assert await ts.get(ref.key) == value


async def test_a_ref_does_not_come_back_to_life(shared, k):
    old = await ts.put(k, "old")
    await ts.delete(k)
    with pytest.raises(ts.VersionGoneError, match=f"'{k}' is gone"):
        await ts.get(old)
    with pytest.raises(ts.KeyNotFoundError):
        await ts.get(k)
    new = await ts.put(k, "new")
    assert new.version > old.version
    with pytest.raises(ts.VersionGoneError):
        await ts.get(old)
    assert await ts.get(new) == "new"


async def test_a_failed_put_changes_nothing(shared, k):
    ref = await ts.put(k, 1)
    with pytest.raises(ts.UnsupportedValueError):
        await ts.put(k, (x for x in ()))
    assert await ts.get(ref) == 1


async def test_refs_are_small_frozen_values(shared):
    ref = await ts.put("policy/w", 1)
    assert (ref.key, ref.version) == ("policy/w", 1)
    with pytest.raises(AttributeError):
        ref.version = 2
    assert ref == ts.ObjectRef("policy/w", 1)
    assert ref != ts.ObjectRef("policy/w", 2)
    assert len({ref, ts.ObjectRef("policy/w", 1)}) == 1
    assert "policy/w" in repr(ref)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(ref, protocol))
        assert type(again) is ts.ObjectRef
        assert again == ref
        assert await ts.get(again) == 1
    assert copy.deepcopy(ref) == ref
    for codec in (msgspec.msgpack, msgspec.json):
        assert codec.decode(codec.encode(ref), type=ts.ObjectRef) == ref
    assert len(pickle.dumps(ref)) < 200


async def test_requests_and_slices_are_such_values_too():
    part = ts.TensorSlice((0, 1), (2, 3), (4, 5), (2,), (1,))
    for value in (part, ts.Request("k", 3, part), ts.Request("k")):
        assert pickle.loads(pickle.dumps(value)) == value
        for codec in (msgspec.msgpack, msgspec.json):
            assert codec.decode(codec.encode(value), type=type(value)) == value
        assert len({value, copy.copy(value)}) == 1
        with pytest.raises(AttributeError):
            value.key = value.offsets = ()


async def test_a_ref_from_another_process(shared):
    """Refs travel as bytes; here as values of the store."""
    out = await run_script(
        """
        small = await ts.put("small", (1, {2}))
        large = await ts.put("large", torch.arange(300_000))
        old = await ts.put("old", 1)
        await ts.put("old", 2)
        await ts.put("refs", [tuple((r.key, r.version)) for r in (small, large, old)])
        await ts.put("pickled", small)
        print(small.version, large.version, old.version)
        """
    )
    assert out == "1 1 1\n"
    small, large, old = (ts.ObjectRef(*pair) for pair in await ts.get("refs"))
    assert await ts.get(small) == (1, {2})
    assert torch.equal(await ts.get(large), torch.arange(300_000))
    with pytest.raises(ts.VersionGoneError):
        await ts.get(old)
    assert await ts.get(await ts.get("pickled")) == (1, {2})
