"""A take, from the application state to the committed manifest."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import msgspec

from torchstore_snapshot.api.stateful import AppState
from torchstore_snapshot.committing.merging import Part
from torchstore_snapshot.committing.options import TakeOptions
from torchstore_snapshot.committing.publishing import commit, give_up, publish
from torchstore_snapshot.committing.replacing import (
    never_visible,
    refuse_existing,
    refuse_foreign_maps,
)
from torchstore_snapshot.errors import RankFailedError
from torchstore_snapshot.format.manifest import StoredKey
from torchstore_snapshot.format.paths import new_take_id
from torchstore_snapshot.progress import metered
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.series.claims import Claim
from torchstore_snapshot.stopping import check
from torchstore_snapshot.storage.opening import open_storage
from torchstore_snapshot.taking.collecting import collect_values
from torchstore_snapshot.taking.parts import maps_of, part_of
from torchstore_snapshot.taking.planning import holdings, split_work
from torchstore_snapshot.taking.preparing import Prepared, agree, plan, prepare
from torchstore_snapshot.taking.sharing import plan_store_files
from torchstore_snapshot.taking.writing import Fetch, write_files

__all__ = [
    "Prepared",
    "TakeOptions",
    "commit",
    "discard",
    "prepare",
    "publish",
    "refuse_existing",
    "take",
    "take_values",
    "write",
]


class _Done(msgspec.Struct, array_like=True):
    """That a rank has got so far."""


def write(prepared: Prepared, fetch: Fetch | None = None) -> Part:
    """Write what this rank has to write. If that fails, nothing of it is left. ``fetch`` as for
    :func:`.writing.write_files`.
    """
    options = prepared.options
    total = sum(file.layout.nbytes - len(file.layout.header) for file in prepared.files)
    with metered(options.progress, "taking", total) as advance:
        digests = write_files(
            prepared.storage,
            prepared.items,
            prepared.files,
            durable=options.fsync,
            threads=options.threads,
            advance=advance,
            fetch=fetch,
            budget=options.memory_budget,
        )
    return part_of(
        prepared.ranks.rank,
        prepared.keys,
        prepared.items,
        prepared.files,
        digests,
        prepared.reused,
    )


def discard(prepared: Prepared) -> None:
    """Remove what this rank has written for a take that failed."""
    storage = prepared.storage
    try:
        with storage.emptying() if prepared.made else contextlib.nullcontext():
            for file in prepared.files:
                storage.delete(file.name)
        if prepared.made > 1:  # the rank that is the last one removes it
            storage.remove_if_empty(prepared.made)
    except OSError:
        pass  # what remains is invisible, and gc collects it
    if prepared.claim is not None:
        prepared.claim.release()


def take(
    path: str | os.PathLike[str],
    app_state: AppState,
    ranks: Ranks,
    replicated: list[str] | None,
    options: TakeOptions,
) -> str:
    """Take a snapshot. Called by all ranks; it is committed when this returns, on every rank.

    An interrupt, or a call that is stopped, is told to the other ranks like an error: they give the
    take up, too.

    Returns:
        Where the snapshot is: what rank 0 gave as ``path``.
    """
    prepared: Prepared | None = None
    part: Part | None = None
    error: BaseException | None = None
    agreed = agree(path, app_state, ranks, replicated, options)
    claim = agreed.claim
    try:
        prepared = plan(agreed)
        part = write(prepared)
        check()
    except BaseException as caught:  # noqa: BLE001 - the other ranks must hear of it; raised below
        error = caught
    try:
        parts = ranks.exchange(part, Part, error)
    except BaseException as failure:
        told = isinstance(failure, RankFailedError) and failure.details  # as rank 0 was
        if claim is not None and error is None and not told:
            claim.abandon()  # a rank has died: gc collects at once what it had written
        if prepared is not None and (ranks.rank == 0 or error is not None or told):
            discard(prepared)  # no rank commits
        if claim is not None:  # rank 0 may have all parts; if not, gc collects this one
            claim.release()
        raise
    storage = open_storage(agreed.first.url)
    if ranks.rank == 0:
        try:
            check()
        except BaseException as caught:  # noqa: BLE001 - as above
            error = caught
            if prepared is not None:
                discard(prepared)
    if ranks.rank == 0 and error is None:
        try:
            commit(storage, agreed.first.take, parts, options, claim=claim)
        except BaseException as caught:  # noqa: BLE001 - as above
            error = caught
    # After an error from here on, the snapshot may have become visible all the same (the last flush
    # may be what failed). Unless it certainly has not, its files are left to a garbage collection.
    try:
        ranks.exchange(_Done(), _Done, error)
    except BaseException as raised:
        take_id = agreed.first.take
        known = never_visible(storage, take_id, options, raised)  # to the other ranks, too
        never = known or never_visible(storage, take_id, options, raised, claim)
        if claim is not None and not known and ranks.size > 1:
            claim.abandon()
        if prepared is not None and never:
            discard(prepared)
        elif claim is not None and ranks.size == 1:
            give_up(storage, claim)
        raise
    finally:
        if claim is not None:
            claim.release()
    return agreed.first.url


def take_values(
    path: str,
    states: dict[str, Any],
    store: dict[str, StoredKey],
    options: TakeOptions,
    fetch: Fetch,
) -> str:
    """Take a snapshot of state dicts, by key: the contents of a store. No other rank takes part.

    Args:
        fetch: called for shards that are on the meta device, batch by batch.

    Returns:
        Where the snapshot is.
    """
    options.check()
    storage = open_storage(path)
    refuse_existing(storage, overwrite=options.overwrite)
    items = collect_values(states, allow_pickle=options.allow_pickle, absent=True)
    alone = Ranks.alone()
    units = split_work(items, 0, [holdings(items)])
    name = new_take_id()
    state_dicts = {key for key, known in store.items() if known.kind == "state dict"}
    files, sharing = plan_store_files(items, units, name, state_dicts, options.file_max)
    store = {
        key: msgspec.structs.replace(known, shared=key in sharing) for key, known in store.items()
    }
    refuse_foreign_maps(storage, maps_of(item for item in items if item.key not in sharing))
    prepared = Prepared(name, storage.url, alone, sorted(states), items, files, options)
    claim = Claim.begin(storage, name, durable=options.fsync)
    try:
        part = write(prepared, fetch)
        try:
            commit(storage, name, [part], options, store, claim)
        except BaseException as raised:
            if never_visible(storage, name, options, raised, claim):
                discard(prepared)
            else:
                give_up(storage, claim)
            raise
    finally:
        claim.release()
    return storage.url
