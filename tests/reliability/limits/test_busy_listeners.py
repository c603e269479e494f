"""Connecting to who is too busy to accept: it is waited for, for it is there."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support import halt, running_store

import torchstore_core as ts
from torchstore_cli.serving import _is_listening
from torchstore_core.clients.session.handshake import client_facts, handshake
from torchstore_core.contracts.transport import LinkContext
from torchstore_core.machine import topology
from torchstore_core.machine.directories import remove_stale
from torchstore_core.server.remote.attached import VolumeConnection
from torchstore_core.testing.timers import within
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import encode
from torchstore_spmd.member import Member

HERE = topology.probe()
SHORT_S = 0.2


@contextlib.contextmanager
def full(path: str) -> Iterator[None]:
    """The queue of who listens at ``path`` is full, unless connections are accepted."""
    clients: list[socket.socket] = []
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                clients.append(socket.socket(socket.AF_UNIX))
                clients[-1].setblocking(False)
                clients[-1].connect(path)
        yield
    finally:
        for client in clients:
            client.close()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "control.sock"))
        sock.listen(0)
        yield sock


# ---- everything that connects -------------------------------------------------------------


async def _liveness(path: str) -> object:
    return (await handshake(f"unix:{path}", b"", client_facts({}, HERE), HERE, 20))[0]


async def _member(path: str) -> object:
    return await Member.join(f"unix:{path}", (0, 0), 20)


async def _volume(path: str) -> object:
    info = m.VolumeInfo("v", 0, 0, HERE, 4096, {})
    return await VolumeConnection.open(path, _NoVolume(), info, lambda: None, 20)  # type: ignore[arg-type]


async def _shm(path: str) -> object:
    from torchstore_transports.shm.link import ShmLink
    from torchstore_transports.shm.server import Offer

    offer = msgspec.msgpack.encode(Offer(path, ((0, 4096),)))
    return await ShmLink.connect(offer, LinkContext(HERE, HERE, same_host=True, offered=True))


async def _agent(path: str) -> object:
    from torchstore_monarch.protocol import Offer
    from torchstore_monarch.rpc import link as rpc
    from torchstore_monarch.rpc.wire import Admission

    async def handshake(request: bytes) -> bytes:
        return msgspec.msgpack.encode(Admission(b"ticket", path))

    context = LinkContext(HERE, HERE, same_host=False, offered=True, handshake=handshake)
    return await rpc.RpcLink.connect(msgspec.msgpack.encode(Offer("s", "v")), context)


class _NoVolume:
    """What a line asks of its volume when it is attached, and when it ends."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def _welcome(peer: socket.socket) -> None:
    peer.sendall(encode(m.Welcome(1, m.PROTOCOL_VERSION, b"t", "s", HERE, [], [])))


def _segment(peer: socket.socket) -> None:
    with open(os.devnull, "rb") as file:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()]))
        peer.sendmsg([b"x"], [rights])


async def test_memory_of_a_server_that_has_died_is_asked_for_again(tmp_path: Path) -> None:
    """It may come back; until then its socket is one where nobody listens, or is gone."""
    path = str(tmp_path / "died.sock")
    with socket.socket(socket.AF_UNIX) as died:
        died.bind(path)
    for _ in range(2):
        with pytest.raises(ts.TransportNotReadyError, match="may come back"):
            await _shm(path)
        Path(path).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("connect", "answer"),
    [
        (_liveness, _welcome),
        (_member, _welcome),
        (_volume, lambda peer: peer.sendall(encode(m.Attached(1, 1)))),
        (_shm, _segment),
        (_agent, lambda peer: None),
    ],
    ids=["liveness", "member", "volume", "shm", "agent"],
)
async def test_a_full_queue_is_waited_for(
    connect: Callable[[str], Awaitable[object]],
    answer: Callable[[socket.socket], None],
    listener: socket.socket,
):
    loop = asyncio.get_running_loop()
    path = listener.getsockname()
    with full(path), contextlib.ExitStack() as peers:
        made = asyncio.ensure_future(connect(path))
        await asyncio.wait([made], timeout=SHORT_S)
        assert not made.done(), made

        def accept() -> None:
            peer = peers.enter_context(listener.accept()[0])
            with contextlib.suppress(OSError):  # one of those that fill the queue
                answer(peer)

        listener.setblocking(False)
        loop.add_reader(listener.fileno(), accept)
        try:
            ended: Any = await asyncio.wait_for(made, 50)
        finally:
            loop.remove_reader(listener.fileno())
        with contextlib.suppress(AttributeError):
            ended.close()


def test_who_is_busy_is_not_taken_for_gone(listener: socket.socket):
    """By those that only look: a second `serve` in its directory, and who sweeps directories."""
    path = Path(listener.getsockname())
    os.utime(path, (0, 0))
    os.rename(path.parent, path.parent.with_name("base"))
    base = path.parent
    base.mkdir()
    os.rename(base.with_name("base"), base / "store")
    path = base / "store" / "control.sock"
    with full(str(path)):
        assert _is_listening(path)
        remove_stale(base)
    assert path.exists()


# ---- a store ------------------------------------------------------------------------------


async def test_a_stopped_server_is_waited_for_until_the_deadline():
    async with running_store() as client:
        server = (await client.status()).controller_pid
        path = client.address.partition(":")[2]
        await halt(server)
        try:
            with full(path):
                async with within(10):
                    with pytest.raises(ts.StoreTimeoutError, match="did not accept a connection"):
                        await ts.connect(client.address, store_name="late", timeout=SHORT_S)
                ways = [
                    asyncio.ensure_future(
                        ts.connect(client.address, store_name=f"way {number}", timeout=30)
                    )
                    for number in range(8)
                ]
                await asyncio.wait(ways, timeout=SHORT_S)
                assert not any(way.done() for way in ways)
                os.kill(server, signal.SIGCONT)
                joined = await asyncio.gather(*ways)
                await joined[0].put("a", 1)
                assert [await way.get("a") for way in joined] == [1] * 8
        finally:
            os.kill(server, signal.SIGCONT)
            for number in range(8):
                await ts.shutdown(f"way {number}")


@pytest.mark.parametrize("there", [False, True], ids=["no_socket", "nobody_listens"])
async def test_no_store_is_said_at_once(there: bool, tmp_path: Path):
    path = tmp_path / "control.sock"
    if there:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))
    async with within(5):
        with pytest.raises(ts.StoreClosedError):
            await ts.connect(f"unix:{path}", timeout=30)
