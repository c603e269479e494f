"""What there is in a series: a consistent view of it, though others change it meanwhile.

Why nothing that is referred to is ever taken for garbage: a take publishes its claim before it
reads the manifest whose files it refers to, and removes the claim after its own manifest is there.
A survey lists the files first; then it reads claims, manifests, claims and manifests again, until
the manifests did not change in between. So a take is seen by one of its claims, or by its manifest,
or it began after the survey, with what the survey saw.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from torchstore_core.errors import TorchStoreError
from torchstore_snapshot.errors import (
    SnapshotCorruptError,
    SnapshotFormatError,
    SnapshotNotFoundError,
    SnapshotUnavailableError,
)
from torchstore_snapshot.format.heads import Head
from torchstore_snapshot.format.manifest import Manifest
from torchstore_snapshot.series.claims import Record, claims_in
from torchstore_snapshot.series.counting import read_head
from torchstore_snapshot.storage.base import FileInfo, KeepsUnfinished, Storage
from torchstore_snapshot.storage.opening import open_storage, read_manifest
from torchstore_snapshot.threads import run_tasks

__all__ = ["Place", "Survey", "folder_name", "newest", "references", "survey"]

_THREADS = 8
_ATTEMPTS = 50
T = TypeVar("T")


class Place(NamedTuple):
    """The folder of a series.

    Args:
        url: its path or URL.
        member: the storage of any name in it, which need not exist.
    """

    url: str
    member: Storage

    @classmethod
    def at(cls, path: str) -> Place:
        """Return the series in a folder."""
        open_storage(path)  # refuses what names no folder
        member = open_storage(f"{path.rstrip('/')}/.none")
        return cls(member.url.rpartition("/")[0], member)

    @classmethod
    def around(cls, storage: Storage) -> Place:
        """Return the series that a snapshot is in."""
        return cls(storage.url.rpartition("/")[0], storage)

    def folder(self, name: str) -> Storage:
        return self.member.sibling(name)


class Survey(NamedTuple):
    """What there is.

    Args:
        files: the files in each folder, also unfinished ones.
        unfinished: those of them that are, as (folder, name).
        manifests: the snapshots, by the name of their folder.
        unreadable: folders with a manifest that cannot be used, and why.
        bounds: the sequences of those, as far as they are known all the same.
        running, dead: the takes that have a claim, and where: folders by the ids of takes.
        stale: the claims of programs that have ended, or died, while they made snapshots invisible:
            which takes these were of.
        reading: some running take may refer to any file.
        claimed: the files that running takes may refer to, as (folder, name).
        let_go: the files that dead claims let go, by their takes: garbage, unless something refers
            to them.
    """

    files: dict[str, list[FileInfo]]
    unfinished: set[tuple[str, str]]
    manifests: dict[str, Manifest]
    unreadable: dict[str, str]
    bounds: dict[str, int]
    running: dict[str, str]
    dead: dict[str, str]
    stale: dict[str, str]
    reading: bool
    claimed: set[tuple[str, str]]
    let_go: dict[str, set[tuple[str, str]]]

    def referred(self) -> set[tuple[str, str]]:
        """Return the files, as (folder, name), that snapshots or running takes refer to."""
        found = set(self.claimed)
        for name, manifest in self.manifests.items():
            found |= references(name, manifest)
        return found

    def may_refer(self, sequence: int) -> list[str]:
        """Return which of the unreadable snapshots may refer to files of one with that sequence (0
        if it is unknown). A snapshot only refers to files of those committed before it.
        """
        return [
            name
            for name in self.unreadable
            if name not in self.bounds or sequence < self.bounds[name]
        ]


def folder_name(storage: Storage) -> str:
    """Return the name of a snapshot's folder."""
    return storage.url.rstrip("/").rpartition("/")[2]


def references(name: str, manifest: Manifest) -> set[tuple[str, str]]:
    """Return the files, as (folder, name), that the snapshot ``name`` consists of."""
    return {(file.snapshot or name, file.name) for file in manifest.files}


