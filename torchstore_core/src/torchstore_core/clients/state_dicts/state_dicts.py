"""State dicts: putting the part of one participant, and getting one consistent version."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch

from torchstore_core.clients.calls.arguments import check_key
from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.packed.packed import TorchStoreStateDict
from torchstore_core.clients.session.channel import Channel, MessageTooLargeError
from torchstore_core.clients.session.session import Session
from torchstore_core.clients.state_dicts.casting import CastPlan, Casts
from torchstore_core.clients.state_dicts.ties import PLAIN, Ties, are_apart, shared
from torchstore_core.clients.transfer.gets import Leasing, Reach, Want, asks_of
from torchstore_core.clients.transfer.puts import Putting
from torchstore_core.clients.transfer.sources import (
    Source,
    plain_source,
    prepare,
    prepare_tensor,
)
from torchstore_core.clients.transfer.targets import Plain, Target, plain_targets, resolve
from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.nesting import Leaf
from torchstore_core.clients.values.plain import look
from torchstore_core.clients.values.sharding import (
    TensorShard,
    is_dtensor,
    is_sharded,
    mesh_ranks,
    takes_part,
    this_rank,
)
from torchstore_core.clients.values.tensors import dtype_name
from torchstore_core.errors import (
    ConfigurationError,
    LayoutMismatchError,
    UnsafeObjectError,
    UnsupportedValueError,
)
from torchstore_core.values import ObjectRef, TensorMeta, TensorSlice
from torchstore_core.wire import messages as m

__all__ = ["PendingPut", "StateDictReport", "fetch", "plan_get", "plan_put"]

log = logging.getLogger(__name__)


# ---- put ----------------------------------------------------------------------------------


class PendingPut:
    """A put of a state dict that is still committing, but whose values may be changed again.

    Awaiting it returns the ``ObjectRef``, or raises the error of the commit. If it is never
    awaited, it still commits, provided that its event loop lives long enough; an error is logged.
    """

    def __init__(self, key: str, putting: Putting | None) -> None:
        self.key = key
        self._ref: ObjectRef | None = None
        self._error: BaseException | None = None
        self._task: asyncio.Task[ObjectRef] | None = None
        if putting is not None:
            self._task = asyncio.create_task(self._commit(putting))
            # Not inside the task: a task that is cancelled before it starts would undo nothing.
            self._task.add_done_callback(putting.__exit__)
            putting.undo_with(self._task)
            putting.clock.outlives_call = True
            self._task.add_done_callback(functools.partial(self._ended, putting.clock))

    @classmethod
    def finished(cls, ref: ObjectRef) -> PendingPut:
        """A put that is already complete."""
        made = cls(ref.key, None)
        made._ref = ref
        return made

    def __repr__(self) -> str:
        return f"<PendingPut of {self.key!r}, {'done' if self.done() else 'committing'}>"

    def done(self) -> bool:
        """Whether the commit has ended, successfully or not."""
        return self._task is None or self._task.done()

    def __await__(self) -> Generator[Any, None, ObjectRef]:
        return self._result().__await__()

    async def _result(self) -> ObjectRef:
        if self._task is not None:
            return await asyncio.shield(self._task)
        if self._error is not None:
            raise self._error
        if self._ref is None:
            raise ConfigurationError("a PendingPut is made by put_state_dict(blocking=False)")
        return self._ref

    async def _commit(self, putting: Putting) -> ObjectRef:
        versions = await putting.commit()
        putting.clock.version = versions[0]
        return ObjectRef(self.key, versions[0])

    def _ended(self, clock: Clock, task: asyncio.Task[ObjectRef]) -> None:
        if task.cancelled():
            clock.end(asyncio.CancelledError())
            return
        self._task = None  # the task refers to its event loop, which may never be closed
        self._error = task.exception()
        clock.end(self._error)
        if self._error is None:
            self._ref = task.result()
        else:
            log.warning("a put_state_dict with blocking=False failed: %s", self._error)


def plan_put(
    state_dict: Any,
    key: str,
    *,
    participants: int | None = None,
    participant: str | int | None = None,
    transfer_dtype: Casts = None,
    partial: bool = False,
    keep: int | None = None,
    anonymous: str,
    allow_pickle: bool,
) -> tuple[list[Source], m.Publication | None]:
    """Inspect every entry once. Returns the sources to store and the publication that they belong
    to; None instead of a publication if this rank is in no mesh of its DTensors.

    Args:
        anonymous: how to identify this process if it has no rank.

    Raises:
        ConfigurationError, UnsupportedValueError, LayoutMismatchError, UnsafeObjectError
    """
    for name, number in (("participants", participants), ("keep", keep)):
        if number is not None and (type(number) is not int or not 0 < number < 1 << 31):
            raise ConfigurationError(f"{name} is an int above 0, not {number!r}")
    if type(partial) is not bool:
        raise ConfigurationError(f"partial is a bool, not {partial!r}")
    if participant is not None and not (
        type(participant) is int or (isinstance(participant, str) and len(participant) <= 256)
    ):
        raise ConfigurationError(
            f"participant is an int, or a str of at most 256 characters, not {participant!r}"
        )
    packed = state_dict if isinstance(state_dict, TorchStoreStateDict) else None
    leaves = nesting.flatten(key, state_dict) if packed is None else packed.leaves()
    ranks: frozenset[int] = frozenset()
    outside = False
    places: dict[tuple[int, ...], tuple[int, ...]] = {}  # of TensorShards: coordinates by mesh
    ties = Ties()
    sources: list[Source] = []
    casts = CastPlan(transfer_dtype)
    looked = look([leaf.value if transfer_dtype is None else None for leaf in leaves])
    tied = shared(looked.addresses)
    columns = zip(leaves, looked.metas, looked.sizes, looked.addresses, strict=True)
    for leaf, looks_like, nbytes, address in columns:
        name, path, value = leaf.name, leaf.path, leaf.value
        fits = len(key) + 1 + len(name) <= m.MAX_KEY
        if looks_like is not None and address not in tied and fits:
            sources.append(plain_source(name, looks_like, nbytes, value, path))
            continue
        plain = type(value) in PLAIN
        if not plain and is_dtensor(value):
            outside = not takes_part(value) and (outside or not ranks)
            ranks |= mesh_ranks(value)
        elif (
            not plain
            and isinstance(value, TensorShard)
            and isinstance(value.tensor_slice, TensorSlice)
        ):
            part = value.tensor_slice
            places[tuple(part.mesh_shape)] = tuple(part.coordinates)
        if not fits:
            raise UnsupportedValueError(
                f"{key!r}: the name of an entry is too long: {len(name)} characters; with the key "
                f"and a slash it may have {m.MAX_KEY}",
                key=key,
            )
        dtype = casts.of(name)
        first = ties.find(value, len(sources))
        if first is not None and sources[first].meta == _meta_with(value, dtype):
            meta = sources[first].meta
            sources.append(Source(name, meta, 0, None, b"", None, path, first))
            continue
        try:
            if plain and dtype is None:
                sources.append(prepare_tensor(check_key(name), value, path))
                continue
            made = prepare(name, value, allow_pickle=allow_pickle, dtype=dtype)
        except (UnsupportedValueError, LayoutMismatchError, UnsafeObjectError) as error:
            text = f"state dict {key!r}: {error.message}"
            raise type(error)(text, key=f"{key}/{name}") from error
        if path:
            made = [msgspec.structs.replace(source, path=path) for source in made]
        sources.extend(made)
    if packed is not None:
        participants = participants or packed.participants
        participant = packed.participant or None if participant is None else participant
    if participants is None:
        if outside:
            return [], None
        participants = len(ranks) or max([math.prod(mesh) for mesh in places], default=1)
    if participants == 1 and not partial:
        _check_alone(key, sources)
    who = ""  # a single participant needs no name: every put makes the next version
    if participants > 1:
        who = str(participant) if participant is not None else this_rank()
        mesh = max(places, key=math.prod, default=())
        who = who or ",".join(map(str, places.get(mesh, ())))
        who = who or f"{anonymous} {_digest(sources)}"
    group = m.Publication(key, who, participants, partial, keep or 0, packed is not None)
    return sources, group


def _check_alone(key: str, sources: Sequence[Source]) -> None:
    """Check that a sole participant puts every tensor as a whole."""
    for source in sources:
        part = source.part
        if part is not None and tuple(part.local_shape) != tuple(part.global_shape):
            if sum(s.nbytes for s in sources if s.key == source.key) >= _global_nbytes(source):
                continue
            raise ConfigurationError(
                f"{key!r}: {source.key!r} is a shard, {list(part.local_shape)} of "
                f"{list(part.global_shape)}, and nobody else would put the rest; say how many put "
                "this state dict (participants=), or give its TensorSlice a mesh_shape"
            )


def _global_nbytes(source: Source) -> int:
    part, tensor = source.part, source.tensor
    if part is None or tensor is None:
        return source.nbytes
    itemsize = (source.cast or tensor.dtype).itemsize
    return math.prod(part.global_shape) * itemsize


def _digest(sources: Sequence[Source]) -> str:
    """A digest that distinguishes participants without a rank by their entries and shards."""
    places = ((s.key, "" if s.part is None else s.part.offsets) for s in sources)
    names = "\0".join(f"{name} {place}" for name, place in places)
    return hashlib.sha1(names.encode("utf-8", "replace"), usedforsecurity=False).hexdigest()[:8]


def _meta_with(value: Any, dtype: torch.dtype | None) -> TensorMeta:
    """The metadata with which the entry would be stored."""
    if isinstance(value, TensorShard):
        shape, own = value.tensor_slice.global_shape, value.tensor.dtype
    else:
        shape, own = tuple(value.shape), value.dtype
    if dtype is None or not own.is_floating_point:
        dtype = own
    return TensorMeta(dtype_name(dtype), tuple(shape))


# ---- get ----------------------------------------------------------------------------------


@dataclass
class StateDictReport:
    """The differences between a stored state dict and the one to fill.

    Args:
        missing: entries to fill that are not stored.
        unexpected: stored entries that have no destination.
        mismatched: for each entry that does not fit, by name, the reason.
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
    """A reader's state dict, inspected once.

    Args:
        asks: the requests: usually one for each leaf; several for a leaf in several pieces.
        places: for each request, the position of its leaf.
        same_as: leaves that share the memory of an earlier leaf, with the position of that leaf.
    """

    state_dict: Any
    leaves: list[Leaf]
    asks: list[Want]
    places: list[int]
    same_as: dict[int, int]


