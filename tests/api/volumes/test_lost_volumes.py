"""Volumes that die while their store goes on: in processes of their own, killed."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
import torch
from tests.api.volumes.killable import LARGE, connected, data, lost, store_of
from tests.support import until

import torchstore_core as ts
from torchstore_cli import main as torchstore
from torchstore_core.testing.timers import within
from torchstore_strategies import HashStrategy, ReplicatedStrategy


def mapped() -> int:
    """How many mappings of this process are memory of the volume that is killed."""
    return Path("/proc/self/maps").read_text().count("lossy-1")


async def test_what_only_a_killed_volume_had_is_lost_and_all_else_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with store_of(HashStrategy()) as store:
        async with connected(store) as client:
            tensors = {f"k{i}": data(i) for i in range(12)}
            await client.put_batch(tensors)
            await client.put("small", 5)
            where = {key: (await client.stat(key)).volume for key in tensors}
            gone = [key for key in tensors if where[key] == "lossy-1"]
            there = [key for key in tensors if where[key] != "lossy-1"]
            assert len(gone) > 2
            assert there
            held = await client.get(gone[0])  # zero-copy: memory of the volume
            before = mapped()
            store.kill(1)
            await lost(client, 1)

            async with within(2):
                with pytest.raises(ts.ObjectLostError, match="lossy-1") as caught:
                    await client.get(gone[0])
            assert caught.value.key == gone[0]
            assert caught.value.details["volume"] == "lossy-1"
            with pytest.raises(ts.ObjectLostError):
                await client.get_batch([*there, gone[-1]])
            got = await client.get_batch([*there, "small"])
            assert all(torch.equal(got[key], tensors[key]) for key in there)
            assert got["small"] == 5
            assert not await client.exists(gone[0])
            assert await client.exists(there[0])
            assert set(gone) <= set(await client.keys())
            assert (await client.stat(gone[0])).lost
            assert torch.equal(held, tensors[gone[0]]), "what is mapped stays"
            await until(lambda: mapped() < before)  # the window is closed

            with pytest.raises(ts.StoreTimeoutError):
                await client.wait(gone[0], timeout=0.1)
            waiting = asyncio.create_task(client.wait(gone[0]))
            again = data(77)
            await client.put(gone[0], again)
            assert (await waiting)[gone[0]].version == 2
            assert torch.equal(await client.get(gone[0]), again)
            await client.delete(gone[-1])
            assert gone[-1] not in await client.keys()

            status = await client.status()
            volume = status.volumes[1]
            assert volume.lost
            assert volume.free_bytes == volume.leased_bytes == 0
            assert volume.used_bytes < LARGE, "only small values, which lie with the controller"
            for words, says in (
                (["status"], "lost: lossy-1"),
                (["stat", gone[-2]], "lost"),
                (["ls"], f"{gone[-2]} (lost)"),
            ):
                words += ["--address", store.address]
                assert await asyncio.to_thread(torchstore, words) == 0
                assert says in capsys.readouterr().out
            del held, got
            gc.collect()

        async with connected(store) as late:  # who comes now is told, too
            assert torch.equal(await late.get(there[0]), tensors[there[0]])
            await late.put("new", data(5))
            with pytest.raises(ts.ObjectLostError):
                await late.get(gone[1])


@pytest.mark.thorough
async def test_with_copies_nothing_is_lost_until_the_last_one_is() -> None:
    with store_of(ReplicatedStrategy(HashStrategy(), copies=2)) as store:
        async with connected(store) as client:
            tensors = {f"k{i}": data(i) for i in range(8)}
            await client.put_batch(tensors)
            await client.put_state_dict({"a": data(50), "b": {"c": data(51)}}, "sd")
            half = 2 * LARGE
            for at in range(2):
                part = ts.TensorSlice((at * LARGE,), (LARGE,), (half,), (2,), (at,))
                await client.put("t", ts.TensorShard(data(60 + at), part))
            store.kill(0)
            # No waiting: whether or not the server has noticed, there is a copy.
            got = await client.get_batch(list(tensors))
            assert all(torch.equal(got[key], tensor) for key, tensor in tensors.items())
            await lost(client, 1)
            state = await client.get_state_dict("sd")
            assert torch.equal(state["b"]["c"], data(51))
            assert torch.equal(await client.get("t"), torch.cat([data(60), data(61)]))
            await client.put("k0", data(90))
            assert (await client.stat("k0")).copies == 2
            one_copy = {key for key in tensors if (await client.stat(key)).copies == 1}
            store.kill(1)
            await lost(client, 2)
            places = {key: (await client.stat(key)) for key in tensors}
            alive = [key for key, found in places.items() if not found.lost]
            assert "k0" in alive
            for key, found in places.items():
                if found.lost:
                    assert key in one_copy
                    with pytest.raises(ts.ObjectLostError):
                        await client.get(key)
                elif key != "k0":
                    assert torch.equal(await client.get(key), tensors[key])
            await client.put("k1", data(91))  # one volume, one copy
            assert torch.equal(await client.get("k1"), data(91))
            store.kill(2)
            await lost(client, 3)
            with pytest.raises(ts.StoreFullError, match="all volumes are lost"):
                await client.put("k1", data(92))
            assert await client.keys("k") == sorted(tensors)
            del got


@pytest.mark.thorough
async def test_a_get_turns_to_another_copy_when_a_volume_cannot_be_reached() -> None:
    """The server knows nothing of it: the client asks again, and says which to leave out."""
    with store_of(ReplicatedStrategy(HashStrategy(), copies=2)) as store:
        tensors = {f"k{i}": data(i) for i in range(12)}
        async with connected(store) as client:
            await client.put_batch(tensors)
            await client.put_state_dict(tensors, "sd")
            places = {key: (await client.stat(key)).volume for key in tensors}
        assert {place[:7] for place in places.values()} == {"lossy-0", "lossy-1", "lossy-2"}
        store.hide(0)
        context = connected(store, block=["tcp"])
        with pytest.warns(RuntimeWarning, match="lossy-0 is not ready"):
            client = await context.__aenter__()
        try:
            got = await client.get_batch(list(tensors))
            assert all(torch.equal(got[key], tensor) for key, tensor in tensors.items())
            into = {key: torch.zeros_like(tensors[key]) for key in tensors}
            await client.get_state_dict("sd", into)
            assert all(torch.equal(into[key], tensors[key]) for key in into)
            for key in tensors:
                assert torch.equal(await client.get(key, torch.zeros_like(data(0))), tensors[key])
            assert not (await client.status()).volumes[0].lost
            # A put needs all of its copies; what is not written is not visible.
            used = [v.used_bytes for v in (await client.status()).volumes]
            here = next(key for key in tensors if "lossy-0" in places[key])
            with pytest.raises(ts.TransportUnavailableError, match="volume lossy-0 cannot be"):
                await client.put(here, data(99))
            assert torch.equal(await client.get(here), tensors[here])
            await until_used(client, used)
        finally:
            del got
            await context.__aexit__(None, None, None)
        store.hide(1)
        context = connected(store, block=["tcp"])
        with pytest.warns(RuntimeWarning, match=r"lossy-. is not ready"):
            client = await context.__aenter__()
        try:
            for key, place in places.items():
                if "lossy-2" in place:
                    assert torch.equal(await client.get(key), tensors[key])
                else:
                    with pytest.raises(ts.TransportUnavailableError, match="cannot be reached"):
                        await client.get(key)
            assert any("lossy-2" not in place for place in places.values())
        finally:
            await context.__aexit__(None, None, None)


async def until_used(client: ts.Client, wanted: list[int]) -> None:
    async def same() -> bool:
        return [v.used_bytes for v in (await client.status()).volumes] == wanted

    await until(same)