def survey(place: Place, grace: float, after: int = 0) -> Survey:
    """Return a consistent view of a series.

    Args:
        grace: seconds without a sign of life after which a take on another host counts as dead.
        after: leave out the manifests of snapshots that were committed no later than the one of
            this sequence, and so refer to nothing that its take has written.

    Raises:
        SnapshotUnavailableError: snapshots are committed so often that no view was consistent.
        OSError: the storage failed.
    """
    folders = sorted(place.member.siblings())
    files = _each(folders, lambda name: _listed(place.folder(name)))
    unfinished: set[tuple[str, str]] = set()
    if isinstance(place.member, KeepsUnfinished):
        for name in folders:
            folder = place.folder(name)
            for info in folder.unfinished() if isinstance(folder, KeepsUnfinished) else ():
                files[name].append(info)
                unfinished.add((name, info.name))
    for _ in range(_ATTEMPTS):
        claims = _claims(place, grace)
        manifests, unreadable = _manifests(place, list(_heads(place, after)))
        claims += _claims(place, grace)
        again, still = _takes(place, unreadable, after)
        bounds = {n: head.sequence for n in still if (head := read_head(place.folder(n)))}
        takes = {name: manifest.take for name, manifest in manifests.items()}
        if again == takes and unreadable.keys() == still.keys():
            break
    else:
        raise _changing(place)
    let_go = {r.take: set(r.lets_go) for _, r, lives in claims if not lives}
    stale = {r.take: r.retires for _, r, lives in claims if r.retires and not lives}
    claims = [claim for claim in claims if not claim[1].retires]
    running = {record.take: name for name, record, lives in claims if lives}
    dead = {r.take: name for name, r, lives in claims if not lives and r.take not in running}
    lively = [record for _, record, lives in claims if lives]
    return Survey(
        files,
        unfinished,
        manifests,
        unreadable,
        bounds,
        running,
        dead,
        stale,
        any(record.files is None for record in lively),
        {file for record in lively for file in record.files or ()},
        let_go,
    )


def newest(place: Place) -> tuple[str, Manifest] | None:
    """Return the snapshot that was committed last, of those that can be read, by the name of its
    folder; None if there is none. Of most others only the first bytes are read.

    Raises:
        SnapshotUnavailableError: snapshots are dropped so often that none could be read.
        OSError: the storage failed.
    """
    for _ in range(_ATTEMPTS):
        heads = _heads(place)
        counted: dict[int, list[str]] = {}
        for name, head in heads.items():
            counted.setdefault(0 if head is None else head.sequence, []).append(name)
        for sequence in sorted(counted, reverse=True):
            names = counted[sequence]
            found, unreadable = _manifests(place, names)
            if any(heads[n] and n not in found and n not in unreadable for n in names):
                break  # dropped since, perhaps because there is a newer one
            if found:
                name = max(found, key=lambda name: found[name].age)
                return name, found[name]
        else:
            return None
    raise _changing(place)


def _changing(place: Place) -> SnapshotUnavailableError:
    return SnapshotUnavailableError(
        f"snapshots in {place.url!r} change all the time; try again later",
        details={"path": place.url},
    )


def _listed(folder: Storage) -> list[FileInfo]:
    """The files of a folder. One that may not be looked into is found by reading its manifest."""
    try:
        return list(folder.list())
    except PermissionError:
        return []


def _claims(place: Place, grace: float) -> list[tuple[str, Record, bool]]:
    """All claims: folder, what it says, and whether the take is running."""

    def of(name: str) -> list[tuple[str, Record, bool]]:
        try:
            return [(name, *claim) for claim in claims_in(place.folder(name), grace)]
        except PermissionError:
            return []

    each = _each(sorted(place.member.siblings()), of)
    return [claim for found in each.values() for claim in found]


def _heads(place: Place, after: int = 0) -> dict[str, Head | None]:
    """The heads of all manifests but those that are known to be no later than a sequence."""
    heads = _each(sorted(place.member.siblings()), lambda name: read_head(place.folder(name)))
    return {n: head for n, head in heads.items() if head is None or head.sequence > after}


def _takes(
    place: Place, unreadable: Collection[str], after: int
) -> tuple[dict[str, str], dict[str, str]]:
    """The takes of the manifests that there are now, and those that cannot be used, and why. Of one
    that is counted, and could be used before, only the first bytes are read: no manifest changes.
    """
    heads = _heads(place, after)
    known = {n: head.take for n, head in heads.items() if head is not None and n not in unreadable}
    found, still = _manifests(place, [name for name in heads if name not in known])
    return known | {name: manifest.take for name, manifest in found.items()}, still


def _manifests(place: Place, names: Sequence[str]) -> tuple[dict[str, Manifest], dict[str, str]]:
    def of(name: str) -> Manifest | str | None:
        try:
            return read_manifest(place.folder(name))
        except SnapshotNotFoundError:
            return None
        except (SnapshotFormatError, SnapshotCorruptError, PermissionError) as error:
            return error.message if isinstance(error, TorchStoreError) else str(error)

    each = _each(sorted(names), of)
    found = {name: which for name, which in each.items() if isinstance(which, Manifest)}
    return found, {name: which for name, which in each.items() if isinstance(which, str)}


def _each(names: Sequence[str], call: Callable[[str], T]) -> dict[str, T]:
    """Call for each name, some at a time."""
    found: dict[str, T] = {}

    def one(name: str) -> None:
        found[name] = call(name)

    run_tasks([partial(one, name) for name in names], min(_THREADS, max(1, len(names) // 4)))
    return {name: found[name] for name in names}
