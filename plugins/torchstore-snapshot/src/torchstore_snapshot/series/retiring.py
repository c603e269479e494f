"""How a snapshot is made invisible without ever harming another that has just replaced it.

No storage can remove a file only if it still has certain contents. So whoever wants to remove a
manifest first says so, by a claim of its own in the folder, and looks for claims of takes; a take,
which has had its claim from the beginning, looks for such claims just before it puts its manifest
into place. One of the two sees the other: the take waits, which is a matter of milliseconds, or the
snapshot stays, since it is being replaced anyway.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torchstore_snapshot.errors import (
    SnapshotCorruptError,
    SnapshotFormatError,
    SnapshotNotFoundError,
    SnapshotUnavailableError,
)
from torchstore_snapshot.format.manifest import Manifest
from torchstore_snapshot.format.paths import MANIFEST, claim_file, new_take_id, take_of
from torchstore_snapshot.format.weight_maps import weight_maps, written_by_a_take
from torchstore_snapshot.series.claims import GRACE_S, Claim, claims_in, decode
from torchstore_snapshot.series.survey import folder_name, references
from torchstore_snapshot.storage.base import FileInfo, Storage
from torchstore_snapshot.storage.opening import read_manifest

__all__ = ["Rest", "await_retirement", "await_turn", "delete_map", "mend_maps", "rest_of", "retire"]
__all__ += ["stale_maps", "sweep_map"]

# Whoever has not removed a manifest by then does not do it any more, but others still wait.
_RETIRES_S = 30.0
_WAITS_S = 60.0
_PAUSE_S = 0.01
_NO_TAKE = "none"


class Rest(NamedTuple):
    """What is left of a snapshot that is replaced or made invisible.

    Args:
        files: the files, as (folder, name), that it consists of; and those that its takes let go,
            and died before they had removed them.
        claims: the names of the claims of those takes.
    """

    files: Sequence[tuple[str, str]]
    claims: Sequence[str]

    def forget_claims(self, folder: Storage) -> None:
        """Remove the claims. So a dead take that still has one has written nothing that any
        snapshot ever had.
        """
        for name in self.claims:
            folder.delete(name)


def rest_of(folder: Storage, manifest: Manifest) -> Rest:
    """Return what will be left of the snapshot in a folder."""
    takes = {take_of(file.name) for file in manifest.files if not file.snapshot} | {manifest.take}
    names = {claim_file(take) for take in takes if take is not None}
    claims = [info.name for info in folder.list() if info.name in names]
    files = references(folder_name(folder), manifest)
    for name in claims:
        with contextlib.suppress(FileNotFoundError):
            record = decode(folder.read(name))
            files.update(record.lets_go if record is not None else ())
    return Rest(sorted(files), claims)


def retire(folder: Storage, manifest: Manifest, grace: float = GRACE_S) -> bool:
    """Make a snapshot invisible. Its files remain for now, and a claim that lets them go.

    Args:
        manifest: of the snapshot; another one in its place is left alone.
        grace: seconds without a sign of life after which a take on another host counts as dead.

    Returns:
        Whether there is no snapshot any more: False if it was replaced, or is about to be.
    """
    deadline = time.monotonic() + _RETIRES_S
    rest = rest_of(folder, manifest)
    with (
        contextlib.suppress(FileNotFoundError),  # somebody else has just removed the folder
        _announced(folder, manifest.take, grace, rest.files) as claim,
    ):
        if claim is None:
            return False
        try:
            if read_manifest(folder).take != manifest.take:
                return False
        except SnapshotNotFoundError:
            return True
        if time.monotonic() > deadline:
            return False
        rest.forget_claims(folder)
        for name in weight_maps(manifest):
            delete_map(folder, name)
        folder.delete(MANIFEST)
        claim.leave_rest(manifest.take)
    return True


def sweep_map(folder: Storage, name: str, grace: float = GRACE_S) -> None:
    """Remove a weight map, unless the snapshot in that folder has it, or a take is running there.

    Args:
        grace: as for :func:`retire`.
    """
    with (
        contextlib.suppress(FileNotFoundError),  # somebody else has just removed the folder
        _announced(folder, _NO_TAKE, grace) as claim,
    ):
        if claim is None:
            return
        try:
            kept = weight_maps(read_manifest(folder))
        except SnapshotNotFoundError:
            kept = {}
        except (SnapshotFormatError, SnapshotCorruptError):
            return
        if name not in kept:
            delete_map(folder, name)


def stale_maps(folder: Storage, manifest: Manifest, files: Iterable[FileInfo]) -> dict[str, bytes]:
    """Return the weight maps of a snapshot that are missing or those of an earlier one, by the
    names of their files, as they should be: a take died after it was committed, before it wrote
    them. Files of other programs are none of them.

    Args:
        files: what is in the folder.
    """
    known = {info.name: info for info in files}
    committed = known.get(MANIFEST)
    found: dict[str, bytes] = {}
    for name, data in weight_maps(manifest).items():
        info = known.get(name)
        if info is None:
            found[name] = data
        elif committed is None or info.modified <= committed.modified:  # it is written later
            try:
                there = folder.read(name)
            except FileNotFoundError:
                there = None
            if there is None or (there != data and written_by_a_take(there)):
                found[name] = data
    return found


def mend_maps(folder: Storage, grace: float = GRACE_S) -> list[str]:
    """Write the :func:`stale_maps` of a snapshot anew, unless a take is running in its folder, or
    somebody is about to remove the snapshot.

    Args:
        grace: as for :func:`retire`.

    Returns:
        The names of their files.
    """
    mended: list[str] = []
    with (
        contextlib.suppress(FileNotFoundError, SnapshotNotFoundError),  # it was removed just now
        _announced(folder, _NO_TAKE, grace, alone=True) as claim,
    ):
        if claim is None:
            return []
        try:
            manifest = read_manifest(folder)
        except (SnapshotFormatError, SnapshotCorruptError):
            return []
        for name, data in stale_maps(folder, manifest, folder.list()).items():
            with contextlib.suppress(IsADirectoryError):  # of somebody else, in its place
                folder.publish(name, data, take=manifest.take, overwrite=True, durable=True)
                mended.append(name)
        try:
            read_manifest(folder)
        except SnapshotNotFoundError:
            for name in mended:
                delete_map(folder, name)
            raise
    return mended


@contextlib.contextmanager
def _announced(
    folder: Storage,
    take: str,
    grace: float,
    lets_go: Sequence[tuple[str, str]] = (),
    *,
    alone: bool = False,
) -> Iterator[Claim | None]:
    """Announce that something of a take is about to be removed, or written; yields the claim that
    says so, or None if that may not be.

    Args:
        lets_go: as for :class:`Claim`.
        alone: it may not be while others have announced the same.
    """
    claim = Claim(folder, new_take_id(), retires=take, lets_go=lets_go)
    try:
        others = [record for record, lives in claims_in(folder, grace) if lives]
        taken = any(not record.retires for record in others) or (alone and len(others) > 1)
        yield None if taken else claim
    finally:
        with folder.emptying():  # who has removed all that was there could not, beside this claim
            claim.release()


def await_retirement(folder: Storage) -> None:
    """Wait until nobody is about to remove the manifest in a folder. Called by a take, whose claim
    is in that folder, just before it puts its own into place.

    Raises:
        SnapshotUnavailableError: somebody has been about to for a minute.
    """
    deadline = time.monotonic() + _WAITS_S
    while any(lives and (r.retires or not r.host) for r, lives in claims_in(folder)):
        if time.monotonic() > deadline:
            raise SnapshotUnavailableError(
                f"the snapshot at {folder.url!r}, which was to be replaced, has been about to be "
                f"removed for {_WAITS_S:.0f} s by a program that does not go on; take it again",
                details={"path": folder.url},
            )
        time.sleep(_PAUSE_S)


def await_turn(folder: Storage, claim: Claim) -> None:
    """Wait until no other take is about to replace the snapshot in a folder, so that each one knows
    which one it replaces. Called by a take that may replace one; its turn ends with its claim.

    Each says that it is about to, and then looks for others. If two see each other, the one that
    began later takes back what it has said. Whoever has waited for a minute, for a take that does
    not go on, goes on: if that one does, too, files may be left that gc collects.

    Raises:
        TakeLostError: the take was given up by a garbage collection.
    """
    deadline = time.monotonic() + _WAITS_S
    claim.commits(True)
    while (others := _committing(folder, claim.take)) and time.monotonic() < deadline:
        if min(others) < claim.take:
            claim.commits(False)
            while time.monotonic() < deadline and _committing(folder, claim.take):
                time.sleep(_PAUSE_S)
            claim.commits(True)
        else:
            time.sleep(_PAUSE_S)


def _committing(folder: Storage, take: str) -> list[str]:
    """The other takes that are about to replace the snapshot in a folder."""
    return [r.take for r, lives in claims_in(folder) if lives and r.commits and r.take != take]


def delete_map(folder: Storage, name: str) -> bool:
    """Remove the weight map of a snapshot; return False if there is none, or a file of somebody
    else instead.
    """
    with contextlib.suppress(FileNotFoundError):
        if written_by_a_take(folder.read(name)):
            folder.delete(name)
            return True
    return False
