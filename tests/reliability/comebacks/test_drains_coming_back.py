"""A server that is killed while a volume is drained comes back, and goes on with it."""

from __future__ import annotations

import asyncio
import functools
import gc
from pathlib import Path

import torch
from tests.reliability.harness import MB, children_of, is_running, kill
from tests.support import halt, running_store, until

import torchstore_core as ts


def value(seed: int, nbytes: int = MB) -> torch.Tensor:
    return torch.full((nbytes // 4,), float(seed))


async def _copiers() -> set[int]:
    """Those that are copying something for the server that runs now."""
    status = await ts.status()
    copying = any(volume.unfinished_bytes for volume in status.volumes)
    return children_of(status.controller_pid) if copying else set()


def _ended(pids: set[int]) -> bool:
    return not any(map(is_running, pids))


async def _empty(volume: int) -> bool:
    return not (await ts.status()).volumes[volume].used_bytes


async def test_draining_goes_on_and_nothing_is_lost() -> None:
    """By default a store of several volumes has a keeper; what is read meanwhile stays as it is."""
    async with running_store(
        num_storage_volumes=3,
        capacity=192 * MB,
        strategy="hash",
        repair_bandwidth=8 * MB,
        timeout=200,
    ):
        there = {f"k{at}": value(at) for at in range(60)}
        await ts.put_batch(there)
        older, newer = ({"a": value(100 + at), "b": value(200 + at)} for at in range(2))
        for entries in (older, newer):
            await ts.put_state_dict(entries, "sd", keep=2)
        mapped = await ts.get_batch(list(there))
        lives = {(await ts.status()).controller_pid}
        before = (await ts.status()).volumes[0].used_bytes
        assert before > 8 * MB
        assert not (await ts.drain(0, wait=False)).done
        for at in range(2):
            copiers = await until(_copiers, 30)
            server = (await ts.status()).controller_pid
            for copier in copiers:  # nobody can know what it would still write
                await halt(copier)
            kill(server)
            there[f"new{at}"] = value(300 + at)
            await ts.put(f"new{at}", there[f"new{at}"])
            status = await ts.status()
            lives.add(status.controller_pid)
            assert status.volumes[0].draining
            await until(functools.partial(_ended, copiers), 10)
        assert len(lives) == 3
        assert all(torch.equal(mapped[key], there[key]) for key in mapped)
        del mapped
        gc.collect()
        await until(functools.partial(_empty, 0), 60)
        kill((await ts.status()).controller_pid)
        for key, tensor in there.items():
            assert torch.equal(await ts.get(key, torch.empty_like(tensor)), tensor)
        for version, entries in enumerate((older, newer), 1):
            got = await ts.get_state_dict("sd", version=version)
            assert all(torch.equal(got[name], entries[name]) for name in entries)
        del got
        await ts.delete_batch(await ts.keys())
        gc.collect()
        for volume in range(3):
            await until(functools.partial(_empty, volume), 30)


async def test_a_store_that_spills_goes_on_with_it(tmp_path: Path) -> None:
    """Killed while values go to disk, come back and are copied; none of them is lost."""
    async with running_store(
        num_storage_volumes=2,
        capacity=64 * MB,
        strategy="spread",
        repair_bandwidth=16 * MB,
        spill=tmp_path,
        when_full="spillable",
        timeout=200,
    ):
        there: dict[str, torch.Tensor] = {}
        for at in range(60):
            there[f"k{at}"] = value(at, 2 * MB)
            await ts.put(f"k{at}", there[f"k{at}"])
        mapped = await ts.get("k59")
        lives = {(await ts.status()).controller_pid}
        assert not (await ts.drain(0, wait=False)).done
        for at in range(3):
            reading = asyncio.ensure_future(ts.get(f"k{at}"))
            kill((await ts.status()).controller_pid)
            there[f"new{at}"] = value(300 + at, 2 * MB)
            await ts.put(f"new{at}", there[f"new{at}"])
            assert torch.equal(await reading, there[f"k{at}"])
            status = await ts.status()
            lives.add(status.controller_pid)
            assert status.volumes[0].draining
            del reading
        assert len(lives) == 4
        assert torch.equal(mapped, there["k59"])
        del mapped
        gc.collect()
        assert (await ts.drain(0)).done
        kill((await ts.status()).controller_pid)
        for key, tensor in there.items():
            assert torch.equal(await ts.get(key, torch.empty_like(tensor)), tensor), key
        assert await _empty(0)
        assert (await ts.drain(0, undo=True)).draining is False
        await ts.delete_batch(list(there))
        gc.collect()
        for volume in range(2):
            await until(functools.partial(_empty, volume), 30)
