"""Volumes of one process share the connections of a client, and each ends what it has to end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.support import until
from tests.transports.tcp.halves import (
    MB,
    PEER,
    Local,
    Volume,
    listening,
    opened_since,
    sockets,
    threads,
    volume,
)

from torchstore_core.errors import TransportError
from torchstore_core.testing.transports.ends.memory import pattern
from torchstore_transports.tcp.link import TcpLink
from torchstore_transports.tcp.wire.authentication import introduce
from torchstore_transports.tcp.wire.protocol import EXTENT, REQUEST, WRITE


@asynccontextmanager
async def _two() -> AsyncIterator[tuple[tuple[Volume, TcpLink], tuple[Volume, TcpLink]]]:
    async with volume(256 * MB) as one, volume(256 * MB) as other:
        links = [await one.connect(), await other.connect()]
        try:
            yield (one, links[0]), (other, links[1])
        finally:
            for link in links:
                link.close()


async def test_one_set_for_all_volumes() -> None:
    before = sockets()
    async with _two() as ((one, to_one), (other, to_other)):
        data = [pattern(1, 40 * MB), pattern(2, 40 * MB)]
        sources = [Local(40 * MB, content) for content in data]
        targets = [Local(40 * MB), Local(40 * MB)]
        await asyncio.gather(
            to_one.write([sources[0].copy(5)]), to_other.write([sources[1].copy()])
        )
        assert one.memory[5 : 5 + 40 * MB] == data[0]
        assert other.holds(data[1])
        await asyncio.gather(to_one.read([targets[0].copy(5)]), to_other.read([targets[1].copy()]))
        assert [target.raw for target in targets] == data
        assert one.endpoint == other.endpoint
        assert to_one._streams is to_other._streams
        to_one.close()
        with pytest.raises(TransportError, match="closed"):
            await to_one.read([targets[0].copy()])
        await to_other.read([targets[1].copy()])
    await until(lambda: not threads())
    assert not opened_since(before)


async def test_the_end_of_one_leaves_the_other_alone() -> None:
    async with _two() as ((one, to_one), (other, to_other)):
        data = pattern(3, 200 * MB)
        source, target = Local(200 * MB, data), Local(200 * MB)
        await to_other.write([source.copy()])
        reading = asyncio.ensure_future(to_other.read([target.copy()]))
        writing = asyncio.ensure_future(to_one.write([source.copy()]))
        await until(lambda: one.memory[:8] == data[:8], 10)
        await one.server.disconnect(PEER)
        one.fill(b"\0", 200 * MB)
        with pytest.raises(TransportError):
            await writing
        await reading
        assert target.holds(data)
        assert one.is_full_of(b"\0", 200 * MB)
        with pytest.raises(TransportError, match="not been let in"):
            await to_one.write([source.copy()])
        assert one.is_full_of(b"\0", 200 * MB)
        await to_other.read([target.copy()])
        port = one.endpoint[1]
        assert listening(port)
        await other.server.disconnect(PEER)
        assert not listening(port)


async def test_a_write_that_has_stalled_is_ended() -> None:
    """Halfway through a write to one volume, while the other volume still knows the client."""
    async with _two() as ((one, _), (other, to_other)):
        assert one.welcome is not None
        idle = set(to_other._streams._connections)
        extent = EXTENT.pack(7, 0, MB, 1, 0)
        with socket.create_connection(one.endpoint) as sock:
            introduce(sock, one.welcome.ticket, one.welcome.secret, 5.0)
            sock.sendall(REQUEST.pack(WRITE, 0, one.welcome.volume, 1, MB, 0) + extent)
            sock.sendall(b"x" * (MB // 2))
            await until(lambda: one.memory[MB // 2 - 1] == ord("x"), 10)
            await asyncio.wait_for(one.server.disconnect(PEER), 50)
            one.memory[:MB] = bytes(MB)
            sock.settimeout(60)
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"y" * (MB // 2))
                assert not sock.recv(1)
            assert one.memory[:MB] == bytes(MB)
        source = Local(8, b"abcdefgh")
        await to_other.write([source.copy()])
        assert other.memory[:8] == b"abcdefgh"
        assert to_other._streams._connections == idle  # which nobody has shut


async def test_another_client_has_its_own() -> None:
    async with volume() as there:
        link, stranger = await there.connect(), await there.connect(b"another")
        assert link._streams is not stranger._streams
        await there.server.disconnect(b"another")
        source = Local(8, b"abcdefgh")
        with pytest.raises(TransportError):
            await stranger.write([source.copy()])
        await link.write([source.copy()])
        assert there.memory[:8] == b"abcdefgh"
        link.close()
        stranger.close()
