"""Volumes in other processes: their line to a real server, over a real socket."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.integration.attacks.hostile import Raw
from tests.support import noise, turn, until
from tests.unit.remote.attached import CAPACITY, Attached, attached
from tests.unit.remote.relays import Backstage

import torchstore_core as ts
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.machine import topology
from torchstore_core.machine.processes import Process, pid_namespace
from torchstore_core.plugins.registry import Registry
from torchstore_core.server.memory.volume import Volume
from torchstore_core.server.remote.attached import VolumeConnection
from torchstore_core.server.remote.attached_volume import AttachedVolume, KnownVolume
from torchstore_core.server.remote.relay_server import RelayRequest, RelayServer
from torchstore_core.server.serving.conversation import Conversation
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import HEADER, encode

MB = 1 << 20


@pytest.fixture(scope="module")
def stage() -> Any:
    with Backstage() as made:
        yield made


async def _client(made: Attached) -> ts.Client:
    return await ts.connect(made.address, store_name="attached", timeout=10)


async def test_clients_are_let_in_when_all_are_attached(stage: Backstage, tmp_path: Path) -> None:
    async with attached(stage, tmp_path, 2) as made:
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
    async with attached(stage, tmp_path, 1) as made:
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
    async with attached(stage, tmp_path, 1) as made:
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
            await VolumeConnection.open(
                path, volume, await volume.start(), lambda: gone.append(0), 0.2
            )

        with pytest.raises(ts.StoreTimeoutError, match="torchstore-0"):
            stage.do(attach())
        peer, _ = silent.accept()
        with peer:
            peer.settimeout(60)
            while peer.recv(1 << 16):
                continue  # what it said, until it has hung up
    stage.do(volume.close())
    assert gone == []


async def test_no_server_there(stage: Backstage, tmp_path: Path) -> None:
    made = Attached(stage, tmp_path, 1, {})
    made.address = f"unix:{tmp_path}/nothing"
    with pytest.raises(ts.StoreClosedError, match="no server"):
        stage.do(made.attach(0))
    stage.do(made.volumes[0].close())


async def test_the_end_of_a_line_is_the_end_of_its_volume(
    stage: Backstage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with attached(stage, tmp_path, 2) as made:
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
        assert f"lost: volume torchstore-0 on {topology.probe().hostname} is gone" in caplog.text


async def test_the_end_of_the_server_is_told_to_volumes(stage: Backstage, tmp_path: Path) -> None:
    async with attached(stage, tmp_path, 1) as made:
        stage.do(made.attach(0))
        stage.do(made.server.close())
        await until(lambda: made.gone == [0])


async def test_prefault_is_asked_for_and_told(stage: Backstage, tmp_path: Path) -> None:
    async with attached(stage, tmp_path, 1, prefault=16 * MB) as made:
        stage.do(made.attach(0))
        await until(lambda: made.volumes[0].memory.warm >= 16 * MB)
        client = await _client(made)

        async def told() -> bool:
            return (await client.status()).volumes[0].warm_bytes >= 16 * MB

        await until(told)


async def test_trimming_gives_back_what_is_free_and_nothing_else(
    stage: Backstage, tmp_path: Path
) -> None:
    async with attached(stage, tmp_path, 1, trim_after=0.5) as made:
        stage.do(made.attach(0))
        client = await _client(made)
        keep = torch.arange(8 * MB, dtype=torch.uint8)
        await client.put("keep", keep)
        await client.put("large", torch.ones(40 * MB, dtype=torch.uint8))
        held = await client.get("keep")

        def resident() -> int:
            return os.fstat(made.volumes[0].memory.fd).st_blocks * 512

        assert resident() >= 48 * MB
        await client.delete("large")

        async def trimmed() -> bool:
            return (await client.status()).volumes[0].warm_bytes <= 9 * MB

        await until(trimmed, 10)
        assert resident() <= 9 * MB  # the volume knew of none of it: clients write by themselves
        assert torch.equal(await client.get("keep"), keep)
        assert torch.equal(held, keep)
        # What was given back can be used again.
        again = noise(50 * MB)
        await client.put("again", again)
        assert torch.equal(await client.get("again"), again)
        assert torch.equal(await client.get("keep"), keep)


def test_nothing_is_placed_where_a_volume_trims() -> None:
    """From when the server asks until the volume has answered: it would be thrown away."""
    info = m.VolumeInfo("v-0", 0, 1, topology.probe(), CAPACITY, {})
    volume = AttachedVolume(KnownVolume(info, 0, 0))
    said: list[m.Message] = []
    volume.connected(said.append)
    volume.memory.touched(40 * MB)
    assert volume.trim(0) == 40 * MB
    assert said == [m.Trim(0, 40 * MB)]
    assert volume.allocator.free_bytes == 0
    assert volume.trim(0) == 0  # one at a time
    volume.memory.warmed(m.Warm(0, trimmed=True))
    volume.trimmed()
    assert volume.allocator.free_bytes == CAPACITY
    assert volume.memory.warm == 0


async def test_puts_while_a_volume_trims_are_not_thrown_away(
    stage: Backstage, tmp_path: Path
) -> None:
    """The server asks, and the volume answers later: what is put in between is not in the way."""
    async with attached(stage, tmp_path, 1, trim_after=1e9) as made:
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
    async with attached(stage, tmp_path, 2) as made:
        stage.do(made.attach(0))
        stage.do(made.attach(1))
        client = await _client(made)
        stage.call(made.lines[0]._send, message)
        await until(lambda: made.gone == [0])
        await client.put("k", torch.ones(MB))
        assert int((await client.get("k")).sum()) == MB
        await turn()


# ---- orphans: sessions of a relay that is gone ----------------------------------------------


class _Orphaned:
    """A process, and a session said to be its own that leases keys and comes through a relay:
    :meth:`cut_off` ends that.
    """

    def __init__(self, made: Attached, stage: Backstage, host_id: str, keys: Sequence[str]) -> None:
        self._stage = stage
        self._made = made
        command = [sys.executable, "-c", "import os; os.read(0, 1)"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE)
        here = msgspec.structs.replace(topology.probe(), host_id=host_id)
        self._relay_server = stage.call(RelayServer, partial(Conversation, made.server))
        self._token = self._relay_server.open(msgspec.msgpack.encode(here))
        process = Process(self.process.pid, pid_namespace())
        facts = ClientFacts(self.process.pid, here.host_id, here.hostname)
        said = [
            m.Hello(1, m.PROTOCOL_VERSION, b"", here, facts),
            m.Locate(2, 5, [m.Want(key) for key in keys], -1),
            m.Put(3, 6, [m.PutItem("new", TensorMeta("uint8", (MB,)), MB)]),
        ]
        self._process = process
        self.say(*said)

    def say(self, *messages: m.Message) -> None:
        """Through the relay."""
        bodies = [
            RelayRequest(1, bytes(encode(one)[HEADER:]), process=self._process) for one in messages
        ]
        said = msgspec.msgpack.encode(bodies)
        self._stage.call(self._relay_server.exchange, self._token, said)

    def cut_off(self) -> None:
        self._stage.call(self._relay_server.close, self._token)

    def books(self) -> tuple[int, list[int], int]:
        """Sessions of that process; leased bytes of each volume; unfinished ones of all."""
        status = self._stage.call(self._made.server.status)
        pids = [session.pid for session in status.sessions]
        volumes = status.volumes
        unfinished = sum(v.unfinished_bytes for v in volumes)
        return pids.count(self.process.pid), [v.leased_bytes for v in volumes], unfinished

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._stage.call(self._relay_server.close)
        if self.process.stdin is not None:
            self.process.stdin.close()


@asynccontextmanager
async def _orphaned(
    stage: Backstage, base: Path, host_id: str = "", **options: Any
) -> AsyncIterator[tuple[Attached, _Orphaned]]:
    """Of a store of two volumes, with 1 MB on each: ``k0`` and ``k1``, or ``k0`` with a copy. After
    that, a put of 1 MB is under way.
    """
    copied = options.get("strategy") == "replicated"
    keys = ["k0"] if copied else ["k0", "k1"]
    async with attached(stage, base, 2, **options) as made:
        stage.do(made.attach(0))
        stage.do(made.attach(1))
        client = await _client(made)
        for i, key in enumerate(keys):
            await client.put(key, torch.full((MB,), i, dtype=torch.uint8))
        orphaned = _Orphaned(made, stage, host_id or topology.probe().host_id, keys)
        try:
            assert orphaned.books() == (1, [MB, MB], 2 * MB if copied else MB)
            yield made, orphaned
        finally:
            orphaned.close()


async def test_leases_of_an_orphan_stay_until_a_volume_sees_its_process_die(
    stage: Backstage, tmp_path: Path
) -> None:
    async with _orphaned(stage, tmp_path) as (made, orphaned):
        orphaned.cut_off()
        assert orphaned.books() == (1, [MB, MB], 0)
        # What a volume says of others changes nothing.
        stage.call(made.lines[0]._send, m.ProcessDied(b"somebody"))
        client = await _client(made)
        await client.delete_batch(["k0", "k1"])
        assert orphaned.books() == (1, [MB, MB], 0)
        orphaned.kill()
        await until(lambda: orphaned.books() == (0, [0, 0], 0))
        assert [v.used_bytes for v in (await client.status()).volumes] == [0, 0]


async def test_an_orphan_whose_process_is_dead_ends_at_once(
    stage: Backstage, tmp_path: Path
) -> None:
    async with _orphaned(stage, tmp_path) as (_, orphaned):
        orphaned.kill()
        assert orphaned.books() == (1, [MB, MB], MB)
        orphaned.cut_off()
        await until(lambda: orphaned.books() == (0, [0, 0], 0))


@pytest.mark.parametrize("order", ["volume first", "relay first"])
async def test_an_orphan_needs_nothing_of_volumes_that_are_lost(
    stage: Backstage, tmp_path: Path, order: str
) -> None:
    """Nor anything at all when all of its host are: it ends, whatever its process does."""
    async with _orphaned(stage, tmp_path) as (made, orphaned):
        if order == "relay first":
            orphaned.cut_off()
        stage.call(made.lines[0].close)
        await until(lambda: orphaned.books()[1] == [0, MB])
        if order == "volume first":
            orphaned.cut_off()
        assert orphaned.books() == (1, [0, MB], 0)
        stage.call(made.lines[1].close)
        await until(lambda: orphaned.books() == (0, [0, 0], 0))
        assert orphaned.process.poll() is None


async def test_the_other_volume_of_the_host_sees_an_orphan_die(
    stage: Backstage, tmp_path: Path
) -> None:
    async with _orphaned(stage, tmp_path) as (made, orphaned):
        orphaned.cut_off()
        stage.call(made.lines[0].close)
        await until(lambda: orphaned.books() == (1, [0, MB], 0))
        orphaned.kill()
        await until(lambda: orphaned.books() == (0, [0, 0], 0))


async def test_what_lies_on_other_hosts_is_given_back_with_the_relay(
    stage: Backstage, tmp_path: Path
) -> None:
    """It can only be copied from there, and a dead relay's clients are not served any more."""
    async with _orphaned(stage, tmp_path, "elsewhere") as (_, orphaned):
        orphaned.cut_off()
        assert orphaned.books() == (0, [0, 0], 0)
        assert orphaned.process.poll() is None


