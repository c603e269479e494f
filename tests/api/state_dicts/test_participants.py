"""State dicts that several participants publish: one version of all of them, or none."""

from __future__ import annotations

import asyncio
import gc
import itertools
import pickle
from typing import Any

import pytest
import torch
from tests.processes import Script
from tests.support import nothing_leased, running_store, until
from tests.trees import assert_same

import torchstore_core as ts

SIZES = pytest.mark.parametrize("rows", [3, 300], ids=["small", "large"])
COLUMNS = 512
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def key() -> str:
    """Never used before: what is unfinished outlives a test of a shared store."""
    return f"model-{next(_numbers)}"


def _stage(name: str, number: float, rows: int = 300) -> dict[str, Any]:
    return {name: {"w": torch.full((rows, COLUMNS), float(number)), "step": number}}


async def _status() -> tuple[int, int]:
    (volume,) = (await ts.status()).volumes
    return volume.used_bytes, volume.unfinished_bytes


# ---- who is who ---------------------------------------------------------------------------


@SIZES
async def test_tasks_that_hold_different_entries_are_different_participants(shared, key, rows):
    refs = await asyncio.gather(
        *(ts.put_state_dict(_stage(f"s{i}", i, rows), key, participants=3) for i in range(3))
    )
    assert refs == [ts.ObjectRef(key, 1)] * 3
    got = await ts.get_state_dict(key)
    assert sorted(got) == ["s0", "s1", "s2"]
    for i in range(3):
        assert_same(got[f"s{i}"], _stage("x", i, rows)["x"])


async def test_processes_without_ranks_are_different_participants(shared, key):
    """Whatever they hold: here both hold one entry that is the same."""
    body = """
        state_dict = {{"shared": torch.full((300, 512), 5.0), "own{me}": torch.arange({me})}}
        ref = await ts.put_state_dict(state_dict, "{key}", participants=2)
        print(ref.version)
        """
    with (
        Script(body.format(me=1, key=key)) as one,
        Script(body.format(me=2, key=key)) as other,
    ):
        got = await ts.get_state_dict(key, min_version=1)
        assert sorted(got) == ["own1", "own2", "shared"]
        assert (got["shared"] == 5).all()
        assert await asyncio.gather(one.output(), other.output()) == ["1\n", "1\n"]


async def test_the_rank_tells_participants_with_the_same_entries_apart(shared, key, monkeypatch):
    state_dict = {"replicated": torch.ones(300_000)}
    monkeypatch.setenv("RANK", "3")
    await ts.put_state_dict(state_dict, key, participants=2)
    assert (await _pending(key)).committed == ["3"]
    monkeypatch.setenv("RANK", "5")
    await ts.put_state_dict(state_dict, key, participants=2)
    assert await ts.versions(key) == [1]
    monkeypatch.setenv("RANK", "3")
    ref = await ts.put_state_dict(state_dict, key, participants=2)
    assert ref.version == 2
    again = await ts.put_state_dict(state_dict, key, participants=2)
    assert again.version == 3  # the next one of the same rank
    assert await ts.versions(key) == [1]


async def test_a_participant_may_say_who_it_is(shared, key, monkeypatch):
    monkeypatch.setenv("RANK", "0")  # what is said counts
    state_dict = {"w": torch.ones(3)}
    for who in ("actor", 7):
        assert await ts.versions(key) == []
        await ts.put_state_dict(state_dict, key, participants=2, participant=who)
    assert await ts.versions(key) == [1]
    await ts.put_state_dict(state_dict, key, participants=2, participant="7")
    await ts.put_state_dict(state_dict, key, participants=2, participant="7")
    assert [p.version for p in (await ts.stat(key)).pending] == [2, 3]
    await ts.put_state_dict(state_dict, key, participants=2, participant="actor")
    assert await ts.versions(key) == [2]


async def test_one_that_is_alone_makes_a_version_whoever_it_is(shared, key, monkeypatch):
    """Nobody's put is taken for a late one of somebody else's version."""
    for number, arguments in enumerate(
        ({"participant": "a"}, {"participant": "b"}, {"participant": "a"}, {}, {"participants": 1}),
        start=1,
    ):
        monkeypatch.setenv("RANK", str(number))
        ref = await ts.put_state_dict(_stage("s", number), key, **arguments)
        assert ref.version == number
        assert await ts.get(f"{key}/s.step") == number


