"""Getting one consistent version of a state dict, as a new one or into the reader's own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.moving.entries import entries_of
from torchstore_core.clients.session.channel import Channel, MessageTooLargeError
from torchstore_core.clients.session.session import Session
from torchstore_core.clients.state_dicts.ties import PLAIN, Ties, are_apart
from torchstore_core.clients.transfer.columns.gets import Named, names_and_tensors
from torchstore_core.clients.transfer.gets import Reading, ValueRequest, asks_of, differing
from torchstore_core.clients.transfer.targets import (
    Plain,
    Target,
    check_apart,
    plain_targets,
    resolve,
)
from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.differences import (
    MOST_NAMED,
    StateDictReport,
    in_words,
    mismatch_error,
)
from torchstore_core.clients.values.nesting import Leaf
from torchstore_core.clients.values.plain import look
from torchstore_core.clients.values.sharding import (
    is_sharded,
)
from torchstore_core.errors import (
    LayoutMismatchError,
    ProtocolError,
    UnsupportedValueError,
)
from torchstore_core.values import ObjectRef, TensorMeta
from torchstore_core.wire import messages as m

__all__ = ["FetchResult", "Filling", "StateDictReport", "fetch", "plan_get"]

log = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """A reader's state dict, inspected once.

    Args:
        asks: the requests: usually one for each leaf; several for a leaf in several pieces.
        places: for each request, the position of its leaf.
        same_as: leaves that share the memory of an earlier leaf, with the position of that leaf.
    """

    state_dict: Any
    leaves: list[Leaf]
    asks: list[ValueRequest]
    places: list[int]
    same_as: dict[int, int]


def plan_get(key: str, user_state_dict: Any) -> Wanted | Named | None:
    """Plan the requests that fill a state dict; None: request everything. ``Named``: it is flat,
    and has many values, all of them tensors that are no subclass.

    Raises:
        UnsupportedValueError, LayoutMismatchError: a destination that contradicts itself.
    """
    if user_state_dict is None:
        return None
    if isinstance(user_state_dict, Mapping):
        named = names_and_tensors(user_state_dict)
        if named is not None:
            return named
    return _plan(key, user_state_dict)


def _plan(key: str, user_state_dict: Any) -> Wanted:
    """Plan the requests that fill a state dict, value by value."""
    leaves = nesting.flatten(key, user_state_dict)
    ties = Ties()
    same_as: dict[int, int] = {}
    asks: list[ValueRequest] = []
    places: list[int] = []
    if are_apart([leaf.value for leaf in leaves]):  # the usual case, with many entries
        asks = [ValueRequest(leaf.name, 0, leaf.value, None) for leaf in leaves]
        return Wanted(user_state_dict, leaves, asks, list(range(len(leaves))), same_as)
    for at, leaf in enumerate(leaves):
        name, value = leaf.name, leaf.value
        plain = type(value) in PLAIN
        tensor = value if plain or isinstance(value, torch.Tensor) or is_sharded(value) else None
        if tensor is not None and (first := ties.find(value, at)) is not None:
            same_as[at] = first
        want = ValueRequest(name, 0, tensor, None)
        if plain or tensor is None:
            asks.append(want)
            places.append(at)
        else:
            parts = asks_of(want)
            asks += parts
            places += [at] * len(parts)
    return Wanted(user_state_dict, leaves, asks, places, same_as)


class Matching(NamedTuple):
    """What a reply has for a reader's state dict.

    Args:
        targets, whole: what is filled, or made.
        beside: what would be written to a tensor that has another value already, to compare it.
        again: the positions of these, and of that value.
    """

    targets: list[Target]
    whole: list[Plain]
    beside: list[Target]
    again: dict[int, int]


class Filling(NamedTuple):
    """Options of a get; see ``Client.get_state_dict``."""

    strict: bool = True
    cast: bool = False
    report: StateDictReport | None = None
    allow_pickle: bool = True


class FetchResult(NamedTuple):
    """The result of a get."""

    state_dict: Any
    entries: int
    version: int


async def fetch(
    session: Session,
    channel: Channel,
    key: str,
    version: int,
    wanted: Wanted | Named | None,
    clock: Clock,
    how: Filling,
    *,
    user_state_dict: Any = None,
    timeline: int = -1,
) -> FetchResult:
    """Fetch a version with one message, one lease and one batch of copies. This is repeated if a
    volume cannot be reached and there are copies on other volumes.

    Args:
        user_state_dict: the state dict to fill, if there is one; ``wanted`` is its plan.
        timeline: of the version, if a ref names it; -1: any.

    Raises:
        LayoutMismatchError: ``how.strict`` is set and something does not match; nothing was
            written.
    """
    leasing = Reading(session, channel, clock)
    while True:
        with leasing:
            exactly = key, version, timeline
            target = user_state_dict, wanted
            return await _fetch(session, channel, exactly, target, clock, how, leasing)


async def _fetch(
    session: Session,
    channel: Channel,
    exactly: tuple[str, int, int],
    target: tuple[Any, Wanted | Named | None],
    clock: Clock,
    how: Filling,
    leasing: Reading,
) -> FetchResult:
    key, version, timeline = exactly
    state_dict, wanted = target
    wants = [ask.wire() for ask in wanted.asks] if isinstance(wanted, Wanted) else None
    ident = channel.next_id(), leasing.lease, key, version
    if isinstance(wanted, Named):
        most = session.inline_max(len(wanted.keys), on_device=wanted.on_device)
    else:
        most = session.inline_max()
    more = most, leasing.avoid
    request: m.Fetch
    if isinstance(wanted, Named):
        request = m.FetchKeys(*ident, [], *more, wanted.keys)
    elif timeline < 0:
        request = m.Fetch(*ident, wants, *more)
    else:
        request = m.FetchRef(*ident, wants, *more, timeline)
    every = False
    try:
        reply = await channel.call(request, m.Fetched, clock.left())
    except MessageTooLargeError:  # very many names: request all entries, and select here
        number = channel.next_id()
        if isinstance(wanted, Named):
            request = m.Fetch(number, *ident[1:], None, *more)
        else:
            request = msgspec.structs.replace(request, id=number, wants=None)
        reply = await channel.call(request, m.Fetched, clock.left())
        every = wanted is not None
    if reply.columns is not None:
        if not every and (wanted is None or not reply.names):
            done = await _in_columns(session, exactly, reply, target, clock, how, leasing)
            if done is not None:
                return done
        reply = msgspec.structs.replace(reply, entries=entries_of(reply.columns), columns=None)
    starts = leasing.granted(reply.entries, reply.leased)
    if isinstance(wanted, Named):
        wanted = _plan_again(key, state_dict, wanted)
    if every and wanted is not None:
        reply, starts = _chosen(wanted, reply, starts)
    if leasing.avoid:
        leasing.check(reply.entries)
    clock.phase("plan")
    _report_version(session, key, reply, how)
    if wanted is None:
        targets, whole = _whole(reply, starts)
        values = await leasing.read(targets, how.allow_pickle, whole)
        made = _rebuilt(key, reply, values)
        return FetchResult(made, len(targets) + len(whole), reply.version)
    found = how.report if how.report is not None else StateDictReport()
    targets, whole, beside, again = _matching(wanted, reply, starts, found, cast=how.cast)
    if found and how.strict:
        hint = _hint(wanted, found)
        if found.mismatched and not hint and not how.cast:
            cast = StateDictReport()
            _matching(wanted, reply, starts, cast, cast=True)
            if not cast.mismatched:
                hint = "Give cast=True to convert one floating-point dtype to the other"
        raise mismatch_error(f"{key!r} version {reply.version}", found, key, hint=hint)
    check_apart(targets, whole)
    values = await leasing.read([*targets, *beside], how.allow_pickle, whole)
    for at, first in differing(values, again):
        names = wanted.asks[first].key, wanted.asks[at].key
        _add_difference(key, names, found, strict=how.strict)
    if found:
        log.warning("%r version %d: %s", key, reply.version, in_words(found, MOST_NAMED))
    made = _filled(wanted, targets, values)
    return FetchResult(made, len(targets) + len(whole), reply.version)


def _add_difference(
    key: str, names: tuple[str, str], report: StateDictReport, *, strict: bool
) -> None:
    """Two entries differ that were to be written to the same tensor: say so.

    Raises:
        LayoutMismatchError: ``strict`` is set.
    """
    what = f"it is not the same as {names[0]!r}, which was written to the same tensor"
    report.mismatched[names[1]] = what
    if strict:
        raise LayoutMismatchError(
            f"{names[1]!r} of {key!r}: {what}, as the destination ties the two. Give each of them "
            "memory of its own, or leave one of them out (strict=False)",
            key=key,
            details={"overlapping": sorted(names)},
        )


def _report_version(session: Session, key: str, reply: m.Fetched, how: Filling) -> None:
    if how.report is not None:
        how.report.version = reply.version
        incarnation = session.welcome.incarnation
        how.report.ref = ObjectRef(key, reply.version, incarnation, reply.timeline)


async def _in_columns(
    session: Session,
    exactly: tuple[str, int, int],
    reply: m.Fetched,
    target: tuple[Any, Wanted | Named | None],
    clock: Clock,
    how: Filling,
    leasing: Reading,
) -> FetchResult | None:
    """Read what the reply has in columns: everything that was asked for, and all that there is.
    None if it must be handled entry by entry; then nothing has been written.
    """
    state_dict, wanted = target
    columns = reply.columns
    tensors = wanted.tensors if isinstance(wanted, Named) else None
    if columns is None or (wanted is not None and tensors is None):
        return None
    if wanted is None and len(reply.names) != len(columns):
        raise ProtocolError(f"{len(reply.names)} names, and {len(columns)} values")
    clock.phase("plan")
    values = await leasing.read_columns(columns, tensors)
    if values is None:
        return None
    _report_version(session, exactly[0], reply, how)
    if wanted is None:
        state_dict = dict(zip(reply.names, values, strict=True))
    elif how.report is not None:
        how.report.missing, how.report.unexpected, how.report.mismatched = [], [], {}
    return FetchResult(state_dict, len(columns), reply.version)


def _plan_again(key: str, state_dict: Any, named: Named) -> Wanted:
    """Plan the requests value by value, for the names for which the server was asked."""
    wanted = _plan(key, dict(zip(named.keys, named.tensors or (), strict=True)))
    return wanted._replace(state_dict=state_dict)


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
) -> Matching:
    """Targets for the entries that match. Entries that do not are added to the report.

    Destinations that share memory are filled once, from the first of their entries that is stored.
    Others are compared with it, unless they are stored once, too.
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
        return Matching([], [one for one in plain if one is not None], [], {})
    beside: list[Target] = []
    again: dict[int, int] = {}
    begins: dict[int, int] = {}  # the first request of each leaf
    others = [None if easy else ask.tensor for ask, easy in zip(asks, plain, strict=True)]
    known = look(others).metas
    asked = zip(asks, wanted.places, reply.entries, starts, plain, known, strict=True)
    for at, (ask, place, entry, start, easy, meta) in enumerate(asked):
        memory = wanted.same_as.get(place, place)
        piece = at - begins.setdefault(place, at)
        if entry is None:
            missing[place] = memory
            continue
        first = begins[filled.get(memory, place)] + piece  # what has been written there already
        if easy is not None and easy.tensor is not None:
            if filled.setdefault(memory, place) == place:
                whole.append(easy)
            elif not _is_stored_once(entry, reply.entries[first]):
                beside.append(msgspec.structs.replace(easy.target(), tensor=None))
                again[at] = first
            continue
        if place == failed:
            continue
        leaf = leaves[place]
        try:
            _check_kind(leaf, ask, entry)
            target = resolve(at, start, leaf.name, entry, ask.tensor, ask.part, meta, cast=cast)
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
        elif not _is_stored_once(entry, reply.entries[first]):
            beside.append(msgspec.structs.replace(target, tensor=None))
            again[at] = first
    report.missing = [leaves[at].name for at, memory in missing.items() if memory not in filled]
    return Matching(targets, whole, beside, again)


