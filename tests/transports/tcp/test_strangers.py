"""Whoever connects to the port without having been let in: refused, logged once, harmless."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest
from tests.strangers import closed
from tests.support import until
from tests.transports.tcp.halves import MB, PEER, Local, Volume, drip, linked, threads, volume

from torchstore_core.errors import TransportNotReadyError, TransportUnavailableError
from torchstore_core.machine.networks import namespace_id, networks
from torchstore_core.testing.timers import within
from torchstore_transports.tcp.serving.peers import UNKNOWN_MAX
from torchstore_transports.tcp.wire import authentication
from torchstore_transports.tcp.wire.protocol import (
    ANSWER,
    EXTENT,
    FAILED,
    READ,
    REQUEST,
    VERSION,
    WRITE,
    Greeting,
    Welcome,
)

MAGIC = b"torchstore tcp 1"


@contextmanager
def _stranger(there: Volume) -> Iterator[socket.socket]:
    with socket.create_connection(there.endpoint, timeout=60) as sock:
        yield sock


async def _works(there: Volume) -> None:
    """A client that has been let in is served."""
    link = await there.connect()
    data = os.urandom(3 * MB)
    local = Local(3 * MB, data)
    await link.write([local.copy()])
    assert there.memory[: 3 * MB] == data
    link.close()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
        os.urandom(1 << 16),
        MAGIC + bytes(48),
        b"torchstore tcp 2" + bytes(48),
    ],
)
async def test_garbage(said: bytes) -> None:
    async with linked() as (_, there):
        with _stranger(there) as sock:
            sock.sendall(said)
            if not said:
                sock.shutdown(socket.SHUT_WR)
            assert await asyncio.to_thread(closed, sock)
        await _works(there)
        await until(lambda: threads().count("torchstore-tcp-serve") <= 2)


async def test_a_wrong_secret_and_a_wrong_ticket() -> None:
    async with linked() as (_, there):

        async def introduced(ticket: bytes, secret: bytes) -> None:
            with _stranger(there) as sock:
                await asyncio.to_thread(authentication.introduce, sock, ticket, secret, 5.0)

        assert there.welcome is not None
        ticket, secret = there.welcome.ticket, there.welcome.secret
        await introduced(ticket, secret)
        with pytest.raises(authentication.RefusedError, match="does not have the secret"):
            await introduced(ticket, os.urandom(32))
        with pytest.raises(OSError, match=r"closed|reset"):
            await introduced(os.urandom(16), secret)
        # Who does not check the volume's proof gets no further either.
        with _stranger(there) as sock:
            sock.sendall(MAGIC + ticket + bytes(32))
            assert len(await asyncio.to_thread(sock.recv, 64, socket.MSG_WAITALL)) == 64
            sock.sendall(os.urandom(32))
            assert await asyncio.to_thread(closed, sock)


async def test_a_volume_without_the_secret_is_not_trusted() -> None:
    """Somebody else may listen at that port: no byte of a tensor is sent to it."""
    async with volume() as there:
        with socket.create_server(("127.0.0.1", 0)) as other:

            def imitate() -> bytes:
                taken, _ = other.accept()
                with taken:
                    taken.recv(64, socket.MSG_WAITALL)
                    taken.sendall(os.urandom(64))
                    return taken.recv(1 << 16)

            said = asyncio.ensure_future(asyncio.to_thread(imitate))
            with pytest.raises(TransportNotReadyError, match="does not have the secret"):
                await there.connect(route=lambda _: (other.getsockname()[:2],))
            assert await said == b""


async def test_a_replayed_greeting_is_refused() -> None:
    async with linked() as (_, there):
        assert there.welcome is not None
        heard: list[bytes] = []

        class Ear(socket.socket):
            def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
                heard.append(bytes(data))
                super().sendall(data, flags)

        with Ear() as sock:
            sock.connect(there.endpoint)
            authentication.introduce(sock, there.welcome.ticket, there.welcome.secret, 5.0)
        with _stranger(there) as sock:
            sock.sendall(heard[0])
            assert len(await asyncio.to_thread(sock.recv, 64, socket.MSG_WAITALL)) == 64
            sock.sendall(heard[1])
            assert await asyncio.to_thread(closed, sock)


async def test_slow_and_silent_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole greeting has one limit, however diligently somebody sends a byte at a time."""
    monkeypatch.setattr("torchstore_transports.tcp.serving.peers.GREETING_S", 2.0)
    async with linked() as (_, there):
        with _stranger(there) as slow, _stranger(there) as silent:
            async with within(5):
                dripping = asyncio.ensure_future(asyncio.to_thread(drip, slow))
                await _works(there)
                assert await asyncio.to_thread(closed, silent)
                await dripping


