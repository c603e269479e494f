"""Which entries of a snapshot go where: state dicts are compared before anything is read."""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from torchstore_core import boxes
from torchstore_core.clients.state_dicts.getting import StateDictReport
from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.plain import look
from torchstore_core.clients.values.sharding import is_dtensor, is_sharded, local_parts, outline
from torchstore_core.clients.values.tensors import check_destination, dtype_of
from torchstore_core.errors import LayoutMismatchError, UnsupportedValueError
from torchstore_core.values import TensorMeta
from torchstore_snapshot.api.stateful import Stateful
from torchstore_snapshot.format.manifest import Entry, ObjectEntry, TensorEntry
from torchstore_snapshot.garbage import no_collections
from torchstore_snapshot.restoring.reading import Read, empty_for, plan_reads

__all__ = ["Filled", "like", "match", "state_of", "tensor_reads"]


@dataclass
class Filled:
    """What will be passed to ``load_state_dict`` of one object.

    Args:
        values: tensors by name, which ``reads`` fill.
        objects: the entries of values that are not tensors, by name.
        reads: what is to be read.
        report: the differences between the snapshot and the object.
        steps: where each name is in the nested state dict.
        state: what the object has now.
    """

    values: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, ObjectEntry] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    report: StateDictReport = field(default_factory=StateDictReport)
    steps: dict[str, bytes] = field(default_factory=dict)
    state: Any = None


def state_of(stateful: Stateful) -> Any:
    """Return the state of an object. That of a module has the parameters themselves, so that
    loading them again copies nothing.
    """
    if isinstance(stateful, torch.nn.Module):
        return stateful.state_dict(keep_vars=True)
    return stateful.state_dict()


def match(key: str, stateful: Stateful, entries: Mapping[str, Entry]) -> Filled:
    """Compare an object with the entries of a snapshot, and plan the reads into its tensors.

    Entries that the object does not have yet, as those of an optimizer before its first step, get
    new tensors; a module must have all of them. A container may take the place of what is neither
    a tensor nor a container, such as None.
    """
    state = state_of(stateful)
    with no_collections():
        return _matched(key, stateful, state, entries)


def _matched(key: str, stateful: Stateful, state: Any, entries: Mapping[str, Entry]) -> Filled:
    filled = Filled(state=state)
    parameters = _parameters(stateful)
    flat = nesting.flatten(key, filled.state, unnamed=True)
    leaves = {leaf.name: leaf.value for leaf in flat}
    module = isinstance(stateful, torch.nn.Module)
    absent = [leaf for leaf in flat if leaf.name not in entries and not _is_container(leaf.value)]
    stored = _containers(key, entries) if absent else ()
    for leaf in absent:
        tensor = isinstance(leaf.value, torch.Tensor) or is_sharded(leaf.value)
        if tensor or nesting.places(key, leaf.name, leaf.path) not in stored:
            filled.report.missing.append(f"{key}/{leaf.name}")
    values = [leaves.get(name) for name in entries]
    for (name, entry), value, plain in zip(
        entries.items(), values, look(values).metas, strict=True
    ):
        path = f"{key}/{name}"
        if name not in leaves and module:
            filled.report.unexpected.append(path)
            continue
        tensor = isinstance(value, torch.Tensor) or is_sharded(value)
        if isinstance(entry, ObjectEntry):
            if tensor:
                filled.report.mismatched[path] = f"{path!r} is no tensor in the snapshot"
                continue
            filled.objects[name] = entry
        else:
            try:
                if not tensor:
                    value = _like_parameter(path, entry, parameters, name)
                if value is None:
                    value = empty_for(path, entry, entry.shape)
                reads = tensor_reads(path, entry, value, plain)
            except (LayoutMismatchError, UnsupportedValueError) as error:
                filled.report.mismatched[path] = error.message
                continue
            filled.reads += reads
            filled.values[name] = value
        filled.steps[name] = _steps(stateful, entry)
    return filled


def _steps(stateful: Stateful, entry: Entry) -> bytes:
    """Where an entry is in the nested state dict. The state of an optimizer has numbers as keys,
    which ``torch.distributed.checkpoint`` turns into text.
    """
    if not entry.steps or not isinstance(stateful, torch.optim.Optimizer):
        return entry.steps
    steps = msgspec.msgpack.decode(entry.steps)
    number = steps[1] if len(steps) > 1 and steps[0] == "state" else None
    if not isinstance(number, str) or not number.isdecimal():
        return entry.steps
    return msgspec.msgpack.encode(["state", int(number), *steps[2:]])


