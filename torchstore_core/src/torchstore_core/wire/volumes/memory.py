"""Messages about the memory of volumes: to and from volumes in other processes, and to clients.

:mod:`torchstore_core.wire.messages` re-exports all of them.
"""

from __future__ import annotations

from typing import Any

from torchstore_core.wire.facts import Message, VolumeInfo
from torchstore_core.wire.volumes.spilling import SpillPlace


class Attach(Message, frozen=True, tag="attach"):
    """The first message of a volume in another process, also to a server that has come back. Reply
    :class:`Attached`.

    After it, the server may send :class:`Prefault`, :class:`Trim`, :class:`MayGrow`,
    :class:`WatchProcess`, :class:`PeerHandshake`, :class:`PeerGone` and orders for its spill file,
    and the volume :class:`Warm`, :class:`Grown`, :class:`ProcessDied`, :class:`PeerReply` and
    ``SpillDone``.

    Args:
        usable: how far its memory may be written to, as in :class:`Grown`; None: the volume does
            not answer :class:`MayGrow`.
        spill: its spill file; None: it has none.
    """

    id: int
    protocol: int
    info: VolumeInfo
    usable: int | None = None
    spill: SpillPlace | None = None


class Attached(Message, frozen=True, tag="attached"):
    """Accepts a volume. ``life``: which one of the server's lives this is, from 1; 0: it does not
    come back when it dies.
    """

    id: int
    life: int


class Warm(Message, frozen=True, tag="warm"):
    """From a volume, without a reply: its first ``nbytes`` bytes are warm. If ``trimmed``, this
    answers a :class:`Trim`, and the bytes after them are not warm.
    """

    nbytes: int
    trimmed: bool = False


class ProcessDied(Message, frozen=True, tag="died"):
    """From a volume, without a reply: the process of a :class:`WatchProcess` has ended."""

    session: bytes


class Prefault(Message, frozen=True, tag="prefault"):
    """To a volume: warm its first ``nbytes`` bytes in the background."""

    nbytes: int


class Trim(Message, frozen=True, tag="trim"):
    """To a volume: return the pages from ``start`` on to the system. Clients have written to the
    memory up to ``warm``. The volume answers with :class:`Warm`.
    """

    start: int
    warm: int


class MayGrow(Message, frozen=True, tag="may-grow"):
    """To a volume: its memory is to be written up to ``end``, which it may have no pages for yet.
    The volume answers with :class:`Grown`.
    """

    end: int


class Grown(Message, frozen=True, tag="grown"):
    """From a volume: the answer to a :class:`MayGrow`.

    Args:
        end: what was asked for.
        usable: how far its memory may be written to without asking again. It is less than ``end``
            if its host, or a cgroup, does not have the memory.
        left: the bytes that the host, or the cgroup, has left; None: the system does not say.
    """

    end: int
    usable: int
    left: int | None = None


class WatchProcess(Message, frozen=True, tag="watch"):
    """To a volume: send :class:`ProcessDied` when a process has ended. The process may have mapped
    the volume's memory, and its relay is gone.

    Args:
        session: the token of the session that the process had.
        pid: the id of the process in the pid namespace ``namespace``.
    """

    session: bytes
    pid: int
    namespace: int


class PeerHandshake(Message, frozen=True, tag="peer-handshake"):
    """To a volume: a handshake from the client half of a transport for the server half. The volume
    answers with :class:`PeerReply`.
    """

    id: int
    peer: bytes
    transport: str
    data: bytes


class PeerGone(Message, frozen=True, tag="peer-gone"):
    """To a volume: disconnect ``peer`` from the server half of ``transport`` (empty: from all), see
    ``TransportServer.disconnect``. The volume answers with :class:`PeerReply`.
    """

    id: int
    peer: bytes
    transport: str = ""


class PeerReply(Message, frozen=True, tag="peer-reply"):
    """From a volume: the answer of a server half, or the ``code``, ``message`` and ``details`` of
    its error.
    """

    id: int
    data: bytes = b""
    code: str = ""
    message: str = ""
    details: dict[str, Any] = {}


class Warmed(Message, frozen=True, tag="warmed"):
    """To clients, over liveness connections: the warm memory has changed.

    Each item is a volume, a segment, and how many bytes of the segment, from its start, are warm.
    """

    warm: list[tuple[int, int, int]]


class Lost(Message, frozen=True, tag="lost"):
    """To clients, over liveness connections: the memory of a volume is permanently lost; ``reason``
    says why.
    """

    volume: int
    reason: str
