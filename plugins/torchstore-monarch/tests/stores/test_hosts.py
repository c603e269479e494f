"""Several (emulated) hosts: no shared memory between them, and only the engine connects them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monarch import acts, dtensors
from tests.monarch.jobs import Job
from tests.support import turn, until

import torchstore_core as ts

MB = 1 << 20
VOLUMES = {"torchstore-0": "host0", "torchstore-1": "host1"}


async def _tree(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.rand(500_000, generator=generator),
        "small": [torch.tensor(seed), {"n": seed}],
        "odd": torch.rand(37, 53, generator=generator).t(),
    }


async def _put_tree(key: str, seed: int) -> None:
    await ts.put_state_dict(await _tree(seed), key)


async def _tree_is_right(key: str, seed: int) -> bool:
    got, expected = await ts.get_state_dict(key), await _tree(seed)
    into = {**expected, "w": torch.zeros(500_000)}
    await ts.get_state_dict(key, into)
    return (
        torch.equal(got["w"], expected["w"])
        and torch.equal(into["w"], expected["w"])
        and torch.equal(got["odd"], expected["odd"])
        and int(got["small"][0]) == got["small"][1]["n"] == seed
    )


async def _volume_of(key: str) -> str:
    """On which host a key's bytes are; by the accounts before and after."""
    before = {v.id: v.used_bytes for v in (await ts.status()).volumes}
    await ts.delete(key)
    after = {v.id: v.used_bytes for v in (await ts.status()).volumes}
    (volume,) = [v for v in before if after[v] < before[v]]
    return VOLUMES[volume]


# ---- values -------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 100_000, MB, 33 * MB + 7])
async def test_put_on_one_host_get_on_every_other(hosts_store: Job, nbytes: int) -> None:
    await hosts_store.at(0, acts.put_ones, "from0", nbytes, 7)
    values = [7] if nbytes else []
    assert await hosts_store.at(1, acts.get_shape, "from0") == ((nbytes,), values)
    assert await hosts_store.at(0, acts.get_shape, "from0") == ((nbytes,), values)
    assert await hosts_store.root(acts.get_shape, "from0") == ((nbytes,), values)


async def test_put_where_there_is_no_volume(hosts_store: Job) -> None:
    """The root's host has none: all it says goes to the server, all it puts to other hosts."""
    await hosts_store.root(acts.put_ones, "root", 20 * MB, 9)
    for worker in (0, 1):
        assert await hosts_store.at(worker, acts.get_shape, "root") == ((20 * MB,), [9])


async def test_zero_copy_only_on_the_same_host(hosts_store: Job) -> None:
    await hosts_store.at(0, acts.put_ones, "mapped", 4 * MB)
    assert await hosts_store.at(0, acts.zero_copy, "mapped")
    assert not await hosts_store.at(1, acts.zero_copy, "mapped")
    assert not await hosts_store.root(acts.zero_copy, "mapped")


async def test_state_dicts(hosts_store: Job) -> None:
    for seed, writer in enumerate((0, 1)):
        await hosts_store.at(writer, _put_tree, "model", seed)
        assert await hosts_store.at(1 - writer, _tree_is_right, "model", seed)
        assert await hosts_store.root(_tree_is_right, "model", seed)


async def test_a_dtensor_across_both_hosts(hosts_store: Job, tmp_path: Path) -> None:
    group = str(tmp_path / "group")
    await asyncio.gather(*(hosts_store.at(i, dtensors.join_group, i, 2, group) for i in (0, 1)))
    try:
        await asyncio.gather(*(hosts_store.at(i, dtensors.put_dtensor, "dt", 0) for i in (0, 1)))
        for dim in (0, 1, None):
            got = await asyncio.gather(
                *(hosts_store.at(i, dtensors.get_dtensor, "dt", dim) for i in (0, 1))
            )
            assert got == [True, True]
        assert torch.equal(await hosts_store.root(acts.get, "dt"), dtensors.whole())
    finally:
        await asyncio.gather(*(hosts_store.at(i, dtensors.leave_group) for i in (0, 1)))


