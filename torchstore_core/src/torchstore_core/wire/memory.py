"""Messages about the memory of volumes: to and from volumes in other processes, and notifications
to clients.

:mod:`.messages` exports them, too.
"""

from __future__ import annotations

from torchstore_core.wire.facts import Message, VolumeInfo

__all__ = ["Attach", "Died", "Lost", "Prefault", "Trim", "Warm", "Warmed", "Watch"]


class Attach(Message, frozen=True, tag="attach"):
    """The first message of a volume in another process. Reply :class:`Done`.

    After that, the server sends :class:`Prefault`, :class:`Trim` and :class:`Watch`, and the volume
    sends :class:`Warm` and :class:`Died`.
    """

    id: int
    protocol: int
    info: VolumeInfo


class Warm(Message, frozen=True, tag="warm"):
    """No reply. From a volume: its first ``nbytes`` bytes are warm. ``trimmed``: this answers a
    :class:`Trim`, and nothing beyond these bytes is warm any more.
    """

    nbytes: int
    trimmed: bool = False


class Died(Message, frozen=True, tag="died"):
    """No reply. From a volume, after :class:`Watch`: the watched process has ended."""

    orphan: bytes


class Prefault(Message, frozen=True, tag="prefault"):
    """Notification to a volume: make your first ``nbytes`` bytes warm in the background."""

    nbytes: int


class Trim(Message, frozen=True, tag="trim"):
    """Notification to a volume: return the pages from ``start`` on to the operating system. Clients
    have written up to ``warm``. The volume answers with :class:`Warm`.
    """

    start: int
    warm: int


class Watch(Message, frozen=True, tag="watch"):
    """Notification to a volume: send :class:`Died` when the process ``pid`` has ended, because it
    may have mapped the volume's memory. ``orphan``: the token of the session that it had
    (``server.remote.orphans``). ``namespace``: the pid namespace of ``pid``.
    """

    orphan: bytes
    pid: int
    namespace: int


class Warmed(Message, frozen=True, tag="warmed"):
    """Notification on anchors: memory of the pool became warm.

    Each item is the volume, the segment, and how many bytes from the segment's start are warm.
    """

    warm: list[tuple[int, int, int]]


class Lost(Message, frozen=True, tag="lost"):
    """Notification on anchors: the memory of a volume is lost for good, for this ``reason``."""

    volume: int
    reason: str
