"""``monarch-rpc``: what the agent of a host carries, and what it does not let through."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.monarch import acts
from tests.monarch.jobs import Job
from tests.support import noise, turn, until
from tests.unit.remote.relays import Backstage

import torchstore_core as ts
from torchstore_core.clients.session.volume_links import VolumeLinks
from torchstore_core.contracts.transport import (
    Copy,
    LinkContext,
    Segment,
    ServerContext,
    SupportsProgress,
)
from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_core.machine import topology
from torchstore_core.plugins.ranking import Policy
from torchstore_core.plugins.registry import Registry
from torchstore_core.server.memory.segment import open_memory
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import framed
from torchstore_monarch import chunks
from torchstore_monarch.actors.hosting import Host, hosting
from torchstore_monarch.chunks import PIECES
from torchstore_monarch.protocol import outcome
from torchstore_monarch.rpc.forwarder import Forwarder
from torchstore_monarch.rpc.link import RpcLink
from torchstore_monarch.rpc.server import RpcServer
from torchstore_monarch.rpc.wire import (
    CHUNK,
    GREETING,
    Admission,
    RpcRequest,
    RpcResponse,
)

SIZE = 64 << 20
PEER = b"client"
HERE = topology.probe()


class _Endpoint:
    """What calling an actor's endpoint does, without an engine: nothing but the call."""

    def __init__(self, work: Any, agent: _Agent) -> None:
        self._work, self._agent = work, agent

    async def call_one(self, volume: str, *args: Any) -> Any:
        self._agent.calls += 1
        if self._agent.gate is not None:
            await self._agent.gate.wait()

        async def work() -> Any:
            return await self._work(*args)

        return await outcome(work())


