"""Handshakes with volumes that are not in the server's process, and through relays."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from tests.support import until
from tests.transports.asking import nothing_unfinished
from tests.transports.mailbox import GATE, Letter
from tests.unit.remote.attached import attached
from tests.unit.remote.relays import Backstage, Relayed

import torchstore_core as ts
from torchstore_core.wire import messages as m

MB = 1 << 20


@pytest.fixture
def stage() -> Iterator[Backstage]:
    with Backstage() as made:
        yield made


async def _round_trip(client: ts.Client) -> None:
    await client.put("t", torch.arange(MB))
    assert torch.equal(await client.get("t"), torch.arange(MB))
    assert {entry["chosen"] for entry in await client.explain()} == {"mailbox"}


async def test_through_a_relay(stage: Backstage, tmp_path: Path) -> None:
    with Relayed(stage, tmp_path) as relayed:
        client = await ts.connect(relayed.address, prefer=["mailbox"])
        await _round_trip(client)
        await ts.shutdown()


async def test_to_volumes_of_other_processes(stage: Backstage, tmp_path: Path) -> None:
    async with attached(stage, tmp_path, 2) as store:
        for index in (0, 1):
            stage.do(store.attach(index))
        client = await ts.connect(store.address, store_name="attached", prefer=["mailbox"])
        await _round_trip(client)
        await ts.shutdown()


async def test_memory_of_an_attached_volume_waits_for_a_write_that_may_arrive(
    stage: Backstage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    monkeypatch.setenv(GATE, str(gate))
    async with attached(stage, tmp_path, 1) as store:
        stage.do(store.attach(0))
        client = await ts.connect(store.address, store_name="attached", prefer=["mailbox"])
        gate.touch()
        with pytest.raises(ts.StoreTimeoutError):
            await client.put("late", torch.ones(MB // 8), timeout=0.3)
        await until(lambda: nothing_unfinished(client), 10)
        assert not held.exists()
        await ts.shutdown()


async def test_a_client_cannot_break_the_connection_of_a_volume(
    stage: Backstage, tmp_path: Path
) -> None:
    """What it asks is passed on with some more around it."""
    async with attached(stage, tmp_path, 1) as store:
        stage.do(store.attach(0))
        client = await ts.connect(store.address, store_name="attached", prefer=["mailbox"])
        await _round_trip(client)
        session = await client._joined.session(10)
        channel = await session.channel(10)
        longest = "x" * (m.MAX_FRAME - 60)
        request = m.Handshake(channel.next_id(), 0, longest, b"")
        with pytest.raises(ts.TorchStoreError):
            await channel.call(request, m.Handshaken, 10)
        assert not [volume.lost for volume in (await client.status()).volumes if volume.lost]
        await _round_trip(client)
        await ts.shutdown()


async def test_a_lost_volume_ends_handshakes(
    stage: Backstage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    monkeypatch.setenv(GATE, str(gate))
    async with attached(stage, tmp_path, 1) as store:
        stage.do(store.attach(0))
        client = await ts.connect(store.address, store_name="attached", prefer=["mailbox"])
        session = await client._joined.session(10)
        (volume,) = session.volumes
        link = await volume.connect(volume.candidates(1)[0])
        assert int(await link.ask(Letter("who"))) == os.getpid()  # type: ignore[attr-defined]
        gate.touch()
        letter = Letter("write", 0, 0, 1, b"x")
        writing = link._ask(msgspec.msgpack.encode(letter))  # type: ignore[attr-defined]
        asking = asyncio.ensure_future(writing)
        await until(held.exists, 10)
        stage.call(store.lines[0].close)
        with pytest.raises(ts.TransportError, match="is gone"):
            await asking
        await ts.shutdown()
