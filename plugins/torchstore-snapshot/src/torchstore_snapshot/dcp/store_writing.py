"""Saves checkpoints of ``torch.distributed.checkpoint`` in a live store: at memory speed."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from torchstore_core import blocking as ts
from torchstore_core.clients.calls.arguments import check_bools
from torchstore_core.clients.stores.environment import DEFAULT_NAME
from torchstore_core.clients.values.codec import decode_object
from torchstore_core.clients.values.sharding import ShardList
from torchstore_core.errors import ConfigurationError, KeyNotFoundError, UnsupportedValueError
from torchstore_core.values import ObjectMeta, TensorSlice
from torchstore_snapshot.dcp.items import resolved
from torchstore_snapshot.dcp.layout import Steps
from torchstore_snapshot.dcp.objects import encoded, value_of
from torchstore_snapshot.dcp.places import AtKey

__all__ = ["TorchStoreWriter"]

# The participant that completes a version: the coordinator, when all ranks have put.
_LAST = "coordinator"


class _Object(NamedTuple):
    """A value that is not a tensor, on its way to the coordinator."""

    codec: str
    data: bytes


class TorchStoreWriter(AtKey, StorageWriter):
    """Saves checkpoints of ``torch.distributed.checkpoint`` in a live store: a trainer that is
    started again on the same hosts loads them at memory speed.

    Every save makes one version of a state dict, to which all ranks contribute. It can be read when
    the last rank has put and the coordinator has put what are not tensors, in one step; until then
    readers get the version before. A save that fails leaves no version, and the next one drops what
    it has put. Versions are numbered by attempts: after a failed save, a number is missing.

    What is saved can also be read by ``get_state_dict``. (Lists that contain tensors are dicts with
    the indices as keys then.) The number of the last attempt is kept under ``<key>.saving``.

    Args:
        key: the key of the state dict; None: what ``checkpoint_id=`` of the call says. With a key,
            every save makes the next version of it, whatever ``checkpoint_id=`` is: for trainers
            that give each step an id of its own.
        store_name: which store.
        keep: how many versions stay readable; None: as many as before, initially one.
        allow_pickle: save what needs pickle, too. Only readers that allow it can load it.
        timeout: seconds for each call of the store; None: the store's default.

    ``dcp.save`` wraps what a rank raises in a ``CheckpointException``, whose ``failures`` are, by
    rank: StoreFullError (nothing has changed), StoreClosedError, StoreTimeoutError,
    UnsafeObjectError, or UnsupportedValueError.
    """

    def __init__(
        self,
        key: str | None = None,
        *,
        store_name: str = DEFAULT_NAME,
        keep: int | None = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
    ) -> None:
        super().__init__(key, store_name, timeout)
        check_bools(allow_pickle=allow_pickle)
        number: object = keep
        if number is not None and (type(number) is not int or number < 1):
            raise ConfigurationError(f"keep is an int above 0, not {keep!r}")
        self._keep = keep
        self._allow_pickle = allow_pickle
        self._rank = 0
        self._save_id = ""

    def storage_meta(self) -> StorageMeta:
        """What planners are told of this checkpoint."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    # ---- the steps of a save, in order -----------------------------------------------------

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remember this process's rank. All ranks call this.

        Raises:
            ConfigurationError: ``use_collectives=False``: a version is that of all ranks.
        """
        if not kwargs.get("use_collectives", True):
            raise ConfigurationError(
                "use_collectives=False saves a checkpoint for each rank alone; a version is that "
                "of all ranks: leave it out, or give each rank a key and no_dist=True"
            )
        self._save_id = str(uuid.uuid4())
        self._rank = int(kwargs.get("rank") or 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing has to be changed."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose the version. Ranks read it from the store, because a planner that caches plans
        hands on those of an earlier save.
        """
        client = self._client()
        before = 0
        with contextlib.suppress(KeyNotFoundError):  # the first save
            before = client.get(self._attempts, timeout=self._timeout)["version"]
        version = max(before, client.latest_version(self.checkpoint_id, timeout=self._timeout)) + 1
        attempt = {"version": version, "ranks": len(plans)}
        client.put(self._attempts, attempt, timeout=self._timeout)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Put the tensors of this rank. It returns when they may be changed."""
        results: list[WriteResult] = []
        tensors: dict[Steps, Any] = {}
        for item in plan.items:
            name = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                value = value_of(planner, item, allow_pickle=self._allow_pickle)
                if plan.planner_data is None and _opens(value):
                    raise UnsupportedValueError(
                        f"{name!r} is a dict or a list of a planner that does not flatten state "
                        "dicts, and a store would; let the planner do it, or save a snapshot",
                        key=name,
                    )
                codec, data = encoded(name, value, allow_pickle=self._allow_pickle)
                results.append(WriteResult(item.index, len(data), _Object(codec, data)))
                continue
            tensor = resolved(planner, item)
            results.append(WriteResult(item.index, tensor.nbytes, None))
            shape = tuple(item.tensor_data.size) if item.tensor_data else ()
            if not tensor.numel() and 0 not in shape:
                continue
            steps = (plan.planner_data or {}).get(name, (name,))
            value = tensor
            if item.tensor_data and tuple(tensor.shape) != shape:
                part = TensorSlice(
                    tuple(item.tensor_data.chunk.offsets), tuple(tensor.shape), shape
                )
                value = ts.TensorShard(tensor, part)
            if steps in tensors:  # several shards of one rank
                before = tensors[steps]
                several = before if isinstance(before, ShardList) else ShardList([before])
                value = ShardList([*several, value])
            tensors[steps] = value
        self._put(nested(tensors, tensors), str(self._rank), self._attempt())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Put what are not tensors, which completes the version. Only the coordinator does this."""
        places: Mapping[str, Steps] = metadata.planner_data or {}
        objects: dict[Steps, Any] = {}
        tensors: list[Steps] = []
        for result in (result for of_rank in results for result in of_rank):
            name, found = result.index.fqn, result.storage_data
            steps = places.get(name, (name,))
            if isinstance(found, _Object):
                meta = ObjectMeta(found.codec)
                objects[steps] = decode_object(
                    name, meta, found.data, allow_pickle=self._allow_pickle
                )
            else:
                tensors.append(steps)
        self._put(nested(objects, tensors), _LAST, self._attempt())
        metadata.storage_meta = self.storage_meta()

    # ---- the store --------------------------------------------------------------------------

    @property
    def _attempts(self) -> str:
        """The key that says which version is being saved."""
        return f"{self.checkpoint_id}.saving"

    def _client(self) -> ts.Client:
        return ts.client(self._store_name)

    def _attempt(self) -> dict[str, int]:
        found: dict[str, int] = self._client().get(self._attempts, timeout=self._timeout)
        return found

    def _put(self, state: dict[Any, Any], participant: str, attempt: dict[str, int]) -> None:
        self._client().put_state_dict(
            state,
            self.checkpoint_id,
            version=attempt["version"],
            participants=attempt["ranks"] + 1,
            participant=participant,
            keep=self._keep,
            timeout=self._timeout,
            allow_pickle=self._allow_pickle,
        )


