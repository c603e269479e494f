"""Volumes that are emptied before they are taken away."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from tests.api.volumes.killable import (
    COPIER,
    LARGE,
    MB,
    REPAIRED_S,
    connected,
    data,
    lost,
    repaired,
    store_of,
)
from tests.support import running_store, until

import torchstore_core as ts
from torchstore_cli import main as torchstore
from torchstore_strategies import HashStrategy, ReplicatedStrategy

COPIES = ReplicatedStrategy(HashStrategy(), copies=2)


@pytest.fixture
async def local() -> AsyncIterator[ts.Client]:
    """A store with three volumes in one process."""
    async with running_store(num_storage_volumes=3, capacity=192 * MB, strategy="hash") as client:
        yield client


async def volume_of(client: ts.Client, key: str) -> str:
    return (await client.stat(key)).volume


async def used(client: ts.Client, index: int) -> int:
    return (await client.status()).volumes[index].used_bytes


async def test_what_is_on_a_volume_of_this_host_goes_to_the_others(
    local: ts.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the command, too; and readers keep what they have."""
    tensors = {f"k{i}": data(i) for i in range(12)}
    await local.put_batch(tensors)
    await local.put_state_dict({"a": data(50), "b": data(51)}, "sd", keep=2)
    await local.put_state_dict({"a": data(52), "b": data(53)}, "sd", keep=2)
    ref = await local.put("over", data(20))
    await local.hold(ref)
    name = await volume_of(local, "k0")
    index = int(name[-1])
    here = [key for key in tensors if await volume_of(local, key) == name]
    held = await local.get(here[0])  # zero-copy
    words = ["drain", name, "--wait", "0", "--json", "--address", local.address]
    assert await asyncio.to_thread(torchstore, words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["draining"]
    assert not report["done"]

    async def only_readers_are_left() -> bool:  # also those of the process that copies have ended
        now = await local.drain(name, wait=False)
        return 0 < now.leased_bytes == now.nbytes < 2 * LARGE

    await until(only_readers_are_left, REPAIRED_S)
    with pytest.raises(ts.StoreTimeoutError, match=r"leased by readers.*it goes on") as caught:
        await local.drain(name, timeout=2.0)
    assert caught.value.details["operation"] == "drain"
    status = await local.status()
    assert status.volumes[index].draining
    assert status.volumes[index].free_bytes == 0
    assert "; drained" in str(status)
    # Whoever reads it now reads another copy, and keeps nobody waiting.
    again = await local.get(here[0])
    assert torch.equal(held, tensors[here[0]])
    assert await used(local, index) > 0
    del held
    gc.collect()
    report = await local.drain(name, timeout=REPAIRED_S)
    assert report.done
    assert torch.equal(again, tensors[here[0]])
    await local.put_batch({f"new{i}": data(100 + i) for i in range(12)})
    assert await used(local, index) == 0
    got = await local.get_batch([*tensors, *(f"new{i}" for i in range(12))])
    assert all(torch.equal(got[key], tensor) for key, tensor in tensors.items())
    assert torch.equal(got["new3"], data(103))
    state, older = await local.get_state_dict("sd"), await local.get_state_dict("sd", version=1)
    assert torch.equal(state["a"], data(52))
    assert torch.equal(older["b"], data(51))
    assert await asyncio.to_thread(torchstore, ["status", "--address", local.address]) == 0
    assert f"drained: {name}" in capsys.readouterr().out

    words = ["drain", name, "--undo", "--address", local.address]
    assert await asyncio.to_thread(torchstore, words) == 0
    assert "in service" in capsys.readouterr().out
    await local.put("k0", data(200))
    assert await volume_of(local, "k0") == name


@pytest.mark.thorough
async def test_the_command_waits_until_that_is_in_vain(
    local: ts.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    await local.put_batch({f"k{i}": data(i) for i in range(6)})
    name = await volume_of(local, "k0")
    held = await local.get("k0")  # zero-copy
    words = ["drain", name, "--address", local.address]

    assert await asyncio.to_thread(torchstore, [*words, "--wait", "0.1"]) == 1
    assert re.search(r"being drained: .* after 0.1 s; it goes on", capsys.readouterr().err)
    before = (await local.status()).operations["Drain"]

    async def has_begun() -> bool:
        return (await local.status()).operations["Drain"] > before + 1

    waiting = asyncio.create_task(asyncio.to_thread(torchstore, words))
    await until(has_begun, REPAIRED_S)
    await local.drain(name, undo=True)
    assert await waiting == 1
    assert "was put back in service by somebody else" in capsys.readouterr().err
    assert torch.equal(held, data(0))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("does", "says"),
    [
        (f"if {COPIER!r} in sys.orig_argv: os._exit(3)", "no copier has started beside volume"),
        # Not the server, but what copies for it asks which transports to use.
        ("os.environ['TORCHSTORE_BLOCK'] = 'shm,tcp'", "no transport can move"),
    ],
    ids=["does not start", "cannot read"],
)
async def test_why_nothing_is_copied_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, says: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import os, sys\n{does}\n")
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    async with running_store(num_storage_volumes=2, capacity=64 * MB, strategy="hash") as client:
        await client.put("k", data(1))
        name = await volume_of(client, "k")
        assert not (await client.drain(name, wait=False)).done

        async def is_said() -> bool:
            return says in (await client.status()).repair.trouble

        await until(is_said, REPAIRED_S)
        assert await volume_of(client, "k") == name
        assert torch.equal(await client.get("k"), data(1))


@pytest.mark.thorough
async def test_a_release_that_was_installed_under_a_store_copies_nothing_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The copier is a new process, so it is of the new release. Its attempts are a line each."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nif {COPIER!r} in sys.orig_argv:\n"
        "    from torchstore_core.wire import messages\n    messages.PROTOCOL_VERSION += 1\n"
    )
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    async with running_store(num_storage_volumes=2, capacity=64 * MB, strategy="hash") as client:
        await client.put("k", data(1))
        assert not (await client.drain(await volume_of(client, "k"), wait=False)).done

        async def is_said() -> bool:
            return (
                "the log of the volume's process says why" in (await client.status()).repair.trouble
            )

        await until(is_said, REPAIRED_S)
        assert torch.equal(await client.get("k"), data(1))
    said = [line for line in capfd.readouterr().err.splitlines() if line]
    assert said
    assert all(re.match(r"torchstore copier \d+: this store .*speaks protocol", s) for s in said)