@pytest.mark.parametrize("gone", [0, 1])
async def test_an_orphan_keeps_the_copy_that_is_left(
    stage: Backstage, tmp_path: Path, gone: int
) -> None:
    async with _orphaned(stage, tmp_path, strategy="replicated") as (made, orphaned):
        orphaned.cut_off()
        await (await _client(made)).delete("k0")
        assert orphaned.books() == (1, [MB, MB], 0)
        stage.call(made.lines[gone].close)
        left = [0 if i == gone else MB for i in range(2)]
        await until(lambda: orphaned.books() == (1, left, 0))
        orphaned.kill()
        await until(lambda: orphaned.books() == (0, [0, 0], 0))


async def test_what_an_orphan_has_page_locked_is_not_trimmed(
    stage: Backstage, tmp_path: Path
) -> None:
    """See ``Keep``: it may have nothing leased."""
    async with _orphaned(stage, tmp_path) as (made, orphaned):
        orphaned.say(m.Keep(), m.Release([5]))
        orphaned.cut_off()
        assert orphaned.books() == (1, [0, 0], 0)
        await (await _client(made)).delete_batch(["k0", "k1"])
        assert stage.call(made.server.controller.trim, 0.0, 0) == 0
        orphaned.kill()
        await until(lambda: orphaned.books()[0] == 0)
        assert stage.call(made.server.controller.trim, 0.0, 0) >= 2 * MB