def _opens(value: Any) -> bool:
    """Whether a store would make several entries of a value."""
    return isinstance(value, Mapping) or (
        isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value)
    )


def nested(values: Mapping[Steps, Any], tensors: Iterable[Steps]) -> dict[Any, Any]:
    """Rebuild a nested dict. A list with tensors in it becomes a dict with the indices as keys,
    because several ranks may have the members of one list.

    >>> nested({("a", 0, "lr"): 1, ("b", 0): 2}, tensors=[("b", 1)])
    {'a': [{'lr': 1}], 'b': {0: 2}}
    """
    with_tensors = {steps[:end] for steps in tensors for end in range(len(steps))}
    root: dict[Any, Any] = {}
    for steps, value in values.items():
        place = root
        for step in steps[:-1]:
            place = place.setdefault(step, {})
        place[steps[-1]] = value
    return {step: _built(value, (step,), with_tensors) for step, value in root.items()}


def _built(value: Any, steps: Steps, with_tensors: set[Steps]) -> Any:
    if type(value) is not dict or not value:
        return value
    made = {step: _built(inner, (*steps, step), with_tensors) for step, inner in value.items()}
    indices = all(type(step) is int for step in made)
    if indices and steps not in with_tensors and sorted(made) == list(range(len(made))):
        return [made[index] for index in range(len(made))]
    return made
