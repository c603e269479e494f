"""Strangers at the data port of a running store, whose server is a process of its own."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from tests.strangers import closed
from tests.support import SMALL, running_store, until
from tests.transports.listening import listening

import torchstore_core as ts
from torchstore_core.clients.session.handshake import ask_volume
from torchstore_core.machine.networks import namespace_id, networks
from torchstore_core.plugins.registry import Registry
from torchstore_transports.tcp.wire import authentication
from torchstore_transports.tcp.wire.protocol import VERSION, Greeting, Welcome

MB = 1 << 20
_MAGIC = b"torchstore tcp 1"
_ROUNDS = 40


class _Store:
    """A store whose client uses ``tcp``, and the port of that."""

    def __init__(self, client: ts.Client, server: int) -> None:
        self.client = client
        self.server = server
        self.value = torch.randn(2 * MB)
        ((_, self.port),) = listening(server)

    async def works(self) -> None:
        """Bytes are moved by ``tcp``, all of them."""
        await self.client.put("t", self.value)
        got = torch.zeros_like(self.value)
        await self.client.get("t", got)
        assert torch.equal(got, self.value)
        assert {entry["chosen"] for entry in await self.client.explain()} == {"tcp"}

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)


@asynccontextmanager
async def _store() -> AsyncIterator[_Store]:
    """Afterwards nothing is left of the client and of strangers."""
    async with running_store(prefer=["shm"], **SMALL) as near:
        await near.put("t", torch.zeros(MB))
        server = (await near.status()).controller_pid
        before = _uses(server)
        client = await ts.connect(await ts.address(), store_name="far", prefer=["tcp"])
        await client.put("t", torch.zeros(MB))
        yield _Store(client, server)
        await ts.shutdown("far")
        await until(lambda: _at_most(_uses(server), before), 20)


def _uses(server: int) -> tuple[int, int]:
    """Descriptors and threads of the server."""
    proc = Path(f"/proc/{server}")
    return len(list((proc / "fd").iterdir())), len(list((proc / "task").iterdir()))


def _at_most(these: tuple[int, int], those: tuple[int, int]) -> bool:
    """The few threads that an event loop keeps for calls that block may stay."""
    return these[0] <= those[0] and these[1] <= those[1] + 8


def _garbage(store: _Store, said: bytes) -> None:
    with store.stranger() as sock:
        try:
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
        except OSError as error:  # the server has closed it already
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
                raise
        else:
            assert closed(sock)


def _scan(store: _Store) -> None:
    for _ in range(_ROUNDS):
        store.stranger().close()


def _wrong_secret(store: _Store, welcome: Welcome) -> None:
    for ticket, secret in (
        (welcome.ticket, os.urandom(len(welcome.secret))),
        (os.urandom(len(welcome.ticket)), welcome.secret),
    ):
        with store.stranger() as sock, pytest.raises(OSError, match=r"secret|closed|reset"):
            authentication.introduce(sock, ticket, secret, 5.0)
    with store.stranger() as sock:  # who has both is let in: the others failed for a reason
        authentication.introduce(sock, welcome.ticket, welcome.secret, 5.0)


def _drip(sock: socket.socket, seconds: float) -> float:
    """Send a byte at a time. Returns how long the server bore it, in seconds: those between the
    bytes, of which this thread sends fewer where the machine is busy.
    """
    most, pause = round(seconds / 0.05), 0.05
    sent = 0
    with sock:
        while sent < most:
            try:
                sock.sendall(b"t")
            except OSError:
                break
            sent += 1
            time.sleep(pause)  # what a slow stranger does
    return sent * pause


async def _welcome(client: ts.Client) -> Welcome:
    """What the store tells a client that it lets in."""
    session = await client._joined.session(10)
    greeting = msgspec.msgpack.encode(Greeting(VERSION, namespace_id(), networks()))
    answer = await ask_volume(await session.channel(10), 0, "tcp", greeting)
    return msgspec.msgpack.decode(answer, type=Welcome)


async def test_strangers_are_refused_logged_once_and_harmless(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """While a client works, and with nothing left in the server afterwards."""
    said = [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, os.urandom(1 << 16), _MAGIC + bytes(48)]
    async with _store() as store:
        await store.works()
        welcome = await _welcome(store.client)
        slow = asyncio.ensure_future(asyncio.to_thread(_drip, store.stranger(), 60.0))
        strangers = [
            asyncio.to_thread(_scan, store),
            asyncio.to_thread(_wrong_secret, store, welcome),
            *(asyncio.to_thread(_garbage, store, one) for one in said * 3),
        ]
        attacking = asyncio.ensure_future(asyncio.gather(*strangers))
        while not attacking.done():
            await store.works()
        await attacking
        assert await slow < authentication.GREETING_S + 5  # however diligently it sends
        await store.works()
    assert capfd.readouterr().err.count("refused a connection") == 1


async def test_slow_and_half_open_strangers(capfd: pytest.CaptureFixture[str]) -> None:
    """More of them than are let near: a client still gets in, and the slow ones have one limit."""
    async with _store() as store:
        await store.works()
        with ExitStack() as stack:
            slow = [asyncio.to_thread(_drip, store.stranger(), 60.0) for _ in range(3)]
            dripping = asyncio.ensure_future(asyncio.gather(*slow))
            # Less than the queue of connections that wait: the client is one of those who wait.
            crowd = [stack.enter_context(store.stranger()) for _ in range(100)]
            for sock in crowd[::2]:
                sock.sendall(_MAGIC[:7])
            address = await ts.address()
            other = await ts.connect(address, store_name="late", prefer=["tcp"])
            got = torch.zeros_like(store.value)
            await other.get("t", got)
            assert torch.equal(got, store.value)
            assert (await other.explain())[0]["chosen"] == "tcp"
            await ts.shutdown("late")
            await store.works()
            assert max(await dripping) < authentication.GREETING_S + 5
    assert capfd.readouterr().err.count("refused a connection") == 1


async def test_no_port_is_open_where_no_network_transport_is_permitted() -> None:
    """Whatever a client asks for."""
    network = {"tcp", "gloo", "rdma", "torchcomms"}
    installed = {spec.name for spec in Registry().transports()} | {"tcp"}
    async with running_store(block=sorted(network & installed), **SMALL) as client:
        server = (await client.status()).controller_pid
        with pytest.raises(ts.TransportError, match="does not serve"):
            await _welcome(client)
        await client.put("t", torch.zeros(MB))
        assert not listening(server)


async def test_no_port_is_open_for_transports_that_nobody_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those with packages of their own included."""
    monkeypatch.delenv("TORCHSTORE_BLOCK", raising=False)
    async with running_store(prefer=["shm"], **SMALL) as client:
        await client.put("t", torch.zeros(MB))
        server = (await client.status()).controller_pid
        assert not listening(server)
        other = await ts.connect(await ts.address(), store_name="other", prefer=["tcp"])
        await other.put("u", torch.zeros(MB))
        assert len(listening(server)) == 1
        await ts.shutdown("other")
        await until(lambda: not listening(server), 10)
