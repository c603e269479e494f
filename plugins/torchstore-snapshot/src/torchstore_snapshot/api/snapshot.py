"""Taking, restoring and reading snapshots: the calls that block."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchstore_core.clients.calls.arguments import check_bools
from torchstore_core.clients.state_dicts.getting import StateDictReport
from torchstore_core.errors import ConfigurationError
from torchstore_core.values import TensorSlice
from torchstore_snapshot.api.pending import PendingSnapshot
from torchstore_snapshot.api.stateful import AppState
from torchstore_snapshot.background.staging import allowed, begin
from torchstore_snapshot.committing.options import TakeOptions
from torchstore_snapshot.errors import SnapshotCorruptError
from torchstore_snapshot.format.manifest import Entry, Manifest
from torchstore_snapshot.progress import Progress
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.restoring import restore as restoring
from torchstore_snapshot.restoring.restore import Verify, VerifyNew
from torchstore_snapshot.restoring.verifying import verify_all
from torchstore_snapshot.storage.opening import open_storage, path_text, read_manifest
from torchstore_snapshot.storage.settings import using
from torchstore_snapshot.taking.preparing import agree
from torchstore_snapshot.taking.take import take

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Snapshot"]


class Snapshot:
    """A snapshot at a path: tensors and other values, saved from the objects of a program.

    Args:
        path: a folder, or a URL.
        pg: the ranks that restore together; None: the default process group if
            ``torch.distributed`` is initialised, otherwise this process alone.
        allow_pickle: also load values that were pickled. Unpickling runs code from the snapshot.
        storage_options: arguments of fsspec's file system for a URL, such as ``endpoint_url`` and
            ``key`` of an object store; they come before ``fsspec.config.conf`` and the environment.

    Opening a snapshot reads nothing: its manifest is read when it is first needed.

    >>> import tempfile, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     before = model.weight.tolist()
    ...     snapshot = Snapshot.take(f"{folder}/step-1", {"model": model})
    ...     _ = torch.nn.init.zeros_(model.weight)
    ...     _ = snapshot.restore({"model": model})
    ...     model.weight.tolist() == before
    True
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        pg: ProcessGroup | None = None,
        *,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_bools(allow_pickle=allow_pickle)
        self.path = path_text(path)
        self.pg = pg
        self._allow_pickle = allow_pickle
        with using(storage_options):
            self._storage = open_storage(path)
        self._manifest: Manifest | None = None

    def __repr__(self) -> str:
        return f"Snapshot({self.path!r})"

    @classmethod
    def take(
        cls,
        path: str | os.PathLike[str],
        app_state: AppState,
        pg: ProcessGroup | None = None,
        replicated: list[str] | None = None,
        *,
        overwrite: bool = False,
        fsync: bool = True,
        allow_pickle: bool = False,
        base: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Snapshot:
        """Take a snapshot, and return when it is committed.

        The files are written straight from the memory of the tensors, or, for those on devices,
        through a few buffers; what is stored is what the work makes of them that is queued on the
        current streams. All ranks call this with the
        same keys. DTensors are stored by their shards. What all ranks have with the same values
        (the parameters of ``DistributedDataParallel``, replicas of DTensors, and what
        ``replicated`` names) is written once, by one of them. Until the snapshot is committed,
        there is none; one that was there before remains.

        Args:
            path: where to; if ranks differ, that of rank 0 counts.
            app_state: objects with ``state_dict()`` and ``load_state_dict()``, by key.
            pg: the ranks that take part; None: as for the class. A rank that gives another one than
                the others, or none, is not heard by them: they wait until their group times out.
            replicated: globs of paths (``"model/*"``) whose values are the same on all ranks.
            overwrite: replace a snapshot that is already there, in one step.
            fsync: flush all files before the snapshot is committed. Without it, a power failure
                (though no crash of a process) soon afterwards may damage the snapshot.
            allow_pickle: store what needs pickle. Only readers that allow it can load it.
            base: a snapshot beside this one (in the same folder). What has not changed since then
                is not written again: the new snapshot refers to the files of earlier ones. It is
                restored like any other. Delete snapshots with ``gc`` only, which keeps those files.
            storage_options: as for the class.
            options: ``file_max``, bytes of tensors in one file (2 GiB); ``threads``, how many
                threads write (the number of copy threads); ``progress``, True for a bar on a
                terminal, or a function of the bytes that are done and of all bytes (what it raises
                ends the take);
                ``memory_budget``, bytes of page-locked memory that tensors on devices may pass
                through (at least 128 KiB; None: 4 MiB for each thread). Beside that, this call
                stages nothing, and has a few buffers of 4 MiB for each thread.

        Raises:
            SnapshotExistsError: there is a snapshot already.
            SnapshotNotFoundError: there is no snapshot at ``base``.
            UnsafeObjectError: a value needs pickle.
            UnsupportedValueError, LayoutMismatchError: a value cannot be stored.
            RankFailedError: another rank failed.
            SnapshotUndecidedError: an object store went away, and nobody knows whether there is a
                snapshot. See if its take is that of ``details["take"]``.
            OSError: the storage failed, for example because it is full.
        """
        ranks = Ranks(pg)
        with contextlib.ExitStack() as opened:
            with ranks.telling():
                chosen = _options(
                    base, overwrite=overwrite, fsync=fsync, allow_pickle=allow_pickle, **options
                )
                opened.enter_context(using(storage_options))
            url = take(path, app_state, ranks, replicated, chosen)
        return cls(url, pg, allow_pickle=allow_pickle, storage_options=storage_options)

    @classmethod
    def async_take(
        cls,
        path: str | os.PathLike[str],
        app_state: AppState,
        pg: ProcessGroup | None = None,
        replicated: list[str] | None = None,
        *,
        memory_budget: int | None = None,
        overwrite: bool = False,
        fsync: bool = True,
        allow_pickle: bool = False,
        base: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> PendingSnapshot:
        """Take a snapshot while the program goes on: return as soon as everything is staged in
        shared memory, after which tensors may be changed.

        Staged is into the store of this process if it has one with room, otherwise into one that is
        started for this purpose and kept. A process of its own, of low priority, writes the files.

        Args:
            path, app_state, pg, replicated, overwrite, fsync, allow_pickle, base, options: as for
                :meth:`take`.
            storage_options: as for the class; the process that writes is sent them, and what
                ``fsspec.config.conf`` has for the URL, so they are numbers, texts, bytes, and lists
                and dicts of those.
            memory_budget: bytes that may be staged at a time; None: half of what the host has free.
                If there is more to write, the call takes as long as writing what goes beyond it.
                With a budget, the store that is started ends soon after the last take, which gives
                all of its memory back; one that the program has keeps memory as it always does.

        Raises:
            SnapshotWriterError: the process that writes has ended.
            TorchStoreError: as for :meth:`take`; errors of writing are raised by
                ``PendingSnapshot.wait``.
        """
        ranks = Ranks(pg)
        with contextlib.ExitStack() as opened:
            with ranks.telling():
                chosen = _options(
                    base,
                    memory_budget=memory_budget,
                    overwrite=overwrite,
                    fsync=fsync,
                    allow_pickle=allow_pickle,
                    **options,
                )
                opened.enter_context(using(storage_options))
            agreed = agree(path, app_state, ranks, replicated, chosen, allowed)
            future = begin(agreed)
        url = agreed.first.url
        made = cls(url, pg, allow_pickle=allow_pickle, storage_options=storage_options)
        return PendingSnapshot(made, future)

    def restore(
        self,
        app_state: AppState,
        strict: bool = True,
        *,
        verify: Verify = True,
        progress: Progress = False,
    ) -> StateDictReport:
        """Restore objects: read what this rank needs straight into the tensors of their state
        dicts, and call ``load_state_dict``. Tensors on devices are written to after the work that
        is queued on their current streams, and are complete when this returns. All ranks call this,
        as for a take, and get the snapshot together: none of them writes to a tensor before all
        have found what they need.

        The number of ranks and the layout of DTensors may differ from those of the take. A rank
        that the take did not have gets what is sharded or the same on all ranks. Values that each
        rank had for itself are missing there, by name; but :class:`RNGState` then leaves the
        generator of such a rank as it is.

        Args:
            app_state: the objects, or some of them, by the keys that they were taken with.
            strict: raise if something does not match, before anything is written; otherwise
                restore what does.
            verify: True: compare hashes before anything is written, so that a damaged snapshot
                changes nothing on any rank; everything is read twice for that. ``"streaming"``:
                compare them on the way, which is about as fast as not at all; after
                SnapshotCorruptError (on other ranks: RankFailedError), the contents of the
                tensors are then undefined on all ranks. False: compare nothing. Names, shapes, and
                whether files are there are compared before anything is written in any case. There
                is a hash for each block of 4 MiB of a tensor (or of a shard), and for each that is
                smaller;
                when resharding, True and ``"streaming"`` check the blocks of which everything is
                read as contiguous bytes, so that no more is read than is needed, and what is read
                of other blocks is not checked. ``"all"``: as True, but everything is checked: all
                blocks are read as a whole of which anything is needed.
            progress: show a bar, if standard error is a terminal; or a function that is called with
                the bytes that are done, of both passes, and with all of them.

        Returns:
            The differences; without ``strict``, there may be some.

        Raises:
            LayoutMismatchError: ``strict`` is set and something does not match, or tensors that are
                tied here have different values in the snapshot; or two tensors share a part of
                their memory and are not the same.
            SnapshotNotFoundError: there is no snapshot.
            SnapshotCorruptError: a file is missing, too short or changed.
            SnapshotFormatError: a newer version wrote the snapshot.
            UnsafeObjectError: a value was pickled.
            ConfigurationError: ``verify`` is none of these.
            RankFailedError: one of these was raised on another rank.
        """
        return restoring.restore(
            self._storage,
            lambda: self.manifest,
            app_state,
            Ranks(self.pg),
            strict=strict,
            verify=verify,
            allow_pickle=self._allow_pickle,
            progress=progress,
        )

    def read_object(
        self,
        path: str,
        obj_out: Any = None,
        memory_budget_bytes: int | None = None,
        *,
        tensor_slice: TensorSlice | None = None,
        verify: VerifyNew = True,
    ) -> Any:
        """Read one object, and nothing else of the snapshot.

        Args:
            path: ``"key/name"``, or ``"rank/key/name"``. What is in a container without tensors,
                which is one object, can be read by itself: ``"optim/param_groups/0/lr"``.
            obj_out: a tensor, DTensor or numpy array to read into; None: a new tensor on the host.
            memory_budget_bytes: bytes of memory that may be used in addition to the tensor that is
                returned (at least 64 KiB are); None: what is fastest. Files are not mapped then,
                so that their pages do not count as memory of this process either.
            tensor_slice: the part of a tensor to read; None: all of it.
            verify: compare the hashes of all blocks of 4 MiB, and of all smaller pieces, that are
                read as a whole; those of which only a part is read are not checked. ``"all"``:
                read those as a whole, too, and check them, before anything is written to.

        Returns:
            ``obj_out`` if it was given for a tensor, otherwise the object.

        Raises:
            SnapshotNotFoundError: there is no such object, or no snapshot.
            LayoutMismatchError: the object does not fit ``obj_out`` or the slice.
            ConfigurationError: an argument is of another type.
            SnapshotCorruptError, SnapshotFormatError, UnsafeObjectError: as for :meth:`restore`.
        """
        return restoring.read_object(
            self._storage,
            self.manifest,
            path,
            obj_out,
            tensor_slice,
            budget=memory_budget_bytes,
            rank=Ranks(self.pg).rank,
            verify=verify,
            allow_pickle=self._allow_pickle,
        )

    def verify(self, *, progress: Progress = False) -> dict[str, SnapshotCorruptError]:
        """Read every byte of the snapshot and compare all hashes, also those of what other programs
        read: the headers of its safetensors files, and the maps of weights beside them.

        Args:
            progress: as for :meth:`restore`.

        Returns:
            What is damaged, and why: objects by ``"key/name"``, and by their names files of which
            only the header or the map is; empty if the snapshot is whole.

        Raises:
            SnapshotNotFoundError, SnapshotFormatError, SnapshotCorruptError: it has no manifest
                that can be used.
        """
        return verify_all(self._storage, self.manifest, progress)

    @property
    def manifest(self) -> Manifest:
        """The manifest, read once.

        Raises:
            SnapshotNotFoundError, SnapshotFormatError, SnapshotCorruptError: there is none that can
                be used.
        """
        if self._manifest is None:
            self._manifest = read_manifest(self._storage)
        return self._manifest

    def get_manifest(self) -> dict[str, Entry]:
        """Return every object of the snapshot by ``"rank/key/name"``; what the ranks have in common
        is listed for each of them.

        Raises:
            SnapshotNotFoundError, SnapshotFormatError, SnapshotCorruptError: see :attr:`manifest`.
        """
        return {
            f"{rank}/{key}/{name}": entry
            for rank in range(self.manifest.world_size)
            for key, named in self.manifest.of_rank(rank).items()
            for name, entry in named.items()
        }

    def get_state_dict_for_key(self, key: str, *, verify: bool = True) -> dict[str, Any]:
        """Return the state dict of one object, nested as it was, with new tensors on the host.
        Sharded tensors are whole.

        Raises:
            SnapshotNotFoundError: the snapshot has no such key, or there is no snapshot.
            SnapshotCorruptError, SnapshotFormatError, UnsafeObjectError: as for :meth:`restore`.
        """
        return restoring.state_dict_of(
            self._storage,
            self.manifest,
            key,
            rank=Ranks(self.pg).rank,
            verify=verify,
            allow_pickle=self._allow_pickle,
        )


def _options(base: Any, **given: Any) -> TakeOptions:
    unknown = given.keys() - set(TakeOptions._fields)
    if unknown:
        raise ConfigurationError(
            f"{', '.join(sorted(unknown))}: a take has no such option; it has "
            f"{', '.join(TakeOptions._fields)}"
        )
    return TakeOptions(base=base, **given)