class _Agent:
    """Server half and forwarder, on a thread's loop; ``read`` and ``write`` are the endpoints."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fd = open_memory("rpc", SIZE)
        self.calls = 0
        self.gate: asyncio.Event | None = None
        self.valid = True

    async def start(self) -> None:
        self.half = RpcServer()
        self.forwarder = Forwarder(str(self.directory), lambda: self.valid)
        context = ServerContext("store", "store-0", str(self.directory), HERE)
        with hosting(Host("store", self.agent_of)):
            self.offer = await self.half.start(context, [Segment(0, self.fd, SIZE)])
        self.forwarder.volumes = {"store-0": self}
        await self.forwarder.start()
        self.ticket = await self.admit()

    async def agent_of(self, peer: bytes) -> str:
        return self.forwarder.path

    async def admit(self) -> bytes:
        answer = await self.half.handshake(PEER, GREETING)
        return msgspec.msgpack.decode(answer, type=Admission).ticket

    @property
    def read(self) -> _Endpoint:
        return _Endpoint(self.half.read, self)

    @property
    def write(self) -> _Endpoint:
        return _Endpoint(self.half.write, self)

    async def close(self) -> None:
        await self.forwarder.close()
        await self.half.close()

    async def link(self) -> RpcLink:
        async def handshake(request: bytes) -> bytes:
            return await self.half.handshake(PEER, request)

        context = LinkContext(HERE, HERE, same_host=False, offered=True, handshake=handshake)
        return await RpcLink.connect(self.offer, context)


@pytest.fixture(scope="module")
def stage() -> Iterator[Backstage]:
    with Backstage() as made:
        yield made


@pytest.fixture
def agent(stage: Backstage, tmp_path: Path) -> Iterator[_Agent]:
    made = _Agent(tmp_path)
    stage.do(made.start())
    try:
        yield made
    finally:
        stage.do(made.close())


def _buffer(nbytes: int, fill: int = 0) -> torch.Tensor:
    return torch.full((nbytes,), fill, dtype=torch.uint8)


def _random(nbytes: int, seed: int) -> torch.Tensor:
    return noise(nbytes, seed)


async def _there_and_back(agent: _Agent, sizes: list[int], seed: int) -> None:
    """Write pieces to places of the segment in any order, and read them into other memory."""
    shuffled = random.Random(seed)
    link = await agent.link()
    one = _buffer(1)
    await link.read([Copy(one.data_ptr(), 0, 0, 1)])  # the agent has accepted it
    offset = 0
    places = []
    for size in sizes:
        places.append((offset, size))
        offset += size + shuffled.randrange(64)
    assert offset <= SIZE
    source = [_random(size, seed + i) for i, (_, size) in enumerate(places)]
    order = list(range(len(places)))
    shuffled.shuffle(order)
    await link.write([Copy(source[i].data_ptr(), 0, *places[i]) for i in order])
    target = [_buffer(size) for _, size in places]
    shuffled.shuffle(order)
    await link.read([Copy(target[i].data_ptr(), 0, *places[i]) for i in order])
    assert all(torch.equal(a, b) for a, b in zip(source, target, strict=True))
    link.close()


_Size = st.sampled_from([0, 1, 2, 3, 4095, 4096, 4097, 65_537, 1_000_003]) | st.integers(0, 5000)


@given(sizes=st.lists(_Size, max_size=12), seed=st.integers(0, 1000))
def test_pieces_of_odd_sizes(
    stage: Backstage, tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int
) -> None:
    made = _Agent(tmp_path_factory.mktemp("a"))
    stage.do(made.start())
    try:
        asyncio.run(_there_and_back(made, sizes, seed))
    finally:
        stage.do(made.close())


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [CHUNK],
        [CHUNK - 1, 2],
        [CHUNK + 1],
        [3 * CHUNK + 17, 5, 2 * CHUNK],
        [7] * (2 * PIECES + 3),
    ],
    ids=["none", "empty", "chunk", "two", "over", "long", "many"],
)
async def test_chunks(agent: _Agent, sizes: list[int]) -> None:
    await _there_and_back(agent, sizes, 1)


async def test_many_pieces_are_few_calls(agent: _Agent) -> None:
    link = await agent.link()
    target = _buffer(1000)
    await link.read([Copy(target.data_ptr() + i, 0, i, 1) for i in range(1000)])
    assert agent.calls == 1
    link.close()


async def test_two_at_once_on_one_link(agent: _Agent) -> None:
    link = await agent.link()
    sources = [_random(3 * CHUNK // 2, i) for i in range(4)]
    places = [(i * 2 * CHUNK) % SIZE for i in range(4)]
    await asyncio.gather(
        *(
            link.write([Copy(source.data_ptr(), 0, at, len(source))])
            for source, at in zip(sources, places, strict=True)
        )
    )
    targets = [torch.zeros_like(source) for source in sources]
    await asyncio.gather(
        *(
            link.read([Copy(target.data_ptr(), 0, at, len(target))])
            for target, at in zip(targets, places, strict=True)
        )
    )
    assert all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True))
    link.close()


@pytest.mark.parametrize("way", ["read", "write"])
async def test_progress_is_what_the_volume_has_answered(
    agent: _Agent, stage: Backstage, way: str
) -> None:
    link = await agent.link()
    mine = _buffer(2 * CHUNK + 5, 1)
    copies = [Copy(mine.data_ptr(), 0, 0, len(mine))]
    agent.gate = stage.call(asyncio.Event)
    work = asyncio.ensure_future(link.read(copies) if way == "read" else link.write(copies))
    await until(lambda: agent.calls > 0)
    assert isinstance(link, SupportsProgress)
    assert link.progress() == 0
    stage.call(agent.gate.set)
    await until(lambda: link.progress() > 0, 20)
    await work
    assert link.progress() == len(mine)
    link.close()


async def test_a_slow_engine_is_called_with_fewer_bytes(
    agent: _Agent, stage: Backstage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that progress shows; and with more where calls are quick, because each has its cost."""
    link = await agent.link()
    mine = _buffer(4 * CHUNK, 1)
    copies = [Copy(mine.data_ptr(), 0, 0, len(mine))]

    async def calls() -> int:
        before = agent.calls
        await link.write(copies)
        return agent.calls - before

    monkeypatch.setattr(chunks, "_QUICK_S", 1e9)
    monkeypatch.setattr(chunks, "_LONG_S", 1e9)
    await calls()
    assert await calls() == 4
    monkeypatch.setattr(chunks, "_QUICK_S", 0.0)
    monkeypatch.setattr(chunks, "_LONG_S", 0.0)
    await calls()
    assert await calls() == len(mine) >> 20
    link.close()


