"""What both halves of a transport say to each other through the store, and what the store does when
a write has an uncertain end.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from tests.processes import Script
from tests.support import SMALL, running_store, until
from tests.transports.asking import ask, nothing_unfinished
from tests.transports.mailbox import GATE, Letter, MailboxLink

import torchstore_core as ts
from torchstore_core.clients.session.handshake import client_facts
from torchstore_core.contracts.transport import Copy, LinkContext
from torchstore_core.machine.topology import probe
from torchstore_core.plugins.registry import Registry
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.memory.volume import Volume
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.serving.handshakes import Handshakes
from torchstore_core.wire.messages import Failure, Handshake, Handshaken, Reply, VolumeInfo

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


async def test_an_isolated_half_has_a_process_that_ends_with_the_volume() -> None:
    async with running_store(prefer=["mailbox-apart", "mailbox"]) as client:
        server = (await client.status()).controller_pid
        assert int(await ask(client, Letter("who"))) == server
        apart = int(await ask(client, Letter("who"), "mailbox-apart"))
        assert apart != server
    await until(lambda: not Path(f"/proc/{apart}").exists(), 10)


async def test_an_isolated_half_that_hangs_ends_with_a_killed_server() -> None:
    async with running_store(prefer=["mailbox-apart"], keeper=False) as client:
        apart = int(await ask(client, Letter("who"), "mailbox-apart"))
        asking = asyncio.ensure_future(ask(client, Letter("hang"), "mailbox-apart"))
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
        before = int(await ask(client, Letter("who"), "mailbox-apart"))
        with pytest.raises(ts.TransportError, match="has died"):
            await ask(client, Letter("die"), "mailbox-apart")
        await client.put("t", torch.arange(MB))
        assert int(await ask(client, Letter("who"), "mailbox-apart")) != before


async def test_an_operation_survives_the_death_of_its_transport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on over the next one, with one warning, and later ones have the first again."""
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    monkeypatch.setenv(GATE, str(gate))
    monkeypatch.setattr("torchstore_core.clients.session.volume_links._FIRST_BACKOFF_S", 60.0)
    async with running_store(prefer=["mailbox-apart"]) as client:
        apart = int(await ask(client, Letter("who"), "mailbox-apart"))
        gate.touch()
        putting = asyncio.ensure_future(client.put("t", torch.arange(MB)))
        await until(held.exists, 10)
        with pytest.warns(RuntimeWarning, match="mailbox-apart.*failed.*has died") as caught:
            await _kill_during(apart, putting)
        assert len(caught) == 1
        gate.unlink()
        assert {entry["chosen"] for entry in await client.explain()} == {"shm"}
        assert torch.equal(await client.get("t"), torch.arange(MB))
        (links,) = (await client._joined.session(10)).volumes
        links._backoffs["mailbox-apart"].due = time.monotonic()
        await until(lambda: _chosen_after_a_get(client, "mailbox-apart"), 15)


