"""Reports about keys, volumes and sessions, for people and tools. Nothing here changes state."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torchstore_core.reports.stat import Found, Listed, Pending
from torchstore_core.reports.status import SessionStatus, VolumeStatus
from torchstore_core.server.index.catalog import Catalog
from torchstore_core.server.index.records import SessionRecord, Shards, Stored, Value, all_values
from torchstore_core.server.memory.lost_volumes import lost_reason
from torchstore_core.server.memory.shortage import session_bytes
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.values import TensorSlice
from torchstore_core.wire import messages as m


def stat(catalog: Catalog, volumes: Sequence[VolumeRecord], key: str, version: int = 0) -> Found:
    """Return what is known about one key, at a version; 0: the newest.

    Raises:
        KeyNotFoundError, PartialPutError: the key has no complete version.
        VersionGoneError: the version cannot be read.
    """
    found = catalog.find(key, version)
    if found is None:
        raise catalog.missing_error([key])
    stored, version = found
    listed = _listed(volumes, key, stored, version)
    values = list(all_values(stored))
    parts = len(values) if isinstance(stored, Shards) else 1
    entries = getattr(stored.meta, "entries", None)
    return Found(
        key,
        version,
        stored.meta,
        stored.nbytes,
        listed.volume,
        listed.segment,
        stored.offset if isinstance(stored, Value) else -1,
        listed.leases,
        stored.created,
        stored.creator,
        parts if entries is None else entries,
        catalog.versions(key),
        catalog.pending(key),
        listed.lost,
        min([1 + len(v.more) for v in values], default=1),
        sum([v.nbytes for v in values if v.data is None and v.offset < 0]),
        _slices(stored) if isinstance(stored, Shards) else [],
    )


def _slices(stored: Shards) -> list[TensorSlice]:
    """Where the shards of a tensor lie in it."""
    shape = stored.meta.shape
    return [TensorSlice(box.offset, box.shape, shape) for box in sorted(stored.parts)]


def listing(
    catalog: Catalog, volumes: Sequence[VolumeRecord], prefix: str, after: str
) -> tuple[list[Listed], list[Pending], bool]:
    """Return one page of the keys that start with ``prefix`` and sort after ``after``: what is
    known about them, their unfinished versions, and whether there are more keys.
    """
    names = catalog.names.page(prefix, after, m.MAX_LISTED + 1)
    waiting = {key for key in catalog.unfinished(prefix) if key > after}
    if waiting:
        names = sorted({*names, *waiting})
    entries: list[Listed] = []
    pending: list[Pending] = []
    room = m.MAX_LISTED_CHARS
    for at, key in enumerate(names[: m.MAX_LISTED]):
        states = catalog.pending(key, brief=True) if key in waiting else []
        room -= len(key) + sum(map(_chars, states))
        if room < 0 and at:
            return entries, pending, True
        pending += states
        found = catalog.find(key)
        if found is not None:
            entries.append(_listed(volumes, key, *found))
    return entries, pending, len(names) > m.MAX_LISTED


def _chars(state: Pending) -> int:
    """Return roughly how many characters ``state`` takes in a message."""
    participants = (state.committed, state.writing, state.missing_participants)
    return len(state.key) + sum(len(name) + 2 for names in participants for name in names)


def volume_status(volume: VolumeRecord) -> VolumeStatus:
    """Return the status of a volume and its memory."""
    info = volume.info
    return VolumeStatus(
        id=info.id,
        pid=info.pid,
        host_id=info.topology.host_id,
        hostname=info.topology.hostname,
        capacity_bytes=info.capacity_bytes,
        used_bytes=volume.used,
        leased_bytes=volume.leased,
        unfinished_bytes=volume.unfinished,
        free_bytes=volume.free,
        warm_bytes=volume.memory.warm,
        transports=sorted(info.offers),
        lost=volume.lost,
        draining=volume.draining,
    )


def session_status(session: SessionRecord, role: str) -> SessionStatus:
    """Return the status of a client's session and what it holds."""
    leased, unfinished = session_bytes(session)
    return SessionStatus(
        pid=session.facts.pid,
        hostname=session.facts.hostname,
        rank=session.facts.rank,
        lanes=session.channels,
        leases=len(session.leases),
        leased_bytes=leased,
        unfinished_puts=len(session.txns),
        unfinished_bytes=unfinished,
        age_s=time.monotonic() - session.opened,
        role=role,
    )


def unfinished(catalog: Catalog) -> tuple[list[Pending], int, int]:
    """Return the first unfinished versions, the number of all of them, and how many bytes they hold
    that are committed.
    """
    keys = catalog.unfinished()
    generations = [g for key in keys for g in catalog.histories[key].generations()]
    first: list[Pending] = []
    room = m.MAX_LISTED_CHARS
    for state in (state for key in keys for state in catalog.pending(key, brief=True)):
        room -= _chars(state)
        if len(first) == m.MAX_PENDING or room < 0:
            break
        first.append(state)
    return first, len(generations), sum(g.nbytes for g in generations)


def _listed(volumes: Sequence[VolumeRecord], key: str, stored: Stored, version: int) -> Listed:
    values = list(all_values(stored))
    places = {volumes[v.volume].info.id: None for v in values}
    places |= {volumes[at].info.id: None for v in values for at, _ in v.more}
    gone = {v.volume: None for v in values if v.data is None and volumes[v.volume].lost}
    segment = -2
    if isinstance(stored, Value):
        segment = 0 if stored.data is None else -1
    return Listed(
        key,
        version,
        stored.meta,
        stored.nbytes,
        "+".join(places),
        segment,
        max((v.pins for v in values), default=0),
        stored.created,
        stored.creator.pid,
        "; ".join([lost_reason(volumes[at]) for at in gone]),
    )