async def test_what_cannot_be_drained_says_so(local: ts.Client) -> None:
    with pytest.raises(ts.ConfigurationError, match="there is no volume 'x'"):
        await local.drain("x")
    with pytest.raises(ts.ConfigurationError, match="there is no volume '3'"):
        await local.drain(3)
    with pytest.raises(ts.UnsupportedValueError):
        await local.drain(None)  # type: ignore[arg-type]
    for index in (0, 1):
        assert (await local.drain(index, timeout=REPAIRED_S)).done
    with pytest.raises(ts.DrainError, match="no other volume of the store is in service") as caught:
        await local.drain(2)
    assert caught.value.details["volume"].endswith("-2")
    await local.put("k", data(1))  # it stays in service
    assert (await volume_of(local, "k")).endswith("-2")


@pytest.mark.thorough
async def test_full_volumes_take_what_fits_and_the_rest_when_there_is_room() -> None:
    async with running_store(
        num_storage_volumes=2, capacity=64 * MB, strategy="spread", repair_bandwidth=0
    ) as client:
        await client.put_batch({"a": data(1, 20 * MB)})
        await client.put_batch({"b": data(2, 20 * MB)})
        await client.put_batch({"c": data(3, 2 * MB)})
        await client.put_batch({"d": data(4, 2 * MB)})
        assert len({await volume_of(client, key) for key in "ab"}) == 2
        name = await volume_of(client, "a")
        with pytest.raises(ts.DrainError, match=r"cannot be moved: no room: 'a'") as caught:
            await client.drain(name, timeout=REPAIRED_S)
        assert caught.value.details["stuck_values"] == 1
        assert caught.value.details["stuck_bytes"] == 20 * MB
        assert await volume_of(client, "a") == name
        with pytest.raises(ts.DrainError):  # as long as nothing changes
            await client.drain(name, timeout=REPAIRED_S)
        with pytest.raises(ts.StoreFullError):
            await client.put("e", data(5, 9 * MB))
        await client.delete("b")
        assert (await client.drain(name, timeout=REPAIRED_S)).done
        for at, key in ((1, "a"), (3, "c"), (4, "d")):
            assert torch.equal(await client.get(key), data(at, (20 if at == 1 else 2) * MB))


@pytest.mark.thorough
async def test_nothing_is_lost_when_a_drained_volume_is_taken_away() -> None:
    """While programs write and read; with one copy of everything."""
    with store_of(HashStrategy(), (64 * MB,) * 3, repair_bandwidth=64 * MB) as store:
        async with connected(store) as client:
            values = {f"k{i}": 0 for i in range(24)}
            for key in values:
                await client.put(key, data(0))

            async def write_on() -> None:
                for step in range(1, 10_000):
                    for key in values:
                        await client.put(key, data(step))
                        values[key] = step
                        assert torch.equal(await client.get(key), data(step))

            writing = asyncio.create_task(write_on())
            beginning = asyncio.create_task(client.put("begun", data(7, 24 * MB)))
            report = await client.drain("lossy-0", timeout=REPAIRED_S)
            assert report.done
            await beginning
            assert await volume_of(client, "begun") != "lossy-0"
            store.kill(0)
            await lost(client, 1)
            begun = dict(values)

            async def written_again() -> bool:
                return all(values[key] > step for key, step in begun.items())

            await until(written_again, 30)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
            for key, step in values.items():
                if key not in begun or values[key] == step:
                    found = await client.get(key)
                    assert torch.equal(found, data(step)) or torch.equal(found, data(step + 1))


