"""What is to be moved: a :class:`Batch` for each segment, with its moves.

Most moves are bytes. Those that only a library can make, such as torch, know themselves how that is
done; this room knows nothing of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from torchstore_core.contracts.transport import Copy, Memory, SupportsMap, SupportsWindow, Window
from torchstore_core.machine import copying

#: From this many bytes on, a new value is mapped if possible; smaller ones are copied (a mapping
#: costs about as much as copying this much, and a process can have some 65,000 of them).
MAP_MIN = 64 << 10

#: Contiguous bytes: their address in this process, their offset in the segment, and their number.
Run = copying.Run
#: Rows of bytes: address, offset, bytes per row, number of rows, and the stride in bytes between
#: rows, in this process and in the segment.
Rows = tuple[int, int, int, int, int, int]


class Columns(NamedTuple):
    """Many contiguous runs: their addresses in this process, their offsets in the segment, and
    their lengths in bytes.
    """

    addresses: list[int]
    offsets: list[int]
    sizes: list[int]

    def runs(self) -> list[Run]:
        """The same, run by run."""
        return list(zip(*self, strict=True))


class LibraryMoves(ABC):
    """A move that a library must make, or several of them."""

    __slots__ = ()

    @abstractmethod
    def tasks(self, base: int, *, into: bool, stream: bool) -> Iterable[copying.Task] | None:
        """What makes it where the segment is memory of this process, at ``base``; None: it has to
        be made by :meth:`on_devices`.
        """

    @staticmethod
    @abstractmethod
    async def on_devices(moves: Sequence[Any], window: Window, *, into: bool) -> None:
        """Make these moves between devices and a segment that is memory of this process."""

    @abstractmethod
    def each(self) -> Iterable[LibraryMove]:
        """The moves, one by one."""


class LibraryMove(LibraryMoves):
    """A move that a library must make."""

    __slots__ = ()

    def each(self) -> Iterable[LibraryMove]:
        return (self,)

    @abstractmethod
    def cut(self, nbytes: int) -> Iterator[tuple[LibraryMove, int]]:
        """Cut it into pieces of about so many bytes, each with its bytes."""

    @abstractmethod
    def plan(self, plan: CopyPlan, segment: int, devices: frozenset[str]) -> None:
        """Make copies of it, for a link that reaches ``devices``: staged, or direct."""

    @abstractmethod
    def stage(self, plan: CopyPlan, copy: Copy, start: int) -> Copy:
        """Stage the bytes of one copy, which begin ``start`` bytes into it; returns the copy of the
        staging memory.
        """

    @staticmethod
    @abstractmethod
    async def settled(moves: Iterable[Any]) -> None:
        """Wait until nothing is under way any more on what is moved directly."""


class Staged(ABC):
    """A part of a value, and the staging memory that it is copied to or from."""

    __slots__ = ()

    @property
    @abstractmethod
    def memory(self) -> object:
        """The staging memory."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """How much is copied."""

    @property
    @abstractmethod
    def on_device(self) -> bool:
        """Whether :meth:`on_devices` has to copy it, and not :meth:`tasks`."""

    @abstractmethod
    def check(self) -> None:
        """Raise UnsupportedValueError if the value has changed meanwhile."""

    @abstractmethod
    def tasks(self, *, pack: bool) -> Iterable[copying.Task]:
        """What copies it into the staging memory, or (not ``pack``) out of it."""

    @staticmethod
    @abstractmethod
    async def on_devices(staged: Sequence[Any], *, pack: bool) -> None:
        """Copy these, which are on devices."""


#: Contiguous runs come in lists, of one run or of many, or in columns.
Move = list[Run] | Rows | LibraryMoves | Columns


class CopyPlan(msgspec.Struct, eq=False):
    """What is left to be moved of a batch without a window, or after one has failed; or of a part.

    Args:
        copies: those that have not arrived yet.
        rest: moves that are not among the copies yet, because their form depends on the link.
        staged: what is still to be copied into staging memory (for a get, out of it).
        grids: rows of which the same is true: from their source to their destination.
        memory: the staging memory.
        direct: moves on a device that copies reach directly, by their addresses.
        strided: there may be copies of several rows.
        followed: there may be another part.
    """

    copies: list[Copy] = []
    rest: list[LibraryMove] = []
    staged: list[Staged] = []
    grids: list[copying.Grid] = []
    memory: list[object] = []
    direct: list[tuple[range, LibraryMove]] = []
    strided: bool = False
    followed: bool = False

    def add(self, other: CopyPlan) -> None:
        """Add what is left of another plan."""
        self.copies += other.copies
        self.rest += other.rest
        self.staged += other.staged
        self.grids += other.grids
        self.memory += other.memory
        self.direct += other.direct
        self.strided |= other.strided


class Mapped(NamedTuple):
    """A private mapping, and the values on it, all of which keep ``owner`` alive; each in the form
    of its batch.
    """

    owner: object
    values: list[Any]


class Batch(ABC):
    """The bytes to move between this process and one segment of one volume.

    Attributes:
        volume, segment: their indices.
        nbytes: total of all moves.
        into_segment: True for a put, False for a get.
        on_device: whether any of the values is on a device.
        prepared: what a transfer that has failed leaves for the next try.
        unsettled: the transport by which some of what a failed put has written may still arrive;
            empty if there is none.
    """

    volume: int
    segment: int
    nbytes: int
    into_segment: bool
    on_device: bool
    prepared: object = None
    unsettled: str = ""

    @abstractmethod
    def memory(self) -> list[Memory]:
        """The host memory of the user's values, as far as moves have been generated."""

    @abstractmethod
    def moves(self, room: int | None) -> Iterator[Move]:
        """The moves, in order, generated lazily.

        Args:
            room: size of the segment in bytes; None if it is not known.

        Raises:
            TransportError: a value would lie outside the segment.
            UnsupportedValueError: a value has changed since it was looked at.
        """


class ReadsInPlace(Batch):
    """A get of which not everything has to be copied."""

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing is left to be moved."""

    @abstractmethod
    def map(self, link: SupportsMap) -> tuple[Sequence[Mapped], ReadsInPlace]:
        """Map what is large enough. Returns the mappings, and a batch of what is left."""

    @abstractmethod
    def decode(self, link: SupportsWindow) -> None:
        """Decode what can be decoded where it is stored; what is left is to be moved."""
