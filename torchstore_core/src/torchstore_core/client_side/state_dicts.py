"""State dicts: what a participant puts of one, and how a reader gets one version of it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import msgspec
import torch

from torchstore_core.client_side import nesting, reading, writing
from torchstore_core.client_side.lane import Lane
from torchstore_core.client_side.nesting import Leaf
from torchstore_core.client_side.operations import Clock, Leasing, Putting, Want, asks_of
from torchstore_core.client_side.packed import TorchStoreStateDict
from torchstore_core.client_side.session import Session
from torchstore_core.client_side.sharding import (
    TensorShard,
    is_dtensor,
    is_sharded,
    mesh_ranks,
    takes_part,
    this_rank,
)
from torchstore_core.client_side.tensors import dtype_name
from torchstore_core.errors import (
    ConfigurationError,
    LayoutMismatchError,
    UnsupportedValueError,
)
from torchstore_core.values import ObjectRef, TensorMeta
from torchstore_core.wire import messages as m

__all__ = ["PendingPut", "StateDictReport", "fetch", "plan_get", "plan_put"]

log = logging.getLogger(__name__)

Casts = torch.dtype | Mapping[str, torch.dtype | None] | None


# ---- put ----------------------------------------------------------------------------------


class PendingPut:
    """A state dict whose values may be changed again, while its commit is under way.

    Awaiting it gives the ``ObjectRef``, or raises what went wrong. One that is never awaited
    still commits, if its event loop lives long enough; it logs what went wrong.
    """

    def __init__(self, key: str, putting: Putting | None) -> None:
        self.key = key
        self._ref: ObjectRef | None = None
        self._task: asyncio.Task[ObjectRef] | None = None
        if putting is not None:
            self._task = asyncio.create_task(self._commit(putting))
            # Not in the task: one that is cancelled before it begins would undo nothing.
            self._task.add_done_callback(putting.__exit__)
            putting.undo_with(self._task)
            self._task.add_done_callback(_ended)

    @classmethod
    def finished(cls, ref: ObjectRef) -> PendingPut:
        """One with nothing left to do."""
        made = cls(ref.key, None)
        made._ref = ref
        return made

    def __repr__(self) -> str:
        return f"<PendingPut of {self.key!r}, {'done' if self.done() else 'committing'}>"

    def done(self) -> bool:
        """Whether the commit has ended, one way or the other."""
        return self._task is None or self._task.done()

    def __await__(self) -> Generator[Any, None, ObjectRef]:
        return self._result().__await__()

    async def _result(self) -> ObjectRef:
        if self._task is not None:
            return await asyncio.shield(self._task)
        if self._ref is None:
            raise ConfigurationError("a PendingPut is made by put_state_dict(blocking=False)")
        return self._ref

    async def _commit(self, putting: Putting) -> ObjectRef:
        versions = await putting.commit()
        return ObjectRef(self.key, versions[0])


def _ended(task: asyncio.Task[ObjectRef]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("a put_state_dict with blocking=False failed: %s", error)


def plan_put(
    state_dict: Any,
    key: str,
    *,
    participants: int | None,
    participant: str | int | None,
    transfer_dtype: Casts,
    partial: bool,
    keep: int,
    anonymous: str,
    allow_pickle: bool,
) -> tuple[list[writing.Source], m.Publication | None]:
    """Look at every entry once: what is to be stored, and as part of what; None: of nothing, for
    this rank is in no mesh of its DTensors.

    Args:
        anonymous: who this process is if it has no rank.

    Raises:
        ConfigurationError, UnsupportedValueError, LayoutMismatchError, UnsafeObjectError
    """
    for name, number in (("participants", participants), ("keep", keep)):
        if number is not None and (type(number) is not int or number < 1):
            raise ConfigurationError(f"{name} is an int above 0, not {number!r}")
    packed = state_dict if isinstance(state_dict, TorchStoreStateDict) else None
    leaves = nesting.flatten(key, state_dict) if packed is None else packed.leaves()
    ranks: frozenset[int] = frozenset()
    outside = False
    ties = _Ties()
    sources: list[writing.Source] = []
    casts = _Casts(transfer_dtype)
    for leaf in leaves:
        name, path, value = leaf.name, leaf.path, leaf.value
        if type(value) not in _PLAIN and is_dtensor(value):
            outside = not takes_part(value) and (outside or not ranks)
            ranks |= mesh_ranks(value)
        dtype = casts.of(name)
        first = ties.find(value, len(sources))
        if first is not None and sources[first].meta == _meta_with(value, dtype):
            meta = sources[first].meta
            sources.append(writing.Source(name, meta, 0, None, b"", None, path, first))
            continue
        made = writing.prepare(name, value, allow_pickle=allow_pickle, dtype=dtype)
        if path:
            made = [msgspec.structs.replace(source, path=path) for source in made]
        sources.extend(made)
    if packed is not None:
        participants = participants or packed.participants
        participant = packed.participant or None if participant is None else participant
    if participants is None:
        if outside:
            return [], None
        participants = len(ranks) or 1
    who = ""  # one that is alone needs no name: whoever puts next makes the next version
    if participants > 1:
        who = str(participant) if participant is not None else this_rank()
        who = who or f"{anonymous} {_digest(leaves)}"
    group = m.Publication(key, who, participants, partial, keep, packed is not None)
    return sources, group


def _digest(leaves: Sequence[Leaf]) -> str:
    """Tells participants without a rank apart that hold different entries."""
    names = "\0".join(leaf.name for leaf in leaves)
    return hashlib.sha1(names.encode("utf-8", "replace"), usedforsecurity=False).hexdigest()[:8]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Ties:
    """Finds tensors that are the same elements in memory as an earlier one."""

    def __init__(self) -> None:
        self._found: dict[object, list[tuple[Any, int]]] = {}

    def find(self, value: Any, mark: int) -> int | None:
        """The mark of the first such tensor; None, and ``mark`` is remembered, if it is new."""
        tensor = value
        if type(value) not in _PLAIN:
            if isinstance(value, TensorShard):
                tensor = value.tensor
            elif is_dtensor(value):
                tensor = value.to_local().detach()
            if type(tensor) not in _PLAIN:
                return None
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return None
        address = tensor.data_ptr()
        if not address or not tensor.numel():
            return None
        others = self._found.get(address)
        if others is None:
            self._found[address] = [(value, mark)]
            return None
        here = _identity(value)
        for other, earlier in others:
            if _identity(other) == here:
                return earlier
        others.append((value, mark))
        return None


def _identity(value: Any) -> object:
    """Equal for tensors at one address if they are the same elements."""
    if isinstance(value, TensorShard):
        return _identity(value.tensor), value.tensor_slice
    if is_dtensor(value):
        local = _identity(value.to_local().detach())
        return local, value.device_mesh, tuple(value.placements), tuple(value.shape)
    flags = value.is_conj(), value.is_neg(), value.device
    return value.shape, value.stride(), value.dtype, flags


def _meta_with(value: Any, dtype: torch.dtype | None) -> TensorMeta:
    """How the entry would be stored."""
    if isinstance(value, TensorShard):
        shape, own = value.tensor_slice.global_shape, value.tensor.dtype
    else:
        shape, own = tuple(value.shape), value.dtype
    if dtype is None or not own.is_floating_point:
        dtype = own
    return TensorMeta(dtype_name(dtype), tuple(shape))


_WILDCARD = re.compile(r"[*?]|\[.[^]]*\]")


class _Casts:
    """Which dtype an entry is stored in."""

    def __init__(self, wanted: Casts) -> None:
        self._all: torch.dtype | None = None
        self._patterns: list[tuple[str, torch.dtype | None]] = []
        if isinstance(wanted, torch.dtype):
            self._all = _floating(wanted)
        elif isinstance(wanted, Mapping):
            for pattern, dtype in wanted.items():
                if not isinstance(pattern, str):
                    raise ConfigurationError(f"transfer_dtype: a pattern is a str, not {pattern!r}")
                self._patterns.append((pattern, None if dtype is None else _floating(dtype)))
            # The most literal characters first.
            self._patterns.sort(key=lambda item: -len(_WILDCARD.sub("", item[0])))
        elif wanted is not None:
            raise ConfigurationError(
                f"transfer_dtype is a torch.dtype or a dict of patterns, not {wanted!r}"
            )

    def of(self, name: str) -> torch.dtype | None:
        """The dtype of an entry; None: its own."""
        for pattern, dtype in self._patterns:
            if fnmatchcase(name, pattern):
                return dtype
        return self._all


def _floating(dtype: object) -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise ConfigurationError(f"transfer_dtype is a floating-point dtype, not {dtype!r}")


# ---- get ----------------------------------------------------------------------------------


@dataclass
class StateDictReport:
    """What did not match between a stored state dict and the one to fill.

    Args:
        missing: entries to fill that are not stored.
        unexpected: entries that are stored, but that there is nothing to fill for.
        mismatched: why an entry does not fit, by name.
        version: the version that was read.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    version: int = 0

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        parts: list[str] = []
        for what, names in (("missing", self.missing), ("unexpected", self.unexpected)):
            if names:
                parts.append(f"{len(names)} {what}: {', '.join(map(repr, names))}")
        if self.mismatched:
            why = "; ".join(self.mismatched.values())
            parts.append(f"{len(self.mismatched)} mismatched: {why}")
        return "; ".join(parts) or "everything matched"


