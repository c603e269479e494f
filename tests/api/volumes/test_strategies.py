"""Strategies in running stores of several volumes: where values lie, and how their bytes move."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from tests.processes import run_script
from tests.support import SMALL, bits, emptied, running_store, until

import torchstore_core as ts
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.testing import StrategyConformance
from torchstore_strategies import (
    ControllerStorageVolumes,
    HashStrategy,
    HostStrategy,
    LocalRankStrategy,
    ReplicatedStrategy,
    SingletonStrategy,
    SpreadStrategy,
)

LARGE = 300_000  # bytes: more than what rides in a message


def data(seed: int, nbytes: int = LARGE) -> torch.Tensor:
    return torch.randint(
        0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


async def volume_of(key: str) -> str:
    return (await ts.stat(key)).volume


@pytest.fixture(scope="module")
def hashed() -> Iterator[None]:
    asyncio.run(ts.initialize(3, HashStrategy(), "hashed", **SMALL))
    yield
    asyncio.run(ts.shutdown("hashed"))


@pytest.fixture
async def by_hash(hashed: None) -> AsyncIterator[ts.Client]:
    client = await ts.client("hashed")
    yield client
    await emptied(client)


async def test_a_key_has_its_volume_alone_and_in_a_batch(by_hash: ts.Client) -> None:
    tensors = {f"k{i}": data(i) for i in range(12)}
    await by_hash.put_batch(tensors)
    batched = {key: (await by_hash.stat(key)).volume for key in tensors}
    assert set(batched.values()) == {"hashed-0", "hashed-1", "hashed-2"}
    got = await by_hash.get_batch(list(tensors))
    assert all(torch.equal(got[key], tensor) for key, tensor in tensors.items())
    for key in tensors:
        await by_hash.put(key, data(99))
        assert (await by_hash.stat(key)).volume == batched[key]
    out = await run_script(
        f"""
        client = await ts.connect({by_hash.address!r}, store_name="there")
        await client.put("k3", torch.zeros({LARGE}, dtype=torch.uint8))
        print((await client.stat("k3")).volume)
        """
    )
    assert out.strip() == batched["k3"], "from another process, too"


async def test_many_tensors_in_columns_have_the_volumes_of_their_keys(by_hash: ts.Client) -> None:
    many = {f"m{i}": data(i, 4000 + 1000 * (i % 3)) for i in range(60)}
    await by_hash.keys()  # what joins the store with a put puts one by one
    await by_hash.put_batch(many)
    got = await by_hash.get_batch(list(many))
    assert all(torch.equal(got[key], tensor) for key, tensor in many.items())
    batched = [(await by_hash.stat(key)).volume for key in list(many)[:6]]
    await by_hash.delete_batch(list(many))
    for key in list(many)[:6]:
        await by_hash.put(key, data(99))
    assert [(await by_hash.stat(key)).volume for key in list(many)[:6]] == batched
    assert len(set(batched)) > 1


async def test_entries_of_a_state_dict_are_spread_like_keys(by_hash: ts.Client) -> None:
    state = {"layers": [{"w": data(i), "b": data(i, 100)} for i in range(8)], "step": 3}
    await by_hash.put_state_dict(state, "sd")
    got = await by_hash.get_state_dict("sd")
    assert got["step"] == 3
    for one, other in zip(got["layers"], state["layers"], strict=True):  # type: ignore[call-overload]
        assert torch.equal(one["w"], other["w"])
        assert torch.equal(one["b"], other["b"])
    names = [key for key in await by_hash.keys("sd/") if key.endswith("w")]
    assert len(names) == 8
    places = [(await by_hash.stat(name)).volume for name in names]
    assert len(set(places)) > 1
    into: Any = {"layers": [{"w": torch.zeros_like(data(0))} for _ in range(8)]}
    report = ts.StateDictReport()
    await by_hash.get_state_dict("sd", into, strict=False, report=report)
    assert all(torch.equal(into["layers"][i]["w"], data(i)) for i in range(8))
    used = [v.used_bytes for v in (await by_hash.status()).volumes]
    assert all(used)


async def test_all_shards_of_a_tensor_lie_on_the_volume_of_its_key(by_hash: ts.Client) -> None:
    whole = data(5, 4 * LARGE)
    for at in range(4):
        part = ts.TensorSlice((at * LARGE,), (LARGE,), (4 * LARGE,), (4,), (at,))
        await by_hash.put("t", ts.TensorShard(whole[at * LARGE : (at + 1) * LARGE], part))
    assert re.fullmatch(r"hashed-\d", (await by_hash.stat("t")).volume)
    assert torch.equal(await by_hash.get("t"), whole)


async def test_spread_fills_the_emptiest() -> None:
    async with running_store(num_storage_volumes=3, strategy="spread"):
        seen = []
        for i in range(6):
            await ts.put(f"k{i}", data(i))
            seen.append(await volume_of(f"k{i}"))
        assert set(Counter(seen).values()) == {2}


async def test_replicas_lie_in_several_volumes_and_are_all_there() -> None:
    strategy = ReplicatedStrategy(HashStrategy(), copies=2)
    async with running_store(num_storage_volumes=3, strategy=strategy) as client:
        tensors = {f"k{i}": data(i) for i in range(6)}
        await client.put_batch(tensors)
        many = {
            f"m{i}": data(i, 4000 + 1000 * (i % 3)) for i in range(60)
        }  # so many come in columns
        await client.put_batch(many)
        tensors |= many
        await client.put("strided", data(7).view(-1, 100).t())
        await client.put("small", 7)
        found = await client.stat("k0")
        assert found.copies == 2
        assert len(set(found.volume.split("+"))) == 2
        assert (await client.stat("small")).copies == 1, "it lies with the controller"
        used = [v.used_bytes for v in (await client.status()).volumes]
        assert sum(used) >= 2 * (7 * LARGE + 60 * 4000)
        got = await client.get_batch([*tensors, "strided", "small"])
        assert all(torch.equal(got[key], tensor) for key, tensor in tensors.items())
        assert torch.equal(bits(got["strided"]), bits(data(7).view(-1, 100).t()))
        await client.put_state_dict({"a": data(1), "b": {"c": data(2)}}, "sd")
        into = {"a": torch.zeros_like(data(1)), "b": {"c": torch.zeros_like(data(2))}}
        await client.get_state_dict("sd", into)
        assert torch.equal(into["b"]["c"], data(2))  # type: ignore[index]
        del got
        await client.delete_batch([*tensors, "strided", "small", "sd"])

        async def empty() -> bool:
            return not any(v.used_bytes for v in (await client.status()).volumes)

        await until(empty)


async def test_too_large_for_all_copies_is_full_and_changes_nothing() -> None:
    async with running_store(num_storage_volumes=2, strategy="replicated", capacity=32 << 20):
        await ts.put("k", data(1))
        used = [v.used_bytes for v in (await ts.status()).volumes]
        with pytest.raises(ts.StoreFullError):
            await ts.put("k", torch.zeros(17 << 20, dtype=torch.uint8))
        assert [v.used_bytes for v in (await ts.status()).volumes] == used
        assert torch.equal(await ts.get("k"), data(1))


# ---- transports ---------------------------------------------------------------------------


async def test_a_strategy_forces_a_transport_for_all_bytes() -> None:
    async with running_store(strategy=HostStrategy(transport="shm")) as client:
        (volume,) = await client.explain(1)
        assert (volume["forced"], volume["chosen"], volume["inline_up_to"]) == ("shm", "shm", -1)
        assert "forces transport 'shm'" in volume["refusals"]["inline"]
        await client.put("k", 5)
        assert (await client.stat("k")).segment == 0, "small values, too"
        assert await client.get("k") == 5
        await client.put("none", torch.zeros(0))
        assert (await client.get("none")).numel() == 0


async def test_what_a_forced_transport_cannot_serve_fails_and_says_why() -> None:
    async with running_store(strategy=SingletonStrategy(transport="inline")) as client:
        await client.put("small", data(1, 1000))
        assert torch.equal(await client.get("small"), data(1, 1000))
        with pytest.raises(ts.TransportUnavailableError, match="strategy forces") as caught:
            await client.put("large", data(1, 8 << 20))
        assert caught.value.details["forced"] == "inline"
        assert await client.keys() == ["small"]


@pytest.mark.parametrize("transport", ["carrier-pigeon", ("shm", "carrier-pigeon"), ""])
async def test_a_transport_that_nobody_has_is_refused_at_once(transport: Any) -> None:
    with pytest.raises(ts.ConfigurationError, match="transport="):
        await ts.initialize(strategy=HashStrategy(transport=transport), **SMALL)
    env = ts.SPMDEnv(0, 0, 1, 1, "127.0.0.1", 29_599)
    with pytest.raises(ts.ConfigurationError, match="transport="):
        await ts.initialize_spmd(env=env, strategy=HashStrategy(transport=transport), **SMALL)


async def test_what_the_user_blocks_stays_blocked() -> None:
    strategy = HostStrategy(transport="shm")
    async with running_store(strategy=strategy) as owner:
        client = await ts.connect(owner.address, store_name="blocking", block=["shm"])
        try:
            with pytest.raises(ts.TransportUnavailableError, match="shm: blocked"):
                await client.put("k", data(1))
            with pytest.raises(ts.TransportUnavailableError):
                await client.put("k", 1)
        finally:
            await ts.shutdown("blocking")
        await owner.put("k", data(1))


async def test_a_strategy_prefers_transports_and_the_user_comes_first() -> None:
    async with running_store(strategy=HostStrategy(transport=("inline", "shm"))) as owner:
        (volume,) = await owner.explain(1000)
        assert volume["chosen"] == "inline"
        limit = volume["inline_up_to"]
        assert limit > 70_212, "as far as it takes it, not as far as it is cheapest"
        await owner.put("k", data(1, 200_000))
        assert (await owner.stat("k")).segment == -1
        client = await ts.connect(owner.address, store_name="other", prefer=["shm"])
        try:
            (volume,) = await client.explain(1000)
            assert volume["chosen"] == "shm"
        finally:
            await ts.shutdown("other")


# ---- names --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["singleton", "local-rank", "host", "hash", "spread", "replicated"]
)
async def test_all_are_known_by_name(name: str) -> None:
    async with running_store(num_storage_volumes=2, strategy=name) as client:
        await client.put("k", data(1))
        assert torch.equal(await client.get("k"), data(1))
        assert (await client.status()).strategy == name


async def test_what_is_no_strategy_is_refused() -> None:
    with pytest.raises(ts.PluginError, match="derived from Strategy"):
        await ts.initialize(strategy=3, **SMALL)  # type: ignore[arg-type]
    with pytest.raises(ts.PluginError, match="is its package installed here"):
        await ts.initialize(strategy="none-such", **SMALL)
    with pytest.raises(ts.PluginError, match=r"'hsh'.*did you mean 'hash'"):
        await ts.initialize(strategy="hsh", **SMALL)


def test_the_names_that_users_know_lead_to_them() -> None:
    assert ts.LocalRankStrategy is LocalRankStrategy
    assert ts.ControllerStorageVolumes is ControllerStorageVolumes is SingletonStrategy
    assert ts.ReplicatedStrategy(ts.HashStrategy(), copies=3).copies == 3
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['torchstore_strategies'] = None\n"
            "import torchstore_core as ts\n"
            "try:\n    ts.HashStrategy\nexcept ts.PluginError as error:\n    print(error)\n",
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert "pip install torchstore-strategies" in done.stdout


# ---- the kit ------------------------------------------------------------------------------


@pytest.mark.thorough
class TestSingleton(StrategyConformance):
    uses_all = False

    def make(self) -> Strategy:
        return SingletonStrategy()


@pytest.mark.thorough
class TestLocalRank(StrategyConformance):
    def make(self) -> Strategy:
        return LocalRankStrategy(transport="shm")


@pytest.mark.thorough
class TestHost(StrategyConformance):
    def make(self) -> Strategy:
        return HostStrategy(transport=("shm", "inline"))


@pytest.mark.thorough
class TestHash(StrategyConformance):
    def make(self) -> Strategy:
        return HashStrategy()


@pytest.mark.thorough
class TestSpread(StrategyConformance):
    def make(self) -> Strategy:
        return SpreadStrategy()


class TestReplicated(StrategyConformance):
    def make(self) -> Strategy:
        return ReplicatedStrategy(HashStrategy(transport="shm"), copies=3)


@pytest.mark.thorough
class TestReplicatedSingleton(StrategyConformance):
    def make(self) -> Strategy:
        return ReplicatedStrategy(SingletonStrategy())