def plan_get(key: str, user_state_dict: Any) -> Wanted | None:
    """Plan the requests that fill a state dict; None: request everything.

    Raises:
        UnsupportedValueError, LayoutMismatchError: a destination that contradicts itself.
    """
    if user_state_dict is None:
        return None
    leaves = nesting.flatten(key, user_state_dict)
    ties = Ties()
    same_as: dict[int, int] = {}
    asks: list[Want] = []
    places: list[int] = []
    if are_apart([leaf.value for leaf in leaves]):  # the usual case, with many entries
        asks = [Want(leaf.name, 0, leaf.value, None) for leaf in leaves]
        return Wanted(user_state_dict, leaves, asks, list(range(len(leaves))), same_as)
    for at, leaf in enumerate(leaves):
        name, value = leaf.name, leaf.value
        plain = type(value) in PLAIN
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
    """Options of a get; see ``Client.get_state_dict``."""

    strict: bool = True
    cast: bool = False
    report: StateDictReport | None = None
    allow_pickle: bool = True


class Fetched(NamedTuple):
    """The result of a get."""

    state_dict: Any
    entries: int
    version: int


async def fetch(
    session: Session,
    channel: Channel,
    key: str,
    version: int,
    wanted: Wanted | None,
    clock: Clock,
    how: Filling,
) -> Fetched:
    """Fetch a version with one message, one lease and one batch of copies. This is repeated if a
    volume cannot be reached and there are copies on other volumes.

    Raises:
        LayoutMismatchError: ``how.strict`` is set and something does not match; nothing was
            written.
    """
    reach = Reach()
    while True:
        with Leasing(session, channel, clock) as leasing, reach:
            return await _fetch(session, channel, key, version, wanted, clock, how, leasing, reach)