async def _pending(key: str) -> Any:
    """The one version of a key that is on its way, whose first one is not there yet."""
    with pytest.raises(ts.PartialPutError) as caught:
        await ts.get(key)
    return type("Pending", (), caught.value.details)


# ---- one version of all -------------------------------------------------------------------


@SIZES
async def test_nothing_is_there_until_all_are(shared, key, rows):
    waiting = [
        asyncio.create_task(ts.wait(key, timeout=30)),
        asyncio.create_task(ts.wait([f"{key}/first.w", f"{key}/last.w"], timeout=30)),
        asyncio.create_task(ts.get_state_dict(key, min_version=1, timeout=30)),
    ]
    ref = await ts.put_state_dict(_stage("first", 1, rows), key, participants=2)
    assert ref == ts.ObjectRef(key, 1)
    for name in (key, f"{key}/first.w", f"{key}/last.w"):
        assert not await ts.exists(name)
        assert await ts.versions(name) == []
        assert await ts.latest_version(name) == 0
        for call in (ts.get(name), ts.get_batch([name]), ts.stat(name)):
            with pytest.raises(ts.PartialPutError) as caught:
                await call
            assert caught.value.key == name
    with pytest.raises(ts.PartialPutError):
        await ts.get_state_dict(key)
    with pytest.raises(ts.PartialPutError):
        await ts.get_state_dict(key, _stage("first", 0, rows), strict=False)
    assert await ts.keys(key) == []
    assert not any(task.done() for task in waiting)

    assert await ts.put_state_dict(_stage("last", 1, rows), key, participants=2) == ref
    assert await waiting[0] == {key: ref}
    assert {r.version for r in (await waiting[1]).values()} == {1}
    assert_same(await waiting[2], {**_stage("first", 1, rows), **_stage("last", 1, rows)})
    assert await ts.keys(key) == [key] + [
        f"{key}/{n}.{x}" for n in ("first", "last") for x in ("step", "w")
    ]


@SIZES
async def test_readers_keep_the_version_before_until_all_have_put_theirs(shared, key, rows):
    names = [f"s{i}" for i in range(3)]
    for number in range(1, 4):
        for i, name in enumerate(names):
            await ts.put_state_dict(_stage(name, number, rows), key, participants=3)
            there = number if i == 2 else number - 1
            assert await ts.latest_version(key) == there
            if there:
                got = await ts.get_state_dict(key)
                assert [got[n]["step"] for n in names] == [there] * 3
                assert all((got[n]["w"] == there).all() for n in names)
                mine = {n: {"w": torch.zeros(rows, COLUMNS), "step": 0} for n in names}
                await ts.get_state_dict(key, mine)
                assert_same(mine, got)


async def test_the_nth_put_of_each_makes_the_nth_version(shared, key):
    """A fast participant may be ahead; what the slow ones complete is never a mixture."""
    for number in (1, 2, 3):
        ref = await ts.put_state_dict(_stage("fast", number), key, participants=2, keep=3)
        assert ref.version == number
    for number in (1, 2, 3):
        ref = await ts.put_state_dict(_stage("slow", number), key, participants=2, keep=3)
        assert ref.version == number
        assert await ts.latest_version(key) == number
    for number in (1, 2, 3):
        got = await ts.get_state_dict(key, version=number)
        assert (got["fast"]["step"], got["slow"]["step"]) == (number, number)


async def test_a_newer_whole_version_overtakes_older_unfinished_ones(shared, key):
    async def put(who: str, version: int) -> int:
        state_dict = _stage(who, version)
        return (
            await ts.put_state_dict(
                state_dict, key, participants=2, participant=who, version=version
            )
        ).version

    async def all_given_back() -> bool:
        return (await _status())[0] <= before  # what other tests held may go, too

    await ts.wait([])
    before = (await _status())[0]
    for version in (1, 2, 3):
        await put("a", version)
    assert await put("b", 3) == 3
    assert await ts.versions(key) == [3]
    assert (await ts.stat(key)).pending == []
    used = (await _status())[0]
    assert used - before < 2 * (300 * COLUMNS * 4 + 4096)  # what was overtaken is gone
    with pytest.raises(ts.VersionGoneError):
        await put("b", 2)
    await ts.delete(key)
    await until(all_given_back)


