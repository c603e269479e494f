"""Snapshots of what is in a store, without a trainer: every key, with its version."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import torchstore_core as ts
from torchstore_core.clients.calls import thread_loops
from torchstore_core.clients.calls.arguments import check_bools
from torchstore_core.clients.packed.packed import TorchStoreStateDict
from torchstore_core.clients.stores.environment import DEFAULT_NAME
from torchstore_core.clients.values import nesting
from torchstore_core.errors import ConfigurationError
from torchstore_core.values import ObjectRef, StateDictMeta
from torchstore_snapshot.api.entries import state_dict_in, with_shards
from torchstore_snapshot.api.shards import (
    STATE_DICT,
    Reading,
    described,
    fetching,
    put_shards,
    shards_of,
)
from torchstore_snapshot.api.snapshot import Snapshot
from torchstore_snapshot.committing.options import TakeOptions
from torchstore_snapshot.errors import SnapshotNotFoundError
from torchstore_snapshot.format.manifest import Manifest, StoredKey
from torchstore_snapshot.stopping import in_thread
from torchstore_snapshot.storage.opening import open_storage, path_text, read_manifest
from torchstore_snapshot.storage.settings import using
from torchstore_snapshot.taking.take import take_values

__all__ = ["load_into_store", "snapshot_store"]

_VALUE = "value"
# How often to look for a moment of which everything can be read, and how many seconds to wait for
# keys of which one may have been deleted since they were listed.
_ROUNDS = 20
_LATE = 1.0
# Keys that are read at a time.
_AT_ONCE = 256


async def snapshot_store(
    path: str | os.PathLike[str],
    *,
    prefix: str = "",
    store_name: str = DEFAULT_NAME,
    overwrite: bool = False,
    fsync: bool = True,
    allow_pickle: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Snapshot:
    """Take a snapshot of what is in a store.

    All keys have the versions that they had at one moment, so that what was put together is there
    together, unless something is always put again before it can be read: then each key has the
    newest version that it had during the call. A state dict of which the store keeps several
    versions has all of them. Tensors are written straight from the store's memory, and stay leased
    until they are. A tensor that is stored as shards is written shard by shard, each of them once,
    however many copies the store has; from another host, 64 MiB of shards are fetched at a time.
    The same holds for sharded entries of state dicts.

    Args:
        path: where to.
        prefix: only keys that start with it.
        store_name: which store.
        overwrite, fsync, allow_pickle, storage_options: as for ``Snapshot.take``.

    Returns:
        The snapshot. A key's state dict has its entries; any other value is its entry ``"value"``.
        Older versions have names of their own, such as ``"policy@3"``; ``manifest.store`` says
        which is which.

    Raises:
        StoreClosedError: there is no such store.
        SnapshotExistsError, UnsafeObjectError, OSError: as for ``Snapshot.take``.
    """
    check_bools(overwrite=overwrite, fsync=fsync, allow_pickle=allow_pickle)
    path_text(path)
    _check_prefix(prefix)
    client = await ts.client(store_name)
    held: list[ts.HeldRef] = []  # what is not read yet
    taken = await _of_one_moment(client, prefix, held)
    if taken is None:
        taken = await _one_by_one(client, prefix, held)
    states = {key: each.value for key, each in taken.items()}
    stored = {key: StoredKey(each.kind, each.version, each.packed) for key, each in taken.items()}
    entries = {name for each in taken.values() for name in each.entries}
    for key, each in taken.items():
        for old in each.older:
            name = f"{key}@{old.version}"
            while name in states or name in entries:
                name += "@"
            stored[name] = StoredKey(old.kind, old.version, old.packed, key)
            states[name] = old.value
    options = TakeOptions(overwrite=overwrite, fsync=fsync, allow_pickle=allow_pickle)
    fetch = fetching(client, stored)

    def take() -> str:
        with using(storage_options):
            return take_values(path_text(path), states, stored, options, fetch)

    url = await in_thread(take)
    held.clear()
    return Snapshot(url, allow_pickle=allow_pickle, storage_options=storage_options)


def _check_prefix(prefix: object) -> None:
    if not isinstance(prefix, str):
        raise ConfigurationError(f"prefix is a str, not {prefix!r}")


class _Taken(NamedTuple):
    """A version of a key.

    Args:
        value: the state dict, or a dict with the value. Of shards, only their places; their version
            is held until they are read.
        entries: the names under which the store has the entries of the state dict.
        older: the versions of the state dict before it that the store keeps, without any of their
            own.
    """

    kind: str
    version: int
    packed: bool
    value: dict[str, Any]
    entries: Set[str] = frozenset()
    older: Sequence[_Taken] = ()


async def _of_one_moment(
    client: ts.Client, prefix: str, held: list[ts.HeldRef]
) -> dict[str, _Taken] | None:
    """Read every key as it was at one moment: what has been replaced before it is read is read
    again, and what was not is not. None if something always was, or if there are too many keys for
    one request.
    """
    read: dict[str, tuple[ObjectRef, _Taken]] = {}
    tried: set[str] = set()
    keys = await client.keys(prefix)
    for _ in range(_ROUNDS):
        before = keys
        refs, keys = await asyncio.gather(_newest(client, keys), client.keys(prefix))
        if refs is None:
            return None
        if keys != before or len(refs) < len(keys):
            continue
        try:
            # First what may be gone soonest, many at a time: it has been replaced before.
            rest = [refs[key] for key in tried & refs.keys()]
            rest = [ref for ref in rest if ref.key not in read or read[ref.key][0] != ref]
            while rest:
                some, rest = rest[:_AT_ONCE], rest[_AT_ONCE:]
                values = await asyncio.gather(*[_read(client, ref, held) for ref in some])
                read |= {ref.key: (ref, value) for ref, value in zip(some, values, strict=True)}
            taken: dict[str, _Taken] = {}
            entries: set[str] = set()
            for key in keys:
                if key in entries:
                    continue
                if key not in tried:
                    tried.add(key)
                    read[key] = refs[key], await _read(client, refs[key], held)
                taken[key] = read[key][1]
                entries |= taken[key].entries
        except (ts.KeyNotFoundError, ts.VersionGoneError):
            continue
        return taken
    return None


async def _newest(client: ts.Client, keys: list[str]) -> Mapping[str, ObjectRef] | None:
    """The newest versions of keys at one moment; none if one of them was deleted, and None if they
    are too many for one request.
    """
    try:
        return await client.wait(keys, timeout=_LATE)
    except ts.StoreTimeoutError:
        return {}
    except ts.ProtocolError:
        return None


async def _one_by_one(client: ts.Client, prefix: str, held: list[ts.HeldRef]) -> dict[str, _Taken]:
    """Read every key, each as it is when its turn comes."""
    taken: dict[str, _Taken] = {}
    entries: set[str] = set()
    for key in await client.keys(prefix):
        if key in entries:
            continue
        try:
            held.append(await client.hold(key))
        except ts.KeyNotFoundError:  # it was deleted
            continue
        taken[key] = await _read(client, held[-1].ref, held)
        entries |= taken[key].entries
    return taken


async def _read(client: ts.Client, ref: ObjectRef, held: list[ts.HeldRef]) -> _Taken:
    key = ref.key
    found = await client.stat(key, version=ref.version)
    if found.kind != STATE_DICT:
        if not found.shards:
            return _Taken(found.kind, found.version, False, {_VALUE: await client.get(ref)})
        held.append(await client.hold(ref))
        return _Taken(found.kind, found.version, False, {_VALUE: described(found)})
    value = await state_dict_in(client, key, found.version, held)
    older: list[_Taken] = []
    for version in found.versions:
        if version >= found.version:
            continue
        try:
            then = await client.stat(key, version=version)
            state = await state_dict_in(client, key, version, held)
        except (ts.KeyNotFoundError, ts.VersionGoneError):
            continue  # newer versions have taken its place
        older.append(_Taken(then.kind, version, _packed(then), state))
    entries = {f"{key}/{leaf.name}" for leaf in nesting.flatten(key, value)}
    return _Taken(found.kind, found.version, _packed(found), value, entries, older)


def _packed(found: ts.Found) -> bool:
    return isinstance(found.meta, StateDictMeta) and found.meta.packed


async def load_into_store(
    path: str | os.PathLike[str],
    *,
    prefix: str = "",
    store_name: str = DEFAULT_NAME,
    keep_versions: bool = True,
    allow_pickle: bool = False,
    verify: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, ObjectRef]:
    """Put what is in a snapshot into a store, one key after the other, with all versions that it
    has of them; the store then keeps as many. What was stored as shards becomes the same shards,
    which are read and put 64 MiB at a time.

    Args:
        path: the snapshot: of a store, or one that was taken of objects (their state dicts are then
            put under their keys, sharded tensors whole, with the values of rank 0).
        prefix: only keys that start with it.
        store_name: which store.
        keep_versions: give each key the version that it had, if the snapshot is one of a store; a
            key with this version or a newer one in the store is an error then. Otherwise, each put
            makes the next version.
        allow_pickle: also load values that were pickled. How values are put is up to the store:
            what a snapshot has without pickle, such as tensors in a list, may need it there.
        verify: compare hashes.
        storage_options: as for ``Snapshot``.

    Returns:
        What was put last, by key.

    Raises:
        SnapshotNotFoundError, SnapshotCorruptError, SnapshotFormatError, UnsafeObjectError: the
            snapshot cannot be read. Keys before the damaged one have been put; of one that is in
            shards, those before the damaged one are an unfinished version.
        StoreFullError, VersionGoneError, StoreClosedError, UnsafeObjectError: a value cannot be
            put.
    """
    check_bools(keep_versions=keep_versions, allow_pickle=allow_pickle, verify=verify)
    _check_prefix(prefix)
    with using(storage_options):
        storage = open_storage(path)
    client = await ts.client(store_name)
    manifest = await thread_loops.in_thread(partial(read_manifest, storage))
    snapshot = Snapshot(path, allow_pickle=allow_pickle, storage_options=storage_options)
    refs: dict[str, ObjectRef] = {}
    found = [(_key_of(manifest, name), name) for name in manifest.of_rank(0)]
    counts = Counter(key for key, _ in found)

    def order(each: tuple[str, str]) -> tuple[str, int]:
        stored = manifest.store.get(each[1])
        return each[0], 0 if stored is None else stored.version

    async def put(key: str, name: str) -> ObjectRef:
        known = manifest.store.get(name)
        version = known.version if known is not None and keep_versions else None
        shards = None if known is None else shards_of(manifest.of_rank(0)[name].get(_VALUE))
        if known is not None and known.kind != STATE_DICT and shards is not None:
            reading = Reading(storage, manifest, f"{name}/{_VALUE}", verify)
            return await put_shards(client, key, version, shards, reading)
        read = partial(snapshot.get_state_dict_for_key, name, verify=verify)
        state = await thread_loops.in_thread(read)
        if known is not None and known.kind != STATE_DICT:
            if _VALUE not in state:
                raise SnapshotNotFoundError(f"the snapshot {path!r} has no value of {key!r}")
            return await client.put(key, state[_VALUE], version=version)
        if known is not None:
            state = with_shards(state, key, manifest.of_rank(0)[name])
        value = TorchStoreStateDict.from_state_dict(state) if known and known.packed else state
        keep = counts[key] if counts[key] > 1 else None
        return await client.put_state_dict(value, key, version=version, keep=keep)

    for key, name in sorted(found, key=order):
        if key.startswith(prefix):
            with _advising(path, key, keep_versions):
                refs[key] = await put(key, name)
    return refs


@contextlib.contextmanager
def _advising(path: str | os.PathLike[str], key: str, keep_versions: bool) -> Iterator[None]:
    """Say what to do if the store has a key already."""
    try:
        yield
    except ts.VersionGoneError as error:
        if not keep_versions:
            raise
        raise ts.VersionGoneError(
            f"the store has {key!r} in the version of the snapshot {os.fspath(path)!r}, or in a "
            "newer one; keep_versions=False puts what the snapshot has as the next version",
            key=key,
            details=error.details,
        ) from error


def _key_of(manifest: Manifest, name: str) -> str:
    """The key in the store of what has a name in the snapshot."""
    known = manifest.store.get(name)
    return (known.key if known is not None else "") or name
