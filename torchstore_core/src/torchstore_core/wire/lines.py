"""Messages of whoever carries the connections of a relay to a server in another process.

Each connection of a relay is one to the server's socket, a *line*: a :class:`Via`, and then what
the client or the volume says. :mod:`.messages` re-exports all of them.
"""

from __future__ import annotations

from torchstore_core.machine.processes import Process
from torchstore_core.machine.topology import Topology
from torchstore_core.wire.facts import Message


class Via(Message, frozen=True, tag="via"):
    """The first message on a line: how the client reaches the server. No reply.

    Args:
        topology: of the relay.
        process: the client's, if it is known.
        uplink: names the relay's uplink; the peer of each session that comes through it begins
            with it.
    """

    topology: Topology
    process: Process | None = None
    uplink: bytes = b""


class ClientDied(Message, frozen=True, tag="client-died"):
    """On a line, without a reply: the client's process has died; a forked child of it may still
    have the connection.
    """


class RelayLost(Message, frozen=True, tag="relay-lost"):
    """The last message on a line: the relay is gone, and the client may still be there."""

    why: str
