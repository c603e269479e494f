"""A restore, from the manifest to ``load_state_dict``, and access to single objects."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch

from torchstore_core import boxes
from torchstore_core.clients.calls.arguments import check_bools
from torchstore_core.clients.state_dicts.getting import StateDictReport
from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.codec import PICKLE, decode_object
from torchstore_core.clients.values.differences import mismatch_error
from torchstore_core.clients.values.overlaps import (
    are_disjoint,
    extent,
    find_overlap,
    overlap_error,
)
from torchstore_core.clients.values.sharding import is_sharded, local_parts
from torchstore_core.clients.values.tensors import slice_box
from torchstore_core.errors import ConfigurationError, LayoutMismatchError
from torchstore_core.values import ObjectMeta, TensorSlice
from torchstore_snapshot.api.stateful import AppState, RNGState, Stateful, checked
from torchstore_snapshot.errors import SnapshotNotFoundError
from torchstore_snapshot.format.manifest import Entry, Manifest, ObjectEntry, TensorEntry
from torchstore_snapshot.progress import Progress, check_progress
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.restoring.destinations import Filled, like, match, tensor_reads
from torchstore_snapshot.restoring.files import Files
from torchstore_snapshot.restoring.reading import (
    Check,
    Read,
    empty_for,
    execute,
    plan_reads,
    read_piece,
)
from torchstore_snapshot.stopping import check as check_stopped
from torchstore_snapshot.storage.base import Storage

__all__ = ["Verify", "VerifyNew", "find", "read_object", "restore", "state_dict_of", "when_new"]

#: Whether hashes are compared, and when: True: before anything is written to.
Verify = bool | Literal["streaming", "all"]
#: The same where tensors are new.
VerifyNew = bool | Literal["all"]


class _Ready(msgspec.Struct, array_like=True):
    """That a rank has got so far."""


_Loads = list[tuple[Stateful, dict[str, Any]]]


class _Planned:
    """What a rank restores: what matches, and the differences."""

    def __init__(self) -> None:
        self.report = StateDictReport()
        self.filled: list[tuple[str, Stateful, Filled]] = []


def restore(
    storage: Storage,
    manifest_of: Callable[[], Manifest],
    app_state: AppState,
    ranks: Ranks,
    *,
    strict: bool,
    verify: Verify,
    allow_pickle: bool,
    progress: Progress = False,
) -> StateDictReport:
    """Restore every object of the application state. Called by all ranks: none of them writes to
    anything before all of them have compared names, shapes and, unless ``verify`` is
    ``"streaming"`` or False, hashes.

    Args:
        manifest_of: returns the manifest; what it raises is told to the other ranks, too.

    Raises:
        LayoutMismatchError: ``strict`` is set and something does not match, or two destinations
            share a part of their memory; nothing was written.
        SnapshotCorruptError: the snapshot is damaged; nothing was written, unless ``verify`` is
            ``"streaming"``.
        UnsafeObjectError: a value was pickled, and ``allow_pickle`` is False.
        RankFailedError: one of these was raised on another rank.
    """
    agreed: list[bool] = []  # that the ranks have been told, and have told this one

    def agree(error: BaseException | None = None) -> None:
        agreed.append(True)
        ranks.exchange(_Ready(), _Ready, error)
        agreed.pop()

    loads: _Loads = []
    try:
        check = _when(verify)
        check_bools(strict=strict)
        check_progress(progress)
        checked(app_state)  # first: whatever there is at the path, it is wrong
        manifest = manifest_of()
        planned = _plan(storage, manifest, app_state, ranks, strict=strict)
        with Files(storage, manifest) as files:
            loads = _loads(files, planned, allow_pickle=allow_pickle)
            reads = [read for _, _, filled in planned.filled for read in filled.reads]
            execute(files, reads, check=check, progress=progress, ready=agree)
        check_stopped()
    except BaseException as error:
        if not agreed:
            agree(error)
        raise
    # What was damaged when it was read, and a file that changed meanwhile, concern all ranks, too.
    agree()
    # The state of the random number generator last, because others may draw from it.
    for stateful, state in sorted(loads, key=lambda load: isinstance(load[0], RNGState)):
        _load(stateful, state, strict=strict)
    return planned.report


def _plan(
    storage: Storage, manifest: Manifest, app_state: AppState, ranks: Ranks, *, strict: bool
) -> _Planned:
    """Compare what this rank has with what it gets.

    Raises:
        LayoutMismatchError: ``strict`` is set and something does not match; or two destinations
            share a part of their memory.
    """
    available = manifest.of_rank(ranks.rank)
    new_rank = ranks.rank >= manifest.world_size
    planned = _Planned()
    report = planned.report
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
        planned.filled.append((key, stateful, filled))
    reads = [read for _, _, filled in planned.filled for read in filled.reads]
    if not are_disjoint([r.target.data_ptr() for r in reads], [extent(r.target) for r in reads]):
        _refuse_overlaps(planned)
        _compare_tied(planned, reads)
    if report and strict:
        hint = ""
        if new_rank and report.missing and any(manifest.own):
            hint = (
                f"The snapshot was taken by {manifest.world_size} ranks, and this is rank "
                f"{ranks.rank}: it gets what is sharded or the same on all ranks. Give strict="
                "False to keep its own values, or name them in replicated= when taking"
            )
        raise mismatch_error(f"the snapshot {storage.url!r}", report, hint=hint)
    return planned


def _refuse_overlaps(planned: _Planned) -> None:
    """Refuse destinations that share a part of their memory, and are not the same tensor: what is
    in that part afterwards would depend on which of them is filled last.

    Raises:
        LayoutMismatchError: names two of them.
    """
    paths: list[str] = []
    tensors: list[torch.Tensor] = []
    for key, _, filled in planned.filled:
        for name, value in filled.values.items():
            path = f"{key}/{name}"
            parts = [part for part, _ in local_parts(path, value)] if is_sharded(value) else [value]
            paths += [path] * len(parts)
            tensors += parts
    found = find_overlap(tensors)
    if found is not None:
        raise overlap_error(paths[found[0]], paths[found[1]])


def _compare_tied(planned: _Planned, reads: Sequence[Read]) -> None:
    """Find entries with different values that would be read into one and the same tensor, such as
    those of a model whose weights were not tied when it was taken. They are mismatched, except for
    the first one, which is what that tensor gets.
    """
    firsts: dict[object, Read] = {}
    mismatched = planned.report.mismatched
    for read in reads:
        to = read.target
        view = to.device, to.data_ptr(), to.dtype, to.shape, to.stride()
        first = firsts.setdefault(view, read)
        if first.piece.digest == read.piece.digest:
            continue
        # The same part of pieces with the same shape: otherwise hashes say nothing.
        parts = [(r.source.shape, boxes.relative(r.box, r.source)) for r in (first, read)]
        if parts[0] == parts[1]:
            mismatched[read.path] = (
                f"it is not the same as {first.path!r}, and the destination has one tensor for both"
            )
    for _, _, filled in planned.filled:
        filled.reads = [read for read in filled.reads if read.path not in mismatched]


def _loads(files: Files, planned: _Planned, *, allow_pickle: bool) -> _Loads:
    """Return what is given to each object's ``load_state_dict``; objects are read for that, and
    tensors are those that will be filled.
    """
    loads: _Loads = []
    for key, stateful, filled in planned.filled:
        values = dict(filled.values)
        pickled: set[int] = set()
        for name, entry in filled.objects.items():
            values[name] = _object(files, f"{key}/{name}", entry, allow_pickle=allow_pickle)
            if entry.codec == PICKLE:
                pickled.add(id(values[name]))
        ordered = ((name, filled.steps[name], values[name]) for name in filled.steps)
        state = nesting.unflatten(key, ordered)
        if not isinstance(stateful, torch.nn.Module):
            state = like(filled.state, state, pickled)
        loads.append((stateful, state))
    return loads


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


def find(manifest: Manifest, path: str, url: str, rank: int = 0) -> tuple[str, Entry, list[str]]:
    """Return the entry of an object, its path without a rank, and where in the entry's value the
    object is: the steps into a container without tensors, which is one entry.

    Args:
        path: ``"key/name"``, or ``"rank/key/name"`` for what that rank alone has; names of nested
            entries have dots or slashes.
        rank: whose entries are meant if the path has no rank.

    Raises:
        SnapshotNotFoundError: there is no such object.
    """
    given: object = path
    if not isinstance(given, str):
        raise ConfigurationError(f"the path of an object is a str, not {given!r}")
    first, _, rest = path.partition("/")
    candidates = [(rank, path)]
    if first.isdecimal() and rest:
        candidates.append((int(first), rest))
    around: tuple[str, Entry, list[str]] | None = None
    for which, rest in candidates:
        entries = manifest.of_rank(which)
        for key, named in entries.items():
            if not rest.startswith(key + "/"):
                continue
            name = rest[len(key) + 1 :]
            for outer, steps in _divisions(name):
                entry = named.get(outer)
                if entry is not None and not steps:
                    return f"{key}/{outer}", entry, steps
                if around is None and isinstance(entry, ObjectEntry):
                    around = f"{key}/{outer}", entry, steps
    if around is None:
        raise _not_found(path, url)
    return around


def _divisions(name: str) -> Iterator[tuple[str, list[str]]]:
    """The entries that a name may be in, the longest name first, and the steps from there."""
    yield name, []
    yield name.replace("/", "."), []
    for dot in reversed([*re.finditer("[./]", name)]):
        outer, inner = name[: dot.start()], re.split("[./]", name[dot.end() :])
        yield outer, inner
        yield outer.replace("/", "."), inner


def _within(value: Any, steps: Sequence[str]) -> Any:
    """Return what is in a container.

    Raises:
        LookupError, ValueError: it is not there.
    """
    for step in steps:
        if isinstance(value, dict):
            value = value[step] if step in value else value[int(step)]
        elif isinstance(value, list | tuple) and step.isdecimal():
            value = value[int(step)]
        else:
            raise LookupError(step)
    return value


def _not_found(path: str, url: str) -> SnapshotNotFoundError:
    return SnapshotNotFoundError(
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
    if tensor_slice is not None and not isinstance(tensor_slice, TensorSlice):
        raise ConfigurationError(f"tensor_slice is a TensorSlice, or None, not {tensor_slice!r}")
    destination = _destination(obj_out)
    where, entry, steps = find(manifest, path, storage.url, rank)
    with Files(storage, manifest) as files:
        if isinstance(entry, ObjectEntry):
            if destination is not None or tensor_slice is not None:
                raise LayoutMismatchError(
                    f"{where!r} is no tensor in the snapshot: it has no slices, and cannot be read "
                    "into a tensor",
                    key=where,
                )
            value = _object(files, where, entry, allow_pickle=allow_pickle)
            try:
                return _within(value, steps)
            except (LookupError, ValueError) as error:
                raise _not_found(path, storage.url) from error
        if destination is None and obj_out is not None:
            raise LayoutMismatchError(
                f"{where!r} is a tensor in the snapshot, and obj_out a "
                f"{type(obj_out).__qualname__}; give a tensor, or None for a new one",
                key=where,
            )
        made: Any = destination
        reads: list[Read]
        if made is not None and tensor_slice is None:
            reads = tensor_reads(where, entry, made)
        else:
            box = boxes.whole(entry.shape)
            if tensor_slice is not None:
                box = slice_box(where, tensor_slice, entry.shape)
            if made is None:
                made = empty_for(where, entry, box.shape)
            part = TensorEntry(entry.dtype, box.shape, ())
            tensor_reads(where, part, made)  # checks the destination
            reads = plan_reads(where, entry, made, box)
        execute(files, reads, check=check, budget=budget)
        return made if obj_out is None else obj_out


def _destination(obj_out: Any) -> Any:
    """The tensor that is filled: for a numpy array, one with its memory; None for another object.

    Raises:
        LayoutMismatchError: torch has no tensor with the memory of that array.
    """
    if isinstance(obj_out, torch.Tensor) or is_sharded(obj_out):
        return obj_out
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(obj_out, numpy.ndarray):
        return None
    try:
        if not obj_out.flags.writeable:
            raise ValueError("it is read-only")
        return torch.from_numpy(obj_out)
    except (TypeError, ValueError) as error:
        raise LayoutMismatchError(
            f"the numpy array given as obj_out cannot be filled: {error}; give a tensor"
        ) from error


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
        ConfigurationError: the key is no str, or ``verify`` no bool.
    """
    given: object = key
    if not isinstance(given, str):
        raise ConfigurationError(f"the key of a state dict is a str, not {given!r}")
    check_bools(verify=verify)
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
