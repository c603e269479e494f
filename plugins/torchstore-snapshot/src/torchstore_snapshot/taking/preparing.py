"""The beginning of a take: the ranks inspect what they have and agree on who writes what."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from torchstore_core.errors import ConfigurationError, TorchStoreError
from torchstore_snapshot.api.stateful import AppState
from torchstore_snapshot.committing.options import NEWEST, TakeOptions
from torchstore_snapshot.committing.replacing import refuse_existing, refuse_foreign_maps
from torchstore_snapshot.format.manifest import Manifest
from torchstore_snapshot.format.paths import new_take_id
from torchstore_snapshot.garbage import no_collections
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.series.claims import Claim
from torchstore_snapshot.series.survey import Place, folder_name, newest, references
from torchstore_snapshot.storage.base import Storage
from torchstore_snapshot.storage.local import LocalStorage
from torchstore_snapshot.storage.opening import open_storage, read_manifest
from torchstore_snapshot.taking.collecting import Item, collect, refuse_ambiguous, with_slashes
from torchstore_snapshot.taking.parts import maps_of
from torchstore_snapshot.taking.planning import (
    Holding,
    PlannedFile,
    Unit,
    holdings,
    plan_files,
    split_work,
)
from torchstore_snapshot.taking.reusing import Reused, find_unchanged

__all__ = ["Agreed", "Prepared", "agree", "plan", "prepare"]


class Prepared(NamedTuple):
    """A take whose ranks have agreed on who writes what.

    Args:
        take: the id of the take.
        url: where the snapshot is taken.
        keys, items: what this rank has.
        files: what this rank writes.
        reused: what it refers to instead.
        claim: on rank 0, what says that the take is running.
        made: how many folders the take has made.
    """

    take: str
    url: str
    ranks: Ranks
    keys: list[str]
    items: list[Item]
    files: list[PlannedFile]
    options: TakeOptions
    reused: list[Reused] = []  # noqa: RUF012 - of a NamedTuple, and never changed
    claim: Claim | None = None
    made: int = 0

    @property
    def storage(self) -> Storage:
        return open_storage(self.url)


class _Proposal(msgspec.Struct, array_like=True):
    """What a rank tells the others: where rank 0 takes the snapshot, what it could write, the URL
    and the take of the base, the keys and names of entries with slashes in them, and how many
    folders rank 0 has made.
    """

    url: str
    take: str
    held: list[Holding]
    alone: int
    base: tuple[str, str] | None = None
    named: list[tuple[str, str]] = []
    made: int = 0


class Agreed(NamedTuple):
    """What the ranks have told each other at the beginning of a take.

    Args:
        first: what rank 0 proposed.
        keys, items: what this rank has.
        everyone: what each rank could write, by rank; see :func:`holdings`.
        base: the snapshot whose files may be referred to, on rank 0.
        claim: on rank 0, what says that the take is running.
        named: the keys and names of all ranks' entries that may have one path.
    """

    first: _Proposal
    ranks: Ranks
    keys: list[str]
    items: list[Item]
    everyone: list[tuple[list[Holding], int]]
    options: TakeOptions
    base: tuple[Storage, Manifest] | None
    claim: Claim | None
    named: list[tuple[str, str]]


def agree(
    path: str | os.PathLike[str],
    app_state: AppState,
    ranks: Ranks,
    replicated: list[str] | None,
    options: TakeOptions,
    check: Callable[[Storage], None] | None = None,
) -> Agreed:
    """Inspect the application state, and hear what the other ranks have.

    Args:
        check: what else may be wrong with the arguments; raises if it is.

    Raises:
        SnapshotExistsError: there is a snapshot, and ``options.overwrite`` is False.
        SnapshotVersionError, ForeignFileError, NotAtomicError: what is there cannot be replaced.
        RankFailedError: another rank failed.
    """
    proposal: _Proposal | None = None
    error: BaseException | None = None
    claim: Claim | None = None
    base: tuple[Storage, Manifest] | None = None
    keys: list[str] = []
    items: list[Item] = []
    try:
        options.check()
        storage = open_storage(path)
        if check is not None:
            check(storage)
        if ranks.rank == 0:
            refuse_existing(storage, overwrite=options.overwrite)
        keys, items = collect(
            app_state, () if replicated is None else replicated, allow_pickle=options.allow_pickle
        )
        if ranks.rank == 0:
            refuse_foreign_maps(storage, maps_of(items))
        held, alone = holdings(items) if ranks.size > 1 else ([], 0)
        proposal = _Proposal(storage.url, new_take_id(), held, alone, named=with_slashes(items))
        if ranks.rank == 0:
            reading = options.base is not None
            claim = Claim.begin(storage, proposal.take, durable=options.fsync, reading=reading)
            proposal.made = claim.made
            base = _read_base(storage, claim, options)
            if base is not None:
                proposal.base = base[0].url, base[1].take
    except BaseException as caught:  # noqa: BLE001 - the other ranks must hear of it; raised below
        error = caught
    try:
        proposals = ranks.exchange(proposal, _Proposal, error)
        everyone = [(p.held, p.alone) for p in proposals]
        if ranks.size == 1:
            everyone = [holdings(items)]
        named = [each for p in proposals for each in p.named]
        return Agreed(proposals[0], ranks, keys, items, everyone, options, base, claim, named)
    except BaseException:
        if claim is not None:
            claim.release()
        raise


@no_collections()
def plan(agreed: Agreed) -> Prepared:
    """Decide what this rank writes. If that fails, the other ranks do not know of it yet.

    Raises:
        LayoutMismatchError: the ranks contradict each other. All of them raise this.
        UnsupportedValueError: so do two names. All of them raise this, too.
    """
    refuse_ambiguous(agreed.named)
    first, ranks, items, options = agreed.first, agreed.ranks, agreed.items, agreed.options
    units = split_work(items, ranks.rank, agreed.everyone)
    units, reused = _reuse(items, units, first, agreed.base, options.memory_budget)
    files = plan_files(items, units, first.take, ranks.rank, options.file_max)
    return Prepared(
        first.take,
        first.url,
        ranks,
        agreed.keys,
        items,
        files,
        options,
        reused,
        agreed.claim,
        first.made,
    )


def prepare(
    path: str,
    app_state: AppState,
    ranks: Ranks,
    replicated: list[str] | None,
    options: TakeOptions,
) -> Prepared:
    """Do both: :func:`agree` and :func:`plan`."""
    agreed = agree(path, app_state, ranks, replicated, options)
    try:
        return plan(agreed)
    except BaseException:
        if agreed.claim is not None:
            agreed.claim.release()
        raise


def _read_base(
    storage: Storage, claim: Claim, options: TakeOptions
) -> tuple[Storage, Manifest] | None:
    """Read the manifest of the base, after the claim says so."""
    if options.base is None:
        return None
    found = _newest(storage) if options.base is NEWEST else _at(storage, options.base)
    if found is None:
        claim.refer([], 0)
        return None
    base, manifest = found
    claim.refer(sorted(references(folder_name(base), manifest)), manifest.sequence)
    return base, manifest


def _newest(storage: Storage) -> tuple[Storage, Manifest] | None:
    """What is read under the claim can be referred to, even if it is dropped by now."""
    found = newest(Place.around(storage))
    return None if found is None else (storage.sibling(found[0]), found[1])


def _at(storage: Storage, path: str | os.PathLike[str]) -> tuple[Storage, Manifest]:
    base = _beside(storage, open_storage(path))
    if storage.sibling(folder_name(base)).url != base.url:
        raise ConfigurationError(
            f"the base {path!r} is not beside {storage.url!r}; a snapshot refers to "
            "snapshots in the same folder, so that they can be moved together"
        )
    return base, read_manifest(base)


def _beside(storage: Storage, base: Storage) -> Storage:
    """Return a base that was given by another path, such as one with a symbolic link, by that of
    the folder that contains both.
    """
    if isinstance(storage, LocalStorage) and isinstance(base, LocalStorage):
        folder, name = os.path.split(os.path.realpath(base.url))
        if folder == os.path.realpath(os.path.dirname(storage.url)):
            return storage.sibling(name)
    return base


def _reuse(
    items: list[Item],
    units: list[Unit],
    first: _Proposal,
    base: tuple[Storage, Manifest] | None,
    budget: int | None,
) -> tuple[list[Unit], list[Reused]]:
    """Find what the base has. A rank that cannot read the base, or finds another snapshot there
    than rank 0 did, writes everything.
    """
    if first.base is None:
        return units, []
    url, take = first.base
    try:
        found = open_storage(url) if base is None else base[0]
        manifest = read_manifest(found) if base is None else base[1]
    except (TorchStoreError, OSError):
        return units, []
    if manifest.take != take:
        return units, []
    own_name = folder_name(open_storage(first.url))
    return find_unchanged(items, units, manifest, found, own_name, budget)