def _parameters(stateful: Stateful) -> list[torch.Tensor]:
    """The parameters of an optimizer, in the order of its state; none of anything else."""
    if not isinstance(stateful, torch.optim.Optimizer):
        return []
    return [p for group in stateful.param_groups for p in group["params"]]


def _like_parameter(
    path: str, entry: TensorEntry, parameters: Sequence[torch.Tensor], name: str
) -> Any | None:
    """A new tensor for the state of an optimizer that has none yet, if it is to be distributed like
    the parameter that it belongs to; otherwise None.
    """
    first, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    if first != "state" or not number.isdecimal() or int(number) >= len(parameters):
        return None
    parameter = parameters[int(number)]
    if not is_dtensor(parameter) or tuple(parameter.shape) != entry.shape:
        return None
    dtype = dtype_of(TensorMeta(entry.dtype, entry.shape), path)
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)


def _containers(key: str, entries: Mapping[str, Entry]) -> Collection[tuple[str | int, ...]]:
    """Where the snapshot has containers, with entries in them."""
    found: set[tuple[str | int, ...]] = set()
    for name, entry in entries.items():
        way = nesting.places(key, name, entry.steps)
        found.update(way[:length] for length in range(1, len(way)))
    return found


def like(state: Any, made: Any, pickled: Collection[int] = ()) -> Any:
    """Give the containers of a restored state the types of those that are in the object now. Those
    of the standard library are stored as plain dicts and tuples.

    Args:
        state: what the object has now.
        made: what was restored. Dicts and lists are changed in place.
        pickled: ids of values in it that have their types already.

    >>> like({"milestones": Counter([5])}, {"milestones": {2: 1, 3: 2}})
    {'milestones': Counter({3: 2, 2: 1})}
    """
    if id(made) in pickled:
        return made
    if type(made) is dict and isinstance(state, Mapping):
        for name, value in made.items():
            if type(value) in _PLAIN:
                made[name] = like(state.get(name), value, pickled)
        if type(state) is Counter or type(state) is OrderedDict:
            return type(state)(made)
        return defaultdict(state.default_factory, made) if type(state) is defaultdict else made
    if type(made) in (list, tuple) and isinstance(state, list | tuple):
        own = [*state[: len(made)], *[None] * (len(made) - len(state))]
        inner = [like(now, value, pickled) for now, value in zip(own, made, strict=True)]
        if type(made) is list:
            made[:] = inner
            return made
        named = hasattr(state, "_make") and len(state) == len(made)
        return state._make(inner) if named else tuple(inner)  # type: ignore[union-attr]
    return made


_PLAIN = (dict, list, tuple)


def _is_container(value: Any) -> bool:
    """Whether a value is an empty container, in whose place the snapshot may have entries."""
    return isinstance(value, Mapping | list | tuple) and not value


_whole = functools.lru_cache(maxsize=4096)(boxes.whole)


def tensor_reads(
    path: str, entry: TensorEntry, value: Any, plain: TensorMeta | None = None
) -> list[Read]:
    """Plan the reads that fill a tensor, a DTensor or a shard.

    Args:
        plain: what the value is, if :func:`.plain.look` has found it to be a plain tensor: then
            there is nothing else to be checked.

    Raises:
        LayoutMismatchError: its shape or dtype is not that of the entry.
        UnsupportedValueError: it cannot be written to.
    """
    meta = TensorMeta(entry.dtype, entry.shape)
    if plain == meta:  # nearly all are
        return plan_reads(path, entry, value.detach(), _whole(entry.shape))
    dtype = dtype_of(meta, path)
    if not is_sharded(value):
        target = check_destination(path, value, entry.shape, dtype, cast=False)
        return plan_reads(path, entry, target, _whole(entry.shape))
    reads: list[Read] = []
    _, shape = outline(value)
    if shape != entry.shape:
        raise _mismatch(path, entry, shape)
    for local, part in local_parts(path, value):
        target = check_destination(path, local, tuple(part.local_shape), dtype, cast=False)
        reads += plan_reads(path, entry, target, boxes.Box(part.offsets, part.local_shape))
    return reads


def _mismatch(path: str, entry: TensorEntry, shape: tuple[int, ...]) -> LayoutMismatchError:
    return LayoutMismatchError(
        f"{path!r} has the shape {list(entry.shape)} in the snapshot, the destination is a part of "
        f"{list(shape)}; nothing was written",
        key=path,
    )