async def test_what_has_arrived_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five values, two arrive by a transport that then dies, and three by the next one."""
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    gate.write_text("2")
    monkeypatch.setenv(GATE, str(gate))
    monkeypatch.setattr("torchstore_core.clients.session.volume_links._FIRST_BACKOFF_S", 60.0)
    values = {f"k{i}": torch.full((MB // 16,), i) for i in range(5)}
    strategy = ts.SingletonStrategy(transport=("mailbox-apart", "mailbox"))
    async with running_store(strategy=strategy, **SMALL) as client:
        apart = int(await ask(client, Letter("who"), "mailbox-apart"))
        putting = asyncio.ensure_future(client.put_batch(values))
        await until(held.exists, 10)
        gate.unlink()
        with pytest.warns(RuntimeWarning, match="mailbox-apart.*failed.*has died"):
            await _kill_during(apart, putting)
        assert int(await ask(client, Letter("written"))) == 3
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


@asynccontextmanager
async def _volume(path: Path) -> AsyncIterator[Volume]:
    """In this process."""
    volume = Volume("s", 0, MB, Registry(), str(path))
    try:
        await volume.start()
        yield volume
    finally:
        await volume.close()


async def test_a_half_that_cannot_end_a_client_is_closed_and_the_others_end_it(
    tmp_path: Path,
) -> None:
    """Two clients at the same time: neither returns before the half has closed."""
    async with _volume(tmp_path) as volume:
        fault = msgspec.msgpack.encode(Letter("close fails"))
        who = msgspec.msgpack.encode(Letter("who"))
        for peer in (b"one", b"two"):
            await volume.handshake(peer, "mailbox", fault)
            await volume.handshake(peer, "mailbox-apart", who)
        await asyncio.gather(volume.disconnect(b"one"), volume.disconnect(b"two"))
        with pytest.raises(ts.TransportUnavailableError, match="does not serve"):
            await volume.handshake(b"one", "mailbox", who)
        assert volume.memory.registered() == 0
        assert await volume.handshake(b"one", "mailbox-apart", who)


async def test_a_half_that_is_slow_to_end_a_client_serves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the memory of that client waits for as long, but other halves end it at once."""
    monkeypatch.setattr("torchstore_core.server.memory.volume._DISCONNECT_S", 0.1)
    async with _volume(tmp_path) as volume:
        for name, what in (("mailbox", "disconnect hangs"), ("mailbox-apart", "who")):
            await volume.handshake(b"one", name, msgspec.msgpack.encode(Letter(what)))
        ending = asyncio.ensure_future(volume.disconnect(b"one"))
        await until(lambda: "mailbox is slow to disconnect a client" in caplog.text, 10)
        apart = volume._halves["mailbox-apart"]
        await until(lambda: not apart.registered(0), 10)
        who = msgspec.msgpack.encode(Letter("who"))
        assert await volume.handshake(b"two", "mailbox", who)
        assert not ending.done()
        await volume.handshake(b"two", "mailbox", msgspec.msgpack.encode(Letter("let go")))
        await asyncio.wait_for(ending, 50)
        assert await volume.handshake(b"one", "mailbox", who)


async def test_a_half_that_hangs_while_its_client_reads_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And other transports carry on: nobody asks it to end anything."""

    async def read(volume: Volume, name: str) -> bytes:
        ask, here = functools.partial(volume.handshake, b"one", name), probe()
        context = LinkContext(here, here, same_host=True, offered=True, handshake=ask)
        link = await MailboxLink.connect(b"mailbox", context)
        into = ctypes.create_string_buffer(10)
        await link.read([Copy(ctypes.addressof(into), 0, 5, 10)])
        return into.raw

    who = msgspec.msgpack.encode(Letter("who"))
    async with _volume(tmp_path) as volume:
        os.pwrite(volume.memory.fd, b"ten bytes.", 5)
        with monkeypatch.context() as soon:
            soon.setattr("torchstore_core.server.memory.isolated._PAUSE_S", 0.3)
            assert await read(volume, "mailbox-apart") == b"ten bytes."
            os.kill(int(await volume.handshake(b"one", "mailbox-apart", who)), signal.SIGSTOP)
            reading = asyncio.ensure_future(read(volume, "mailbox-apart"))
            assert await read(volume, "mailbox") == b"ten bytes."
            assert not reading.done()
            with pytest.raises(ts.TransportError, match="has died"):
                await asyncio.wait_for(reading, 50)
        assert await read(volume, "mailbox-apart") == b"ten bytes."


async def test_handshakes_of_a_client_that_disconnects_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    monkeypatch.setenv(GATE, str(gate))
    gate.touch()
    async with _volume(tmp_path) as volume:
        letter = msgspec.msgpack.encode(Letter("write", nbytes=1, data=b"x"))
        writing = asyncio.ensure_future(volume.handshake(b"one", "mailbox", letter))
        await until(held.exists, 10)
        await volume.disconnect(b"one")
        with pytest.raises(ts.TransportError, match="has disconnected"):
            await asyncio.wait_for(writing, 50)


def _served(volume: Volume) -> tuple[Handshakes, SessionRecord]:
    """What the server has around a volume of its own, and a session."""
    here = probe()
    info = VolumeInfo(volume.id, 0, os.getpid(), here, MB, {})
    session = SessionRecord(b"token", client_facts({}, here), here)
    return Handshakes([VolumeRecord(info, volume.memory, volume)]), session


async def test_what_a_process_asked_just_before_its_death_is_not_carried_out(
    tmp_path: Path,
) -> None:
    """Its memory may be somebody else's by then."""
    async with _volume(tmp_path) as volume:
        handshakes, session = _served(volume)
        replies: asyncio.Queue[Reply] = asyncio.Queue()
        for letter in (Letter("who"), Letter("write", nbytes=1, data=b"x")):
            data = msgspec.msgpack.encode(letter)
            handshakes.answer(session, Handshake(1, 0, "mailbox", data), replies.put_nowait)
            if letter.what == "who":
                assert isinstance(await replies.get(), Handshaken)
        handshakes.ended(session, lambda: None)
        assert isinstance(await replies.get(), Failure)
        assert volume.memory.read(0, 1) == b"\0"


