"""Loads state dicts of a live store through ``torch.distributed.checkpoint``."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
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

import torchstore_core as ts
from torchstore_core.clients.calls import thread_loops
from torchstore_core.clients.calls.arguments import check_bools, check_version
from torchstore_core.clients.stores.environment import DEFAULT_NAME
from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.sharding import ShardList
from torchstore_core.clients.values.tensors import describe, dtype_of
from torchstore_core.errors import LayoutMismatchError, VersionGoneError
from torchstore_core.values import Request, StateDictMeta, TensorMeta
from torchstore_snapshot.dcp.objects import saved
from torchstore_snapshot.dcp.places import AtKey

__all__ = ["TorchStoreReader"]


class TorchStoreReader(AtKey, StorageReader):
    """Loads state dicts of a live store through ``dcp.load``: those that :class:`TorchStoreWriter`
    saved, on any number of ranks and in any layout, and those that ``put_state_dict`` put.

    Each rank gets the boxes that it needs, straight into its tensors. All ranks load one version:
    the newest that one of them has seen.

    Args:
        key: the key of the state dict; None: what ``checkpoint_id=`` of the call says. With a key,
            ``checkpoint_id=`` does not matter.
        store_name: which store.
        version: which version; None: the newest.
        allow_pickle: also load values that were pickled.
        timeout: seconds for each call of the store; None: the store's default.

    ``dcp.load`` wraps what a rank raises in a ``CheckpointException``, whose ``failures`` are, by
    rank: VersionGoneError (a newer version has replaced it: load again), StoreClosedError,
    UnsafeObjectError, or LayoutMismatchError. That there is no such key is the text of an
    AssertionError there.
    """

    def __init__(
        self,
        key: str | None = None,
        *,
        store_name: str = DEFAULT_NAME,
        version: int | None = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
    ) -> None:
        super().__init__(key, store_name, timeout)
        check_bools(allow_pickle=allow_pickle)
        check_version(version)
        self._version = version
        self._allow_pickle = allow_pickle
        self._seen = 0
        self._entries: dict[str, TensorMeta] = {}
        self._objects: dict[str, Any] = {}
        self._stored: list[str] = []

    # ---- the steps of a load, in order -----------------------------------------------------

    def read_metadata(self) -> Metadata:
        """Return what the state dict contains.

        Raises:
            KeyNotFoundError, PartialPutError: there is no state dict, or no complete one.
            VersionGoneError: that version is not kept, or was replaced meanwhile.
        """
        found = self._run(self._look(), "read_metadata")
        described: dict[str, Any] = {name: BytesStorageMetadata() for name in found.objects}
        for name, meta in found.tensors.items():
            whole = ChunkStorageMetadata(torch.Size([0] * len(meta.shape)), torch.Size(meta.shape))
            properties = TensorProperties(dtype=dtype_of(meta, name))
            described[name] = TensorStorageMetadata(properties, torch.Size(meta.shape), [whole])
        self._seen, self._entries, self._objects = found.version, found.tensors, found.objects
        self._stored = found.stored
        origin = StorageMeta(checkpoint_id=self.checkpoint_id, load_id=str(uuid.uuid4()))
        return Metadata(described, planner_data=found.places, storage_meta=origin)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing has to be done."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say which version this rank has seen."""
        return dataclasses.replace(plan, storage_data=self._seen)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Agree on one version."""
        version = max(int(plan.storage_data) for plan in plans)
        return [dataclasses.replace(plan, storage_data=version) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load what this rank needs.

        Raises:
            VersionGoneError: a newer version has replaced what was to be loaded.
            LayoutMismatchError: a newer version has other shapes or dtypes.
        """
        if plan.storage_data != self._seen:  # another rank was later, and saw a newer version
            self._version, fixed = plan.storage_data, self._version
            try:
                self.read_metadata()
            finally:
                self._version = fixed
        wanted: dict[str, ShardList] = {}
        committed: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                continue
            meta = self._entries.get(name)
            target = planner.resolve_tensor(item).detach()
            if meta is None or tuple(target.shape) != tuple(item.lengths):
                raise LayoutMismatchError(f"{name!r} is not what the plan says", key=name)
            dtype = dtype_of(meta, name)
            into = target
            if target.dtype != dtype or target.is_conj() or target.is_neg():
                into = torch.empty(tuple(target.shape), dtype=dtype, device="cpu")
            committed.append((item, target, into))
            part = ts.TensorSlice(tuple(item.storage_offsets), tuple(into.shape), meta.shape)
            wanted.setdefault(name, ShardList()).append(ts.TensorShard(into, part))
        if wanted:
            self._run(self._fill(wanted), "read_data")
        for item, target, into in committed:
            if into is not target:
                with torch.no_grad():
                    target.copy_(into)
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, saved(self._objects[item.storage_index.fqn]))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # ---- the store --------------------------------------------------------------------------

    def _run(self, call: Any, name: str) -> Any:
        return thread_loops.run(call, name)

    async def _look(self) -> _Found:
        client = await ts.client(self._store_name)
        key, version, timeout = self.checkpoint_id, self._version, self._timeout
        found = await client.stat(key, timeout=timeout)
        if version is not None and version != found.version:
            if version not in found.versions:
                raise VersionGoneError(
                    f"{key!r} has no version {version} any more; it has {found.versions}", key=key
                )
            return await self._look_at(client, version)
        if not isinstance(found.meta, StateDictMeta):
            raise LayoutMismatchError(f"{key!r} is no state dict, but a {found.kind}", key=key)
        prefix = f"{key}/"
        names = [name for name in await client.keys(prefix, timeout=timeout) if name != key]
        stats = await asyncio.gather(*[client.stat(name, timeout=timeout) for name in names])
        tensors = {s.key[len(prefix) :]: s.meta for s in stats if isinstance(s.meta, TensorMeta)}
        others = [s.key for s in stats if not isinstance(s.meta, TensorMeta)]
        objects = await client.get_batch(
            [Request(name, found.version) for name in others],
            timeout=timeout,
            allow_pickle=self._allow_pickle,
        )
        if (now := await client.latest_version(key, timeout=timeout)) != found.version:
            raise VersionGoneError(
                f"version {found.version} of {key!r} was replaced by {now} while its contents were "
                "listed; load again",
                key=key,
            )
        named = {name[len(prefix) :]: value for name, value in objects.items()}
        return _found(found.version, tensors, named)

    async def _look_at(self, client: ts.Client, version: int) -> _Found:
        """The same of an older version, which can only be got as a whole."""
        state = await client.get_state_dict(
            self.checkpoint_id,
            version=version,
            timeout=self._timeout,
            allow_pickle=self._allow_pickle,
        )
        tensors: dict[str, TensorMeta] = {}
        objects: dict[str, Any] = {}
        for leaf in nesting.flatten(self.checkpoint_id, state):
            if isinstance(leaf.value, torch.Tensor):
                tensors[leaf.name] = describe(leaf.value)
            else:
                objects[leaf.name] = leaf.value
        return _found(version, tensors, objects)

    async def _fill(self, wanted: dict[str, ShardList]) -> None:
        """Fill the destinations, each from its entry. If all entries are wanted, that is one call;
        otherwise it would report the others as differences.
        """
        client = await ts.client(self._store_name)
        key, version, timeout = self.checkpoint_id, self._seen, self._timeout
        if wanted.keys() == self._entries.keys():
            state = {**wanted, **dict.fromkeys(self._stored)}
            await client.get_state_dict(
                key, state, version=version, timeout=timeout, allow_pickle=self._allow_pickle
            )
            return
        everything: dict[str, Any] = dict(wanted)
        gets = [
            client.get(Request(f"{key}/{name}", version), part, timeout=timeout)
            for name, parts in everything.items()
            for part in parts
        ]
        await asyncio.gather(*gets)


@dataclasses.dataclass
class _Found:
    """What a version contains.

    Args:
        tensors: dtypes and shapes.
        objects: all other values, by the names that ``torch.distributed.checkpoint`` gives them.
        stored: the names of these in the store.
        places: where everything is in the nested state dict.
    """

    version: int
    tensors: dict[str, TensorMeta]
    objects: dict[str, Any]
    stored: list[str]
    places: dict[str, Any]


def _found(version: int, tensors: dict[str, TensorMeta], objects: dict[str, Any]) -> _Found:
    flat, places = flatten_state_dict(objects)
    return _Found(
        version, tensors, flat, [*objects], {**{name: (name,) for name in tensors}, **places}
    )