async def _fetch(
    session: Session,
    channel: Channel,
    key: str,
    version: int,
    wanted: Wanted | None,
    clock: Clock,
    how: Filling,
    leasing: Leasing,
    reach: Reach,
) -> Fetched:
    wants = None if wanted is None else [ask.wire() for ask in wanted.asks]
    request = m.Fetch(
        channel.next_id(),
        leasing.lease,
        key,
        version,
        wants,
        session.inline_max(),
        reach.avoid,
    )
    try:
        reply = await channel.call(request, m.Fetched, clock.left())
        starts = leasing.granted(reply.entries, reply.leased)
    except MessageTooLargeError:  # very many names: request all entries, and select here
        request = msgspec.structs.replace(request, id=channel.next_id(), wants=None)
        reply = await channel.call(request, m.Fetched, clock.left())
        starts = leasing.granted(reply.entries, reply.leased)
        if wanted is not None:
            reply, starts = _chosen(wanted, reply, starts)
    reach.check(reply.entries)
    clock.phase("plan")
    if how.report is not None:
        how.report.version = reply.version
    if wanted is None:
        targets, whole = _whole(reply, starts)
    else:
        found = how.report if how.report is not None else StateDictReport()
        targets, whole = _matching(wanted, reply, starts, found, cast=how.cast)
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
    values = await leasing.read(targets, how.allow_pickle, whole)
    made = _rebuilt(key, reply, values) if wanted is None else _filled(wanted, targets, values)
    return Fetched(made, len(targets) + len(whole), reply.version)


