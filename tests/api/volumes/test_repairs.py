"""Copies that were lost with a volume are made again, in the background."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time

import pytest
import torch
from tests.api.volumes.killable import LARGE, MB, Store, connected, data, lost, repaired, store_of
from tests.support import has_loaded, turn, until

import torchstore_core as ts
from torchstore_core.plugins.registry import Registry
from torchstore_core.server.memory.volume import Volume
from torchstore_core.server.remote.attached import VolumeConnection
from torchstore_strategies import HashStrategy, ReplicatedStrategy

COPIES = ReplicatedStrategy(HashStrategy(), copies=2)


async def test_copies_come_back_on_what_is_left() -> None:
    """Of every kind of value; and again, of what was put since, when the next volume is lost."""
    with store_of(COPIES, (64 * MB,) * 4) as store:
        async with connected(store) as client:
            tensors = {f"k{i}": data(i) for i in range(8)}
            await client.put_batch(tensors)
            await client.put_state_dict({"a": data(50), "b": {"c": data(51)}}, "sd", keep=2)
            await client.put_state_dict({"a": data(52), "b": {"c": data(53)}}, "sd", keep=2)
            held = await client.put_object(data(54))
            for at in range(2):
                part = ts.TensorSlice((at * LARGE,), (LARGE,), (2 * LARGE,), (2,), (at,))
                await client.put("t", ts.TensorShard(data(60 + at), part))
            begun = ts.TensorSlice((0,), (LARGE,), (2 * LARGE,), (2,), (0,))
            await client.put("half", ts.TensorShard(data(62), begun))
            await client.put("small", 5)
            for count, victim in enumerate((0, 1), 1):
                store.kill(victim)
                await lost(client, count)
                await repaired(client)
                assert (await client.status()).repair.copied_bytes > LARGE
                await client.put("k0", data(100 + victim))
                tensors["k0"] = data(100 + victim)
                for key in (*tensors, "sd", "t"):
                    assert (await client.stat(key)).copies == 2
            await comes_back(store, 0)
            store.kill(2)  # all is on the last one, too
            await lost(client, 3)
            got = await client.get_batch(list(tensors))
            assert all(torch.equal(got[key], tensor) for key, tensor in tensors.items())
            state = await client.get_state_dict("sd")
            assert torch.equal(state["b"]["c"], data(53))
            older = await client.get_state_dict("sd", version=1)
            assert torch.equal(older["a"], data(50))
            assert torch.equal(await client.get(held), data(54))
            assert torch.equal(await client.get("t"), torch.cat([data(60), data(61)]))
            rest = ts.TensorSlice((LARGE,), (LARGE,), (2 * LARGE,), (2,), (1,))
            await client.put("half", ts.TensorShard(data(63), rest))
            assert torch.equal(await client.get("half"), torch.cat([data(62), data(63)]))
            assert await client.get("small") == 5
            del got, state, older, held


async def comes_back(store: Store, index: int) -> None:
    """A new volume in the place of one that was lost is refused: clients know the other one."""
    with tempfile.TemporaryDirectory() as directory:
        volume = Volume("lossy", index, MB, Registry(), directory)
        try:
            info, path = await volume.start(), store.address.partition(":")[2]
            with pytest.raises(ts.ConfigurationError, match=f"does not wait for a volume {index}"):
                await VolumeConnection.open(path, volume, info, lambda: None, 30)
        finally:
            await volume.close()


@pytest.mark.thorough
async def test_what_is_deleted_or_replaced_meanwhile_is_not_repaired() -> None:
    """At a rate at which it would take minutes. Accounts are exact at the end."""
    with store_of(COPIES, (64 * MB,) * 3, repair_bandwidth=MB) as store:
        async with connected(store) as client:
            await client.put_batch({f"k{i}": data(i, 8 * MB) for i in range(4)})
            kept = await client.get("k0")  # leased while its copy is made
            store.kill(0)
            await lost(client, 1)
            await until(store.copiers, 30)
            before = (await client.status()).repair
            assert before.values
            for i in range(4):
                await client.put(f"k{i}", data(10 + i))
            await client.delete("k3")
            await repaired(client)
            assert torch.equal(kept, data(0, 8 * MB))
            del kept
            assert torch.equal(await client.get("k1"), data(11))

            async def exact() -> bool:
                volumes = (await client.status()).volumes[1:]
                used = sum(v.used_bytes for v in volumes)
                return used == 2 * 3 * ((LARGE + 63) // 64 * 64) and not any(
                    v.unfinished_bytes or v.leased_bytes for v in volumes
                )

            await until(exact, 20)
            assert (await client.stat("k1")).copies == 2


@pytest.mark.thorough
async def test_whatever_is_killed_during_repair() -> None:
    """A copier, then the volume that gets the copies; reads of a program go on all the while."""
    # So slow that it is not over before the last of them is killed.
    with store_of(COPIES, (64 * MB,) * 4, repair_bandwidth=8 * MB) as store:
        async with connected(store) as client:
            tensors = {f"k{i}": data(i, 2 * MB) for i in range(16)}
            await client.put_batch(tensors)
            reading = asyncio.create_task(read_on(client, tensors))
            store.kill(0)
            await lost(client, 1)
            for count in range(2):
                copied = (await client.status()).repair.copied_bytes

                async def copies_more(before: int = copied) -> bool:
                    return (await client.status()).repair.copied_bytes > before

                await until(store.copiers, 30)
                if count:
                    await until(copies_more, 30)
                for copier in store.copiers():
                    assert not has_loaded(copier.pid, "libtorch")  # 200 MB, for bytes
                    copier.send_signal(signal.SIGKILL)
            store.kill(await until(store.target, 30))
            await lost(client, 2)
            await repaired(client)
            reading.cancel()
            missing = 0
            for key, tensor in tensors.items():
                found = await client.stat(key)
                if found.lost:  # both of its copies were on what was killed
                    missing += 1
                    continue
                assert found.copies == 2
                assert torch.equal(await client.get(key), tensor)
            assert missing < len(tensors) / 2
            status = await client.status()
            assert not any(v.unfinished_bytes for v in status.volumes)


async def read_on(client: ts.Client, tensors: dict[str, torch.Tensor]) -> None:
    """Read everything, again and again, and compare it, at a pace that leaves room for repair."""
    while True:
        for key, tensor in tensors.items():
            await asyncio.sleep(0.02)
            try:
                assert torch.equal(await client.get(key), tensor)
            except ts.ObjectLostError:
                continue


@pytest.mark.thorough
async def test_a_target_without_room_gets_what_fits_and_the_rest_later() -> None:
    with store_of(COPIES, (64 * MB, 64 * MB, 24 * MB)) as store:
        async with connected(store) as client:
            await client.put_batch({f"k{i}": data(i, 4 * MB) for i in range(10)})
            store.kill(0)
            await lost(client, 1)

            async def stuck() -> bool:
                repair = (await client.status()).repair
                return bool(repair.stuck_values and repair.stuck_values == repair.values)

            await until(stuck, 60)
            status = await client.status()
            assert "no room" in status.repair.why
            assert "cannot be copied: no room" in str(status)
            here = [key for key in await client.keys() if await client.exists(key)]
            alone = [key for key in here if (await client.stat(key)).copies == 1]
            assert len(alone) == status.repair.stuck_values
            both = [key for key in here if key not in alone]
            for key in both[: len(alone)]:
                await client.delete(key)
            await repaired(client)
            for key in alone:
                assert (await client.stat(key)).copies == 2


@pytest.mark.thorough
async def test_no_more_than_the_bandwidth_is_used() -> None:
    """Counted in pages of the volumes' memory that are written to, not in what the store says."""
    rate = 4 * MB
    with store_of(COPIES, (64 * MB,) * 3, repair_bandwidth=rate) as store:
        async with connected(store) as client:
            await client.put_batch({f"k{i}": data(i, MB) for i in range(24)})
            store.kill(0)
            await lost(client, 1)
            samples: list[tuple[float, int, float]] = []

            async def sampled() -> bool:
                before = time.monotonic()
                samples.append((before, store.written(), time.monotonic()))
                repair = (await client.status()).repair
                return not (repair.values or repair.scanning)

            await until(sampled, 90)
            assert samples[-1][1] - samples[0][1] >= 8 * MB
            # What is copied in one step may be ahead of the rate, and so may a page of each value.
            step = rate // 8 + 24 * 4096
            for start, there, _ in samples[::20]:
                for _, later, end in samples:
                    assert later - there <= rate * max(0.0, end - start) + step
            assert (await client.status()).repair.bandwidth == rate


