"""Removes what no snapshot and no running take refers to. Torch-free."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from torchstore_core.clients.calls.arguments import check_bools
from torchstore_core.errors import ConfigurationError, TorchStoreError
from torchstore_snapshot.format.manifest import Manifest
from torchstore_snapshot.format.paths import MANIFEST, claim_file, take_of, temporary_of
from torchstore_snapshot.format.weight_maps import MAP, map_name, written_by_a_take
from torchstore_snapshot.series.claims import GRACE_S, give_up
from torchstore_snapshot.series.retiring import mend_maps, retire, stale_maps, sweep_map
from torchstore_snapshot.series.survey import Place, Survey, folder_name, references, survey
from torchstore_snapshot.storage.base import KeepsUnfinished, Storage
from torchstore_snapshot.storage.opening import open_storage, path_text
from torchstore_snapshot.storage.settings import using

__all__ = ["GarbageFile", "GcReport", "collect", "gc", "remove_replaced"]

# Younger files of takes without a claim may be those of a take that is running.
_UNCLAIMED_S = 86_400.0
_DATA = ".safetensors"


class GarbageFile(msgspec.Struct, frozen=True):
    """A file that nothing refers to.

    Args:
        snapshot: the name of the folder that it is in.
        name: its name.
        nbytes: its size; 0 for uploads that were never completed.
        take: the id of the take that wrote it; empty for a weight map, which does not say it.
    """

    snapshot: str
    name: str
    nbytes: int
    take: str


class GcReport(msgspec.Struct, frozen=True):
    """What a garbage collection has removed; or would remove, if it was a dry run.

    Args:
        path: the folder.
        dry_run: nothing was removed.
        dropped: names of snapshots that are not among the last ones to be kept.
        kept: names of the other snapshots, the oldest first.
        files: the files.
        nbytes: their size.
        running: ids of takes that are running: what they wrote, and what they may refer to, stays.
        dead: ids of takes that have died.
        unreadable: names of snapshots whose manifests cannot be used, and why.
        held: what stays because an unreadable snapshot may refer to it, and which one that is:
            by names of snapshots that would be dropped otherwise, and of files
            (``snapshot/file``) that would be removed.
        mended: weight maps (``snapshot/file``) that were written anew, because a take died after
            it was committed, before it wrote them.
    """

    path: str
    dry_run: bool
    dropped: tuple[str, ...]
    kept: tuple[str, ...]
    files: tuple[GarbageFile, ...]
    nbytes: int
    running: tuple[str, ...]
    dead: tuple[str, ...]
    unreadable: dict[str, str]
    held: dict[str, str]
    mended: tuple[str, ...] = ()


def gc(
    path: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    dry_run: bool = False,
    grace: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> GcReport:
    """Remove the leavings of takes that have died, and snapshots other than the last ones; and
    finish what takes that died left undone after they were committed: the maps of weights.

    May run at any time, beside takes, restores and other garbage collections. A file is removed
    only if no snapshot in the series refers to it and no running take may. (A snapshot that is
    dropped while it is being restored ends that restore with SnapshotReplacedError.)

    A snapshot whose manifest cannot be used stays, with its files and with all that it may refer
    to: it can only refer to what was committed before it. What takes have left that died before
    they were committed goes in any case, and so do snapshots that are known to be newer. If not
    even its place in the order can be read, or its folder may not be looked into, all snapshots
    stay. Take another snapshot in its place (``overwrite=True``), or remove it, to end that.

    Args:
        path: a folder with snapshots in it, or the folder of one snapshot.
        keep_last: how many snapshots remain: those that were committed last, as they were counted
            when they were committed, whatever the clocks said; None: all.
        dry_run: only report.
        grace: seconds without a sign of life after which a take on another host counts as dead, and
            after which files count as left behind whose take has no claim; None: 15 minutes, and a
            day.
        storage_options: as for :class:`~torchstore_snapshot.Snapshot`.

    Raises:
        ConfigurationError: an argument is invalid.
        OSError: the storage failed. What was removed by then was garbage.

    >>> import tempfile, torch
    >>> from torchstore_snapshot import Snapshot, StateDict
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in range(3):
    ...         _ = Snapshot.take(f"{folder}/{step}", {"m": StateDict(w=torch.ones(9) * step)})
    ...     report = gc(folder, keep_last=2)
    >>> report.dropped, report.kept, len(report.files)
    (('0',), ('1', '2'), 1)
    """
    check_bools(dry_run=dry_run)
    last: object = keep_last
    if last is not None and (type(last) is not int or last < 1):
        raise ConfigurationError(f"keep_last is an int above 0, not {last!r}")
    silence: object = grace
    if silence is not None and not (type(silence) in (int, float) and float(grace or 0) >= 0):
        raise ConfigurationError(f"grace is a number of seconds from 0, not {grace!r}")
    with using(storage_options):
        return _gc(path_text(path), keep_last, dry_run, grace)


def collect(storage: Storage) -> None:
    """Collect what is garbage in the folder of one snapshot, whether or not there is one.

    Raises:
        TorchStoreError, OSError: as for :func:`gc`.
    """
    _gc(storage.url, None, False, None)


def _gc(text: str, keep_last: int | None, dry_run: bool, grace: float | None) -> GcReport:
    own = open_storage(text)
    single = any(info.name == MANIFEST or take_of(info.name) for info in own.list())
    if single and keep_last is not None:
        raise ConfigurationError(
            f"{text!r} is a snapshot; keep_last is for the folder that its snapshots are in"
        )
    place = Place.around(own) if single else Place.at(text)
    silence = GRACE_S if grace is None else grace
    seen = survey(place, silence)
    names = [folder_name(own)] if single else sorted(seen.files)
    order = sorted(seen.manifests, key=lambda name: seen.manifests[name].age)
    doomed = order[:-keep_last] if keep_last is not None else []
    held: dict[str, str] = {}
    gone: dict[str, Manifest] = {}
    for name in doomed:
        manifest = seen.manifests[name]
        if name in seen.running.values():
            continue
        if keepers := seen.may_refer(manifest.sequence):
            held[name] = _because(keepers)
        elif dry_run or retire(place.folder(name), manifest, silence):
            gone[name] = manifest
    if gone and not dry_run:
        # Only claims that are seen from now on can tell who has read these manifests before.
        seen = survey(place, silence)
    elif gone:
        remaining = {n: m for n, m in seen.manifests.items() if n not in gone}
        seen = seen._replace(manifests=remaining)
    gone_takes = {manifest.take: manifest.sequence for manifest in gone.values()}
    patience = _UNCLAIMED_S if grace is None else grace
    files: list[GarbageFile] = []
    for file in _garbage(seen, names, gone, patience):
        keepers = _keepers(seen, file, gone_takes)
        if keepers:
            held[f"{file.snapshot}/{file.name}"] = _because(keepers)
        else:
            files.append(file)
    # Nothing that was left behind: they say what is to be removed.
    marks = [f for f in files if f.take in seen.stale and f.name == claim_file(f.take)]
    files = [file for file in files if file not in marks]
    files += _maps(place, seen, [name for name in names if name not in gone])
    # Others may be about to put something into a folder that had a snapshot, but nothing into one
    # where a take has died, or whose folder does not have its name yet; except a take that begins,
    # which then makes the folder again. Beside a folder that was just emptied, there is one without
    # its name.
    unnamed = {} if single else {n: at for n in seen.files if (at := temporary_of(n))}
    died = set() if single else {*seen.dead.values(), *(at.name for at in unnamed.values())}
    # Files may have stayed for others that referred to them when a snapshot was dropped.
    emptied = set() if single else {file.snapshot for file in files + marks}
    leaving = gone.keys() | (died | emptied) - seen.manifests.keys() - unnamed.keys()
    if not dry_run:  # first, so that there is room for what is mended
        with contextlib.ExitStack() as folders:
            for name in sorted(leaving & {*place.member.siblings()}):
                folders.enter_context(place.folder(name).emptying())
            _remove(place, seen, files + marks, silence)
        for name in unnamed:
            place.folder(name).remove_if_empty()
    mended: list[str] = []
    for name, manifest in seen.manifests.items():
        if name not in names or name in gone or name in seen.running.values():
            continue
        folder = place.folder(name)
        maps: Iterable[str] = stale_maps(folder, manifest, seen.files[name])
        if maps and not dry_run:
            maps = mend_maps(folder, silence)
        mended += [f"{name}/{map_}" for map_ in maps]
    return GcReport(
        place.url if not single else own.url,
        dry_run,
        tuple(gone),
        tuple(name for name in order if name not in gone and name in names),
        tuple(files),
        sum(file.nbytes for file in files),
        tuple(sorted(seen.running)),
        tuple(sorted(take for take, name in seen.dead.items() if name in names)),
        seen.unreadable,
        held,
        tuple(mended),
    )


def remove_replaced(storage: Storage, before: Manifest, files: Iterable[tuple[str, str]]) -> bool:
    """Remove the files of a snapshot that has just been replaced, also those of earlier ones that
    it referred to, as far as no other snapshot and no running take may refer to them. Never raises
    because of what others have left.

    Args:
        files: as (folder, name).

    Returns:
        False if a collection is to remove what is left as soon as that is possible.
    """
    name = folder_name(storage)
    rest = set(files)
    if not rest:
        return True
    # Only later ones may refer to what its own take has written.
    own = all(where == name and take_of(file) == before.take for where, file in rest)
    try:
        seen = survey(Place.around(storage), GRACE_S, before.sequence if own else 0)
    except (TorchStoreError, OSError):
        return False
    if seen.reading:
        return False
    if seen.may_refer(before.sequence):
        return True
    if seen.may_refer(0):  # to what is older than the snapshot
        rest = {(folder, file) for folder, file in rest if folder == name}
    removed = not rest & seen.claimed
    rest &= {(folder, info.name) for folder, there in seen.files.items() for info in there}
    for folder, file in rest - seen.referred():
        if take_of(file) not in {None, *seen.running}:
            try:
                storage.sibling(folder).delete(file)
            except OSError:
                removed = False
    return removed


def _because(keepers: list[str]) -> str:
    names = ", ".join(map(repr, keepers))
    return f"{names} cannot be read, and may refer to it"


def _keepers(seen: Survey, file: GarbageFile, gone: dict[str, int]) -> list[str]:
    """Which unreadable snapshots a file may belong to.

    Args:
        gone: the takes of snapshots that were dropped, with their sequences.
    """
    if not file.name.endswith(_DATA):
        return []
    if file.snapshot in seen.unreadable:
        return [file.snapshot]
    if file.take in seen.dead:  # it never was part of a snapshot; see forget_claims
        return []
    return seen.may_refer(gone.get(file.take, 0))


def _garbage(
    seen: Survey, names: Iterable[str], gone: Mapping[str, Manifest], grace: float
) -> Iterable[GarbageFile]:
    if seen.reading:
        return
    referred = seen.referred()
    now = time.time()
    retired = {*(manifest.take for manifest in gone.values()), *seen.stale.values()}
    # Also those of snapshots that were replaced, and that only these referred to.
    let_go = {file for name, manifest in gone.items() for file in references(name, manifest)}
    let_go.update(*seen.let_go.values())
    # A running take may refer to some of them, or may not: the claim is needed until that is known.
    pending = {claim_file(t) for t, files in seen.let_go.items() if files & seen.claimed}
    for name in names:
        for info in seen.files.get(name, ()):
            take = take_of(info.name)
            if take is None or take in seen.running or (name, info.name) in referred:
                continue
            ended = take in seen.dead or take in seen.stale
            if info.name in pending or (info.name == claim_file(take) and not ended):
                continue
            # In a folder without its name, a take has nothing yet but what it can write again.
            known = take in retired or ended or take_of(name) or (name, info.name) in let_go
            made = temporary_of(info.name)  # whoever was to rename it may not live any more
            known = known or (made is not None and made.orphaned)
            if known or max(now - info.modified, 0.0) >= grace:
                yield GarbageFile(name, info.name, info.nbytes, take)


def _maps(place: Place, seen: Survey, names: Iterable[str]) -> Iterable[GarbageFile]:
    """The weight maps of snapshots that were replaced by a take that died just then."""
    for name in names:
        if name in seen.unreadable or name in seen.running.values():
            continue
        manifest = seen.manifests.get(name)
        kept = set() if manifest is None else {map_name(key) for key in manifest.shared}
        for info in seen.files.get(name, ()):
            if not info.name.endswith(MAP) or info.name in kept:
                continue
            with contextlib.suppress(FileNotFoundError):
                if written_by_a_take(place.folder(name).read(info.name)):
                    yield GarbageFile(name, info.name, info.nbytes, "")


def _remove(place: Place, seen: Survey, files: list[GarbageFile], grace: float) -> None:
    """Remove files; claims first say that their take is lost, and are removed last."""
    claims = [file for file in files if file.name == claim_file(file.take)]
    for file in claims:  # so that a take that was only slow cannot be committed
        folder = place.folder(file.snapshot)
        try:
            give_up(folder, file.take)
        except OSError:  # the disk is full: neither can one without a claim
            folder.delete(file.name)
    for file in [f for f in files if f not in claims] + claims:
        folder = place.folder(file.snapshot)
        if not file.take:
            sweep_map(folder, file.name, grace)
        elif (file.snapshot, file.name) in seen.unfinished:
            if isinstance(folder, KeepsUnfinished):
                folder.discard_unfinished(file.name)
        else:
            folder.delete(file.name)