async def test_entries_of_all_participants_join_one_nested_dict(shared, key):
    first = {"layers": {0: {"w": torch.ones(2)}}, "embedding": torch.ones(1)}
    last = {"layers": {1: {"w": torch.zeros(2)}}, "head": [torch.ones(1), "x"]}
    await ts.put_state_dict(first, key, participants=2)
    await ts.put_state_dict(last, key, participants=2)
    expected = {
        "layers": {0: {"w": torch.ones(2)}, 1: {"w": torch.zeros(2)}},
        "embedding": torch.ones(1),
        "head": [torch.ones(1), "x"],
    }
    assert_same(await ts.get_state_dict(key), expected)


# ---- the same entry from several ----------------------------------------------------------


async def test_what_all_of_them_hold_is_stored_once(shared, key):
    before = (await _status())[0]
    replicated = torch.randn(300, COLUMNS)
    for who in range(4):
        state_dict = {"replicated": replicated, "own": {who: torch.arange(3)}}
        await ts.put_state_dict(state_dict, key, participants=4, participant=who)
    # Less than two of it; what an earlier test held may have come back meanwhile.
    assert (await _status())[0] - before <= replicated.nbytes + 4096
    found = await ts.stat(f"{key}/replicated")
    assert (found.parts, found.nbytes) == (1, replicated.nbytes)
    got = await ts.get_state_dict(key)
    assert torch.equal(got["replicated"], replicated)
    assert sorted(got["own"]) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.ones(300_001), r"float32 \[300001\].*float32 \[300000\]"),
        (torch.ones(300_000).half(), r"float16 \[300000\].*float32 \[300000\]"),
        (torch.ones(3), r"float32 \[3\]"),
        ("an object", r"an object.*float32 \[300000\]"),
    ],
    ids=["shape", "dtype", "small", "object"],
)
async def test_participants_that_disagree_are_told_and_may_put_again(shared, key, other, words):
    theirs = {"w": torch.ones(300_000), "first": 1}
    await ts.put_state_dict(theirs, key, participants=2, participant=0)
    gc.collect()
    await until(nothing_leased)  # what a test before this one has read is released, too
    used = await _status()
    wrong = {"w": other, "second": torch.ones(100_000)}
    with pytest.raises(ts.LayoutMismatchError, match=words) as caught:
        await ts.put_state_dict(wrong, key, participants=2, participant=1)
    assert str(caught.value).startswith(f"version 1 of {key!r}: 'w' comes as")
    assert await _status() == used
    assert not await ts.exists(key)
    right = {"w": torch.ones(300_000), "second": 2}
    assert (await ts.put_state_dict(right, key, participants=2, participant=1)).version == 1
    assert_same(await ts.get_state_dict(key), {**theirs, "second": 2})


async def test_a_put_that_does_not_fit_leaves_the_others_and_may_come_again():
    async with running_store(capacity=8 << 20, store_name="tiny") as tiny:
        await tiny.put_state_dict({"a": torch.ones(1 << 20)}, "k", participants=2)
        with pytest.raises(ts.StoreFullError):
            await tiny.put_state_dict({"b": torch.ones(2 << 20)}, "k", participants=2)
        with pytest.raises(ts.PartialPutError):
            await tiny.get("k")
        ref = await tiny.put_state_dict({"b": torch.ones(1 << 18)}, "k", participants=2)
        assert ref.version == 1
        got = await tiny.get_state_dict("k")
        assert (got["a"].numel(), got["b"].numel()) == (1 << 20, 1 << 18)
        del got


async def test_participants_must_agree_on_their_number(shared, key):
    state_dict = {"w": torch.ones(3)}
    await ts.put_state_dict(state_dict, key, participants=2, participant=0, version=5)
    with pytest.raises(ts.VersionGoneError, match="another number of participants"):
        await ts.put_state_dict(state_dict, key, participants=3, participant=1, version=5)
    assert not await ts.exists(key)
    await ts.put_state_dict(state_dict, key, participants=2, participant=1, version=5)
    assert await ts.versions(key) == [5]


