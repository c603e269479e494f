"""What people and tools are told of keys. Reads only."""

from __future__ import annotations

from collections.abc import Sequence

from torchstore_core.server.catalog import Catalog
from torchstore_core.server.losing import lost_reason
from torchstore_core.server.records import Shards, Stored, Value, VolumeRecord, all_values
from torchstore_core.wire import messages as m

__all__ = ["listing", "stat"]


def stat(catalog: Catalog, volumes: Sequence[VolumeRecord], request: m.Stat) -> m.Found:
    """What is known of one key.

    Raises:
        KeyNotFoundError, PartialPutError: there is no whole version of it.
    """
    key = request.key
    found = catalog.find(key)
    if found is None:
        raise catalog.missing_error([key])
    stored, version = found
    listed = _listed(volumes, key, stored, version)
    values = list(all_values(stored))
    parts = len(values) if isinstance(stored, Shards) else 1
    entries = getattr(stored.meta, "entries", None)
    return m.Found(
        request.id,
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
    )


def listing(
    catalog: Catalog, volumes: Sequence[VolumeRecord], prefix: str, after: str
) -> tuple[list[m.Listed], bool]:
    """What is known of the keys above ``after`` that start with ``prefix``: one page, sorted, and
    whether there are more.
    """
    names = catalog.names(prefix, after, m.MAX_LISTED + 1)
    entries: list[m.Listed] = []
    room = m.MAX_LISTED_CHARS
    for key in names[: m.MAX_LISTED]:
        room -= len(key)
        found = catalog.find(key)
        if room < 0 or found is None:
            break
        entries.append(_listed(volumes, key, *found))
    return entries, len(entries) < len(names)


def _listed(volumes: Sequence[VolumeRecord], key: str, stored: Stored, version: int) -> m.Listed:
    values = list(all_values(stored))
    places = {volumes[v.volume].info.id: None for v in values}
    places |= {volumes[at].info.id: None for v in values for at, _ in v.more}
    gone = {v.volume: None for v in values if v.data is None and volumes[v.volume].lost}
    segment = -2
    if isinstance(stored, Value):
        segment = 0 if stored.data is None else -1
    return m.Listed(
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