@pytest.mark.soak
async def test_one_volume_after_the_other_under_load() -> None:
    """Each is killed when what the one before had is repaired; everything that was acknowledged is
    there, and every read is of a version that was put, none older than the reader saw before.
    """
    volumes = 7
    with store_of(COPIES, (96 * MB,) * volumes, repair_bandwidth=64 * MB) as store:
        async with connected(store) as client:
            keys = [f"k{i}" for i in range(24)]
            acknowledged = dict.fromkeys(keys, 0)

            def content(key: str, version: int) -> torch.Tensor:
                return data(1000 * int(key[1:]) + version, LARGE)

            async def write(mine: list[str]) -> None:
                while True:
                    for key in mine:
                        version = acknowledged[key] + 1
                        try:
                            ref = await client.put(key, content(key, version))
                        except ts.ObjectLostError:  # of a put, while its volumes die: put it again
                            continue
                        assert ref.version >= version
                        acknowledged[key] = ref.version

            async def read() -> None:
                seen = dict.fromkeys(keys, 0)
                while True:
                    await turn()
                    for key in keys:
                        least = max(seen[key], acknowledged[key])
                        if not least:
                            continue
                        found = await client.stat(key)
                        assert found.version >= least
                        ref = ts.ObjectRef(key, found.version)
                        with contextlib.suppress(ts.VersionGoneError):
                            assert (await client.get(ref)).nbytes == LARGE
                        seen[key] = found.version

            tasks = [asyncio.create_task(write(keys[at::3])) for at in range(3)]
            tasks += [asyncio.create_task(read()) for _ in range(2)]
            for victim in range(volumes - 2):
                store.kill(victim)
                await lost(client, victim + 1)
                await repaired(client)
                assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            for task in tasks:
                with pytest.raises(asyncio.CancelledError):
                    await task
            for key in keys:
                found = await client.stat(key)
                assert found.version >= acknowledged[key] > 3
                assert found.copies == 2
                got = await client.get(key)
                assert torch.equal(got, content(key, found.version))
            assert not any(v.unfinished_bytes for v in (await client.status()).volumes)
