"""A switchboard outlives the actor that carries what it says; without Monarch, and its relays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.support import until

from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.machine import topology
from torchstore_core.machine.directories import is_abandoned
from torchstore_core.runtimes.server_process import ServerProcess
from torchstore_core.server.remote.relay_server import RelayReply, RelayRequest
from torchstore_core.testing.timers import within
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import HEADER, decode_reply, encode, framed
from torchstore_monarch.switchboard import wire

_LONG_S = 600.0
_SHORT_S = 0.5
_SERVER = {"attached": True, "keeper": True, "num_storage_volumes": 1}


class _Actor:
    """The end of a connection that an actor has."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, path: str) -> _Actor:
        made = cls(*await asyncio.open_unix_connection(path))
        made.send(wire.Carry())
        return made

    def send(self, message: wire.FromActor) -> None:
        self._writer.write(framed(message))

    async def receive(self) -> wire.ToActor:
        size = int.from_bytes(await self._reader.readexactly(HEADER), "little")
        return wire.to_actor(await self._reader.readexactly(size))

    async def open(self, token: bytes = b"", got: int = 0) -> wire.Answer:
        here = msgspec.msgpack.encode(topology.probe())
        self.send(wire.OpenUplink(1, token, here, "agent.sock", got))
        answer = await self.receive()
        assert isinstance(answer, wire.Answer)
        return answer

    async def nothing_more(self) -> None:
        """What was sent has been handled, and nothing was said to it."""
        self.send(wire.AgentOf(99, b"nobody"))
        assert await self.receive() == wire.Answer(99)

    def close(self) -> None:
        self._writer.close()


class _Board:
    """A switchboard, with its server.

    Attributes:
        path: of its socket.
        pids: its own, and those of all processes below it.
    """

    def __init__(self, process: ServerProcess, address: str) -> None:
        self.path = str(Path(address.partition(":")[2]).with_name(wire.SOCKET))
        self.keeper_pid = process.server_pid
        below = psutil.Process(process.pid).children(recursive=True)
        self.pids = {process.pid, *[one.pid for one in below]}

    async def has_ended(self) -> None:
        await until(lambda: not any(map(self._runs, self.pids)))
        assert not Path(self.path).parent.exists()

    @staticmethod
    def _runs(pid: int) -> bool:
        return topology.start_time(pid) is not None

    @property
    def runs(self) -> bool:
        return all(map(self._runs, self.pids))


@asynccontextmanager
async def _switchboard(grace_s: float, root: int = 0) -> AsyncIterator[_Board]:
    process = ServerProcess("torchstore_monarch.switchboard")
    server = {"store_name": "s", **_SERVER}
    options = wire.Options("s", server, 60.0, os.getpid(), root, grace_s)
    address = await process.launch(msgspec.structs.asdict(options), 60.0)
    board = _Board(process, address)
    assert len(board.pids) >= 3
    try:
        yield board
    finally:
        await process.stop(10.0)
    await board.has_ended()


async def test_it_waits_for_the_next_actor() -> None:
    async with _switchboard(_LONG_S) as board:
        for _ in range(3):
            actor = await _Actor.connect(board.path)
            actor.send(wire.Led())
            await actor.nothing_more()
            actor.close()
        actor = await _Actor.connect(board.path)
        await actor.nothing_more()
        assert board.runs
        actor.close()


async def test_who_only_looks_whether_it_listens_is_no_actor() -> None:
    """As a server does that comes back."""
    async with _switchboard(_SHORT_S) as board:
        actor = await _Actor.connect(board.path)
        actor.send(wire.Led())
        assert not is_abandoned(board.path)
        token = (await actor.open()).token
        actor.send(wire.Ask(token, 1, 0, _hello(1)))
        await _refused(actor, 1, 1)
        await asyncio.sleep(2 * _SHORT_S)  # it does not wait for another one
        assert board.runs
        actor.close()