async def test_a_client_cannot_fill_the_server_with_handshakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a transport does not answer; another client is not affected."""
    gate = tmp_path / "gate"
    monkeypatch.setenv(GATE, str(gate))
    gate.touch()
    async with _volume(tmp_path) as volume:
        handshakes, session = _served(volume)
        letter = msgspec.msgpack.encode(Letter("write", data=bytes(MB // 2)))
        replies: list[Reply] = []
        with pytest.raises(ts.TransportNotReadyError, match="at once"):
            [
                handshakes.answer(session, Handshake(i, 0, "mailbox", letter), replies.append)
                for i in range(1000)
            ]
        other = SessionRecord(b"other", session.facts, session.topology)
        who = Handshake(1, 0, "mailbox", msgspec.msgpack.encode(Letter("who")))
        answered: asyncio.Queue[Reply] = asyncio.Queue()
        handshakes.answer(other, who, answered.put_nowait)
        assert isinstance(await answered.get(), Handshaken)
        done = asyncio.Event()
        handshakes.settle(session, [(0, "")], done.set)
        await asyncio.wait_for(done.wait(), 50)
        await until(lambda: not session.handshakes_weight, 10)
        handshakes.answer(session, who, answered.put_nowait)
        assert isinstance(await answered.get(), Handshaken)
        assert 100 < len(replies) < 1000


async def test_what_waits_for_the_end_of_writes_is_done_in_order_by_one_task(
    tmp_path: Path,
) -> None:
    """Also if one of it fails: a client may abort as often as it likes meanwhile."""
    async with _volume(tmp_path) as volume:
        handshakes, session = _served(volume)
        data = msgspec.msgpack.encode(Letter("disconnect hangs"))
        answered: asyncio.Queue[Reply] = asyncio.Queue()
        handshakes.answer(session, Handshake(1, 0, "mailbox", data), answered.put_nowait)
        assert isinstance(await answered.get(), Handshaken)
        done: list[int] = []
        handshakes.settle(session, [(0, "")], lambda: done.append(1 // len(done)))
        before = len(asyncio.all_tasks())
        for number in range(10_000):
            handshakes.settle(session, [(0, "")], functools.partial(done.append, number))
        assert len(asyncio.all_tasks()) == before
        assert not done
        await volume.handshake(b"other", "mailbox", msgspec.msgpack.encode(Letter("let go")))
        await until(lambda: done == list(range(10_000)), 10)


async def test_pages_are_kept_if_a_half_does_not_know_what_is_registered(tmp_path: Path) -> None:
    async with _volume(tmp_path) as volume:
        fault = msgspec.msgpack.encode(Letter("no count"))
        await volume.handshake(b"one", "mailbox", fault)
        volume.memory.touched(MB)
        assert volume.memory.trim(0) == 0


async def _kill_during(pid: int, work: asyncio.Future[ts.ObjectRef]) -> None:
    os.kill(pid, signal.SIGKILL)
    await work


async def _chosen_after_a_get(client: ts.Client, name: str) -> bool:
    await client.get("t", torch.empty(MB, dtype=torch.int64))
    return {entry["chosen"] for entry in await client.explain()} == {name}


async def test_a_fault_of_a_half_is_a_transport_error_with_the_fault() -> None:
    async with running_store(prefer=["mailbox"]) as client:
        with pytest.raises(ts.TransportError, match="a fault of the half") as caught:
            await ask(client, Letter("fail"))
        assert caught.value.details == {"raised": "ValueError"}
        server = await ask(client, Letter("who"))
        with pytest.raises(ts.TransportError, match=r"SystemExit.*the library's fault"):
            await ask(client, Letter("exit"))
        assert await ask(client, Letter("who")) == server


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
        await until(lambda: nothing_unfinished(client), 10)
        assert not held.exists()  # by then it had arrived
        gate.unlink()
        await client.put("next", torch.full((MB // 8,), 2.0))
        assert torch.equal(await client.get("next"), torch.full((MB // 8,), 2.0))


async def test_memory_is_not_used_again_while_a_write_of_a_lost_event_loop_may_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was closed in the middle of a put, and the put never ends."""
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    monkeypatch.setenv(GATE, str(gate))
    async with running_store(prefer=["mailbox"], **SMALL) as client:

        async def begin() -> asyncio.Future[ts.ObjectRef]:
            putting = asyncio.ensure_future(client.put("late", torch.ones(MB // 8)))
            await until(held.exists, 10)
            return putting

        def lose() -> None:
            loop = asyncio.new_event_loop()
            putting = loop.run_until_complete(begin())
            putting._log_destroy_pending = False  # type: ignore[attr-defined]
            loop.close()

        await client.put("warm", torch.zeros(MB))
        gate.touch()
        await asyncio.to_thread(lose)
        gc.collect()
        await until(lambda: nothing_unfinished(client), 10)
        assert not held.exists()


async def test_memory_is_not_used_again_while_a_write_of_a_closed_client_may_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session goes on, because a tensor that it has mapped lives."""
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    monkeypatch.setenv(GATE, str(gate))
    async with running_store(prefer=["mailbox"], **SMALL) as client:
        session = await client._joined.session(10)
        mapped = torch.zeros(1)
        session.hold(mapped, 1 << 40, None)
        other = await ts.connect(await ts.address(), store_name="other")
        gate.touch()
        putting = asyncio.ensure_future(client.put("late", torch.ones(MB // 8)))
        await until(held.exists, 10)
        session.close(now=True)
        with pytest.raises(ts.StoreClosedError, match="was closed"):
            await putting
        await until(lambda: nothing_unfinished(other), 10)
        assert not held.exists()
        assert len((await other.status()).sessions) == 2
        del mapped
        await ts.shutdown("other")


async def test_the_next_transport_waits_until_the_write_of_the_last_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one has stopped: it is killed before anything else is written there."""
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    monkeypatch.setenv(GATE, str(gate))
    monkeypatch.setattr("torchstore_core.clients.moving.executor._LEAST_S", 0.5)
    async with running_store(prefer=["mailbox-apart"], **SMALL) as client:
        apart = int(await ask(client, Letter("who"), "mailbox-apart"))
        (volume,) = (await client._joined.session(10)).volumes
        volume.context = msgspec.structs.replace(volume.context, same_host=False)
        gate.touch()
        putting = asyncio.ensure_future(client.put("t", torch.arange(MB // 8)))
        await until(held.exists, 10)
        os.kill(apart, signal.SIGSTOP)
        with pytest.warns(RuntimeWarning, match="mailbox-apart.*did not end within"):
            await putting
        assert not Path(f"/proc/{apart}").exists()
        assert torch.equal(await client.get("t"), torch.arange(MB // 8))


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
        with Script(put):
            await until(held.exists, 30)
        await until(lambda: nothing_unfinished(client), 10)
        assert not held.exists()
