"""What a client gives back before it closes a connection counts, also if it did not wait for the
reply to a request, and the server cannot write it any more.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
from collections.abc import Callable, Sequence

import pytest
import uvloop
from tests.support import until

from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts
from torchstore_core.machine import topology
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.server import Server, ServerOptions
from torchstore_core.server.serving.connection import Connection
from torchstore_core.server.serving.conversation import Conversation
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import HEADER, decode_reply, encode

MB = 1 << 20
HERE = topology.probe()
FACTS = ClientFacts(os.getpid(), HERE.host_id, HERE.hostname)
#: What happens while the server handles a put, before it writes the reply.
MEANWHILE: list[Callable[[], None]] = []


class Interrupted(Strategy, frozen=True, tag="interrupted"):
    """Asked where a put goes, it does what the test wants to happen at that moment."""

    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        while MEANWHILE:
            MEANWHILE.pop()()
        return range(len(volumes))


def connected(path: str, token: bytes) -> tuple[socket.socket, m.Welcome]:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(60)
    sock.connect(path)
    sock.sendall(encode(m.Hello(1, m.PROTOCOL_VERSION, token, HERE, FACTS)))
    welcome = received(sock)
    assert isinstance(welcome, m.Welcome)
    return sock, welcome


def received(sock: socket.socket) -> m.Message:
    header = sock.recv(HEADER, socket.MSG_WAITALL)
    return decode_reply(sock.recv(int.from_bytes(header, "little"), socket.MSG_WAITALL))


def a_put(txn: int) -> bytes:
    item = m.PutItem("k", TensorMeta("uint8", (MB,)), MB)
    return bytes(encode(m.Put(txn, txn, [item])))


@pytest.mark.quick
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_was_given_back_before_the_connection_was_closed_is_heard(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    done = threading.Event()

    def client(path: str) -> None:
        liveness, welcome = connected(path, b"")
        channel, _ = connected(path, welcome.session)
        item = m.PutItem("", TensorMeta("uint8", (4,)), 4, b"abcd")
        channel.sendall(encode(m.PutObject(3, 3, item, 4)) + encode(m.Lend(4, 5)))
        assert isinstance(received(channel), m.Committed)

        def leave() -> None:  # on the server's thread: it has read the put, and will answer it
            channel.sendall(encode(m.Abort([2])) + encode(m.TakeBack([5])))
            channel.close()
            done.set()

        MEANWHILE.append(leave)
        channel.sendall(a_put(2))
        assert done.wait(60)
        other, _ = connected(path, welcome.session)
        for number in range(3, 100):  # until the server has seen the end of the channel
            other.sendall(encode(m.Status(number)))
            reply = received(other)
            assert isinstance(reply, m.StatusReply)
            (session,) = reply.status.sessions
            if session.lanes == 1:
                break
        assert (session.lanes, session.unfinished_puts, session.unfinished_bytes) == (1, 0, 0)
        other.sendall(encode(m.Refs(100)))
        reply = received(other)
        assert isinstance(reply, m.RefsReply)
        assert [holder.state for one in reply.refs for holder in one.holders] == ["held"]
        other.close()
        liveness.close()

    async def serve() -> None:
        options = ServerOptions(capacity=64 * MB, prefault=0, num_storage_volumes=2)
        server = Server(options)
        address = await server.start()
        server.controller.strategy = Interrupted()
        try:
            await asyncio.to_thread(client, address.partition(":")[2])
        finally:
            await server.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(serve())


@pytest.mark.quick
async def test_what_a_connection_held_is_free_without_the_collector() -> None:
    """Its session, its puts and what waited for it: not when the collector comes by."""
    server = Server(ServerOptions(capacity=64 * MB, prefault=0))
    path = (await server.start()).partition(":")[2]

    def come_and_go() -> None:
        sock, _ = connected(path, b"")
        sock.sendall(encode(m.Wait(2, ["never"], 1)) + a_put(3))
        assert isinstance(received(sock), m.Granted)
        sock.close()

    def there() -> list[object]:
        kinds = Connection, Conversation, SessionRecord
        return [one for one in gc.get_objects() if type(one) in kinds]

    def left() -> set[int]:
        return {id(one) for one in there()} - others

    gc.collect()
    gc.disable()
    try:
        before = there()  # of other tests: kept, so that nothing else has their ids
        others = {id(one) for one in before}
        for _ in range(3):
            await asyncio.to_thread(come_and_go)
        await until(lambda: not server.connections and not left())
    finally:
        gc.enable()
        await server.close()