class Wanted(NamedTuple):
    """A reader's state dict, looked at once.

    Args:
        asks: what to ask for; mostly one for each leaf, several for one in several pieces.
        places: which leaf each of them is for.
        same_as: leaves that share the memory of an earlier one, and which.
    """

    state_dict: Any
    leaves: list[Leaf]
    asks: list[Want]
    places: list[int]
    same_as: dict[int, int]


def plan_get(key: str, user_state_dict: Any) -> Wanted | None:
    """What to ask for to fill a state dict; None: for everything.

    Raises:
        UnsupportedValueError, LayoutMismatchError: a destination that contradicts itself.
    """
    if user_state_dict is None:
        return None
    leaves = nesting.flatten(key, user_state_dict)
    ties = _Ties()
    same_as: dict[int, int] = {}
    asks: list[Want] = []
    places: list[int] = []
    for at, leaf in enumerate(leaves):
        name, value = leaf.name, leaf.value
        plain = type(value) in _PLAIN
        tensor = value if plain or isinstance(value, torch.Tensor) or is_sharded(value) else None
        if tensor is not None and (first := ties.find(value, at)) is not None:
            same_as[at] = first
        want = Want(name, 0, tensor, None)
        if plain or tensor is None:
            asks.append(want)
            places.append(at)
        else:
            parts = asks_of(want)
            asks += parts
            places += [at] * len(parts)
    return Wanted(user_state_dict, leaves, asks, places, same_as)


