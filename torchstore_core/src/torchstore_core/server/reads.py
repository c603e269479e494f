"""What a get is given: the versions that it means, leased, or their bytes.

Like the controller, this does no I/O and never waits, so that a reply is one consistent cut of the
index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from torchstore_core.errors import LayoutMismatchError
from torchstore_core.server.index.catalog import Catalog
from torchstore_core.server.index.items import one_by_one
from torchstore_core.server.index.records import (
    Entry,
    HeldVersion,
    Manifest,
    SessionRecord,
    Stored,
    Value,
    values_in,
)
from torchstore_core.server.memory.leases import Leases, fit_columns
from torchstore_core.server.memory.lost_volumes import LostVolumes
from torchstore_core.server.spilling.spilling import Spilling
from torchstore_core.wire import messages as m


class Reads:
    """Finds what is to be read, and leases it.

    Args:
        lost_volumes: says what cannot be read any more.
        spilling: is told what is used, and brings back what is on disk.
    """

    def __init__(
        self, catalog: Catalog, leases: Leases, lost_volumes: LostVolumes, spilling: Spilling
    ) -> None:
        self._catalog = catalog
        self._leases = leases
        self._lost_volumes = lost_volumes
        self._spilling = spilling

    def locate(
        self, session: SessionRecord, request: m.Locate
    ) -> tuple[list[m.Entry] | m.EntryColumns, bool]:
        """Return entries for all wanted values, from one snapshot, and whether they are now leased
        under ``lease``. They are in columns if the request was for keys and all of them fit.

        Raises:
            KeyNotFoundError, VersionGoneError, ObjectLostError: a value cannot be read; nothing is
                leased.
            ProtocolError: the lease id is in use.
            Delayed, StoreFullError: see ``Spilling.use``.
        """
        if type(request) is m.LocateKeys:
            columns = self._columns(session, request, map(self._catalog.newest.get, request.keys))
            if columns is not None:
                return columns, True
            request = one_by_one(request)
        by_ref: dict[int, Stored] = {}  # what references hold, by the id() of the want
        if type(request) is m.LocateRefs:
            for want, timeline in zip(request.wants, request.timelines, strict=False):
                if timeline >= 0:
                    held = self._catalog.held_version(want.key, want.version, timeline)
                    if held is None:
                        self._catalog.check_timeline(want.key, want.version, timeline)
                    else:
                        by_ref[id(want)] = held.stored
        find, newest = self._catalog.find, self._catalog.newest
        found: list[tuple[Stored, int]] = []
        boxes: list[m.Box | None] = []
        missing: list[str] = []
        for want in request.wants:
            boxes.append(want.box)
            there = newest.get(want.key)
            if there is not None and not want.version:  # the usual case, very often
                found.append((there, there.version))
                continue
            if by_ref and id(want) in by_ref:
                found.append((by_ref[id(want)], want.version))
                continue
            stored = find(want.key, want.version)
            if stored is None:
                missing.append(want.key)
            else:
                found.append(stored)
        if missing:
            raise self._catalog.missing_error(missing)
        if self._lost_volumes.any:
            for want, (there, _) in zip(request.wants, found, strict=True):
                self._lost_volumes.check(want.key, there, want.box)
        if self._spilling.active:
            self._spilling.use(
                [v for (one, _), box in zip(found, boxes, strict=True) for v in values_in(one, box)]
            )
        return self._leases.entries(
            session, request.lease, found, boxes, request.inline_max, request.avoid
        )

    def _columns(
        self,
        session: SessionRecord,
        request: m.Locate | m.Fetch,
        found: Iterable[Stored | None],
        version: int = 0,
        prefix: str = "",
    ) -> m.EntryColumns | None:
        """Lease what was found, and describe it in columns; None if it must be entries. ``prefix``,
        and what it raises: see ``Spilling.use``.
        """
        if self._lost_volumes.any or request.wants:
            return None
        found = list(found)
        if not fit_columns(found):
            return None
        if self._spilling.active:
            self._spilling.use(cast("list[Value]", found), prefix)
        return self._leases.columns(
            session, request.lease, found, request.inline_max, request.avoid, version
        )

    def fetch(self, session: SessionRecord, request: m.Fetch) -> m.Fetched:
        """Return entries of one version of a state dict, leased under ``lease`` unless the reply
        contains all of their bytes.

        Raises:
            KeyNotFoundError, VersionGoneError, ObjectLostError: it cannot be read; nothing is
                leased.
            LayoutMismatchError: the key is not a state dict.
            ProtocolError: as for :meth:`locate`.
        """
        manifest, version, timeline = self._manifest(request)
        entries, own_paths = manifest.contents()
        if type(request) is m.FetchKeys or request.wants is None:
            reply = self._fetch_columns(session, request, entries, own_paths, version, timeline)
            if reply is not None:
                return reply
        if type(request) is m.FetchKeys:
            request = one_by_one(request)
        wanted: list[Stored | None]
        boxes: list[m.Box | None]
        paths: dict[int, bytes] = {}
        if request.wants is None:
            names, wanted, boxes = list(entries), list(entries.values()), [None] * len(entries)
            if own_paths:
                at = {name: i for i, name in enumerate(names)}
                paths = {at[name]: path for name, path in own_paths.items()}
        else:
            asked = {want.key for want in request.wants}
            names = [name for name in entries if name not in asked]
            wanted = [entries.get(want.key) for want in request.wants]
            boxes = [want.box for want in request.wants]
        there = [(stored, version) for stored in wanted if stored is not None]
        cuts = [box for box, stored in zip(boxes, wanted, strict=True) if stored is not None]
        if self._lost_volumes.any:
            asked_names = names if request.wants is None else [want.key for want in request.wants]
            for name, some, box in zip(asked_names, wanted, boxes, strict=True):
                if some is not None:
                    self._lost_volumes.check(f"{request.key}/{name}", some, box)
        if self._spilling.active:
            self._spilling.use(
                [v for (one, _), box in zip(there, cuts, strict=True) for v in values_in(one, box)],
                f"{request.key}/",
            )
        made, leased = self._leases.entries(
            session, request.lease, there, cuts, request.inline_max, request.avoid
        )
        replies = iter(made)
        answers = [None if stored is None else next(replies) for stored in wanted]
        same_as = _tied(wanted) if request.wants is None else []
        return m.Fetched(
            request.id, version, answers, names, paths, same_as, leased, timeline=timeline
        )

    def _manifest(self, request: m.Fetch) -> tuple[Manifest, int, int]:
        """The state dict that is requested, its version, and the timeline of that."""
        held: HeldVersion | None = None
        if type(request) is m.FetchRef:
            held = self._catalog.held_version(request.key, request.version, request.timeline)
        found: Stored
        if held is not None:
            found, version, timeline = held.stored, held.version, held.timeline
        else:
            there = self._catalog.find(request.key, request.version)
            if there is None:
                raise self._catalog.missing_error([request.key])
            found, version = there
            if type(request) is m.FetchRef:
                self._catalog.check_timeline(request.key, version, request.timeline)
            timeline = self._catalog.timeline(request.key, version)
        if type(found) is not Manifest:
            raise LayoutMismatchError(
                f"{request.key!r} is no state dict (it was put by itself); get it with `get`",
                key=request.key,
            )
        return found, version, timeline

    def _fetch_columns(
        self,
        session: SessionRecord,
        request: m.Fetch,
        entries: Mapping[str, Entry],
        own_paths: Mapping[str, bytes],
        version: int,
        timeline: int,
    ) -> m.Fetched | None:
        """Answer a Fetch in columns; None if that is impossible."""
        names: list[str] = []
        paths: dict[int, bytes] = {}
        found: list[Stored | None]
        if type(request) is m.FetchKeys:
            asked = set(request.keys)
            if len(asked) < len(entries):
                names = [name for name in entries if name not in asked]
            found = list(map(entries.get, request.keys))
        else:
            names, found = list(entries), list(entries.values())
            if own_paths or len(set(map(id, found))) < len(found):
                return None
        columns = self._columns(session, request, found, version, f"{request.key}/")
        if columns is None:
            return None
        return m.Fetched(
            request.id, version, [], names, paths, [], True, timeline=timeline, columns=columns
        )


def _tied(entries: Sequence[Stored | None]) -> list[tuple[int, int]]:
    """The positions of entries that occur earlier, too, each with its first position."""
    first: dict[int, int] = {}
    return [
        (at, before)
        for at, entry in enumerate(entries)
        if (before := first.setdefault(id(entry), at)) != at
    ]
