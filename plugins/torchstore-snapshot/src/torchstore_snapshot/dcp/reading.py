"""Loads snapshots through ``torch.distributed.checkpoint``."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torchstore_core import boxes
from torchstore_core.clients.calls.arguments import check_bools
from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.codec import decode_object
from torchstore_core.clients.values.tensors import dtype_of
from torchstore_core.errors import LayoutMismatchError, UnsafeObjectError
from torchstore_core.values import ObjectMeta, TensorMeta
from torchstore_snapshot.dcp.layout import Stored, Unfolded, holds_stored, unfold
from torchstore_snapshot.dcp.objects import saved
from torchstore_snapshot.dcp.places import AtPath
from torchstore_snapshot.errors import SnapshotNotFoundError
from torchstore_snapshot.format.manifest import Checkpoint, Manifest, ObjectEntry, TensorEntry
from torchstore_snapshot.format.paths import check_name
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.restoring.files import Files
from torchstore_snapshot.restoring.reading import (
    Check,
    Read,
    check_reads,
    empty_for,
    execute,
    plan_reads,
    read_piece,
)
from torchstore_snapshot.restoring.restore import VerifyNew, when_new
from torchstore_snapshot.storage.opening import path_text, read_manifest
from torchstore_snapshot.storage.settings import using

__all__ = ["SnapshotStorageReader", "described", "load_values", "unfolded"]


class SnapshotStorageReader(AtPath, StorageReader):
    """Loads snapshots through ``dcp.load``: those that :class:`SnapshotStorageWriter` saved, on any
    number of ranks and in any layout, and those that ``Snapshot.take`` took.

    Each rank reads the ranges that it needs, on several threads, straight into its tensors. The
    metadata are made from the manifest: nothing is unpickled.

    Args:
        path: a folder or a URL; None: ``checkpoint_id=`` of the call says where.
        key: load this key's state dict alone, as if it had been saved by itself.
        verify: compare the hashes of all blocks of 4 MiB, and of all smaller pieces, that are read
            as a whole, before anything is written to: several ranks do so while they plan, so that
            damage that one of them finds ends the load on all of them; ``"all"``: also read as a
            whole those of which only a part is needed.
        allow_pickle: also load values that were pickled.
        storage_options: as for ``Snapshot``; for a ``checkpoint_id=`` of the call, too.

    ``dcp.load`` wraps what a rank raises in a ``CheckpointException``, whose ``failures`` are, by
    rank: SnapshotCorruptError, SnapshotFormatError, UnsafeObjectError or LayoutMismatchError. That
    there is no snapshot is the text of an AssertionError there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        key: str | None = None,
        verify: VerifyNew = True,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        with using(storage_options):  # refuses what are none
            self._storage_options = storage_options
        self._path = None if path is None else path_text(path)
        check_name("key", key)
        self._key = key
        self._verify = verify
        self._check: Check | None = "before" if when_new(verify) == "during" else when_new(verify)
        check_bools(allow_pickle=allow_pickle)
        self._allow_pickle = allow_pickle
        self._manifest: Manifest | None = None
        self._values: dict[str, Any] = {}
        self._load_id = ""
        self._verified: list[ReadItem] | None = None

    # ---- the steps of a load, in order -----------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to load another checkpoint."""
        if checkpoint_id is not None:
            self._path = path_text(checkpoint_id)
        self._manifest, self._values, self._verified = None, {}, None

    def read_metadata(self) -> Metadata:
        """Return what the snapshot contains.

        Raises:
            SnapshotNotFoundError, SnapshotFormatError, SnapshotCorruptError: there is no snapshot
                that can be used, or it does not have the key.
        """
        storage = self._storage()
        manifest = read_manifest(storage)
        with Files(storage, manifest) as files:
            state = unfolded(
                files, manifest, Ranks().rank, self._key, allow_pickle=self._allow_pickle
            )
        self._manifest, self._values = manifest, state.values
        self._load_id = str(uuid.uuid4())
        metadata = described(state)
        metadata.storage_meta = StorageMeta(
            checkpoint_id=self.checkpoint_id, save_id=manifest.take, load_id=self._load_id
        )
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing has to be done."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Compare hashes, if there are other ranks: they all hear of an error that is raised here
        before any of them reads. The plan is not changed.

        Raises:
            SnapshotCorruptError: a file is missing, too short or changed.
        """
        manifest = self._manifest
        if manifest is None or Ranks().size == 1:
            return plan
        reads: list[Read] = []
        for item in plan.items:
            value = self._values.get(item.storage_index.fqn)
            if isinstance(value, Stored) and isinstance(value.entry, TensorEntry):
                meta = TensorMeta(value.entry.dtype, value.entry.shape)
                dtype = dtype_of(meta, value.path)
                target = torch.empty(tuple(item.lengths), dtype=dtype, device="meta")
                reads += _reads(value, item, target)
        with Files(self._storage(), manifest) as files:
            check_reads(files, reads, self._check)
        self._verified = plan.items
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing has to be changed."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load what this rank needs.

        Raises:
            SnapshotCorruptError: a file is missing, too short or changed. No tensor of this rank
                was written to; those of other ranks were not either, unless the file changed since
                they planned.
            UnsafeObjectError: a value was pickled.
            LayoutMismatchError: a tensor is not of the shape that the plan says.
        """
        storage = self._storage()
        manifest = self._manifest or read_manifest(storage)
        known = self._verified is not None and self._verified == plan.items
        with Files(storage, manifest) as files:
            objects: list[tuple[ReadItem, Any]] = []
            direct: list[tuple[ReadItem, torch.Tensor, list[Read]]] = []
            through: list[tuple[ReadItem, torch.Tensor, Stored]] = []
            for item in plan.items:
                value = self._values[item.storage_index.fqn]
                if item.type == LoadItemType.BYTE_IO:
                    objects.append((item, load_values(files, item.storage_index.fqn, value)))
                    continue
                target = planner.resolve_tensor(item).detach()
                stored = cast(Stored, value)
                if _fits(target, stored):
                    direct.append((item, target, _reads(stored, item, target)))
                else:
                    through.append((item, target, stored))
            execute(
                files,
                [read for *_, reads in direct for read in reads],
                check=None if known else self._check,
            )
            for item, target, _ in direct:
                planner.commit_tensor(item, target)
            for item, target, stored in through:  # one by one: each needs memory of its own
                made = empty_for(stored.path, stored.entry, item.lengths)
                execute(files, _reads(stored, item, made), check=when_new(self._verify))
                with torch.no_grad():
                    target.copy_(made)
                planner.commit_tensor(item, target)
        for item, value in objects:
            planner.load_bytes(item, saved(value))
        future: Future[None] = Future()
        future.set_result(None)
        return future


