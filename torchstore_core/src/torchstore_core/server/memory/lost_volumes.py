"""Volumes whose memory is permanently lost, and the values that were lost with them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from torchstore_core.errors import ObjectLostError
from torchstore_core.server.index.catalog import Catalog
from torchstore_core.server.index.errors import version_lost_error
from torchstore_core.server.index.records import (
    SessionRecord,
    Stored,
    Txn,
    Value,
    all_values,
    values_in,
)
from torchstore_core.server.index.stored import stored_values
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.wire import messages as m


class LostVolumes:
    """Determines which values are lost: those of which every copy was on a lost volume.

    Attributes:
        any: whether any volume is lost. If none is, nothing needs to be checked.
    """

    def __init__(self, volumes: Sequence[VolumeRecord]) -> None:
        self._volumes = volumes
        self.any = any(volume.lost for volume in volumes)

    def lose(
        self, index: int, why: str, catalog: Catalog, sessions: Iterable[SessionRecord]
    ) -> None:
        """Record the loss of a volume: no value has a copy there any more."""
        volume = self._volumes[index]
        volume.lose(why)
        self.any = True
        for value in {id(v): v for v in _every_value(catalog, sessions)}.values():
            forget_copy(value, index)
        for session in sessions:
            for txn in session.txns.values():
                txn.granted.pop(index, None)

    def is_lost(self, stored: Stored) -> bool:
        """Return whether any part of a stored value is lost."""
        return self.any and self._first_lost(all_values(stored)) is not None

    def check(self, key: str, stored: Stored, box: m.Box | None) -> None:
        """Raise ObjectLostError if ``box`` of ``stored`` (None: all of it) cannot be read."""
        gone = self._first_lost(values_in(stored, box))
        if gone is not None:
            raise self._error(key, gone, stored.version)

    def check_put(self, txn: Txn, name: str = "") -> None:
        """Raise ObjectLostError if values of a put, or a generation that it joined, are lost.
        ``name``: of the only value, in the error, if that is not its key.
        """
        gone = self._first_lost(txn.values)
        if gone is not None:
            raise self._error(name or gone.key, gone, 0)
        for target, _ in txn.contributions:
            if target.generation is not None and target.generation.lost:
                raise version_lost_error(target.key, target.version, target.generation.lost)

    def _first_lost(self, values: Iterable[Value]) -> Value | None:
        volumes = self._volumes
        for value in values:
            if value.data is None and volumes[value.volume].lost:
                return value
        return None

    def reason(self, values: Iterable[Value]) -> str:
        """Return why any of the values is lost; empty if none is."""
        gone = self._first_lost(values)
        return "" if gone is None else lost_reason(self._volumes[gone.volume])

    def _error(self, key: str, value: Value, version: int) -> ObjectLostError:
        volume = self._volumes[value.volume]
        what = f"version {version} of {key!r}" if version else f"what was being put to {key!r}"
        is_part = value.key not in key and not value.key.startswith(m.HIDDEN)
        part = f" ({value.key!r}, a part of it)" if is_part else ""
        return ObjectLostError(
            f"{what}{part} is lost: {lost_reason(volume)}, and there was no copy elsewhere. Put it "
            "again; to survive the next loss initialize the store with ReplicatedStrategy",
            key=key,
            details={
                "version": version,
                "volume": volume.info.id,
                "index": volume.index,
                "reason": volume.lost,
                "since": volume.lost_at,
            },
        )


def lost_reason(volume: VolumeRecord) -> str:
    """Describe a lost volume: its id, and since when and why it is lost; empty if it is not."""
    if not volume.lost:
        return ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(volume.lost_at))
    return f"volume {volume.info.id} is gone since {since} ({volume.lost})"


def forget_copy(value: Value, index: int) -> None:
    """Remove the copy on volume ``index`` from a value's places, unless it is the only copy."""
    if value.data is not None:
        return
    places = value.places
    left = tuple([place for place in places if place[0] != index])
    if left and len(left) < len(places):
        value.volume, value.offset = left[0]
        value.more = left[1:]


def _every_value(catalog: Catalog, sessions: Iterable[SessionRecord]) -> Iterator[Value]:
    """Yield every value that anything holds; some are yielded several times."""
    for found in stored_values(catalog):
        yield from (value for _, value in found)
    for session in sessions:
        for txn in session.txns.values():
            yield from txn.values
        for held in session.leases.values():
            yield from (value for value in held if value is not None)
