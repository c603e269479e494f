"""Messages about the memory of volumes: from and to those in other processes, and to clients.

:mod:`.messages` names all of it, too.
"""

from __future__ import annotations

from typing import Any

from torchstore_core.wire.facts import Message, VolumeInfo

__all__ = ["Attach", "Lost", "PeerGone", "PeerHandshake", "PeerReply", "Prefault", "ProcessDied"]
__all__ += ["Trim", "Warm", "Warmed", "WatchProcess"]


class Attach(Message, frozen=True, tag="attach"):
    """First message of a volume in another process. Reply :class:`Done`.

    Then the server sends :class:`Prefault`, :class:`Trim`, :class:`WatchProcess`,
    :class:`PeerHandshake` and :class:`PeerGone`, the volume :class:`Warm`, :class:`ProcessDied` and
    :class:`PeerReply`.
    """

    id: int
    protocol: int
    info: VolumeInfo


class Warm(Message, frozen=True, tag="warm"):
    """No reply. From a volume: its first ``nbytes`` bytes are warm. ``trimmed``: this answers a
    :class:`Trim`, so none after them is.
    """

    nbytes: int
    trimmed: bool = False


class ProcessDied(Message, frozen=True, tag="died"):
    """No reply. From a volume: the process of a :class:`WatchProcess` has ended."""

    session: bytes


class Prefault(Message, frozen=True, tag="prefault"):
    """Unasked, to a volume: make its first ``nbytes`` bytes warm in the background."""

    nbytes: int


class Trim(Message, frozen=True, tag="trim"):
    """Unasked, to a volume: return the pages from ``start`` on to the system. Clients have
    written up to ``warm``. It is answered by :class:`Warm`.
    """

    start: int
    warm: int


class WatchProcess(Message, frozen=True, tag="watch"):
    """Unasked, to a volume: answer :class:`ProcessDied` when a process has ended that may have
    mapped the volume's memory, and whose relay is gone.

    Args:
        session: token of the session that the process had.
        pid: of the process, in the pid namespace ``namespace``.
    """

    session: bytes
    pid: int
    namespace: int


class PeerHandshake(Message, frozen=True, tag="peer-handshake"):
    """To a volume: what a client's half of a transport asks the volume's. It is answered by
    :class:`PeerReply`.
    """

    id: int
    peer: bytes
    transport: str
    data: bytes


class PeerGone(Message, frozen=True, tag="peer-gone"):
    """To a volume: see ``TransportServer.disconnect``. It is for the half of ``transport``, or for
    all if that is empty, and is answered by :class:`PeerReply`.
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
    """Unasked, over liveness connections: memory has become warm.

    Each item is a volume, a segment, and how many bytes of it, from its start, are warm.
    """

    warm: list[tuple[int, int, int]]


class Lost(Message, frozen=True, tag="lost"):
    """Unasked, over liveness connections: the memory of a volume is gone for good, and ``reason``
    says why.
    """

    volume: int
    reason: str
