"""The handshake that opens every connection to a server, and those of transports. Torch-free."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.errors import (
    ConfigurationError,
    ProtocolError,
    StoreClosedError,
    StoreTimeoutError,
    TransportNotReadyError,
    from_wire,
    in_seconds,
)
from torchstore_core.machine import topology
from torchstore_core.machine.directories import CONTROL
from torchstore_core.machine.sockets.unix import connect, peer, unix_socket
from torchstore_core.wire import framing
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, encode

if TYPE_CHECKING:
    from torchstore_core.clients.session.channel import Channel

#: What else it may be if the kernel has taken a connection that the server does not answer.
NO_DESCRIPTOR = ", or has no file descriptors left for more clients, as its log says"
_RECEIVE = 1 << 18
# Between attempts when the server has closed the connection without an answer.
_PAUSES_S = (0.01, 0.05, 0.1, 0.2)
Ranks = tuple[int | None, int | None]  # global rank, local rank


def socket_path(address: str) -> str:
    """Return the path in a ``unix:`` address.

    Raises:
        StoreClosedError: it is not an address of this kind.
    """
    scheme, _, path = address.partition(":")
    if scheme != "unix" or not path:
        raise StoreClosedError(f"not a store address: {address!r} (expected unix:/path/to/socket)")
    return path


def _if_folder(address: str) -> str:
    """What to say of an address that leads to the folder of a socket."""
    folder = os.path.isdir(socket_path(address))
    return (
        f"; that is a folder, and the address names the socket in it: {CONTROL!r}" if folder else ""
    )


def client_facts(
    environment: Mapping[str, str],
    here: topology.Topology,
    ranks: Ranks | None = None,
    role: str = "",
) -> ClientFacts:
    """Return the facts about this process that strategies and ``status`` use.

    ``ranks``: the caller's ranks, if they are known; None: those in the environment. ``role``: see
    ``ClientFacts``.
    """

    def number(name: str) -> int | None:
        text = environment.get(name, "")
        return int(text) if text.isdecimal() else None

    rank, local_rank = ranks or (number("RANK"), number("LOCAL_RANK"))
    return ClientFacts(here.pid, here.host_id, here.hostname, rank, local_rank, role)


async def handshake(
    address: str, token: bytes, facts: ClientFacts, here: topology.Topology, timeout: float | None
) -> tuple[socket.socket, m.Welcome]:
    """Connect to a server and exchange hello and welcome; waits while the server is too busy. If
    the connection is lost meanwhile, this tries again: the server may be one that comes back.

    Returns:
        The socket, non-blocking, and the server's welcome.

    Raises:
        StoreClosedError: there is no server at the address.
        ProtocolError: what listens there does not speak this protocol.
        StoreTimeoutError: there was no answer within ``timeout`` seconds.
    """
    begun = time.monotonic()
    left = timeout
    for pause in _PAUSES_S:
        try:
            return await _handshake(address, token, facts, here, left)
        except StoreClosedError as error:
            if not isinstance(error.__cause__, ConnectionResetError | BrokenPipeError):
                raise
        await asyncio.sleep(pause)
        if timeout is not None:
            left = max(0.0, timeout - (time.monotonic() - begun))
    return await _handshake(address, token, facts, here, left)


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that runs this call.

    Raises:
        ConfigurationError: there is none: a library that is not asyncio runs the coroutine.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(
            "this call needs an asyncio event loop, and none is running in this thread: the "
            "coroutine is run by something else, such as trio, or by a child that was forked "
            "while its parent's loop was running. With trio, call the functions of "
            "torchstore_core.blocking in a thread (`await trio.to_thread.run_sync(...)`); in such "
            "a child, call `asyncio.run` or torchstore_core.blocking"
        ) from None


async def _handshake(
    address: str, token: bytes, facts: ClientFacts, here: topology.Topology, timeout: float | None
) -> tuple[socket.socket, m.Welcome]:
    loop = running_loop()
    path = socket_path(address)
    accepted = False
    with unix_socket() as sock:
        try:
            async with asyncio.timeout(timeout):
                await connect(sock, path)
                accepted = True
                _, uid = peer(sock)
                if uid != os.getuid():
                    raise PermissionError(
                        f"uid {uid} runs it, and this process is of {os.getuid()}"
                    )
                hello = m.Hello(1, m.PROTOCOL_VERSION, token, here, facts)
                sock.sendall(encode(hello), socket.MSG_NOSIGNAL)  # it fits: it is the first
                reader = FrameReader(m.MAX_FRAME)
                bodies: list[bytes] = []
                while not bodies:
                    data = await loop.sock_recv(sock, _RECEIVE)
                    if not data:
                        raise ConnectionResetError("the server closed the connection")
                    bodies = reader.feed(data)
        except ProtocolError as error:
            raise ProtocolError(
                f"what listens at {address} is no store: its first bytes are none of this protocol"
            ) from error
        except TimeoutError as error:
            what = (
                f"no answer from {address} within {in_seconds(timeout)}: it is stopped, or busy"
                f"{NO_DESCRIPTOR}"
            )
            if not accepted:
                what = (
                    f"the server at {address} did not accept a connection within "
                    f"{in_seconds(timeout)}: it is stopped, or busy, and more clients wait than "
                    "its queue holds"
                )
            details = {"operation": "connect", "timeout": timeout, "address": address}
            raise StoreTimeoutError(
                what, details={**details, "answered": False, "accepted": accepted}
            ) from error
        except PermissionError as error:
            raise StoreClosedError(
                f"no way to the store at {address}: {error}; only processes of the user who "
                "started it can connect"
            ) from error
        except OSError as error:
            raise StoreClosedError(
                f"no store at {address}: {error}{_if_folder(address)}"
            ) from error
        return sock, welcome_in(bodies, address)


def welcome_in(bodies: Sequence[bytes], address: str) -> m.Welcome:
    """The answer to a hello, which is in the first messages of the server. The last one counts: if
    the server has died and is back, it asks with it.

    Raises:
        ProtocolError: there is none.
        TorchStoreError: the server refuses the hello.
    """
    try:
        replies = [framing.decode_reply(body) for body in bodies]
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{address} does not speak this protocol: {error}") from error
    welcomes = [one for one in replies if isinstance(one, m.Welcome)]
    reply = welcomes[-1] if welcomes else replies[0]
    if isinstance(reply, m.Failure):
        raise from_wire(reply.code, reply.message, reply.key, reply.details)
    if not isinstance(reply, m.Welcome):
        raise ProtocolError(f"{address} answered a hello with {type(reply).__name__}")
    return reply


async def ask_volume(channel: Channel, volume: int, transport: str, data: bytes) -> bytes:
    """Ask the server half of a volume's transport; see ``LinkContext.handshake``.

    Raises:
        TransportError: what the half has raised.
        TransportNotReadyError: no answer within ``HANDSHAKE_S``.
        StoreClosedError: the server is gone.
    """
    request = m.Handshake(channel.next_id(), volume, transport, data)
    try:
        return (await channel.call(request, m.Handshaken, m.HANDSHAKE_S)).data
    except StoreTimeoutError as error:
        raise TransportNotReadyError(
            f"the volume did not answer a handshake within {m.HANDSHAKE_S:g} s"
        ) from error