async def test_more_strangers_than_are_let_near(caplog: pytest.LogCaptureFixture) -> None:
    """The oldest gives way, so that a client still gets in; and the log does not fill."""
    caplog.set_level(logging.WARNING)
    async with linked() as (_, there), asyncio.timeout(60):
        with ExitStack() as stack:
            async with within(authentication.GREETING_S / 2):
                crowd = [stack.enter_context(_stranger(there)) for _ in range(2 * UNKNOWN_MAX)]
                for sock in crowd[:UNKNOWN_MAX]:
                    assert await asyncio.to_thread(closed, sock)
            # The thread of a connection ends a moment after it was closed.
            await until(lambda: threads().count("torchstore-tcp-serve") <= UNKNOWN_MAX + 2)
            await _works(there)
        await until(lambda: threads().count("torchstore-tcp-serve") <= 2)
    refusals = [record for record in caplog.records if "refused a connection" in record.message]
    assert len(refusals) == 1


async def test_a_port_scan() -> None:
    async with linked() as (_, there):
        for _ in range(200):
            with _stranger(there):
                pass
        await _works(there)
        await until(lambda: threads().count("torchstore-tcp-serve") <= 2)


async def test_a_client_that_was_forgotten_is_a_stranger() -> None:
    """With the ticket and the secret that it was given, too."""
    async with linked() as (link, there):
        local = Local(100)
        await link.write([local.copy()])
        known = there.welcome
        assert known is not None

        async def introduced() -> None:
            with _stranger(there) as sock:
                given = known.ticket, known.secret
                await asyncio.to_thread(authentication.introduce, sock, *given, 5.0)

        other = await there.connect(b"other")
        await introduced()
        await there.server.disconnect(PEER)
        with pytest.raises(OSError, match=r"closed|reset"):
            await introduced()
        await other.read([local.copy()])
        other.close()


@pytest.mark.parametrize(
    "request_",
    [
        REQUEST.pack(9, 0, 0, 0, 0, 0),
        REQUEST.pack(READ, 0, 0, 1025, 10, 0),
        REQUEST.pack(READ, 0, 0, 0, 1 << 40, 0),
        REQUEST.pack(READ, 0, 0, 1, 10, 0) + EXTENT.pack(7, 0, 9, 1, 0),
        REQUEST.pack(READ, 0, 0, 1, 10, 0) + EXTENT.pack(8, 0, 10, 1, 0),
        REQUEST.pack(READ, 0, 0, 1, 10, 0) + EXTENT.pack(7, 64 * MB, 10, 1, 0),
        REQUEST.pack(READ, 0, 0, 1, 10, 0) + EXTENT.pack(7, (1 << 64) - 1, 10, 1, 0),
        REQUEST.pack(WRITE, 0, 0, 1, 10, 0) + EXTENT.pack(7, 5, 5, 2, -(1 << 63)),
        REQUEST.pack(WRITE, 0, 0, 1, 0, 0) + EXTENT.pack(7, 5, 0, 0, 0),
        REQUEST.pack(WRITE, 1, 0, 1, 4, 77) + EXTENT.pack(7, 0, 4, 1, 0) + b"data",
    ],
)
async def test_a_client_that_asks_for_nonsense(request_: bytes) -> None:
    """Even who has been let in: an answer that says no, and the end of that connection."""
    async with linked() as (_, there):
        assert there.welcome is not None
        with _stranger(there) as sock:
            authentication.introduce(sock, there.welcome.ticket, there.welcome.secret, 5.0)
            sock.settimeout(60)
            sock.sendall(request_)
            head = await asyncio.to_thread(sock.recv, ANSWER.size, socket.MSG_WAITALL)
            outcome, _, _, _, nbytes = ANSWER.unpack(head)
            assert outcome == FAILED
            assert len(sock.recv(nbytes, socket.MSG_WAITALL)) == nbytes > 10
            sock.shutdown(socket.SHUT_WR)
            assert await asyncio.to_thread(closed, sock)
        assert there.memory[16:64] == bytes(48)
        await _works(there)


async def test_greetings_that_are_none() -> None:
    async with volume() as there:
        with pytest.raises(TransportUnavailableError, match="not a greeting"):
            await there.server.handshake(PEER, b"\xff\xff")
        old = msgspec.msgpack.encode(Greeting(0, namespace_id(), networks()))
        with pytest.raises(TransportUnavailableError, match="version 0"):
            await there.server.handshake(PEER, old)
        await until(lambda: not threads())
        ours = msgspec.msgpack.encode(Greeting(VERSION, namespace_id(), ()))
        first, second = [
            msgspec.msgpack.decode(await there.server.handshake(PEER, ours), type=Welcome)
            for _ in range(2)
        ]
        assert first == second
        other = await there.server.handshake(b"other", ours)
        assert msgspec.msgpack.decode(other, type=Welcome).secret != first.secret
