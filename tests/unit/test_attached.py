"""Volumes in other processes: their line to a real server, over a real socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.hostile import Raw
from tests.support import turn, until
from tests.unit.relays import Backstage

import torchstore_core as ts
from torchstore_core.plugins import Registry
from torchstore_core.server.allocator import Allocator
from torchstore_core.server.app import Server, ServerOptions
from torchstore_core.server.attached import AttachedMemory, VolumeLine
from torchstore_core.server.volume import Volume
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import encode

MB = 1 << 20
CAPACITY = 64 * MB


class _Attached:
    """A server and its volumes, whose lines are real: on one event loop of a thread."""

    def __init__(self, base: Path, volumes: int, options: dict[str, Any]) -> None:
        self.base = base
        self.options = ServerOptions(
            num_storage_volumes=volumes,
            attached=True,
            directory=str(base),
            **{"prefault": 0, "strategy": "spread", **options},
        )
        self.volumes: list[Volume] = []
        self.lines: list[VolumeLine] = []
        self.gone: list[int] = []

    async def start(self) -> None:
        self.server = Server(self.options)
        self.address = await self.server.start()

    async def attach(self, index: int, store_name: str = "torchstore") -> None:
        volume = Volume(store_name, index, CAPACITY, Registry(), str(self.base / f"{index}"))
        (self.base / f"{index}").mkdir(exist_ok=True)
        self.volumes.append(volume)
        line = await VolumeLine.open(
            self.address.partition(":")[2],
            volume,
            await volume.start(),
            lambda: self.gone.append(index),
            10,
        )
        self.lines.append(line)

    async def close(self) -> None:
        for line in self.lines:
            line.close()
        await self.server.close()
        for volume in self.volumes:
            await volume.close()


@asynccontextmanager
async def _attached(
    stage: Backstage, base: Path, volumes: int = 1, **options: Any
) -> AsyncIterator[_Attached]:
    made = _Attached(base, volumes, options)
    stage.do(made.start())
    try:
        yield made
    finally:
        await ts.shutdown("attached")
        stage.do(made.close())


@pytest.fixture(scope="module")
def stage() -> Any:
    with Backstage() as made:
        yield made


async def _client(made: _Attached) -> ts.Client:
    return await ts.connect(made.address, store_name="attached", timeout=10)


async def test_clients_are_let_in_when_all_are_attached(stage: Backstage, tmp_path: Path) -> None:
    async with _attached(stage, tmp_path, 2) as made:
        stage.do(made.attach(1))
        with pytest.raises(ts.StoreClosedError, match="starting"):
            await _client(made)
        with pytest.raises(ts.StoreTimeoutError, match="1 of 2"):
            stage.do(made.server.attached(0.05))
        stage.do(made.attach(0))
        stage.do(made.server.attached(1))
        client = await _client(made)
        for i in range(4):
            await client.put(f"k{i}", torch.full((MB,), i, dtype=torch.uint8))
        for i in range(4):
            assert (await client.get(f"k{i}")).unique().tolist() == [i]
        status = await client.status()
        assert [v.used_bytes for v in status.volumes] == [2 * MB, 2 * MB]


async def test_the_server_does_not_read_what_it_cannot(stage: Backstage, tmp_path: Path) -> None:
    """A reader that wants it inline gets a lease instead: readers may have other limits than the
    writer had.
    """
    async with _attached(stage, tmp_path, 1) as made:
        stage.do(made.attach(0))
        client = await _client(made)
        await client.put("k", torch.ones(MB))
        with Raw(made.address) as raw:
            raw.greet()
            raw.send(encode(m.Locate(2, 1, [m.Want("k")], 64 * MB)))
            (located,) = await asyncio.to_thread(raw.finish)
        assert isinstance(located, m.Located)
        assert located.leased
        assert located.entries[0].data is None


async def test_a_volume_that_nobody_waits_for(stage: Backstage, tmp_path: Path) -> None:
    async with _attached(stage, tmp_path, 1) as made:
        stage.do(made.attach(0))
        for index in (0, 1):
            with pytest.raises(ts.ConfigurationError, match=f"volume {index}"):
                stage.do(made.attach(index))
        client = await _client(made)
        await client.put("k", torch.ones(MB))
        assert made.gone == []


async def test_a_server_that_does_not_answer(stage: Backstage, tmp_path: Path) -> None:
    path = str(tmp_path / "silent")
    volume = Volume("torchstore", 0, CAPACITY, Registry(), str(tmp_path))
    gone: list[int] = []
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()

        async def attach() -> None:
            await VolumeLine.open(path, volume, await volume.start(), lambda: gone.append(0), 0.2)

        with pytest.raises(ts.StoreTimeoutError, match="torchstore-0"):
            stage.do(attach())
        peer, _ = silent.accept()
        with peer:
            peer.settimeout(5)
            while peer.recv(1 << 16):
                continue  # what it said, until it has hung up
    stage.do(volume.close())
    assert gone == []


async def test_no_server_there(stage: Backstage, tmp_path: Path) -> None:
    made = _Attached(tmp_path, 1, {})
    made.address = f"unix:{tmp_path}/nothing"
    with pytest.raises(ts.StoreClosedError, match="no server"):
        stage.do(made.attach(0))
    stage.do(made.volumes[0].close())


async def test_the_end_of_a_line_is_the_end_of_its_volume(stage: Backstage, tmp_path: Path) -> None:
    async with _attached(stage, tmp_path, 2) as made:
        stage.do(made.attach(0))
        stage.do(made.attach(1))
        client = await _client(made)
        for i in range(2):
            await client.put(f"k{i}", torch.full((MB,), i, dtype=torch.uint8))
        stage.call(made.lines[0].close)

        async def lost() -> bool:
            return bool((await client.status()).volumes[0].lost)

        await until(lost)
        with pytest.raises(ts.ObjectLostError):
            await client.get("k0")
        assert (await client.get("k1")).unique().tolist() == [1]
        assert made.gone == []  # it was closed here


async def test_the_end_of_the_server_is_told_to_volumes(stage: Backstage, tmp_path: Path) -> None:
    async with _attached(stage, tmp_path, 1) as made:
        stage.do(made.attach(0))
        stage.do(made.server.close())
        await until(lambda: made.gone == [0])


async def test_prefault_is_asked_for_and_told(stage: Backstage, tmp_path: Path) -> None:
    async with _attached(stage, tmp_path, 1, prefault=16 * MB) as made:
        stage.do(made.attach(0))
        await until(lambda: made.volumes[0].memory.warm >= 16 * MB)
        client = await _client(made)

        async def told() -> bool:
            return (await client.status()).volumes[0].warm_bytes >= 16 * MB

        await until(told)


async def test_trimming_gives_back_what_is_free_and_nothing_else(
    stage: Backstage, tmp_path: Path
) -> None:
    async with _attached(stage, tmp_path, 1, trim_after=0.5) as made:
        stage.do(made.attach(0))
        client = await _client(made)
        keep = torch.arange(8 * MB, dtype=torch.uint8)
        await client.put("keep", keep)
        await client.put("large", torch.ones(40 * MB, dtype=torch.uint8))
        held = await client.get("keep")
        await client.delete("large")

        async def trimmed() -> bool:
            return (await client.status()).volumes[0].warm_bytes <= 9 * MB

        def resident() -> int:
            return os.fstat(made.volumes[0].memory.fd).st_blocks * 512

        assert resident() >= 48 * MB
        await until(trimmed, 10)
        assert resident() <= 9 * MB  # the volume knew of none of it: clients write by themselves
        assert torch.equal(await client.get("keep"), keep)
        assert torch.equal(held, keep)
        # What was given back can be used again.
        again = torch.randint(0, 255, (50 * MB,), dtype=torch.uint8)
        await client.put("again", again)
        assert torch.equal(await client.get("again"), again)
        assert torch.equal(await client.get("keep"), keep)


def test_nothing_is_placed_where_a_volume_trims() -> None:
    """From when the server asks until the volume has answered: it would be thrown away."""
    allocator = Allocator(CAPACITY)
    said: list[m.Message] = []
    memory = AttachedMemory(said.append, allocator)
    memory.touched(40 * MB)
    assert memory.trim(0) == 40 * MB
    assert said == [m.Trim(0, 40 * MB)]
    assert allocator.free_bytes == 0
    assert memory.trim(0) == 0  # one at a time
    memory.warmed(m.Warm(0, trimmed=True))
    assert allocator.free_bytes == CAPACITY
    assert memory.warm == 0


async def test_puts_while_a_volume_trims_are_not_thrown_away(
    stage: Backstage, tmp_path: Path
) -> None:
    """The server asks, and the volume answers later: what is put in between is not in the way."""
    async with _attached(stage, tmp_path, 1, trim_after=1e9) as made:
        stage.do(made.attach(0))
        client = await _client(made)
        wrong = 0
        for number in range(15):
            size = (1 + number % 5) * 2 * MB
            await client.put("k", torch.full((size,), number, dtype=torch.uint8))
            stage.call(made.server.controller.trim, 0.0, 0)
            await client.put(f"other{number % 3}", torch.full((MB,), number, dtype=torch.uint8))
            stage.call(made.server.controller.trim, 0.0, 0)
            got = await client.get_batch(["k", f"other{number % 3}"])
            wrong += sum(int((value != number).sum()) for value in got.values())
        assert wrong == 0


@pytest.mark.parametrize(
    "message", [m.Keys(1, ""), m.Attach(1, 0, None), m.Shutdown(1)], ids=["keys", "again", "down"]
)
async def test_a_line_carries_nothing_else(
    stage: Backstage, tmp_path: Path, message: m.Message
) -> None:
    """A volume is no client: what it may not say ends it, and nobody else."""
    async with _attached(stage, tmp_path, 2) as made:
        stage.do(made.attach(0))
        stage.do(made.attach(1))
        client = await _client(made)
        stage.call(made.lines[0]._send, message)
        await until(lambda: made.gone == [0])
        await client.put("k", torch.ones(MB))
        assert int((await client.get("k")).sum()) == MB
        await turn()
