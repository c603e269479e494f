"""Who holds which versions, as values for users: what ``refs`` returns. Torch-free."""

from __future__ import annotations

import msgspec


class HolderReport(msgspec.Struct, frozen=True):
    """One hold of a version: a ``HeldRef`` of a process, or one that is on its way.

    Args:
        pid, hostname, rank: of the process that has it, or that has sent it.
        since: when it began, in seconds since the epoch.
        where: the line of the program that made it, as ``file:line in function``; empty unless that
            process ran with ``TORCHSTORE_TRACE_REFS=1``.
        state: ``"held"``; ``"in flight"``: sent, and not received yet; ``"received"``: received,
            and kept for a while in case that the same bytes are received once more; ``"in a
            value"``: part of what this store has, which keeps it; ``"orphan"``:
            the way to the process is lost, and nobody can say whether it has ended.
    """

    pid: int
    hostname: str
    rank: int | None
    since: float
    where: str = ""
    state: str = "held"


class RefReport(msgspec.Struct, frozen=True):
    """One version that is held.

    Args:
        key: empty for an object that was put without one.
        version: the number of the version, or of the object.
        nbytes: its size, bytes.
        kind: what it is: ``"tensor"``, ``"object"`` or ``"state dict"``.
        current: whether its key can still be read at that version, so that it stays when nobody
            holds it any more.
        holders: who holds it; the oldest first.
        timeline: that of the version, see ``ObjectRef``.
    """

    key: str
    version: int
    nbytes: int
    kind: str
    current: bool
    holders: list[HolderReport]
    timeline: int = 0
