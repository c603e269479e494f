"""Versions that wait for others: what builds on them, what they may hold up, and how they go."""

from __future__ import annotations

import asyncio

import pytest
import torch

import torchstore_core as ts
from torchstore_core import TensorShard, TensorSlice

MB = 1 << 20


def _shard(rank: int, number: float, rows: int = 256, **mesh: tuple[int, ...]) -> TensorShard:
    part = TensorSlice((rank * rows, 0), (rows, 1024), (2 * rows, 1024), **mesh)
    return TensorShard(torch.full((rows, 1024), float(number)), part)


async def test_a_partial_put_waits_for_the_version_that_it_builds_on(shared, k):
    await ts.put_state_dict({"w": torch.zeros(MB), "lora": 0}, k)
    whole = await ts.put_state_dict({"w": torch.ones(MB), "lora": 1}, k, blocking=False)
    part = await ts.put_state_dict({"lora": 2}, k, partial=True)
    assert (await whole).version < part.version
    await ts.wait(k, min_version=part.version)
    got = await ts.get_state_dict(k)
    assert (got["lora"], got["w"][0].item()) == (2, 1)


async def test_partial_puts_at_once_lose_nothing_of_each_other(shared, k):
    await ts.put_state_dict({f"w{i}": torch.zeros(MB // 4) for i in range(4)}, k)
    for number in (1.0, 2.0, 3.0):
        await asyncio.gather(
            *(
                ts.put_state_dict(
                    {f"w{i}": torch.full((MB // 4 if i % 2 else 8,), number)}, k, partial=True
                )
                for i in range(4)
            )
        )
        got = await ts.get_state_dict(k)
        assert {name: value[0].item() for name, value in got.items()} == dict.fromkeys(got, number)


async def test_a_partial_put_does_not_wait_for_what_has_been_given_up(shared, k):
    await ts.put_state_dict({"w": torch.zeros(MB), "lora": 0}, k)
    begun = asyncio.Event()

    async def never_ends() -> None:
        await ts.put_state_dict({"w": torch.ones(MB)}, k, blocking=False)
        begun.set()

    await never_ends()
    await begun.wait()
    ref = await ts.put_state_dict({"lora": 2}, k, partial=True)
    await ts.reset_client()  # whatever was under way is over, one way or the other
    await ts.wait(k, min_version=ref.version, timeout=10)
    assert (await ts.get_state_dict(k))["lora"] == 2


async def test_shards_with_a_mesh_say_how_many_put_them(shared, k):
    for rank in (0, 1):
        shard = _shard(rank, 1.0, mesh_shape=(2,), coordinates=(rank,))
        await ts.put_state_dict({"w": shard}, k)
    assert (await ts.get_state_dict(k))["w"].shape == (512, 1024)


async def test_shards_that_nobody_would_complete_are_refused(shared, k):
    with pytest.raises(ts.ConfigurationError, match="participants="):
        await ts.put_state_dict({"w": _shard(0, 1.0)}, k)
    for rank in (0, 1):  # one process for both: other shards are another participant
        await ts.put_state_dict({"w": _shard(rank, 1.0)}, k, participants=2)
    assert await ts.versions(k) == [1]


async def test_slices_of_nonsense_harm_nobody_else(shared, k):
    waiting = asyncio.ensure_future(ts.wait("later", timeout=30))
    for part in (
        TensorSlice((0.0,), (2,), (4,)),
        TensorSlice(("0",), (2,), (4,)),
        TensorSlice((0,), (2,), (1 << 70,)),
        TensorSlice((0,), (2,), (4,), (2,)),
        TensorSlice((0,), (2,), (4,), (2,), (2,)),
    ):
        with pytest.raises(ts.LayoutMismatchError):
            await ts.put(k, torch.ones(2), part)
    await ts.put("whole", torch.arange(4))
    with pytest.raises(ts.LayoutMismatchError):
        await ts.get("whole", tensor_slice_spec=TensorSlice((0.0,), (2,), (4,)))
    for nonsense in ({"partial": "no"}, {"participant": object()}, {"participants": 1 << 70}):
        with pytest.raises(ts.ConfigurationError):
            await ts.put_state_dict({"w": 1}, k, **nonsense)
    await ts.put("later", 1)
    assert (await waiting)["later"].version == 1


async def test_an_empty_optimizer_state_of_one_rank_joins_what_the_others_have(shared, k):
    step = torch.ones(3)
    await ts.put_state_dict({"opt": {}, "a": 1}, k, participants=2, participant=0)
    await ts.put_state_dict({"opt": {"s": step}, "b": 2}, k, participants=2, participant=1)
    got = await ts.get_state_dict(k)
    assert torch.equal(got.pop("opt")["s"], step)
    assert got == {"a": 1, "b": 2}


async def test_what_cannot_be_one_dict_can_be_got_by_name(shared, k):
    await ts.put_state_dict({"a": torch.ones(1)}, k)
    await ts.put_state_dict({"a": {"b": torch.zeros(1)}}, k, partial=True)
    with pytest.raises(ts.LayoutMismatchError, match="one by one"):
        await ts.get_state_dict(k)
    assert (await ts.get(f"{k}/a")).item() == 1
    assert (await ts.get(f"{k}/a.b")).item() == 0


async def test_a_version_that_is_not_there_yet_is_not_said_to_be_gone(shared, k):
    await ts.put_state_dict({"w": 1}, k)
    with pytest.raises(ts.VersionGoneError, match=f"no version 9 of '{k}' yet"):
        await ts.get_state_dict(k, version=9)