async def test_a_participant_may_put_a_version_again_before_it_is_whole(shared, key):
    for number in (1, 2):
        await ts.put_state_dict(
            _stage("a", number), key, participants=2, participant="a", version=4
        )
    await ts.put_state_dict(_stage("b", 2), key, participants=2, participant="b", version=4)
    got = await ts.get_state_dict(key)
    assert (got["a"]["step"], got["b"]["step"]) == (2, 2)
    assert (got["a"]["w"] == 2).all()


async def test_two_participants_publish_some_entries(shared, key):
    for i in range(2):
        state_dict = {
            f"s{i}": torch.full((300, COLUMNS), float(i)),
            f"kept{i}": torch.ones(300, COLUMNS),
        }
        await ts.put_state_dict(state_dict, key, participants=2)
    before = (await _status())[0]
    for i in range(2):
        changed = {f"s{i}": torch.full((300, COLUMNS), 10.0 + i)}
        ref = await ts.put_state_dict(
            changed, key, participants=2, participant=i, partial=True, version=2
        )
        assert await ts.latest_version(key) == 1 + i
        assert (await ts.get(f"{key}/s0"))[0, 0] == 10 * i
    assert ref.version == 2
    got = await ts.get_state_dict(key)
    assert {name: tensor[0, 0].item() for name, tensor in got.items()} == {
        "s0": 10,
        "kept0": 1,
        "s1": 11,
        "kept1": 1,
    }
    assert (await _status())[0] - before < 3 * 300 * COLUMNS * 4


async def test_some_entries_wait_for_the_version_that_has_the_others(shared, key):
    async def put(who: int, state_dict: dict[str, Any], version: int, **how: Any) -> None:
        await ts.put_state_dict(
            state_dict, key, participants=2, participant=who, version=version, keep=2, **how
        )

    await put(0, {"a": 1, "b": 1}, 1)
    for who in range(2):
        await put(who, {f"new{who}": 2}, 2, partial=True)
        assert await ts.versions(key) == []
    await put(1, {"c": 1}, 1)
    assert await ts.versions(key) == [1, 2]
    assert await ts.get_state_dict(key, version=1) == {"a": 1, "b": 1, "c": 1}
    assert await ts.get_state_dict(key) == {"a": 1, "b": 1, "c": 1, "new0": 2, "new1": 2}


async def test_a_delete_forgets_what_was_under_way(shared, key):
    await ts.put_state_dict({"w": torch.ones(300_000)}, key, participants=2, participant=0)
    assert (await _pending(key)).committed == ["0"]
    await ts.delete(key)
    with pytest.raises(ts.KeyNotFoundError, match="no such key") as caught:
        await ts.get(key)
    assert type(caught.value) is ts.KeyNotFoundError
    ref = await ts.put_state_dict({"w": torch.zeros(2)}, key, participants=2, participant=1)
    assert ref.version == 2
    assert not await ts.exists(key)
    await ts.put_state_dict({"w": torch.zeros(2)}, key, participants=2, participant=0)
    assert (await ts.get_state_dict(key))["w"].tolist() == [0, 0]


# ---- the error ----------------------------------------------------------------------------


async def test_the_error_says_who_has_put_what_and_what_to_do(shared, key):
    for who in ("actor", "critic"):
        await ts.put_state_dict({who: torch.ones(3)}, key, participants=4, participant=who)
    with pytest.raises(ts.PartialPutError) as caught:
        await ts.get_state_dict(key)
    error = caught.value
    assert isinstance(error, KeyError)
    assert isinstance(error, ts.KeyNotFoundError)
    assert (error.code, error.key) == ("partial-put", key)
    assert str(error) == (
        f"{key!r} is not whole yet: of version 1, 2 of 4 participants have put theirs "
        f"(actor, critic). Wait for it with `await ts.wait({key!r})`"
    )
    assert error.details == {
        "version": 1,
        "missing": [],
        "participants": 4,
        "committed": ["actor", "critic"],
        "writing": [],
        "missing_participants": [],
        "key": key,
        "nbytes": 24,
    }
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.details) == (type(error), str(error), error.details)
    with pytest.raises(KeyError):
        await ts.get(f"{key}/actor")