async def test_it_does_not_wait_for_ever() -> None:
    async with _switchboard(_SHORT_S) as board:
        first = await _Actor.connect(board.path)
        first.send(wire.Led())
        await first.nothing_more()
        first.close()
        second = await _Actor.connect(board.path)
        await asyncio.sleep(2 * _SHORT_S)  # it would have ended by now
        await second.nothing_more()
        assert board.runs
        second.close()
        await board.has_ended()


async def test_an_actor_that_nobody_knows_yet_is_not_waited_for() -> None:
    """As long as the store starts, it ends with the actor that has started it."""
    async with _switchboard(_LONG_S) as board:
        actor = await _Actor.connect(board.path)
        await actor.nothing_more()
        actor.close()
        await board.has_ended()


@pytest.mark.parametrize("first", ["actor", "root"])
async def test_without_its_program_it_does_not_wait(first: str) -> None:
    with subprocess.Popen(["sleep", "600"]) as root:
        async with _switchboard(_LONG_S, root.pid) as board:
            actor = await _Actor.connect(board.path)
            actor.send(wire.Led())
            await actor.nothing_more()
            if first == "actor":
                actor.close()
            root.kill()
            root.wait()
            if first == "root":  # the engine ends the actor when it sees that
                await actor.nothing_more()
                assert board.runs
                actor.close()
            await board.has_ended()


async def test_it_ends_with_its_keeper() -> None:
    """And says so."""
    async with _switchboard(_LONG_S) as board:
        actor = await _Actor.connect(board.path)
        actor.send(wire.Led())
        await actor.nothing_more()
        os.kill(board.keeper_pid, signal.SIGKILL)
        async with within(10):
            assert await actor.receive() == wire.Ended(good=False)
        actor.close()
        await board.has_ended()


def _hello(conn: int) -> bytes:
    here = topology.probe()
    facts = ClientFacts(here.pid, here.host_id, here.hostname)
    frame = encode(m.Hello(1, m.PROTOCOL_VERSION, b"", here, facts))
    return msgspec.msgpack.encode([RelayRequest(conn, bytes(frame[HEADER:]))])


async def _refused(actor: _Actor, number: int, conn: int) -> wire.Say:
    """What is said of that connection: that the store lacks its volume."""
    said = await actor.receive()
    assert isinstance(said, wire.Say)
    assert said.number == number
    (reply,) = msgspec.msgpack.decode(said.replies, type=list[RelayReply])
    assert reply.conn == conn
    if reply.frame:
        failure = decode_reply(reply.frame[HEADER:])
        assert isinstance(failure, m.Failure)
        assert "still starting" in failure.message
    return said


async def test_what_was_under_way_is_done_once() -> None:
    async with _switchboard(_LONG_S) as board:
        first = await _Actor.connect(board.path)
        first.send(wire.Led())
        token = (await first.open()).token
        first.send(wire.Ask(token, 1, 0, _hello(1)))
        said = [await _refused(first, number, 1) for number in (1, 2)]  # an answer, and the end
        first.close()  # before the relay has it
        second = await _Actor.connect(board.path)
        assert (await second.open(token)).received == 1
        assert [await second.receive() for _ in said] == said
        second.send(wire.Ask(token, 1, 1, _hello(1)))  # the relay does not know that it has arrived
        await second.nothing_more()
        second.close()
        third = await _Actor.connect(board.path)
        assert (await third.open(token, got=1)).received == 1
        assert await third.receive() == said[1]
        third.send(wire.Ask(token, 2, 2, _hello(2)))
        assert (await _refused(third, 3, 2)).received == 2
        third.close()


async def test_a_relay_that_was_given_up_is_told() -> None:
    async with _switchboard(_LONG_S) as board:
        actor = await _Actor.connect(board.path)
        answer = await actor.open(b"unknown", got=3)
        assert answer.failure
        await actor.nothing_more()
        actor.close()