@pytest.mark.parametrize("nbytes", [4096, CHUNK])
async def test_only_what_is_small_is_copied_on_the_event_loop(
    agent: _Agent, stage: Backstage, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """Of the volume's actor, and of the agent, which clients and the volumes of its host share."""
    copied, called, received = set(), set(), []

    class Actor:
        """An actor whose calls take the engine a while."""

        class write:
            @staticmethod
            def call_one(*args: Any) -> Any:
                called.add(threading.get_ident())
                return agent.write.call_one(*args)

    pwrite, pread, readexactly = os.pwrite, os.pread, asyncio.StreamReader.readexactly

    def written(fd: int, data: Any, offset: int) -> int:
        copied.add(threading.get_ident())
        return pwrite(fd, data, offset)

    def read(fd: int, size: int, offset: int) -> bytes:
        copied.add(threading.get_ident())
        return pread(fd, size, offset)

    async def exactly(reader: asyncio.StreamReader, size: int) -> bytes:
        received.append(size)
        return await readexactly(reader, size)

    monkeypatch.setattr(os, "pwrite", written)
    monkeypatch.setattr(os, "pread", read)
    monkeypatch.setattr(asyncio.StreamReader, "readexactly", exactly)
    loops = {stage.call(threading.get_ident), threading.get_ident()}
    agent.forwarder.volumes = {"store-0": Actor}
    link = await agent.link()
    mine = _buffer(CHUNK, 1)
    monkeypatch.setattr(link._size, "nbytes", CHUNK)  # what it grows to
    await link.write([Copy(mine.data_ptr(), 0, 0, nbytes)])
    assert await agent.half.read(agent.ticket, [(0, 0, nbytes)]) == b"\x01" * nbytes
    link.close()
    small = nbytes == 4096
    assert copied
    assert (copied | called <= loops) is small
    assert copied.isdisjoint(loops) is called.isdisjoint(loops) is not small
    assert max(received) <= 256 << 10


async def test_a_volume_that_closes_waits_for_what_is_being_written(agent: _Agent) -> None:
    """The descriptor of its memory may be another file's a moment later."""
    half = agent.half
    with half.writing(agent.ticket):
        closing = asyncio.ensure_future(half.close())
        ended, _ = await asyncio.wait([closing], timeout=0.1)
        assert not ended
    await asyncio.wait_for(closing, 60)
    with pytest.raises(TransportError, match="has disconnected"):
        await half.write(agent.ticket, [(0, 0, 1)], b"1")


# ---- what goes wrong ----------------------------------------------------------------------


@pytest.mark.parametrize("way", ["read", "write"])
async def test_cancelled_in_the_middle(agent: _Agent, stage: Backstage, way: str) -> None:
    """When the cancelled call returns, nobody touches the memory here any more; nor, once the
    volume has disconnected the client, the memory there.
    """
    link = await agent.link()
    mine = _buffer(6 * CHUNK, 1)
    agent.gate = stage.call(asyncio.Event)
    copies = [Copy(mine.data_ptr(), 0, 0, len(mine))]
    task = asyncio.create_task(link.read(copies) if way == "read" else link.write(copies))
    await until(lambda: agent.calls > 0)
    task.cancel()
    await turn()
    task.cancel()  # by the user, say, and by the time that is over
    await asyncio.wait([task], timeout=5)  # a host that never answers does not hold anybody
    assert task.cancelled()
    assert link.unsettled is (way == "write")
    here = mine.clone()
    if link.unsettled:  # as the store does
        link.close()
        stage.do(agent.half.disconnect(PEER))
        agent.ticket = await agent.admit()
        link = await agent.link()
    stage.call(agent.gate.set)
    stage.do(agent.forwarder.idle(HERE.pid))
    calls = agent.calls
    assert calls <= 3
    assert await agent.half.read(agent.ticket, [(0, 0, len(mine))]) == bytes(len(mine))
    agent.gate = None
    # Answers are not mixed up.
    other = _random(1000, 5)
    await link.write([Copy(other.data_ptr(), 0, SIZE - 1000, 1000)])
    back = _buffer(1000)
    await link.read([Copy(back.data_ptr(), 0, SIZE - 1000, 1000)])
    assert torch.equal(back, other)
    assert agent.calls == calls + 2
    assert torch.equal(mine, here)
    link.close()


async def test_a_queued_write_that_is_cancelled_disturbs_nobody(
    agent: _Agent, stage: Backstage
) -> None:
    link = await agent.link()
    mine, queued = _buffer(CHUNK, 1), _buffer(CHUNK, 2)
    agent.gate = stage.call(asyncio.Event)
    first = asyncio.create_task(link.write([Copy(mine.data_ptr(), 0, 0, CHUNK)]))
    await until(lambda: agent.calls > 0)
    second = asyncio.create_task(link.write([Copy(queued.data_ptr(), 0, CHUNK, CHUNK)]))
    await turn()
    second.cancel()
    await asyncio.wait([second], timeout=5)
    assert second.cancelled()
    assert not link.unsettled
    stage.call(agent.gate.set)
    await asyncio.wait_for(first, 60)
    assert await agent.half.read(agent.ticket, [(0, 0, CHUNK)]) == b"\x01" * CHUNK
    link.close()


async def test_the_agent_ends_in_the_middle(agent: _Agent, stage: Backstage) -> None:
    link = await agent.link()
    agent.gate = stage.call(asyncio.Event)
    mine = _buffer(4 * CHUNK)
    task = asyncio.create_task(link.read([Copy(mine.data_ptr(), 0, 0, len(mine))]))
    await until(lambda: agent.calls > 0)
    stage.do(agent.forwarder.close())
    with pytest.raises(TransportError, match="agent of this host is gone"):
        await task
    with pytest.raises(TransportError, match="broken"):
        await link.read([Copy(mine.data_ptr(), 0, 0, 1)])
    stage.call(agent.gate.set)
    link.close()


async def test_no_agent(agent: _Agent, stage: Backstage) -> None:
    stage.do(agent.forwarder.close())
    with pytest.raises(TransportUnavailableError, match="no agent"):
        await agent.link()


@pytest.mark.parametrize("way", ["read", "write"])
async def test_what_has_arrived_when_a_batch_fails_is_told(
    agent: _Agent, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Requests of 1 MB, however quick they are: none has a part of two copies.
    monkeypatch.setattr("torchstore_monarch.rpc.link.CHUNK", 1 << 20)
    link = await agent.link()
    mine = _buffer(3 << 20, 3)
    good, bad = (Copy(mine.data_ptr(), 0, offset, 3 << 20) for offset in (0, SIZE))
    with pytest.raises(TransportError, match="not in segment") as raised:
        await (link.read if way == "read" else link.write)([good, good, bad, good])
    assert raised.value.details["done"] == 2
    link.close()


async def test_each_disconnect_waits_for_a_write_that_is_under_way(agent: _Agent) -> None:
    half = agent.half
    with half.writing(agent.ticket):
        ending = [asyncio.ensure_future(half.disconnect(PEER)) for _ in range(2)]
        ended, _ = await asyncio.wait(ending, timeout=0.1)
        assert not ended
    await asyncio.wait_for(asyncio.gather(*ending), 60)
    with pytest.raises(TransportError, match="has disconnected"):
        await half.write(agent.ticket, [(0, 0, 1)], b"1")
    assert await agent.admit() != agent.ticket


@pytest.mark.parametrize(
    ("segment", "offset", "nbytes"),
    [(0, SIZE - 1, 2), (0, SIZE, 1), (1, 0, 1), (0, -1, 1), (0, 2**62, 8)],
)
@pytest.mark.parametrize("way", ["read", "write"])
async def test_places_outside_the_segment(
    agent: _Agent, way: str, segment: int, offset: int, nbytes: int
) -> None:
    link = await agent.link()
    mine = _buffer(64, 3)
    copies = [Copy(mine.data_ptr(), segment, offset, nbytes)]
    with pytest.raises(TransportError, match="not in segment"):
        await (link.read(copies) if way == "read" else link.write(copies))
    assert mine.unique().tolist() == [3]
    # A request that was refused does not end the link.
    await link.read([Copy(mine.data_ptr(), 0, 0, 64)])
    assert mine.unique().tolist() == [0]
    link.close()


async def test_a_volume_that_is_not_there(agent: _Agent) -> None:
    agent.forwarder.volumes = {}
    link = await agent.link()
    mine = _buffer(64)
    with pytest.raises(TransportError, match="no volume"):
        await link.read([Copy(mine.data_ptr(), 0, 0, 64)])
    link.close()


async def test_no_bytes_when_the_server_may_have_given_them_to_others(agent: _Agent) -> None:
    """A relay that has lost its server cannot know whether leases are still held."""
    agent.valid = False
    link = await agent.link()
    mine = _buffer(64, 3)
    for work in (link.read, link.write):
        with pytest.raises(TransportError, match="lost the server"):
            await work([Copy(mine.data_ptr(), 0, 0, 64)])
    assert agent.calls == 0
    assert mine.unique().tolist() == [3]
    link.close()


def _carry(
    places: list[tuple[int, int, int]], nbytes: int, *, write: bool = False, ticket: bytes = b""
) -> bytes:
    return framed(RpcRequest("store-0", places, nbytes, write, ticket))


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        (4).to_bytes(4, "little") + b"\xc1\xc1\xc1\xc1",
        _carry([(0, 0, 8)], 9),
        _carry([(0, 0, CHUNK), (0, 0, 1)], CHUNK + 1),
        _carry([(0, 0, -8)], -8),
        _carry([(0, 0, 16), (0, 0, -8)], 8),
        _carry([(0, 0, 0)] * (PIECES + 1), 0),
        framed(RpcResponse("no request")),
        _carry([(0, 0, 100)], 100, write=True) + b"short",
    ],
    ids=["size", "bytes", "sum", "long", "negative", "mixed", "many", "kind", "short"],
)
async def test_garbage_ends_that_connection_alone(agent: _Agent, garbage: bytes) -> None:
    link = await agent.link()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(agent.forwarder.path)
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        left = await asyncio.to_thread(sock.recv, 1 << 16)
    if left:  # answered and refused: then it was read as a request
        size = int.from_bytes(left[:4], "little")
        assert msgspec.msgpack.decode(left[4 : 4 + size], type=RpcResponse).error
    mine = _buffer(64, 1)
    await link.write([Copy(mine.data_ptr(), 0, 0, 64)])
    assert await agent.half.read(agent.ticket, [(0, 0, 64)]) == bytes(mine.tolist())
    link.close()