def unfolded(
    files: Files, manifest: Manifest, rank: int, key: str | None, *, allow_pickle: bool
) -> Unfolded:
    """Return what a rank may load of a snapshot, by the names of ``torch.distributed.checkpoint``.
    Objects are loaded; tensors, and what may not be unpickled, are :class:`Stored`.

    Raises:
        SnapshotNotFoundError: the snapshot does not have ``key``.
        SnapshotCorruptError: an object is damaged.
        LayoutMismatchError: two entries would have one name.
    """
    entries = manifest.of_rank(rank)
    checkpoint = manifest.checkpoint
    if key is not None:
        if key not in entries:
            raise SnapshotNotFoundError(f"the snapshot {files.url!r} has no {key!r}", key=key)
        entries = {key: entries[key]}
        flat = checkpoint is not None and checkpoint.flat
        checkpoint = Checkpoint(key, flat=flat)
    states: dict[str, list[tuple[str, bytes, Any]]] = {}
    for own, named in entries.items():
        states[own] = []
        for name, entry in named.items():
            path = f"{own}/{name}"
            value: Any = Stored.of(path, entry)
            if isinstance(entry, ObjectEntry) and (allow_pickle or entry.codec != "pickle"):
                data = entry.data if entry.piece is None else read_piece(files, path, entry.piece)
                value = decode_object(
                    path, ObjectMeta(entry.codec), data, allow_pickle=allow_pickle
                )
            states[own].append((name, entry.steps, value))
    return unfold(states, checkpoint, files.url)


def described(state: Unfolded) -> Metadata:
    """Return the metadata of a state dict."""
    found: dict[str, Any] = {}
    for name, value in state.values.items():
        if not isinstance(value, Stored) or isinstance(value.entry, ObjectEntry):
            found[name] = BytesStorageMetadata()
            continue
        entry: TensorEntry = value.entry
        found[name] = TensorStorageMetadata(
            TensorProperties(dtype=dtype_of(TensorMeta(entry.dtype, entry.shape), value.path)),
            torch.Size(entry.shape),
            [
                ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
                for box in entry.boxes()
            ],
        )
    return Metadata(found, planner_data=state.places)


def load_values(files: Files, name: str, value: Any) -> Any:
    """Return an object; tensors inside of it are read.

    Raises:
        UnsafeObjectError: it was pickled.
        SnapshotCorruptError: a tensor in it is damaged.
    """
    if isinstance(value, Stored):
        raise UnsafeObjectError(
            f"{name!r} was stored with pickle, which allow_pickle=False forbids to load", key=name
        )
    if not holds_stored(value):
        return value
    held: Mapping[str, Any] = {name: value}
    reads: list[Read] = []

    def read(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, Stored):
            return leaf
        made = empty_for(leaf.path, leaf.entry, leaf.entry.shape)
        reads.extend(plan_reads(leaf.path, leaf.entry, made, boxes.whole(leaf.entry.shape)))
        return made

    made = nesting.replace(dict(held), nesting.flatten(name, held, unnamed=True), read)
    execute(files, reads, check="during")
    return made[name]


def _fits(target: torch.Tensor, stored: Stored) -> bool:
    """Whether bytes can be read straight into a tensor; otherwise torch has to copy."""
    dtype = dtype_of(TensorMeta(stored.entry.dtype, stored.entry.shape), stored.path)
    return (
        target.dtype == dtype
        and target.device.type in ("cpu", "cuda")
        and not (target.is_conj() or target.is_neg())
    )


def _reads(stored: Stored, item: ReadItem, target: torch.Tensor) -> list[Read]:
    """What fills the target of a read item."""
    entry: TensorEntry = stored.entry
    lengths = tuple(item.lengths)
    chunks = entry.boxes()
    begin = tuple(item.storage_index.offset or (0,) * len(lengths))
    at = item.storage_index.index
    if at is None or at >= len(chunks) or chunks[at].offset != begin:
        at = next((i for i, chunk in enumerate(chunks) if chunk.offset == begin), None)
    if at is None or tuple(target.shape) != lengths:
        raise LayoutMismatchError(
            f"{stored.path!r}: {list(target.shape)} at {list(begin)} is not what the plan says",
            key=stored.path,
        )
    if not target.numel():
        return []
    offset = tuple(b + o for b, o in zip(begin, item.storage_offsets, strict=True))
    box = boxes.Box(offset, lengths)
    return [Read(stored.path, entry.pieces[at], chunks[at], box, target)]
