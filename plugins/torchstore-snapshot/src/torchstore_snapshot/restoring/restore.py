"""A restore, from the manifest to ``load_state_dict``, and access to single objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from torchstore_core import boxes
from torchstore_core.clients.state_dicts.getting import StateDictReport
from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.codec import decode_object
from torchstore_core.clients.values.sharding import is_sharded
from torchstore_core.clients.values.tensors import slice_box
from torchstore_core.errors import ConfigurationError, LayoutMismatchError
from torchstore_core.values import ObjectMeta, TensorSlice
from torchstore_snapshot.api.stateful import AppState, RNGState, Stateful, checked
from torchstore_snapshot.errors import SnapshotNotFoundError
from torchstore_snapshot.format.manifest import Entry, Manifest, ObjectEntry, TensorEntry
from torchstore_snapshot.progress import Progress
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.restoring.destinations import Filled, match, tensor_reads
from torchstore_snapshot.restoring.files import Files
from torchstore_snapshot.restoring.reading import (
    Check,
    Read,
    empty_for,
    execute,
    plan_reads,
    read_piece,
)
from torchstore_snapshot.storage.base import Storage

__all__ = ["Verify", "VerifyNew", "find", "read_object", "restore", "state_dict_of", "when_new"]

#: Whether hashes are compared, and when: True: before anything is written to.
Verify = bool | Literal["streaming", "all"]
#: The same where tensors are new.
VerifyNew = bool | Literal["all"]


def restore(
    storage: Storage,
    manifest: Manifest,
    app_state: AppState,
    ranks: Ranks,
    *,
    strict: bool,
    verify: Verify,
    allow_pickle: bool,
    progress: Progress = False,
) -> StateDictReport:
    """Restore every object of the application state.

    Raises:
        LayoutMismatchError: ``strict`` is set and something does not match; nothing was written.
        SnapshotCorruptError: the snapshot is damaged; nothing was written, unless ``verify`` is
            ``"streaming"``.
        UnsafeObjectError: a value was pickled, and ``allow_pickle`` is False.
    """
    check = _when(verify)
    available = manifest.of_rank(ranks.rank)
    new_rank = ranks.rank >= manifest.world_size
    report = StateDictReport()
    planned: list[tuple[str, Stateful, Filled]] = []
    for key, stateful in checked(app_state):
        if key not in available:
            report.missing.append(key)
            continue
        filled = match(key, stateful, available[key])
        if isinstance(stateful, RNGState) and new_rank and not filled.values:
            continue  # no rank of the take was this one: its generator stays as it is
        report.missing += filled.report.missing
        report.unexpected += filled.report.unexpected
        report.mismatched |= filled.report.mismatched
        planned.append((key, stateful, filled))
    if report and strict:
        why = ""
        if new_rank and report.missing and any(manifest.own):
            why = (
                f" The snapshot was taken by {manifest.world_size} ranks, and this is rank "
                f"{ranks.rank}: it gets what is sharded or the same on all ranks. Give strict="
                "False to keep its own values, or name them in replicated= when taking."
            )
        raise LayoutMismatchError(
            f"the snapshot {storage.url!r} does not match; nothing was written. {report}{why}",
            details={
                "missing": report.missing,
                "unexpected": report.unexpected,
                "mismatched": report.mismatched,
            },
        )
    loads: list[tuple[Stateful, dict[str, Any]]] = []
    with Files(storage, manifest) as files:
        for key, stateful, filled in planned:
            values = dict(filled.values)
            for name, entry in filled.objects.items():
                path = f"{key}/{name}"
                values[name] = _object(files, path, entry, allow_pickle=allow_pickle)
            ordered = ((name, filled.steps[name], values[name]) for name in filled.steps)
            loads.append((stateful, nesting.unflatten(key, ordered)))
        reads = [read for _, _, filled in planned for read in filled.reads]
        execute(files, reads, check=check, progress=progress)
    # The state of the random number generator last, because others may draw from it.
    for stateful, state in sorted(loads, key=lambda load: isinstance(load[0], RNGState)):
        _load(stateful, state, strict=strict)
    return report


def _when(verify: Verify) -> Check | None:
    if verify == "streaming":
        return "during"
    if verify == "all":
        return "all"
    if not isinstance(verify, bool):
        raise ConfigurationError(f"verify is True, False, 'streaming' or 'all', not {verify!r}")
    return "before" if verify else None


def when_new(verify: VerifyNew) -> Check | None:
    """When to compare hashes where nobody has the tensors yet.

    Raises:
        ConfigurationError: ``verify`` is something else.
    """
    if verify == "all":
        return "all"
    if not isinstance(verify, bool):
        raise ConfigurationError(f"verify is True, False or 'all', not {verify!r}")
    return "during" if verify else None


def _load(stateful: Stateful, state: dict[str, Any], *, strict: bool) -> None:
    if isinstance(stateful, torch.nn.Module) and not strict:
        stateful.load_state_dict(state, strict=False)
        return
    stateful.load_state_dict(state)


def _object(files: Files, path: str, entry: ObjectEntry, *, allow_pickle: bool) -> Any:
    data = entry.data if entry.piece is None else read_piece(files, path, entry.piece)
    return decode_object(path, ObjectMeta(entry.codec), data, allow_pickle=allow_pickle)


def find(manifest: Manifest, path: str, url: str, rank: int = 0) -> tuple[str, Entry]:
    """Return the entry of an object, and its path without a rank.

    Args:
        path: ``"key/name"``, or ``"rank/key/name"`` for what that rank alone has; names of nested
            entries have dots or slashes.
        rank: whose entries are meant if the path has no rank.

    Raises:
        SnapshotNotFoundError: there is no such object.
    """
    first, _, rest = path.partition("/")
    candidates = [(rank, path)]
    if first.isdecimal() and rest:
        candidates.append((int(first), rest))
    for which, rest in candidates:
        entries = manifest.of_rank(which)
        for key, named in entries.items():
            if not rest.startswith(key + "/"):
                continue
            name = rest[len(key) + 1 :]
            for spelt in (name, name.replace("/", ".")):
                if spelt in named:
                    return f"{key}/{spelt}", named[spelt]
    raise SnapshotNotFoundError(
        f"the snapshot {url!r} has no {path!r}; get_manifest() shows what it has",
        key=path,
        details={"path": url},
    )


def read_object(
    storage: Storage,
    manifest: Manifest,
    path: str,
    obj_out: Any,
    tensor_slice: TensorSlice | None,
    *,
    budget: int | None,
    rank: int,
    verify: VerifyNew,
    allow_pickle: bool,
) -> Any:
    """Read one object, or a slice of a tensor. See ``Snapshot.read_object``."""
    number: object = budget
    if number is not None and (type(number) is not int or number < 1):
        raise ConfigurationError(f"memory_budget_bytes is an int above 0, not {budget!r}")
    check = when_new(verify)
    where, entry = find(manifest, path, storage.url, rank)
    with Files(storage, manifest) as files:
        if isinstance(entry, ObjectEntry):
            return _object(files, where, entry, allow_pickle=allow_pickle)
        tensor = isinstance(obj_out, torch.Tensor) or is_sharded(obj_out)
        reads: list[Read]
        if tensor and tensor_slice is None:
            reads = tensor_reads(where, entry, obj_out)
            made = obj_out
        else:
            box = boxes.whole(entry.shape)
            if tensor_slice is not None:
                box = slice_box(where, tensor_slice, entry.shape)
            made = obj_out if tensor else empty_for(where, entry, box.shape)
            part = TensorEntry(entry.dtype, box.shape, ())
            tensor_reads(where, part, made)  # checks the destination
            reads = plan_reads(where, entry, made, box)
        execute(files, reads, check=check, budget=budget)
        return made


def state_dict_of(
    storage: Storage,
    manifest: Manifest,
    key: str,
    *,
    rank: int,
    verify: bool,
    allow_pickle: bool,
) -> dict[str, Any]:
    """Return the state dict of one key, with new tensors on the host.

    Raises:
        SnapshotNotFoundError: there is no such key.
    """
    entries: Mapping[str, Entry] | None = manifest.of_rank(rank).get(key)
    if entries is None:
        raise SnapshotNotFoundError(
            f"the snapshot {storage.url!r} has no {key!r}", key=key, details={"path": storage.url}
        )
    values: list[tuple[str, bytes, Any]] = []
    reads: list[Read] = []
    made: dict[object, torch.Tensor] = {}
    with Files(storage, manifest) as files:
        for name, entry in entries.items():
            path = f"{key}/{name}"
            if isinstance(entry, ObjectEntry):
                value = _object(files, path, entry, allow_pickle=allow_pickle)
            else:
                identity = entry.dtype, entry.shape, entry.pieces
                value = made.get(identity)
                if value is None or not entry.nbytes:  # tied tensors stay one tensor
                    value = made[identity] = empty_for(path, entry, entry.shape)
                    reads += plan_reads(path, entry, value, boxes.whole(entry.shape))
            values.append((name, entry.steps, value))
        execute(files, reads, check="during" if verify else None)
    return nesting.unflatten(key, iter(values))
