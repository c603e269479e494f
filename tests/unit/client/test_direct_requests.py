"""A request whose reply is waited for in ``recv`` counts as not answered, like any other."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

from torchstore_core.clients.session.channel import Channel
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import HEADER, encode


def _answered(peer: socket.socket, channel: Channel, number: int) -> list[int]:
    """Receive a put and answer it; returns what the channel said meanwhile is not answered."""
    size = int.from_bytes(peer.recv(HEADER, socket.MSG_WAITALL), "little")
    peer.recv(size, socket.MSG_WAITALL)
    found = channel.unanswered()
    peer.sendall(encode(m.Committed(number, [1])))
    return found


async def test_what_the_server_may_have_and_has_not_answered_is_asked_for_again() -> None:
    """From the moment that it is sent: a server that comes back forgets the results of all others,
    and what is sent again would be done once more.
    """
    ours, peer = socket.socketpair()
    channel = Channel(ours, asyncio.get_running_loop(), "the server is gone")
    with peer, ThreadPoolExecutor(1) as thread:
        for number in range(2, 100):
            put = m.Put(number, number + 1000, [])
            found = thread.submit(_answered, peer, channel, number)
            reply = await channel.call(put, m.Committed, 10, quick=True)
            assert reply.versions == [1]
            assert found.result(60) == [number + 1000]
        assert channel.unanswered() == []
    channel.close()