class Filling(NamedTuple):
    """How a reader wants it; see ``Client.get_state_dict``."""

    strict: bool = True
    cast: bool = False
    report: StateDictReport | None = None
    allow_pickle: bool = True


class Fetched(NamedTuple):
    """What a get gave."""

    state_dict: Any
    entries: int
    nbytes: int
    transport: str


async def fetch(
    session: Session,
    lane: Lane,
    key: str,
    version: int,
    wanted: Wanted | None,
    clock: Clock,
    how: Filling,
) -> Fetched:
    """One message, one lease, one batch of copies.

    Raises:
        LayoutMismatchError: ``how.strict`` and something does not match; nothing was written.
    """
    with Leasing(session, lane, clock) as leasing:
        wants = None if wanted is None else [ask.wire() for ask in wanted.asks]
        request = m.Fetch(lane.next_id(), leasing.lease, key, version, wants, session.inline_max())
        reply = await lane.call(request, m.Fetched, clock.left())
        starts = leasing.granted(reply.entries, reply.leased)
        clock.phase("plan")
        if how.report is not None:
            how.report.version = reply.version
        if wanted is None:
            targets = _whole(reply, starts)
        else:
            found = how.report if how.report is not None else StateDictReport()
            targets = _matching(wanted, reply, starts, found, cast=how.cast)
            if found and how.strict:
                raise LayoutMismatchError(
                    f"{key!r} version {reply.version} does not match; nothing was written. {found}",
                    key=key,
                    details={
                        "missing": found.missing,
                        "unexpected": found.unexpected,
                        "mismatched": found.mismatched,
                    },
                )
            if found:
                log.warning("%r version %d: %s", key, reply.version, found)
        result = await leasing.read(targets, how.allow_pickle)
    nbytes = sum([target.nbytes for target in targets])
    if wanted is None:
        made = _rebuilt(key, reply, result.values)
    else:
        made = _filled(wanted, targets, result.values)
    return Fetched(made, len(targets), nbytes, result.transport)


