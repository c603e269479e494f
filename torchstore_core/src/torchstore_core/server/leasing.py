"""Giving readers the bytes of what is stored, or the right to read them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from torchstore_core.errors import ProtocolError
from torchstore_core.server.allocator import rounded
from torchstore_core.server.records import (
    SessionRecord,
    Shards,
    Stored,
    Value,
    VolumeRecord,
    values_in,
)
from torchstore_core.wire import messages as m

__all__ = ["Leases"]


class Leases:
    """What keeps memory as it is while somebody reads it."""

    def __init__(self, volumes: Sequence[VolumeRecord]) -> None:
        self.volumes = volumes

    def entries(
        self,
        session: SessionRecord,
        lease: int,
        found: Sequence[tuple[Stored, int]],
        boxes: Sequence[m.Box | None],
        inline_max: int,
    ) -> tuple[list[m.Entry], bool]:
        """Reply entries for what was found, leased unless all of it comes inside the reply."""
        values: list[Value] = []  # of all of them, one after the other
        counts: list[int] = []
        for (stored, _), box in zip(found, boxes, strict=True):
            if type(stored) is Value:
                values.append(stored)
                continue
            some = values_in(stored, box)
            values += some
            counts.append(len(some))
        nbytes = inline = sum([v.nbytes for v in values])
        if nbytes > inline_max:
            inline = sum([v.nbytes for v in values if v.data is not None])
        if inline > m.MAX_FRAME // 2:
            raise ProtocolError(
                f"{inline} bytes of inline values do not fit one reply; get fewer keys at once"
            )
        leased = inline != nbytes
        if leased:
            if lease in session.leases:
                raise ProtocolError(f"lease id {lease} is in use")
            if lease in session.given_back:
                session.given_back.discard(lease)
                raise ProtocolError(f"lease id {lease} was given back before it began")
        held: list[Value | None] = []
        entries: list[m.Entry] = []
        each, sizes = iter(values), iter(counts)
        for stored, version in found:
            if type(stored) is Value:
                data, grant = self._access(next(each), leased, held)
                entries.append(m.Entry(version, stored.meta, stored.nbytes, data, grant))
                continue
            count = next(sizes)
            if type(stored) is Shards:
                parts = [
                    m.Part(*value.box, value.nbytes, *self._access(value, leased, held))
                    for value in islice(each, count)
                    if value.box is not None
                ]
                entries.append(m.Entry(version, stored.meta, stored.nbytes, None, None, parts))
            else:
                entries.append(m.Entry(version, stored.meta, stored.nbytes))
                held.append(None)
        if leased:
            session.leases[lease] = held
        return entries, leased

    def _access(
        self, value: Value, leased: bool, held: list[Value | None]
    ) -> tuple[bytes | None, m.Grant | None]:
        """The bytes of a value, or the right to read them."""
        data = value.data
        if data is not None or not leased:
            held.append(None)
            if data is None:
                data = self.volumes[value.volume].memory.read(value.offset, value.nbytes)
            return data, None
        held.append(value)
        value.pins += 1
        if value.pins == 1:
            self.volumes[value.volume].leased += rounded(value.nbytes)
        return None, m.Grant(value.volume, 0, value.offset)

    def unpin(self, value: Value, dead: list[Value]) -> None:
        """One lease less."""
        value.pins -= 1
        if value.pins == 0:
            self.volumes[value.volume].leased -= rounded(value.nbytes)
            if not value.uses:
                dead.append(value)
