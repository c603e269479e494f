"""Gives readers the bytes of stored values, or leases that entitle them to read the memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import cast

from torchstore_core.contracts.strategy import ClientFacts, Strategy
from torchstore_core.errors import ProtocolError
from torchstore_core.server.index.records import SessionRecord, Shards, Stored, Value, values_in
from torchstore_core.server.memory import strategy_calls
from torchstore_core.server.memory.allocator import ALIGNMENT, rounded
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.columns import FEWEST, LARGE, MOST, kinds_of, pack

_VALUES = {Value}
_TENSORS = {TensorMeta}


class Leases:
    """Grants and releases leases, which keep memory unchanged while it is being read.

    Args:
        strategy: chooses which copy of a value a client reads.
        take_in: moves inline values into a segment, all or none.
    """

    def __init__(
        self,
        volumes: Sequence[VolumeRecord],
        strategy: Strategy,
        take_in: Callable[[Sequence[Value]], None],
    ) -> None:
        self.volumes = volumes
        self.strategy = strategy
        self._take_in = take_in

    def entries(
        self,
        session: SessionRecord,
        lease: int,
        found: Sequence[tuple[Stored, int]],
        boxes: Sequence[m.Box | None],
        inline_max: int,
        avoid: Collection[int] = (),
    ) -> tuple[list[m.Entry], bool]:
        """Return the reply's entries for the values that were found, and whether they are leased,
        which they are unless the reply contains all of their bytes.

        ``avoid``: volumes to use only if there is no copy on another one.
        """
        if len(found) == 1:
            stored, version = found[0]
            if (
                type(stored) is Value
                and stored.data is not None
                and stored.nbytes <= min(inline_max, m.MAX_FRAME // 2)
            ):  # The usual case of small values.
                return [m.Entry(version, stored.meta, stored.nbytes, stored.data)], False
        values: list[Value] = []  # all values, in order
        parts_of: list[Value] = []  # the values that are shards of tensors
        counts: list[int] = []
        for (stored, _), box in zip(found, boxes, strict=True):
            if type(stored) is Value:
                values.append(stored)
                continue
            some = values_in(stored, box)
            values += some
            parts_of += some
            counts.append(len(some))
        nbytes = inline = sum([v.nbytes for v in values])
        contents: list[bytes] | None = None
        if nbytes <= min(inline_max, m.MAX_FRAME // 2):
            contents = self._read(values)
        if contents is None:
            inline = _inline_bytes(values)
            if inline > inline_max and not avoid:  # more than a message should carry
                self._take_in(values)
                inline = _inline_bytes(values)
        leased = inline != nbytes
        if leased:
            if lease in session.leases:
                raise ProtocolError(f"lease id {lease} is in use")
            if session.was_ended_early(lease):
                raise ProtocolError(f"lease id {lease} was given back before it began")
        choice: _Choice | None = None
        if leased and len(self.volumes) > 1:
            choice = _Choice(self.strategy, self.volumes, session.facts, avoid)
            for value in values:
                if value.more:  # choose before leasing: if the strategy fails, nothing is held
                    choice.of(value)
        read = iter(contents or ())
        held: list[Value | None] = []
        entries: list[m.Entry] = []
        each, sizes = iter(parts_of), iter(counts)
        for stored, version in found:
            if type(stored) is Value:
                data = stored.data
                if data is not None or not leased:
                    held.append(None)
                    data = next(read) if data is None else data
                    entries.append(m.Entry(version, stored.meta, stored.nbytes, data))
                else:
                    held.append(stored)
                    grant = self._pin(stored, choice)
                    entries.append(m.Entry(version, stored.meta, stored.nbytes, None, grant))
                continue
            count = next(sizes)
            if type(stored) is Shards:
                parts = [
                    m.Part(
                        *value.box, value.nbytes, *self._access(value, leased, held, read, choice)
                    )
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

    def columns(
        self,
        session: SessionRecord,
        lease: int,
        found: Sequence[Stored | None],
        inline_max: int,
        avoid: Collection[int] = (),
        version: int = 0,
    ) -> m.EntryColumns | None:
        """Lease values, and describe them in columns. Returns None, and leases nothing, if they do
        not fit: then :meth:`entries` answers.

        Args:
            found: see :func:`fit_columns`.
            avoid: as for :meth:`entries`.
            version: of all values; 0: each has its own.
        """
        values = cast("list[Value]", found)
        sizes = [value.nbytes for value in values]
        nbytes = sum(sizes)
        if (
            not inline_max < nbytes < LARGE * len(sizes)
            or lease in session.leases
            or lease in session.ended_early
        ):
            return None
        index = values[0].volume
        if len(self.volumes) > 1:
            for value in values:
                if value.more or value.volume != index:
                    return None
        offsets = [value.offset for value in values]
        metas = [value.meta for value in values]
        if set(map(type, metas)) != _TENSORS:
            return None
        if min(offsets) < 0:  # some have their bytes inline
            if not avoid:
                self._take_in(values)
                offsets = [value.offset for value in values]
            if min(offsets) < 0:
                return None
        kinds, of = kinds_of(cast("list[TensorMeta]", metas), sizes)
        versions = [version] if version else [value.version for value in values]
        leased = 0
        for value in values:
            pins = value.pins
            value.pins = pins + 1
            if not pins:
                leased += (value.nbytes + ALIGNMENT - 1) & -ALIGNMENT
        self.volumes[index].leased += leased
        session.leases[lease] = list(values)
        if len(set(versions)) == 1:
            versions = versions[:1]
        return m.EntryColumns(kinds, of, versions, index, 0, pack(offsets))

    def _read(self, values: Sequence[Value]) -> list[bytes] | None:
        """Read the bytes of values in segments; None if the controller cannot read all of them."""
        found: list[bytes] = []
        for value in values:
            if value.data is None:
                data = self.volumes[value.volume].memory.read(value.offset, value.nbytes)
                if data is None:
                    return None
                found.append(data)
        return found

    def _access(
        self,
        value: Value,
        leased: bool,
        held: list[Value | None],
        read: Iterator[bytes],
        choice: _Choice | None,
    ) -> tuple[bytes | None, m.Grant | None]:
        """Return the bytes of a value, or else a grant to read them."""
        data = value.data
        if data is not None or not leased:
            held.append(None)
            return next(read) if data is None else data, None
        held.append(value)
        return None, self._pin(value, choice)

    def _pin(self, value: Value, choice: _Choice | None) -> m.Grant:
        """Add a lease of a value, and return the grant of the copy to read."""
        value.pins += 1
        if value.pins == 1:
            nbytes = (value.nbytes + ALIGNMENT - 1) & -ALIGNMENT
            self.volumes[value.volume].leased += nbytes
            if choice is not None:
                for at, _ in value.more:  # a lease keeps every copy unchanged
                    self.volumes[at].leased += nbytes
        if choice is None or not value.more:
            return m.Grant(value.volume, 0, value.offset)
        volume, offset = choice.of(value)
        return m.Grant(volume, 0, offset)

    def lease(self, session: SessionRecord, lease: int, values: Sequence[Value]) -> None:
        """Lease values, whichever of their copies will be read.

        Raises:
            ProtocolError: the lease id is in use.
        """
        if lease in session.leases:
            raise ProtocolError(f"lease id {lease} is in use")
        for value in values:
            value.pins += 1
            if value.pins == 1:
                for at, _ in value.places:
                    self.volumes[at].leased += rounded(value.nbytes)
        session.leases[lease] = list(values)

    def add_copy(self, value: Value, place: tuple[int, int]) -> None:
        """A value has another copy, of which its leases are leases, too."""
        value.more = (*value.more, place)
        if value.pins:
            self.volumes[place[0]].leased += rounded(value.nbytes)

    def unpin(self, values: Iterable[Value | None]) -> list[Value]:
        """Remove a lease of each value; returns the values that nothing holds any more."""
        freed: list[Value] = []
        volumes = self.volumes
        last, leased = -1, 0  # a volume, and how many of its bytes are no longer leased
        for value in values:
            if value is None:
                continue
            value.pins = pins = value.pins - 1
            if pins:
                continue
            nbytes = (value.nbytes + ALIGNMENT - 1) & -ALIGNMENT
            if value.volume != last:
                if leased and not volumes[last].lost:
                    volumes[last].leased -= leased
                last, leased = value.volume, 0
            leased += nbytes
            for at, _ in value.more:
                volumes[at].leased -= nbytes
            if not value.uses:
                freed.append(value)
        if leased and not volumes[last].lost:
            volumes[last].leased -= leased
        return freed


def fit_columns(found: Sequence[Stored | None]) -> bool:
    """Whether a reply may have what was found in columns: all of them, each a single value."""
    return FEWEST <= len(found) <= MOST and set(map(type, found)) == _VALUES


def _inline_bytes(values: Iterable[Value]) -> int:
    return sum([value.nbytes for value in values if value.data is not None])


class _Choice:
    """Chooses which copies a reader reads."""

    def __init__(
        self,
        strategy: Strategy,
        volumes: Sequence[VolumeRecord],
        client: ClientFacts,
        avoid: Collection[int],
    ) -> None:
        self._strategy = strategy
        self._volumes = volumes
        self._client = client
        self._avoid = avoid
        self._chosen: dict[tuple[int, ...], int] = {}

    def of(self, value: Value) -> tuple[int, int]:
        """Return the volume and offset of the chosen copy; all copies are on live volumes."""
        places = value.places
        volumes = tuple([at for at, _ in places])
        chosen = self._chosen.get(volumes)
        if chosen is None:
            chosen = self._chosen[volumes] = self._choose(volumes)
        return places[chosen]

    def _choose(self, volumes: Sequence[int]) -> int:
        staying = [at for at, v in enumerate(volumes) if not self._volumes[v].draining]
        staying = staying or list(range(len(volumes)))
        reachable = [at for at in staying if volumes[at] not in self._avoid]
        reachable = reachable or [at for at, v in enumerate(volumes) if v not in self._avoid]
        reachable = reachable or staying
        if len(reachable) == 1:
            return reachable[0]
        copies = [self._volumes[volumes[at]].facts(for_puts=False) for at in reachable]
        return reachable[strategy_calls.choice(self._strategy, self._client, copies)]