def _is_stored_once(entry: m.Entry, other: m.Entry | None) -> bool:
    """Whether two entries are the same bytes of the store, as tied weights are, or equal ones."""
    what = entry.meta, entry.data, entry.grant, entry.parts
    return other is not None and what == (other.meta, other.data, other.grant, other.parts)


def _hint(wanted: Wanted, report: StateDictReport) -> str:
    """What to do if a container to fill has no entries yet, as in a new optimizer, or if tensors to
    fill are on the meta device; empty if there are none of these.
    """
    missing = set(report.missing)
    for leaf in wanted.leaves:
        if leaf.name in report.mismatched and getattr(leaf.value, "is_meta", False):
            return (
                "A module on the meta device has no memory to fill: give it what is stored, by "
                "`module.load_state_dict(await get_state_dict(key), assign=True)`, or memory "
                "before, by `module.to_empty(device=...)`"
            )
        if leaf.name in missing and (leaf.value is None or nesting.is_empty(leaf.value)):
            inside = [name for name in report.unexpected if name.startswith(f"{leaf.name}.")]
            if inside:
                return (
                    f"{leaf.name!r} is {leaf.value!r} in the destination, which has no memory "
                    f"for the {len(inside)} entries stored in it. Get new tensors, without a "
                    "destination, and load these, as in `optimizer.load_state_dict(await "
                    "get_state_dict(key))`; or create the state first, as a step of the optimizer "
                    "does"
                )
    return ""


def _check_kind(leaf: Leaf, ask: ValueRequest, entry: m.Entry) -> None:
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
