"""Whom an uncertain write of one transport concerns, and what is known of an error of a half."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path

import msgspec
import pytest
import torch
from tests.support import SMALL, running_store, until
from tests.transports.asking import ask, nothing_unfinished
from tests.transports.mailbox import GATE, Letter
from tests.unit.remote.attached import attached
from tests.unit.remote.relays import Backstage, Relayed

import torchstore_core as ts

MB = 1 << 20


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_only_the_transport_of_an_uncertain_write_is_ended(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other half would be closed if it were told to end this client."""
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    monkeypatch.setenv(GATE, str(gate))
    monkeypatch.setattr("torchstore_core.clients.moving.executor._LEAST_S", 0.5)
    strategy = ts.SingletonStrategy(transport=("mailbox-apart", "mailbox"))
    async with running_store(strategy=strategy, **SMALL) as client:
        await ask(client, Letter("disconnect fails"))
        gate.touch()
        if how == "failed":
            (volume,) = (await client._joined.session(10)).volumes
            volume.context = msgspec.structs.replace(volume.context, same_host=False)
            # The next one is `mailbox`, whose writes go through: the gate is for as many.
            putting = asyncio.ensure_future(client.put("t", torch.arange(MB // 8)))
            await until(held.exists, 10)
            gate.write_text("1000")
            with pytest.warns(RuntimeWarning, match="mailbox-apart.*did not end within"):
                await putting
            assert torch.equal(await client.get("t"), torch.arange(MB // 8))
        else:
            putting = asyncio.ensure_future(client.put("t", torch.arange(MB // 8)))
            await until(held.exists, 10)
            putting.cancel()
            await asyncio.wait([putting])
        await until(lambda: nothing_unfinished(client), 10)
        assert not held.exists()
        assert await ask(client, Letter("who"))


@pytest.mark.parametrize("name", ["mailbox", "mailbox-apart"])
async def test_details_of_an_error_reach_the_client(name: str) -> None:
    async with running_store(prefer=[name], **SMALL) as client:
        await _check_details(client, name)


@pytest.mark.parametrize("name", ["mailbox", "mailbox-apart"])
async def test_details_of_an_error_come_from_volumes_of_other_processes(
    name: str, tmp_path: Path
) -> None:
    with Backstage() as stage:
        async with attached(stage, tmp_path, 1) as store:
            stage.do(store.attach(0))
            client = await ts.connect(store.address, store_name="attached", prefer=[name])
            await _check_details(client, name)
            await ts.shutdown()


async def _check_details(client: ts.Client, name: str) -> None:
    with pytest.raises(ts.TransportNotReadyError, match="a reason") as caught:
        await ask(client, Letter("details"), name)
    assert caught.value.details == {"left": 3, "why": ["a", "b"]}
    for what in ("strange details", "cancelled"):
        with pytest.raises(ts.TransportError):
            await asyncio.wait_for(ask(client, Letter(what), name), 50)


async def test_memory_of_a_client_whose_relay_is_lost_waits_for_its_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has a typed error at once; the server ends what it has under way first."""
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    monkeypatch.setenv(GATE, str(gate))
    with Backstage() as stage, Relayed(stage, tmp_path, expire_s=1.0) as relayed:
        far = await ts.connect(relayed.address, store_name="far", prefer=["mailbox"])
        near = await ts.connect(relayed.direct, store_name="near")
        gate.touch()
        putting = asyncio.ensure_future(far.put("late", torch.ones(MB // 8)))
        await until(held.exists, 10)
        relayed.uplink.silent = True
        with pytest.raises(ts.StoreClosedError):
            await asyncio.wait_for(putting, 50)
        await until(lambda: nothing_unfinished(near), 10)
        assert not held.exists()  # by then it had arrived
        gate.unlink()
        await near.put("next", torch.full((MB // 8,), 2.0))
        assert torch.equal(await near.get("next"), torch.full((MB // 8,), 2.0))
        for name in ("near", "far"):
            await ts.shutdown(name)


async def test_a_relay_that_is_lost_while_its_client_writes_over_tcp(tmp_path: Path) -> None:
    """Again and again, at different moments: what others put into that memory stays theirs."""
    value = torch.full((16 * MB,), 7, dtype=torch.uint8)
    other = torch.full_like(value, 9)
    for step in range(3):
        base = tmp_path / str(step)
        base.mkdir()
        with Backstage() as stage, Relayed(stage, base, expire_s=1.0) as relayed:
            far = await ts.connect(relayed.address, store_name="far", prefer=["tcp"])
            near = await ts.connect(relayed.direct, store_name="near")
            assert (await far.explain())[0]["chosen"] == "tcp"

            async def write(client: ts.Client) -> None:
                while True:
                    await client.put("far", value)

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                writing = asyncio.ensure_future(write(far))
                await until(lambda put=near: _writes(put), 10)
                await asyncio.wait([writing], timeout=0.01 * step)
                relayed.uplink.silent = True
                with pytest.raises((ts.StoreClosedError, ts.TransportError)):
                    await asyncio.wait_for(writing, 50)
            await until(lambda put=near: nothing_unfinished(put), 10)
            for number in range(3):
                await near.put(f"{number}", other)
            for number in range(3):
                assert torch.equal(await near.get(f"{number}"), other)
            if await near.exists("far"):
                assert torch.equal(await near.get("far"), value)
            for name in ("near", "far"):
                await ts.shutdown(name)


async def _writes(client: ts.Client) -> bool:
    return not await nothing_unfinished(client)
