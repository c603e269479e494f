"""What both halves of a transport say to each other through the store, and what the store does when
a write has an uncertain end.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest
import torch
from tests.processes import Script
from tests.support import SMALL, running_store, until
from tests.transports.mailbox import GATE, Letter, MailboxLink

import torchstore_core as ts
from torchstore_core.plugins.registry import Registry
from torchstore_core.server.memory.volume import Volume

MB = 1 << 20


@pytest.mark.parametrize("name", ["mailbox", "mailbox-apart"])
async def test_every_byte_arrives(name: str) -> None:
    async with running_store(prefer=[name]) as client:
        await client.put("t", torch.arange(MB))
        assert torch.equal(await client.get("t"), torch.arange(MB))
        got = torch.zeros(MB // 2, 2, dtype=torch.int64)
        await client.get("t", got.view(-1))
        assert torch.equal(got.view(-1), torch.arange(MB))
        rows = torch.arange(MB).view(1024, 1024)
        await client.put("columns", rows[:, ::2])
        assert torch.equal(await client.get("columns"), rows[:, ::2])
        assert {entry["chosen"] for entry in await client.explain()} == {name}


async def _ask(client: ts.Client, letter: Letter, name: str = "mailbox") -> bytes:
    """Through the link that the client uses."""
    session = await client._joined.session(10)
    (volume,) = session.volumes
    candidate = next(c for c in volume.candidates(1) if c.spec.name == name)
    link = await volume.connect(candidate)
    assert isinstance(link, MailboxLink)
    return await link.ask(letter)


async def test_an_isolated_half_has_a_process_that_ends_with_the_volume() -> None:
    async with running_store(prefer=["mailbox-apart", "mailbox"]) as client:
        server = (await client.status()).controller_pid
        assert int(await _ask(client, Letter("who"))) == server
        apart = int(await _ask(client, Letter("who"), "mailbox-apart"))
        assert apart != server
    await until(lambda: not Path(f"/proc/{apart}").exists(), 10)


async def test_an_isolated_half_that_hangs_ends_with_a_killed_server() -> None:
    async with running_store(prefer=["mailbox-apart"]) as client:
        apart = int(await _ask(client, Letter("who"), "mailbox-apart"))
        asking = asyncio.ensure_future(_ask(client, Letter("hang"), "mailbox-apart"))
        await until(lambda: _sleeps(apart), 10)
        os.kill((await client.status()).controller_pid, signal.SIGKILL)
        with pytest.raises(ts.StoreClosedError):
            await asking
        await until(lambda: not Path(f"/proc/{apart}").exists(), 10)


def _sleeps(pid: int) -> bool:
    """In the main thread, and not in its event loop."""
    return "nanosleep" in Path(f"/proc/{pid}/wchan").read_text()


async def test_an_isolated_half_that_dies_is_started_again() -> None:
    async with running_store(prefer=["mailbox-apart"]) as client:
        before = int(await _ask(client, Letter("who"), "mailbox-apart"))
        with pytest.raises(ts.TransportError, match="has died"):
            await _ask(client, Letter("die"), "mailbox-apart")
        await client.put("t", torch.arange(MB))
        assert int(await _ask(client, Letter("who"), "mailbox-apart")) != before


async def test_an_operation_survives_the_death_of_its_transport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on over the next one, with one warning, and later ones have the first again."""
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    monkeypatch.setenv(GATE, str(gate))
    async with running_store(prefer=["mailbox-apart"]) as client:
        apart = int(await _ask(client, Letter("who"), "mailbox-apart"))
        gate.touch()
        putting = asyncio.ensure_future(client.put("t", torch.arange(MB)))
        await until(held.exists, 10)
        with pytest.warns(RuntimeWarning, match="mailbox-apart.*failed.*has died") as caught:
            await _kill_during(apart, putting)
        assert len(caught) == 1
        gate.unlink()
        assert {entry["chosen"] for entry in await client.explain()} == {"shm"}
        assert torch.equal(await client.get("t"), torch.arange(MB))
        await until(lambda: _chosen_after_a_get(client, "mailbox-apart"), 15)