def _chosen(wanted: Wanted, reply: m.Fetched, starts: Sequence[int]) -> tuple[m.Fetched, list[int]]:
    """From a reply with all entries, make the reply that the requests would have had."""
    at = {name: i for i, name in enumerate(reply.names)}
    found = [at.get(ask.key) for ask in wanted.asks]
    asked = {ask.key for ask in wanted.asks}
    chosen = msgspec.structs.replace(
        reply,
        entries=[None if i is None else reply.entries[i] for i in found],
        names=[name for name in reply.names if name not in asked],
        paths={},
        same_as=[],
    )
    return chosen, [-1 if i is None else starts[i] for i in found]


def _whole(reply: m.Fetched, starts: Sequence[int]) -> tuple[list[Target], list[Plain]]:
    """Targets for all entries, as new tensors and objects; tied weights only once."""
    tied = {i for i, _ in reply.same_as}
    entries = [None if at in tied else entry for at, entry in enumerate(reply.entries)]
    nothing: list[None] = [None] * len(entries)
    plain = plain_targets(reply.names, entries, starts, [*nothing], nothing)
    targets = [
        resolve(at, start, name, entry)
        for at, (name, entry, start, easy) in enumerate(
            zip(reply.names, entries, starts, plain, strict=True)
        )
        if entry is not None and easy is None
    ]
    return targets, [easy for easy in plain if easy is not None]


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
) -> tuple[list[Target], list[Plain]]:
    """Targets for the entries that match. Entries that do not are added to the report.

    Destinations that share memory are filled once, from the first of their entries that is stored.
    """
    leaves = wanted.leaves
    report.mismatched = {}
    report.unexpected = reply.names
    if reply.names:  # a leaf with no piece on this rank was not requested
        absent = {leaves[at].name for at in set(range(len(leaves))) - set(wanted.places)}
        report.unexpected = [name for name in reply.names if name not in absent]
    targets: list[Target] = []
    whole: list[Plain] = []
    missing: dict[int, int] = {}
    filled: dict[int, int] = {}
    failed = -1
    asks = wanted.asks
    plain = plain_targets(
        [ask.key for ask in asks],
        reply.entries,
        starts,
        [ask.tensor for ask in asks],
        [ask.part for ask in asks],
    )
    if not wanted.same_as and all(one is not None and one.tensor is not None for one in plain):
        report.missing = []
        return [], [one for one in plain if one is not None]
    asked = zip(asks, wanted.places, reply.entries, starts, plain, strict=True)
    for at, (ask, place, entry, start, easy) in enumerate(asked):
        memory = wanted.same_as.get(place, place)
        if entry is None:
            missing[place] = memory
            continue
        if easy is not None and easy.tensor is not None:
            if filled.setdefault(memory, place) == place:
                whole.append(easy)
            continue
        if place == failed:
            continue
        leaf = leaves[place]
        try:
            _check_kind(leaf, ask, entry)
            target = resolve(at, start, leaf.name, entry, ask.tensor, ask.part, cast=cast)
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
    return targets, whole


def _check_kind(leaf: Leaf, ask: Want, entry: m.Entry) -> None:
    if ask.tensor is None and leaf.value is not None and isinstance(entry.meta, TensorMeta):
        raise LayoutMismatchError(
            f"{leaf.name!r} is stored as a tensor, the destination is a "
            f"{type(leaf.value).__qualname__}"
        )


def _filled(wanted: Wanted, targets: Sequence[Target], values: dict[int, Any]) -> Any:
    """The reader's state dict, with new values for the leaves that are not its own tensors."""
    new = {target.key: values[target.at] for target in targets if target.tensor is None}
    if not new:
        return wanted.state_dict
    return nesting.replace(wanted.state_dict, wanted.leaves, new.get)