async def test_a_wait_for_another_host(hosts_store: Job) -> None:
    waiting = asyncio.create_task(hosts_store.at(1, acts.wait, "awaited"))
    await turn()
    await hosts_store.at(0, acts.put, "awaited", 5)
    await waiting
    with pytest.raises(ts.StoreTimeoutError):
        await hosts_store.at(1, acts.wait, "never", 0.2)


async def test_errors_cross_hosts_as_they_are(hosts_store: Job) -> None:
    with pytest.raises(ts.KeyNotFoundError, match="nothing") as caught:
        await hosts_store.at(0, acts.get, "nothing")
    assert caught.value.key == "nothing"
    with pytest.raises(ts.StoreFullError):
        await hosts_store.at(0, acts.put_ones, "huge", 300 * MB)
    await hosts_store.at(0, acts.put, "after", 1)


# ---- what is chosen, and what is shown ---------------------------------------------------


async def test_transports_and_status(hosts_store: Job, carrier: str) -> None:
    assert await hosts_store.at(0, acts.transports) == {
        "torchstore-0": "shm",
        "torchstore-1": carrier,
    }
    assert await hosts_store.at(1, acts.transports) == {
        "torchstore-0": carrier,
        "torchstore-1": "shm",
    }
    assert set((await hosts_store.root(acts.transports)).values()) == {carrier}
    status = await hosts_store.root(acts.status)
    assert {v.id: v.host_id for v in status.volumes} == VOLUMES
    assert len({v.pid for v in status.volumes}) == 2
    pids = {await hosts_store.at(i, acts.pid) for i in (0, 1)}
    assert pids | {hosts_store.pid} <= {session.pid for session in status.sessions}


async def test_the_host_strategy_keeps_bytes_where_they_are_put(hosts_store: Job) -> None:
    for worker, host in ((0, "host0"), (1, "host1")):
        await hosts_store.at(worker, acts.put_ones, "local", 2 * MB)
        assert await hosts_store.root(_volume_of, "local") == host


