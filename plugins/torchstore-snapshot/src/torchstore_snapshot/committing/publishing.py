"""The moment at which a snapshot becomes visible, and what has to be done before and after it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import msgspec

from torchstore_core.errors import TorchStoreError
from torchstore_snapshot.committing.merging import Part, merge
from torchstore_snapshot.committing.options import TakeOptions
from torchstore_snapshot.committing.replacing import refuse_foreign_maps, replaced
from torchstore_snapshot.errors import (
    SnapshotExistsError,
    SnapshotUnavailableError,
    SnapshotUndecidedError,
)
from torchstore_snapshot.format import manifest as manifests
from torchstore_snapshot.format.manifest import Manifest, StoredKey
from torchstore_snapshot.format.paths import MANIFEST, claim_file, take_of
from torchstore_snapshot.format.weight_maps import MAP, weight_maps
from torchstore_snapshot.series.claims import Claim
from torchstore_snapshot.series.counting import next_sequence
from torchstore_snapshot.series.gc import collect, remove_replaced
from torchstore_snapshot.series.retiring import (
    await_retirement,
    await_turn,
    delete_map,
    rest_of,
)
from torchstore_snapshot.storage.base import Storage
from torchstore_snapshot.storage.opening import is_remote, read_manifest

__all__ = ["commit", "give_up", "publish"]


def commit(
    storage: Storage,
    take: str,
    parts: list[Part],
    options: TakeOptions,
    store: dict[str, StoredKey] | None = None,
    claim: Claim | None = None,
) -> Manifest:
    """Make a snapshot of what all ranks have written; see :func:`publish`.

    Raises:
        LayoutMismatchError: no rank has some part of a sharded tensor.
        SnapshotError, OSError: what publishing raises. There is no snapshot then, or still the one
            before.
    """
    manifest = merge(parts, take, time.time())
    if store:
        manifest = msgspec.structs.replace(manifest, store=store)
    publish(storage, manifest, options, claim)
    return manifest


def publish(
    storage: Storage, manifest: Manifest, options: TakeOptions, claim: Claim | None = None
) -> None:
    """Make a snapshot of files that are written already: put its manifest into place. With
    ``overwrite``, the files of the snapshot before it are then removed, except those that other
    snapshots refer to.

    Args:
        manifest: its ``sequence`` is decided here.
        claim: the claim of the take, which is released. If something cannot be removed now, it
            stays and says what.

    Raises:
        TakeLostError: the take was given up by a garbage collection.
        SnapshotExistsError: another take was faster.
        ForeignFileError, SnapshotVersionError: somebody has put something in its place since the
            take began.
        SnapshotUndecidedError: an object store went away, and does not say whether there is a
            snapshot. The claim stays.
        OSError: the storage failed. There is no snapshot then, or still the one before; unless the
            last flush is what failed.
    """
    take = manifest.take
    maps = weight_maps(manifest)
    refuse_foreign_maps(storage, [*maps])
    if options.fsync:
        _flush_reused(storage, manifest)
    if claim is not None and options.overwrite:
        await_turn(storage, claim)
    before = replaced(storage) if options.overwrite else None
    rest = None if before is None else rest_of(storage, before)
    if claim is not None:
        if rest is not None:
            claim.let_go(rest.files)
        claim.check()
    await_retirement(storage)
    if rest is not None:
        rest.forget_claims(storage)
    sequence = next_sequence(storage, claim.after if claim is not None else 0)
    manifest = msgspec.structs.replace(manifest, sequence=sequence)
    with _without_maps(storage, before, options):
        if claim is not None:
            claim.may_be_visible = True
        try:
            storage.publish(
                MANIFEST,
                manifests.encode(manifest),
                take=take,
                overwrite=options.overwrite and storage.replaces,
                durable=options.fsync,
            )
        except FileExistsError as error:
            raise SnapshotExistsError(
                f"another take has made a snapshot at {storage.url!r} in the meantime",
                details={"path": storage.url},
            ) from error
        except KeyboardInterrupt:
            if claim is not None and is_remote(storage.url):
                claim.outlive()  # the request may have been sent
            raise
        except SnapshotUnavailableError as error:
            if claim is not None:
                claim.outlive()
            raise SnapshotUndecidedError(
                f"{storage.url!r} went away when the snapshot was to become visible there, so that "
                f"nobody knows whether it is; when it can be reached again, see if there is the "
                f"take {take}, and otherwise take the snapshot again ({error.message})",
                details={**error.details, "take": take},
            ) from error
    try:
        for name, data in maps.items():
            storage.publish(name, data, take=take, overwrite=True, durable=options.fsync)
    finally:
        if claim is not None:
            claim.release() if before is None else claim.leave_rest(before.take)
    if before is not None and rest is not None and remove_replaced(storage, before, rest.files):
        with contextlib.suppress(TorchStoreError, OSError):
            storage.delete(claim_file(take))


def give_up(storage: Storage, claim: Claim) -> None:
    """End a take of one rank that failed to commit, though its snapshot may have become visible, or
    others may have replaced it: what no snapshot needs is collected. Never raises.
    """
    claim.abandon()
    with contextlib.suppress(TorchStoreError, OSError):
        collect(storage)
        storage.remove_if_empty(claim.made)


@contextlib.contextmanager
def _without_maps(
    storage: Storage, before: Manifest | None, options: TakeOptions
) -> Iterator[None]:
    """Remove the maps of the snapshot that is replaced, before it is: nobody who goes by a map may
    ever get the weights of another snapshot than the one that is there. If that stays, they are put
    back. A take that is killed meanwhile leaves none, and gc writes those that belong there.
    """
    removed: list[str] = []
    if options.overwrite and storage.replaces:
        names = [info.name for info in storage.list() if info.name.endswith(MAP)]
        removed = [name for name in names if delete_map(storage, name)]
    try:
        yield
    except BaseException:
        with contextlib.suppress(TorchStoreError, OSError):
            if removed and before is not None and read_manifest(storage).take == before.take:
                for name, data in weight_maps(before).items():
                    if name in removed:
                        storage.publish(
                            name, data, take=before.take, overwrite=True, durable=options.fsync
                        )
        raise


def _flush_reused(storage: Storage, manifest: Manifest) -> None:
    """Flush the files of earlier takes that a snapshot refers to: those may not have done so."""
    folders: dict[str, list[str]] = {}
    for file in manifest.files:
        if file.snapshot:
            folders.setdefault(file.snapshot, []).append(file.name)
        elif take_of(file.name) != manifest.take:
            folders.setdefault("", []).append(file.name)
    for folder, names in folders.items():
        (storage.sibling(folder) if folder else storage).flush(names)