async def test_idle_waits_for_writes_of_that_process_alone(agent: _Agent, stage: Backstage) -> None:
    """See ``Server.before_close``: what a dead client asked for is still written."""
    agent.gate = stage.call(asyncio.Event)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(agent.forwarder.path)
        request = _carry([(0, 0, CHUNK)], CHUNK, write=True, ticket=agent.ticket)
        await asyncio.to_thread(sock.sendall, request)
        await asyncio.to_thread(sock.sendall, b"\x05" * CHUNK)
        await until(lambda: agent.calls > 0)
    # The connection is closed, as if this process were killed: the request is with the agent.
    stage.do(agent.forwarder.idle(1))

    async def idle_here() -> None:
        await agent.forwarder.idle(HERE.pid)

    waiting = asyncio.run_coroutine_threadsafe(idle_here(), stage.loop)
    with pytest.raises(TimeoutError):
        waiting.result(0.2)
    stage.call(agent.gate.set)
    await asyncio.wait_for(asyncio.wrap_future(waiting), 60)
    assert await agent.half.read(agent.ticket, [(0, 0, CHUNK)]) == b"\x05" * CHUNK


@pytest.mark.filterwarnings("ignore:unclosed event loop:ResourceWarning")
@pytest.mark.filterwarnings(
    r"ignore:unclosed <socket.socket fd=\d+, family=1, type=1, proto=0>:ResourceWarning"
)
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function BaseEventLoop:pytest.PytestUnraisableExceptionWarning"
)
async def test_a_loop_that_is_never_closed_goes_with_its_link(agent: _Agent) -> None:
    """Though two transfers have waited for each other on it, and a third is under way."""
    info = m.VolumeInfo("v", 0, 0, HERE, SIZE, {"monarch-rpc": agent.offer})
    registry = Registry()

    async def handshake(transport: str, data: bytes) -> bytes:
        return await agent.half.handshake(PEER, data)

    links = VolumeLinks(info, HERE, False, registry, Policy.make(), handshake)
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []
    before = len(os.listdir("/proc/self/fd"))

    async def read() -> None:
        back = _buffer(CHUNK)
        with links.in_use():
            (candidate,) = links.candidates(CHUNK)
            link = await links.connect(candidate)
            await links.until_lost(link.read([Copy(back.data_ptr(), 0, 0, CHUNK)]), 60.0)

    async def main() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await read()
        await asyncio.gather(read(), read())
        asyncio.get_running_loop().create_task(read())
        await turn()

    def work() -> None:
        asyncio.new_event_loop().run_until_complete(main())

    thread = threading.Thread(target=work)
    thread.start()
    await asyncio.to_thread(thread.join)
    await until(lambda: gc.collect() >= 0 and loops[0]() is None)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)  # the executor's


async def _agents() -> tuple[str, list[str]]:
    """Where this process reaches the store, and the sockets of the agents that it would ask."""
    session = await (await ts.client())._joined.session(10)
    links = [
        await volume.connect(candidate)
        for volume in session.volumes
        for candidate in volume.candidates(CHUNK)
        if candidate.spec.name == "monarch-rpc"
    ]
    return session.address, [link._path for link in links if isinstance(link, RpcLink)]


async def test_clients_ask_the_agent_beside_the_relay_that_they_use(hosts: Job) -> None:
    """The volume tells them, after it has asked the controller: where there is no agent of the
    store, each process has a relay and an agent of its own, and on the controller's host there is
    the controller's.
    """
    await hosts.root(acts.initialize, {"block": ["tcp", "monarch-rdma"]})
    try:
        asked = [await hosts.root(_agents), await hosts.at(0, _agents), await hosts.at(1, _agents)]
    finally:
        await hosts.root(acts.shutdown)
    for address, agents in asked:
        beside = os.path.dirname(address.partition(":")[2])
        assert [os.path.dirname(agent) for agent in agents] == [beside]
    assert len({address for address, _ in asked}) == 3
