"""Messages between a switchboard and the actor that carries them to and from the relays.

Frames: a little-endian u32 length, and the message in msgpack. What a relay asks, and what it is
told, is numbered from 1 in each direction, and kept until the other end has said that it has it: so
nothing is lost with an actor, and nothing is done twice.
"""

from __future__ import annotations

import msgspec

from torchstore_core.errors import ProtocolError

#: The name of a switchboard's socket, beside that of the server.
SOCKET = "switchboard.sock"
#: The largest frame: what arrives at a relay together goes in one.
MAX_FRAME = (1 << 32) - 1


class Options(msgspec.Struct, frozen=True):
    """What a switchboard is told when it is started.

    Args:
        store_name: of the store.
        server: the options of the server, see ``torchstore_core.server.__main__``.
        timeout: within how many seconds the server has to start.
        starter: pid of the process that starts it, with which it ends until an actor is there.
        root: pid of the program with which the store ends; 0: it is not known.
        grace_s: how long it waits for another actor when one has died.
    """

    store_name: str
    server: dict[str, object]
    timeout: float
    starter: int
    root: int
    grace_s: float


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


class Carry(_Message, frozen=True):
    """This is an actor, and no one that only wants to know whether somebody listens."""


class OpenUplink(_Message, frozen=True):
    """Open an uplink for a relay, or go on with one, see ``RelayServer.open``.

    Args:
        token: of the uplink to go on with; empty: it is a new one.
        here: the encoded Topology of the relay's host.
        agent: the path there of the socket of the ``Forwarder`` beside it.
        got: the number of the last reply that the relay has.
    """

    id: int
    token: bytes
    here: bytes
    agent: str
    got: int


class Ask(_Message, frozen=True):
    """Requests of a relay, see ``RelayServer.exchange``; ``got`` as in :class:`OpenUplink`. Those
    with the number 0 are none: the relay shows that it is alive, see ``RelayServer.heard``.
    """

    token: bytes
    number: int
    got: int
    requests: bytes


class Poll(_Message, frozen=True):
    """Call ``RelayServer.poll``; ``got`` as in :class:`OpenUplink`."""

    id: int
    token: bytes
    got: int


class AgentOf(_Message, frozen=True):
    """Ask which ``Forwarder`` is beside the relay of a client, see ``RelayServer.token_of``."""

    id: int
    peer: bytes


class AgentFailed(_Message, frozen=True):
    """The engine reports that an agent died some seconds ago."""


class Led(_Message, frozen=True):
    """The directory knows this actor, so relays find it: from now on their silence counts."""


class End(_Message, frozen=True):
    """End the server and the switchboard."""

    id: int
    why: str


class Answer(_Message, frozen=True):
    """The answer to a message with an id.

    Args:
        failure: an encoded error, see ``protocol.result``; empty: it went well.
        token: of the uplink that was opened.
        received: the number of the relay's last requests that have arrived.
        agent: a path; empty: there is none.
    """

    id: int
    failure: bytes = b""
    token: bytes = b""
    received: int = 0
    agent: str = ""


class Say(_Message, frozen=True):
    """What a relay is told: encoded replies, or what ends it.

    Args:
        received: as in :class:`Answer`.
    """

    token: bytes
    number: int
    received: int
    failure: bytes
    replies: bytes


class Ended(_Message, frozen=True):
    """The server has ended. ``good``: with the last of its members."""

    good: bool


FromActor = Carry | OpenUplink | Ask | Poll | AgentOf | AgentFailed | Led | End
ToActor = Answer | Say | Ended
_from_actor: msgspec.msgpack.Decoder[FromActor] = msgspec.msgpack.Decoder(FromActor)
_to_actor: msgspec.msgpack.Decoder[ToActor] = msgspec.msgpack.Decoder(ToActor)


def from_actor(body: bytes) -> FromActor:
    """Decode what an actor has sent.

    Raises:
        ProtocolError: it is none of these.
    """
    try:
        return _from_actor.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"an actor has sent something unreadable: {error}") from error


def to_actor(body: bytes) -> ToActor:
    """Decode what a switchboard has sent.

    Raises:
        ProtocolError: it is none of these.
    """
    try:
        return _to_actor.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a switchboard has sent something unreadable: {error}") from error
