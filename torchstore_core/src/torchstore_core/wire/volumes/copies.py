"""Messages about copies that the store makes by itself: repairs, and volumes that are drained.

A *copier* is a process beside a volume that moves the bytes. It is a client: what it reads is
leased by its session, what it writes is an unfinished put of its session.
:mod:`torchstore_core.wire.messages` re-exports all of them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from torchstore_core.reports.repairs import DrainReport
from torchstore_core.wire.facts import Message

#: A volume (index), and an offset in bytes in its segment.
Place = tuple[int, int]


class TakeCopies(Message, frozen=True, tag="take-copies"):
    """Ask for values to copy, into one of ``volumes``. Reply :class:`Copies`, when there are some.

    The values are leased under ``lease``, and the memory for their copies is that of the put
    ``txn``: a Commit makes the copies visible, an Abort gives the memory back.

    ``trouble``: why the copies that were taken before could not be made; empty if they were.
    """

    id: int
    txn: int
    lease: int
    volumes: list[int]
    trouble: str = ""


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A value to copy: where there are copies of it, best first, and where another one is to be."""

    nbytes: int
    sources: list[Place]
    target: Place


class Copies(Message, frozen=True, tag="copies"):
    """What to copy, all into one volume. Nothing: there is no more to do, the copier may end.

    ``rate``: at most so many bytes per second; 0: no limit.
    """

    id: int
    pieces: list[Piece]
    rate: int = 0


class StartCopier(Message, frozen=True, tag="start-copier"):
    """To a volume: start a copier, which copies into this volume, unless one is running; with
    ``again``, in place of the one that is running.
    """

    again: bool = False


class CopierEnded(Message, frozen=True, tag="copier-ended"):
    """From a volume, without a reply: the copier beside it has ended, or could not be started."""


class Drain(Message, frozen=True, tag="drain"):
    """Begin to drain a volume, put it back in service, or ask how far it is. Reply
    :class:`DrainReply`, at once.

    ``volume``: its id, or its index in decimal.
    """

    id: int
    volume: str
    what: Literal["begin", "undo", "look"]


class DrainReply(Message, frozen=True, tag="drain-reply"):
    """How far the draining of a volume is."""

    id: int
    report: DrainReport