async def test_what_has_arrived_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five values, two arrive by a transport that then dies, and three by the next one."""
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    gate.write_text("2")
    monkeypatch.setenv(GATE, str(gate))
    values = {f"k{i}": torch.full((MB // 16,), i) for i in range(5)}
    async with running_store(prefer=["mailbox-apart"], block=["shm", "tcp"], **SMALL) as client:
        apart = int(await _ask(client, Letter("who"), "mailbox-apart"))
        putting = asyncio.ensure_future(client.put_batch(values))
        await until(held.exists, 10)
        gate.unlink()
        with pytest.warns(RuntimeWarning, match="mailbox-apart.*failed.*has died"):
            await _kill_during(apart, putting)
        assert int(await _ask(client, Letter("written"))) == 3
        for key, value in values.items():
            assert torch.equal(await client.get(key), value)


async def test_a_half_says_what_is_registered_while_a_client_uses_it(tmp_path: Path) -> None:
    """In this process: what the server asks the volume before it gives pages back."""
    volume = Volume("s", 0, MB, Registry(), str(tmp_path))
    try:
        await volume.start()
        who = msgspec.msgpack.encode(Letter("who"))
        for name in ("mailbox", "mailbox-apart"):
            assert volume.memory.registered() == 0
            await volume.handshake(b"one", name, who)
            await volume.handshake(b"two", name, who)
            await volume.disconnect(b"one")
            assert volume.memory.registered() == MB
            await volume.disconnect(b"two")
        assert volume.memory.registered() == 0
    finally:
        await volume.close()


async def _kill_during(pid: int, work: asyncio.Future[ts.ObjectRef]) -> None:
    os.kill(pid, signal.SIGKILL)
    await work


async def _chosen_after_a_get(client: ts.Client, name: str) -> bool:
    await client.get("t", torch.empty(MB, dtype=torch.int64))
    return {entry["chosen"] for entry in await client.explain()} == {name}


async def test_a_fault_of_a_half_is_a_transport_error_with_the_fault() -> None:
    async with running_store(prefer=["mailbox"]) as client:
        with pytest.raises(ts.TransportError, match="a fault of the half"):
            await _ask(client, Letter("fail"))
        assert await _ask(client, Letter("who"))


@pytest.mark.parametrize("name", ["mailbox", "mailbox-apart"])
async def test_memory_is_not_used_again_while_a_cancelled_write_may_arrive(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of the first put arrives late, when its client has long given up: nobody else's
    value may lie there by then.
    """
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    monkeypatch.setenv(GATE, str(gate))
    async with running_store(prefer=[name], **SMALL) as client:
        await client.put("warm", torch.zeros(MB))
        gate.touch()
        putting = asyncio.ensure_future(client.put("late", torch.ones(MB // 8)))
        await until(held.exists, 10)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        await until(lambda: _nothing_unfinished(client), 10)
        assert not held.exists()  # by then it had arrived
        gate.unlink()
        await client.put("next", torch.full((MB // 8,), 2.0))
        assert torch.equal(await client.get("next"), torch.full((MB // 8,), 2.0))


@pytest.mark.parametrize("name", ["mailbox", "mailbox-apart"])
async def test_memory_is_not_used_again_while_a_write_of_a_dead_client_may_arrive(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    monkeypatch.setenv(GATE, str(gate))
    async with running_store(prefer=[name], **SMALL) as client:
        gate.touch()
        put = f"""
            client = await ts.connect({(await ts.address())!r}, prefer=[{name!r}])
            await client.put("late", torch.ones({MB // 8}))
            """
        with Script(put, fresh=True):
            await until(held.exists, 30)
        await until(lambda: _nothing_unfinished(client), 10)
        assert not held.exists()


async def _nothing_unfinished(client: ts.Client) -> bool:
    return not any(volume.unfinished_bytes for volume in (await client.status()).volumes)
