"""What is said of a volume's memory: by and to volumes in other processes, and to clients unasked.

:mod:`.messages` names all of it, too.
"""

from __future__ import annotations

from torchstore_core.wire.facts import Message, VolumeInfo

__all__ = ["Attach", "Died", "Lost", "Prefault", "Trim", "Warm", "Warmed", "Watch"]


class Attach(Message, frozen=True, tag="attach"):
    """First message of a volume in another process. Reply :class:`Done`.

    Then the server sends :class:`Prefault`, :class:`Trim` and :class:`Watch`, the volume
    :class:`Warm` and :class:`Died`.
    """

    id: int
    protocol: int
    info: VolumeInfo


class Warm(Message, frozen=True, tag="warm"):
    """No reply. From a volume: its first ``nbytes`` bytes are warm. ``trimmed``: this answers a
    :class:`Trim`; from there on nothing is.
    """

    nbytes: int
    trimmed: bool = False


class Died(Message, frozen=True, tag="died"):
    """No reply. From a volume, to :class:`Watch`: that process has ended."""

    orphan: bytes


class Prefault(Message, frozen=True, tag="prefault"):
    """Unasked, to a volume: make its first ``nbytes`` bytes warm in the background."""

    nbytes: int


class Trim(Message, frozen=True, tag="trim"):
    """Unasked, to a volume: give the pages from ``start`` on back to the system. Clients have
    written up to ``warm``. Answered by :class:`Warm`.
    """

    start: int
    warm: int


class Watch(Message, frozen=True, tag="watch"):
    """Unasked, to a volume: say :class:`Died` when the process ``pid`` has ended, which may have
    mapped the volume's memory. ``orphan``: the token of the session it had (``server.orphans``).
    ``namespace``: where it has that pid.
    """

    orphan: bytes
    pid: int
    namespace: int


class Warmed(Message, frozen=True, tag="warmed"):
    """Unasked, to anchors: pool memory became warm.

    Each item: volume, segment, bytes from the segment's start.
    """

    warm: list[tuple[int, int, int]]


class Lost(Message, frozen=True, tag="lost"):
    """Unasked, to anchors: the memory of a volume is gone for good, and ``reason`` says why."""

    volume: int
    reason: str
