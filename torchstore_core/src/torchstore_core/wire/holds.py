"""Messages about holds: what keeps a version alive for the processes that refer to it.

A *hold* belongs to a session, under an id that the client chooses, as leases do. A *ticket* is a
hold in flight: whoever encodes a reference lends its hold to a ticket, and whoever decodes it
claims that ticket. Except for the requests with an ``id``, none of these messages has a reply, and
a client sends all of them over one connection, so that they take effect in order.
"""

from __future__ import annotations

from torchstore_core.reports.refs import RefReport
from torchstore_core.wire.facts import Message


class Hold(Message, frozen=True, tag="hold"):
    """Hold a version of a key (0: the newest) as ``hold``. Reply ``CommittedIn`` with the version
    and its timeline.

    Args:
        where: the line of the program that asks, if references are traced.
        timeline: that of the version; -1: the one that the version with this number has now.
    """

    id: int
    hold: int
    key: str
    version: int = 0
    where: str = ""
    timeline: int = -1


class Unhold(Message, frozen=True, tag="unhold"):
    """End holds. An id that is still unknown is ended when the request that begins it arrives."""

    holds: list[int]


class Lend(Message, frozen=True, tag="lend"):
    """A reference is being sent: what ``hold`` holds is in flight as ``ticket``, too."""

    hold: int
    ticket: int


class LendAll(Message, frozen=True, tag="lend-all"):
    """The process forks: all that the session holds goes to the session that sends an
    :class:`Adopt` with this ticket, too.
    """

    ticket: int


class Adopt(Message, frozen=True, tag="adopt"):
    """Take over what a :class:`LendAll` lends, under the same ids; that may still be on its way.

    ``pid``: of the forked child that has the connection from now on; 0: it is not known yet.
    """

    ticket: int
    pid: int = 0


class Claim(Message, frozen=True, tag="claim"):
    """A reference has arrived: hold what ``ticket`` holds, or that version if it still exists."""

    hold: int
    ticket: int
    key: str
    version: int
    timeline: int
    where: str = ""


class TakeBack(Message, frozen=True, tag="take-back"):
    """What was encoded with these tickets was sent to nobody, but for the values of puts that were
    sent before. The tickets that no value has end; the others end with their values.
    """

    tickets: list[int]


class Free(Message, frozen=True, tag="free"):
    """End all holds of these versions, whoever has them. Reply ``Deleted``: how many were held.

    ``refs``: key, version and timeline (-1: as for :class:`Hold`) of each. ``txn``: see
    ``messages.Delete``.
    """

    id: int
    refs: list[tuple[str, int, int]]
    txn: int = 0


class WaitAny(Message, frozen=True, tag="wait-any"):
    """Reply ``Flags``, one for each key, its lowest version and its timeline (-1: any), once at
    least ``count`` of them can be read, or are known to be gone. Objects without a key always are
    one of the two.
    """

    id: int
    refs: list[tuple[str, int, int]]
    count: int


class Refs(Message, frozen=True, tag="refs"):
    """Reply :class:`RefsReply`."""

    id: int


class RefsReply(Message, frozen=True, tag="refs-reply"):
    """Every version that is held, and by whom."""

    id: int
    refs: list[RefReport]
    continued: bool = False