def _whole(reply: m.Fetched, starts: Sequence[int]) -> list[reading.Target]:
    """Targets for all entries, as new tensors and objects; tied ones once."""
    tied = {i for i, _ in reply.same_as}
    return [
        reading.resolve(at, start, name, entry)
        for at, (name, entry, start) in enumerate(
            zip(reply.names, reply.entries, starts, strict=True)
        )
        if entry is not None and at not in tied
    ]


def _rebuilt(key: str, reply: m.Fetched, values: dict[int, Any]) -> dict[str, Any]:
    for i, j in reply.same_as:
        values[i] = values[j]
    paths = reply.paths
    found = ((name, paths.get(i, b""), values[i]) for i, name in enumerate(reply.names))
    return nesting.unflatten(key, found)


def _matching(
    wanted: Wanted,
    reply: m.Fetched,
    starts: Sequence[int],
    report: StateDictReport,
    *,
    cast: bool,
) -> list[reading.Target]:
    """Targets for the entries that match; what does not, goes into the report.

    Destinations that share their memory are filled once, from the first of them that is stored.
    """
    leaves = wanted.leaves
    report.mismatched = {}
    report.unexpected = reply.names
    if reply.names:  # a leaf of which no piece is here was not asked for
        absent = {leaves[at].name for at in set(range(len(leaves))) - set(wanted.places)}
        report.unexpected = [name for name in reply.names if name not in absent]
    targets: list[reading.Target] = []
    missing: dict[int, int] = {}
    filled: dict[int, int] = {}
    failed = -1
    asked = zip(wanted.asks, wanted.places, reply.entries, starts, strict=True)
    for at, (ask, place, entry, start) in enumerate(asked):
        memory = wanted.same_as.get(place, place)
        if entry is None:
            missing[place] = memory
            continue
        if place == failed:
            continue
        leaf = leaves[place]
        try:
            _check_kind(leaf, ask, entry)
            target = reading.resolve(at, start, leaf.name, entry, ask.tensor, ask.part, cast=cast)
        except (LayoutMismatchError, UnsupportedValueError) as error:
            report.mismatched[leaf.name] = error.message.removesuffix("; nothing was written")
            failed = place
            while targets and targets[-1].key == leaf.name:
                targets.pop()
            if filled.get(memory) == place:
                del filled[memory]
            continue
        if filled.setdefault(memory, place) == place:
            targets.append(target)
    report.missing = [leaves[at].name for at, memory in missing.items() if memory not in filled]
    return targets


def _check_kind(leaf: Leaf, ask: Want, entry: m.Entry) -> None:
    if ask.tensor is None and leaf.value is not None and isinstance(entry.meta, TensorMeta):
        raise LayoutMismatchError(
            f"{leaf.name!r} is stored as a tensor, the destination is a "
            f"{type(leaf.value).__qualname__}"
        )


def _filled(wanted: Wanted, targets: Sequence[reading.Target], values: dict[int, Any]) -> Any:
    """The reader's state dict with the values that are no tensors of its own."""
    new = {target.key: values[target.at] for target in targets if target.tensor is None}
    return nesting.replace(wanted.state_dict, wanted.leaves, new.get)