@pytest.mark.thorough
async def test_a_loss_while_another_volume_is_drained() -> None:
    """What is lost does not keep draining from its end, and every value has what copies it can."""
    with store_of(COPIES, (64 * MB,) * 4, repair_bandwidth=32 * MB) as store:
        async with connected(store) as client:
            tensors = {f"k{i}": data(i, MB) for i in range(24)}
            await client.put_batch(tensors)
            draining = asyncio.create_task(client.drain("lossy-0", timeout=REPAIRED_S))

            async def some_moved() -> bool:
                return (await client.status()).repair.copied_values > 0

            await until(some_moved, 60)
            store.kill(1)
            await lost(client, 1)
            assert (await draining).done
            store.kill(0)
            await lost(client, 2)
            await repaired(client)
            for key, tensor in tensors.items():
                assert torch.equal(await client.get(key), tensor)
                assert (await client.stat(key)).copies == 2


@pytest.mark.thorough
async def test_a_store_that_spills_to_one_place_for_all_volumes(tmp_path: Path) -> None:
    """What is on disk stays there; what was in memory goes to the others, or to disk."""
    spills = {"spill": tmp_path, "when_full": "spillable", "repair_bandwidth": 0}
    async with running_store(
        num_storage_volumes=2, capacity=64 * MB, strategy="spread", **spills
    ) as client:
        tensors = {f"k{i}": data(i, 4 * MB) for i in range(30)}
        for key, tensor in tensors.items():
            await client.put(key, tensor)
        for entries in ({"a": data(50), "b": data(51)}, {"a": data(52), "b": data(53)}):
            await client.put_state_dict(entries, "sd", keep=2)
        held = await client.get("k29")  # zero-copy
        name = await volume_of(client, "k29")
        reference = await client.put_object(data(60, 3 * MB))
        draining = asyncio.create_task(client.drain(name, timeout=REPAIRED_S))
        for key, tensor in tensors.items():
            into = torch.empty_like(tensor)
            await client.get(key, into)
            assert torch.equal(into, tensor)
        assert torch.equal(held, tensors["k29"])
        del held
        gc.collect()
        assert (await draining).done
        for i in range(30, 36):
            tensors[f"k{i}"] = data(i, 4 * MB)
            await client.put(f"k{i}", tensors[f"k{i}"])
        got = {key: await client.get(key, torch.empty_like(tensors[key])) for key in tensors}
        assert all(torch.equal(got[key], tensor) for key, tensor in tensors.items())
        assert await used(client, int(name[-1])) == 0
        older = await client.get_state_dict("sd", version=1)
        assert torch.equal(older["b"], data(51))
        assert torch.equal(await client.get(reference), data(60, 3 * MB))
        assert (await client.status()).spill.spilled_bytes > 30 * MB


@pytest.mark.thorough
async def test_pinned_values_stay_where_there_is_no_room_although_others_are_spilled(
    tmp_path: Path,
) -> None:
    """What is pinned makes what may be spilled leave the other volume; no more can be asked."""
    async with running_store(
        num_storage_volumes=2, capacity=64 * MB, strategy="spread", spill=tmp_path
    ) as client:
        for i in range(4):  # in turn on both
            await client.put(f"pinned{i}", data(i, 9 * MB))
        for i in range(4):
            await client.put(f"cold{i}", data(10 + i, 3 * MB), when_full="spillable")
        name = await volume_of(client, "pinned0")
        with pytest.raises(ts.DrainError, match=r"cannot be moved: no room: 'pinned\d'") as caught:
            await client.drain(name, timeout=REPAIRED_S)
        assert caught.value.details["stuck_bytes"] == 9 * MB
        for i in range(4):
            assert torch.equal(await client.get(f"pinned{i}"), data(i, 9 * MB))
            assert torch.equal(await client.get(f"cold{i}"), data(10 + i, 3 * MB))


async def test_what_copies_wait_for_is_said(tmp_path: Path) -> None:
    """It said how much was left, and not that a reader had the room."""
    async with running_store(
        num_storage_volumes=2, capacity=64 * MB, strategy="spread", spill=tmp_path
    ) as client:
        await client.put("pinned", data(1, 20 * MB))
        await client.put("read", data(2, 28 * MB), when_full="spillable")
        held = await client.get("read")
        name = await volume_of(client, "pinned")
        assert name != await volume_of(client, "read")
        report = await client.drain(name, wait=False)

        async def waits() -> bool:
            nonlocal report
            report = await client.drain(name, wait=False)
            return "readers held" in report.why

        await until(waits)
        assert (report.stuck_values, report.done) == (0, False)
        assert f"the next copies wait: {report.why}" in str(report)
        del held
        gc.collect()
        assert (await client.drain(name, timeout=REPAIRED_S)).done
        assert (await client.drain(name, wait=False)).why == ""
