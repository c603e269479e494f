"""Memory of copies that were dropped while somebody read the value: kept until these readers are
done.

A lease is of a value, not of one of its copies, and new leases of the value may begin at any time,
which read other copies. So the leases that there are when the copy is dropped are remembered, and
its memory is free when these have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from torchstore_core.server.index.records import SessionRecord, Value
from torchstore_core.server.memory.allocator import rounded
from torchstore_core.server.memory.lost_volumes import forget_copy
from torchstore_core.server.memory.volume_record import VolumeRecord

# The token of a session, the id of a lease, and the position in the lease.
_Reader = tuple[bytes, int, int]


class Left(msgspec.Struct, eq=False):
    """The memory of a copy that was dropped, and those that may still read it."""

    value: Value
    volume: int
    offset: int
    readers: set[_Reader]


class Leavings:
    """Drops copies, and keeps the memory of those that are still read.

    Args:
        holders: the sessions that may have leases, by token.
    """

    def __init__(
        self, volumes: Sequence[VolumeRecord], holders: Mapping[bytes, SessionRecord]
    ) -> None:
        self._volumes = volumes
        self._holders = holders
        self._left: dict[int, list[Left]] = {}  # by the id() of the value

    def __len__(self) -> int:
        return len(self._left)

    @property
    def all(self) -> list[Left]:
        """All that is kept."""
        return [left for some in self._left.values() for left in some]

    @all.setter
    def all(self, kept: Iterable[Left]) -> None:
        for left in kept:
            self._left.setdefault(id(left.value), []).append(left)

    def drop(self, values: Iterable[Value], volume: int) -> None:
        """Drop the copies on a volume of values that have another one."""
        record = self._volumes[volume]
        freed: list[tuple[int, int]] = []
        read: dict[int, Left] = {}
        for value in values:
            offset = dict(value.places).get(volume)
            if offset is None or len(value.places) < 2:
                continue
            forget_copy(value, volume)
            if value.pins:
                read[id(value)] = Left(value, volume, offset, set())
            else:
                freed.append((offset, value.nbytes))
        if read:
            self._note_readers(read)
            for number, left in read.items():
                if left.readers:
                    self._left.setdefault(number, []).append(left)
                else:  # the only reader is a session that is just being closed
                    record.leased -= rounded(left.value.nbytes)
                    freed.append((left.offset, left.value.nbytes))
        if freed:
            record.allocator.free(freed)

    def _note_readers(self, read: Mapping[int, Left]) -> None:
        for token, session in self._holders.items():
            for lease, held in session.leases.items():
                for at, value in enumerate(held):
                    if value is not None and (left := read.get(id(value))) is not None:
                        left.readers.add((token, lease, at))

    def places(self, value: Value) -> tuple[tuple[int, int], ...]:
        """The volume and offset of every copy of a value, those that were dropped included."""
        left = self._left.get(id(value), ())
        return (*value.places, *((one.volume, one.offset) for one in left))

    def released(
        self,
        session: SessionRecord,
        leases: Iterable[int],
        parts: Iterable[tuple[int, list[int]]],
    ) -> None:
        """Leases of a session are about to be released; see ``Controller.release``."""
        whole = [(one, range(len(session.leases.get(one, ())))) for one in leases]
        for lease, positions in [*whole, *parts]:
            held = session.leases.get(lease, ())
            for at in positions:
                value = held[at] if 0 <= at < len(held) else None
                if value is not None and id(value) in self._left:
                    self._ended(value, (session.token, lease, at))

    def _ended(self, value: Value, reader: _Reader) -> None:
        kept: list[Left] = []
        for left in self._left.pop(id(value)):
            left.readers.discard(reader)
            if left.readers:
                kept.append(left)
                continue
            record = self._volumes[left.volume]
            record.leased -= rounded(value.nbytes)
            record.allocator.free([(left.offset, value.nbytes)])
        if kept:
            self._left[id(value)] = kept

    def volume_lost(self, volume: int) -> None:
        """The memory of a volume is lost, so nothing of it has to be kept."""
        for number, some in self._left.copy().items():
            kept = [left for left in some if left.volume != volume]
            if kept:
                self._left[number] = kept
            else:
                del self._left[number]