@pytest.mark.parametrize(
    "strategy",
    [*(pytest.param(name, marks=pytest.mark.soak) for name in ("hash", "spread")), "local-rank"],
)
async def test_other_strategies_over_hosts(hosts: Job, strategy: str) -> None:
    """Every volume can be written and read from every host, whatever the strategy says."""
    name = f"with-{strategy}"
    for rank in (0, 1):
        await hosts.at(rank, acts.set_rank, rank)
    await hosts.root(acts.initialize_on_hosts, {"strategy": strategy, "store_name": name})
    try:
        for writer in (0, 1):
            await hosts.at(writer, acts.put_tensors, f"w{writer}", 8, MB, name)
        for reader in (0, 1):
            for writer in (0, 1):
                assert await hosts.at(reader, acts.tensors_are_right, f"w{writer}", 8, MB, name)
        used = [v.used_bytes // MB for v in (await hosts.root(acts.status, name)).volumes]
        if strategy == "hash":
            assert sum(used) == 16
            assert all(used)
        else:
            assert used == [8, 8]
    finally:
        await hosts.root(acts.shutdown, name)


@pytest.mark.parametrize(
    ("volumes", "on"),
    [
        pytest.param(1, ["host0"], id="1", marks=pytest.mark.soak),
        pytest.param(3, ["host0", "host1", "host0"], id="3", marks=pytest.mark.soak),
    ],
)
async def test_hosts_take_turns(hosts: Job, volumes: int, on: list[str]) -> None:
    """One process more than there are volumes is no harm."""
    for worker in (0, 1):  # the engine starts them when they are first asked for something
        await hosts.at(worker, acts.pid)
    before = hosts.processes()
    given = {"store_name": "turns", "num_storage_volumes": volumes}
    await hosts.root(acts.initialize_on_hosts, given)
    try:
        await hosts.at(0, acts.put_tensors, "k", 3, MB, "turns")
        assert await hosts.at(1, acts.tensors_are_right, "k", 3, MB, "turns")
        status = await hosts.root(acts.status, "turns")
        assert [v.host_id for v in status.volumes] == on
        assert len({v.pid for v in status.volumes}) == volumes
    finally:
        await hosts.root(acts.shutdown, "turns")
    await until(lambda: not hosts.processes() - before, 10)


async def test_replicas_are_on_both_hosts(hosts: Job) -> None:
    name = "replicated"
    await hosts.root(
        acts.initialize_on_hosts,
        {"strategy": ts.ReplicatedStrategy(copies=2), "store_name": name},
    )
    try:
        await hosts.at(0, acts.put_tensors, "r", 4, MB, name)
        used = [v.used_bytes // MB for v in (await hosts.root(acts.status, name)).volumes]
        assert used == [4, 4]
        for reader in (0, 1):
            assert await hosts.at(reader, acts.tensors_are_right, "r", 4, MB, name)
    finally:
        await hosts.root(acts.shutdown, name)


# ---- fewer agents than hosts -------------------------------------------------------------


@pytest.mark.soak  # so do the tests of controllers, of ended actors, and of first calls
async def test_a_host_without_any_agent_has_a_relay_of_its_own(hosts: Job) -> None:
    name, before = "away", set(hosts.directories())
    # The engine starts a process on each host for the first actor there, which stays.
    await hosts.root(acts.initialize, {"store_name": name, "num_storage_volumes": 1})
    for host in (0, 1):
        await hosts.at(host, acts.put_tensors, "k", 1, MB, name)
    await hosts.root(acts.shutdown, name)
    await until(lambda: set(hosts.directories()) == before, 30)
    processes = hosts.processes()
    await hosts.root(acts.initialize, {"store_name": name, "num_storage_volumes": 1})
    await hosts.at(0, acts.put_tensors, "k", 3, MB, name)
    assert await hosts.at(1, acts.tensors_are_right, "k", 3, MB, name)
    assert await hosts.root(acts.tensors_are_right, "k", 3, MB, name)
    assert len(set(hosts.directories()) - before) == 4  # server, volume, two relays
    # Another one of the name: the relays of the old one are not taken for its.
    await hosts.root(acts.shutdown, name)
    await hosts.root(acts.initialize, {"store_name": name, "num_storage_volumes": 1})
    with pytest.raises(ts.KeyNotFoundError):
        await hosts.at(0, acts.tensors_are_right, "k", 1, MB, name)
    await hosts.at(1, acts.put_tensors, "k", 1, MB, name)
    assert await hosts.at(0, acts.tensors_are_right, "k", 1, MB, name)
    await hosts.at(1, acts.shutdown, name)
    await until(lambda: set(hosts.directories()) == before, 30)
    await until(lambda: hosts.processes() == processes, 30)


async def _stress(worker: int, rounds: int) -> int:
    """Puts and gets of random sizes to keys that the other host writes, too."""
    wrong = 0
    generator = torch.Generator().manual_seed(worker)
    for number in range(rounds):
        size = int(torch.randint(1, 3 * MB, (1,), generator=generator))
        await ts.put(f"s/{number % 3}", torch.full((size,), size % 251, dtype=torch.uint8))
        got = await ts.get(f"s/{(number + 1) % 3}") if number > 2 else None
        if got is not None:
            wrong += int((got != got.numel() % 251).sum())
    return wrong


async def test_both_hosts_write_and_read_the_same_keys(hosts_store: Job) -> None:
    wrong = await asyncio.gather(*(hosts_store.at(i, _stress, i, 30) for i in (0, 1)))
    assert wrong == [0, 0]

    async def free() -> bool:
        status = await hosts_store.root(acts.status)
        return all(v.leased_bytes == v.unfinished_bytes == 0 for v in status.volumes)

    await until(free, 10)
