"""Orders to whoever has a spill file: threads of the server, or the process of a volume.

:mod:`torchstore_core.wire.messages` re-exports the messages.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from torchstore_core.wire.facts import Message

#: What a spill file is written in, bytes; a value keeps its position within one.
PAGE = 4096


class Extent(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Where a value lies in the file.

    Args:
        runs: the parts of the file that hold its pages one after the other, as (offset, bytes), in
            whole pages: one, unless there was room only in several places.
        head: bytes of the first page that precede the value.
        nbytes: of the value.
    """

    runs: tuple[tuple[int, int], ...]
    head: int
    nbytes: int

    @property
    def span(self) -> int:
        """Bytes of the file that it takes: whole pages."""
        return spanned(self.head, self.nbytes)

    def within(self, at: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """The parts of the file, as (offset, bytes), that hold these bytes of the extent.

        >>> list(Extent(((8192, 4096), (0, 8192)), 0, 12288).within(2048, 4096))
        [(10240, 2048), (0, 2048)]
        """
        for offset, size in self.runs:
            if at < size:
                here = min(nbytes, size - at)
                yield offset + at, here
                nbytes -= here
                at = size
            if not nbytes:
                return
            at -= size


def spanned(head: int, nbytes: int) -> int:
    """The bytes of whole pages that hold ``nbytes`` which begin ``head`` bytes into a page.

    >>> spanned(0, 4096), spanned(64, 4096), spanned(4032, 1)
    (4096, 8192, 4096)
    """
    return (head + nbytes + PAGE - 1) & -PAGE


class Place(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Where a value lies in memory: in which segment of those that the file is for."""

    segment: int
    offset: int
    nbytes: int


class WriteValues(Message, frozen=True, tag="spill-write"):
    """Write values from memory to the file, each where its extent says. Like every order but
    :class:`HurrySpill`, it is answered with :class:`SpillDone`.
    """

    id: int
    places: list[Place]
    extents: list[Extent]


class WriteTogether(Message, frozen=True, tag="spill-write-together"):
    """Write small values to the file, one after the other. Of some the bytes are given.

    Args:
        whole: where all of them lie.
    """

    id: int
    values: list[bytes | Place]
    whole: Extent


class ReadPieces(Message, frozen=True, tag="spill-read"):
    """Read pieces of a value into memory, where it has a place.

    Args:
        sums: the checksums of the pieces, one after the other.
        first: which one the first of them is.
    """

    id: int
    place: Place
    extent: Extent
    sums: list[int]
    first: int


class ReadTogether(Message, frozen=True, tag="spill-read-together"):
    """Read small values: into memory where they have a place there, the bytes of others are
    returned.
    """

    id: int
    places: list[Place | None]
    extents: list[Extent]
    sums: list[list[int]]


class CutSpill(Message, frozen=True, tag="spill-cut"):
    """Return what lies from ``start`` on to the file system (-1: nothing), and let the segments
    leave the page tables.
    """

    id: int
    start: int


class FreeSpill(Message, frozen=True, tag="spill-free"):
    """Nothing is in use any more in these parts of the file, as (offset, bytes). Only for who
    wants to know: see :class:`SpillPlace`. It comes before anything is written there again.
    """

    id: int
    runs: list[tuple[int, int]]


class KeepSpill(Message, frozen=True, tag="spill-keep"):
    """Only these parts of the file are in use, as a new life of the server knows."""

    id: int
    runs: list[tuple[int, int]]


class HurrySpill(Message, frozen=True, tag="spill-hurry"):
    """Somebody waits for what is being written."""


SpillOrder = (
    WriteValues | WriteTogether | ReadPieces | ReadTogether | CutSpill | FreeSpill | KeepSpill
)


class SpillTrouble(msgspec.Struct, frozen=True, array_like=True):
    """Why a value could not be written or read, for people.

    Args:
        is_damaged: whether it never can be: what was read is not what was written.
    """

    why: str
    is_damaged: bool = False


class SpillDone(Message, frozen=True, tag="spill-done"):
    """How an order has ended.

    Args:
        sums: of each value that was to be written, the checksums of its pieces.
        contents: of each small value that was read, its bytes; empty where they are in memory now.
        troubles: of those values that could not be moved, by their positions.
        failed: why none could be.
        most: how many bytes the file may have, as far as its disk has them.
    """

    id: int
    sums: list[list[int]] = []
    contents: list[bytes] = []
    troubles: dict[int, SpillTrouble] = {}
    failed: SpillTrouble | None = None
    most: int = 0

    def trouble(self, at: int = 0) -> SpillTrouble | None:
        """Why the value at this position could not be moved; None if it was."""
        return self.failed or self.troubles.get(at)


class SpillPlace(msgspec.Struct, frozen=True):
    """The spill file of a volume in another process.

    Args:
        capacity: the most bytes that it may have.
        most: as in :class:`SpillDone`.
        file_system: its type; empty if it is not known.
        frees: whether it is to be told what is not in use any more.
    """

    capacity: int
    most: int
    file_system: str = ""
    frees: bool = False
