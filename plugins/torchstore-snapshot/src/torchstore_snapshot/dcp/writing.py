"""Saves checkpoints of ``torch.distributed.checkpoint`` as snapshots."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from torchstore_core.errors import ConfigurationError, TorchStoreError
from torchstore_snapshot.committing.files import OpenFiles
from torchstore_snapshot.committing.options import TakeOptions
from torchstore_snapshot.committing.publishing import publish
from torchstore_snapshot.committing.replacing import refuse_existing, refuse_foreign_maps
from torchstore_snapshot.dcp.items import (
    Written,
    entry_of,
    planned,
    results_of,
    sources_of,
    whole,
)
from torchstore_snapshot.dcp.layout import divided, fold
from torchstore_snapshot.dcp.objects import encoded, value_of
from torchstore_snapshot.dcp.places import AtPath
from torchstore_snapshot.devices import Devices
from torchstore_snapshot.errors import SnapshotUndecidedError
from torchstore_snapshot.format.manifest import (
    Entry,
    Manifest,
)
from torchstore_snapshot.format.paths import check_name, claim_file, new_take_id, take_of
from torchstore_snapshot.series.claims import Claim, outlive, require
from torchstore_snapshot.storage.opening import path_text
from torchstore_snapshot.storage.remote import RemoteStorage
from torchstore_snapshot.storage.settings import using
from torchstore_snapshot.taking.collecting import Item
from torchstore_snapshot.taking.parts import maps_of
from torchstore_snapshot.taking.planning import INLINE_MAX, Unit, plan_files

__all__ = ["SnapshotStorageWriter"]


class SnapshotStorageWriter(AtPath, StorageWriter):
    """Saves checkpoints of ``torch.distributed.checkpoint`` as snapshots: for ``dcp.save``, and
    for ``dcp.async_save`` with a thread or a process.

    What is saved is a snapshot like any other. Every dict in the state dict, such as ``"model"``,
    is one of its keys, and what else is at the top has the key ``"state_dict"``. It becomes visible
    when all ranks have written, in one step.

    Args:
        path: a folder or a URL; None: ``checkpoint_id=`` of the call says where.
        key: the key for all that is saved, instead of one for each dict: ``"model"`` for
            ``dcp.save(model.state_dict(), ...)``.
        overwrite: replace a snapshot that is already there, in one step.
        fsync: flush all files before the snapshot becomes visible.
        allow_pickle: save what needs pickle, too. Only readers that allow it can load it.
        storage_options: as for ``Snapshot``; for a ``checkpoint_id=`` of the call, too. A process
            of an ``async_save`` is sent them, by pickle.
        options: as for ``Snapshot.take``: ``file_max``, ``threads``.

    ``dcp.save`` wraps what a rank raises in a ``CheckpointException``, whose ``failures`` are, by
    rank: SnapshotExistsError, UnsafeObjectError (a value needs pickle), UnsupportedValueError,
    LayoutMismatchError (no rank has some part of a tensor), or OSError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        key: str | None = None,
        overwrite: bool = False,
        fsync: bool = True,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        unknown = options.keys() - {"file_max", "threads"}
        if unknown:
            raise ConfigurationError(
                f"{', '.join(sorted(unknown))}: a save has no such option; it has file_max, threads"
            )
        check_name("key", key)
        self._options = TakeOptions(
            overwrite=overwrite, fsync=fsync, allow_pickle=allow_pickle, **options
        )
        self._options.check()
        self._key = key
        with using(storage_options):  # refuses what are none
            self._storage_options = storage_options
        self._path = None if path is None else path_text(path)
        self._process = os.getpid()
        self._take = new_take_id()
        self._rank = 0
        self._claim: Claim | None = None
        self._abandon: weakref.finalize[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Sent to the process of an async_save, which makes claims of its own.
        return {**self.__dict__, "_claim": None, "_abandon": None}

    def storage_meta(self) -> StorageMeta:
        """What planners are told of this checkpoint."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._take)

    # ---- the steps of a save, in order -----------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another checkpoint."""
        if checkpoint_id is not None:
            self._path = path_text(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare the folder. All ranks call this.

        Raises:
            SnapshotExistsError: there is a snapshot already.
            ConfigurationError: ``use_collectives=False``: a snapshot is that of all ranks; or this
                is the process of an async_save, whose memory nobody else sees.
        """
        if not kwargs.get("use_collectives", True):
            raise ConfigurationError(
                "use_collectives=False saves a checkpoint for each rank alone; a snapshot is that "
                "of all ranks: leave it out, or give each rank a path and no_dist=True"
            )
        self._end_claim()
        self._take = new_take_id()
        self._rank = int(kwargs.get("rank") or 0)
        storage = self._storage()
        if os.getpid() != self._process and isinstance(storage, RemoteStorage):
            storage.refuse_private("AsyncCheckpointerType.PROCESS writes", "a thread")
        if is_coordinator:
            refuse_existing(storage, overwrite=self._options.overwrite)
            self._protect(Claim.begin(storage, self._take, durable=self._options.fsync))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing has to be changed."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing has to be changed: the names of files differ between ranks in any case.

        Raises:
            ForeignFileError: the map of the weights would replace a file that no take has written.
        """
        items = (item for plan in plans for item in self._tensors(plan))
        try:
            refuse_foreign_maps(self._storage(), maps_of(items))
        except BaseException:
            self._release()  # nothing was written
            raise
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank saves, on several threads, straight from the memory of tensors. If
        that fails, nothing of it is left.
        """
        allow_pickle = self._options.allow_pickle
        items: list[Item] = []
        members: list[WriteItem] = []
        units: list[Unit] = []
        done: list[WriteResult] = []
        for item in plan.items:
            key, name = self._place(item.index.fqn, plan.planner_data)
            if item.type == WriteItemType.BYTE_IO:
                value = value_of(planner, item, allow_pickle=allow_pickle)
                codec, data = encoded(item.index.fqn, value, allow_pickle=allow_pickle)
                if len(data) <= INLINE_MAX:
                    done.append(
                        WriteResult(item.index, len(data), Written(None, codec=codec, data=data))
                    )
                    continue
                items.append(Item(key, name, b"", codec=codec, data=data))
            else:
                piece = planned(item)
                if piece is None:
                    done.append(WriteResult(item.index, 0, Written()))
                    continue
                dtype, shape = whole(item)
                items.append(Item(key, name, b"", dtype, shape, (piece,)))
            members.append(item)
            units.append(Unit(len(items) - 1, 0))
        files = plan_files(items, units, self._take, self._rank, self._options.file_max)
        layouts = [(file.name, file.layout) for file in files]
        storage = self._storage()
        if files and self._claim is None:
            self._protect(Claim(storage, self._take))
        opened = OpenFiles(
            storage, layouts, durable=self._options.fsync, threads=self._options.threads
        )
        try:
            with Devices() as devices:
                opened.write(sources_of(items, members, files, planner, devices))
            digests = opened.close()
        except BaseException:
            opened.abort()
            self._release()  # nothing of this rank's is left
            raise
        done += results_of(items, members, files, digests, self._rank)
        future: Future[list[WriteResult]] = Future()
        future.set_result(done)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the snapshot visible. Only the coordinator calls this, when all have written.

        Raises:
            SnapshotExistsError: another save was faster.
            TakeLostError: a garbage collection has given the save up.
            LayoutMismatchError: no rank has some part of a tensor.
            OSError: the storage failed.
        """
        written = [result for of_rank in results for result in of_rank]
        files = {w.file.name: w.file for r in written if (w := r.storage_data).file is not None}
        numbers = {name: number for number, name in enumerate(files)}
        found: dict[str, list[Written]] = {}
        for result in written:
            found.setdefault(result.index.fqn, []).append(result.storage_data)
        entries: dict[str, Entry] = {}
        for name in metadata.state_dict_metadata:
            entries[name] = entry_of(name, found.get(name, []), numbers)
        shared, checkpoint = fold(entries, metadata.planner_data, self._key)
        manifest = Manifest(
            self._take,
            time.time(),
            len(results),
            tuple(files.values()),
            shared,
            checkpoint=checkpoint,
        )
        storage = self._storage()
        # The file of each rank has a take of its own, with a claim that is no longer needed then.
        others = {take for name in files if (take := take_of(name)) and take != self._take}
        try:
            for take in others:
                require(storage, take)
            publish(storage, manifest, self._options, self._claim)
        except SnapshotUndecidedError:
            for take in others:
                with contextlib.suppress(TorchStoreError, OSError):
                    outlive(storage, take)
            raise
        finally:
            self._end_claim()
        for take in others:
            storage.delete(claim_file(take))
        metadata.storage_meta = self.storage_meta()

    def _tensors(self, plan: SavePlan) -> Iterator[Item]:
        """What a plan says about tensors."""
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                continue
            piece = planned(item)
            if piece is not None:
                key, name = self._place(item.index.fqn, plan.planner_data)
                yield Item(key, name, b"", *whole(item), (piece,))

    def _protect(self, claim: Claim) -> None:
        """Protect what this rank writes from garbage collections, until the save has ended or this
        object is gone.
        """
        self._claim = claim
        self._abandon = weakref.finalize(self, _abandon, claim, os.getpid())

    def _end_claim(self) -> None:
        """End the claim of the save before, unless that was committed."""
        if self._abandon is not None:
            self._abandon()
        self._claim = self._abandon = None

    def _release(self) -> None:
        """Remove the claim: nothing has to be collected."""
        if self._claim is not None and self._abandon is not None:
            self._abandon.detach()
            self._claim.release()
        self._claim = self._abandon = None

    def _place(self, name: str, places: Any) -> tuple[str, str]:
        """The key and the name that a file shows; the manifest decides them in the end."""
        steps = (places or {}).get(name, (name,))
        key, inner = divided(steps, self._key, self._key or "state_dict")
        return key, ".".join(map(str, inner))


def _abandon(claim: Claim, process: int) -> None:
    """End a claim, unless that is the parent's: a forked child only has a copy of it."""
    if os.getpid() == process:
        claim.abandon()
