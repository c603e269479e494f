"""The steps of a get, over an open session and channel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from torchstore_core.clients.calls.arguments import check_exact, check_key
from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.calls.incarnations import check_incarnation
from torchstore_core.clients.moving.entries import entries_of
from torchstore_core.clients.moving.leasing import Leasing
from torchstore_core.clients.session.channel import QUICK_ENTRIES, Channel
from torchstore_core.clients.session.held_ref import HeldRef
from torchstore_core.clients.session.session import Session
from torchstore_core.clients.transfer.columns.batches import NotPlainError
from torchstore_core.clients.transfer.columns.gets import Named, batch_of
from torchstore_core.clients.transfer.moves import get_batches
from torchstore_core.clients.transfer.targets import (
    Plain,
    Results,
    Target,
    check_apart,
    from_reply,
    plain_targets,
    resolve,
)
from torchstore_core.clients.values.plain import MANY
from torchstore_core.clients.values.sharding import is_sharded, local_parts
from torchstore_core.clients.values.tensors import byte_like, plain_slice, were_written
from torchstore_core.errors import (
    LayoutMismatchError,
    UnsupportedValueError,
)
from torchstore_core.values import ObjectRef, Request, TensorSlice
from torchstore_core.wire import messages as m

T = TypeVar("T", Target, Plain)


class ValueRequest(msgspec.Struct, frozen=True, gc=False):
    """A request for one value, or for a ``part`` of it. ``tensor`` is the destination, if there is
    one; it may be sharded until :func:`asks_of` has split it.

    ``incarnation``: that of the ref that names the version; 0: it is named by a number only, if at
    all, and ``timeline`` does not count.
    """

    key: str
    version: int
    tensor: Any
    part: TensorSlice | None
    incarnation: int = 0
    timeline: int = 0

    def wire(self) -> m.Want:
        """The form that is sent in a message."""
        part = self.part
        if part is None:
            return m.Want(self.key, self.version)
        return m.Want(self.key, self.version, (part.offsets, part.local_shape))

    @classmethod
    def make(cls, what: Any, tensor: Any = None, part: TensorSlice | None = None) -> ValueRequest:
        if type(what) is str and part is None:  # the usual case, very often
            return cls(check_key(what), 0, tensor, None)
        if isinstance(what, Request) and what.tensor_slice is not None:
            if part is not None:
                raise LayoutMismatchError(
                    f"{what.key!r}: the Request says itself which slice it wants; give either that "
                    "or a tensor slice"
                )
            part = what.tensor_slice
        if part is not None and not isinstance(part, TensorSlice):
            raise UnsupportedValueError(
                f"tensor_slice_spec is a TensorSlice, not a {type(part).__qualname__}"
            )
        if part is not None:
            part = plain_slice(str(what), part)
        if isinstance(what, HeldRef):
            what = what.ref
        if isinstance(what, ObjectRef):
            version = check_exact(what.key, what.version)
            of = what.incarnation, what.timeline
            key = what.key
            if key or not what.incarnation:  # otherwise it is an object without a key
                key = check_key(key)
            return cls(key, version, tensor, part, *of)
        if isinstance(what, Request):
            version = 0 if what.version is None else check_exact(what.key, what.version)
            return cls(check_key(what.key), version, tensor, part)
        return cls(check_key(what), 0, tensor, part)


def asks_of(want: ValueRequest) -> list[ValueRequest]:
    """Split a request: one for each piece of a sharded destination, otherwise the request itself.

    Raises:
        LayoutMismatchError, UnsupportedValueError: a destination that contradicts itself.
    """
    tensor = want.tensor
    if tensor is None or type(tensor) is torch.Tensor or not is_sharded(tensor):
        return [want]
    if want.part is not None:
        raise LayoutMismatchError(
            f"{want.key!r}: a {type(want.tensor).__name__} says itself which slice it is; give "
            "either it or a tensor slice",
            key=want.key,
        )
    key, version, incarnation, timeline = want.key, want.version, want.incarnation, want.timeline
    return [
        ValueRequest(key, version, local.tensor, local.part, incarnation, timeline)
        for local in local_parts(key, tensor)
    ]


async def get_asks(
    session: Session,
    channel: Channel,
    asks: Sequence[ValueRequest],
    clock: Clock,
    allow_pickle: bool,
) -> tuple[dict[int, Any], list[m.Entry]]:
    """Locate and lease the values, check everything, then move the bytes; release what is not
    mapped.

    Returns:
        The values by the position of their request, and the entries.
    """
    if not asks:
        return {}, []
    wants: list[m.Want] = []
    timelines: list[int] = []
    by_ref = False
    for ask in asks:
        wants.append(ask.wire())
        timelines.append(ask.timeline if ask.incarnation else -1)
        if ask.incarnation:
            by_ref = True
            if ask.incarnation != session.welcome.incarnation:
                what = ask.key, ask.version, ask.incarnation
                await check_incarnation(session, channel, clock, *what)
    quick = len(wants) <= QUICK_ENTRIES
    leasing = Reading(session, channel, clock)
    while True:
        with leasing:
            lease, most = leasing.lease, session.inline_max()
            request = (
                m.Locate(channel.next_id(), lease, wants, most, leasing.avoid)
                if not by_ref
                else m.LocateRefs(channel.next_id(), lease, wants, most, leasing.avoid, timelines)
            )
            located = await channel.call(request, m.Located, clock.left(), quick=quick)
            entries, leasing.leased = located.entries, located.leased
            if clock.measured is not None:
                clock.measured.phase("plan")
            if len(asks) == len(entries) == 1 and not located.leased:  # usual, of small values
                only = from_reply(entries[0], asks[0].tensor, asks[0].part)
                if only is not None:
                    if clock.measured is not None:
                        clock.measured.moved(only.nbytes, "inline")
                        clock.measured.phase("copy")
                    return {0: only}, entries
            targets, whole, again = _targets(leasing, entries, located.leased, asks)
            values = await leasing.read(targets, allow_pickle, whole)
            _check_same(values, again, asks)
            return values, entries


async def get_named(
    session: Session, channel: Channel, named: Named, clock: Clock, allow_pickle: bool
) -> Found | tuple[dict[int, Any], list[m.Entry]]:
    """:func:`get_asks` for many values. Returns the same if they had to be handled one by one."""
    leasing = Reading(session, channel, clock)
    while True:
        with leasing:
            number, lease = channel.next_id(), leasing.lease
            most = session.inline_max(len(named.keys), on_device=named.on_device)
            request = m.LocateKeys(number, lease, [], most, leasing.avoid, named.keys)
            located = await channel.call(request, m.Located, clock.left())
            clock.phase("plan")
            entries, columns = located.entries, located.columns
            if columns is not None:
                values = await leasing.read_columns(columns, named.tensors)
                if values is not None:
                    return Found(values, columns.version_of()[0])
                entries = entries_of(columns)
            asks = requests_of(named)
            targets, whole, again = _targets(leasing, entries, located.leased, asks)
            got = await leasing.read(targets, allow_pickle, whole)
            _check_same(got, again, asks)
            return got, entries


class Found(NamedTuple):
    """Values that were all handled together, in the order of the request; and the version of the
    first one.
    """

    values: Sequence[torch.Tensor]
    version: int


def requests_of(named: Named) -> list[ValueRequest]:
    """A request for each value."""
    tensors: Sequence[torch.Tensor | None] = named.tensors or [None] * len(named.keys)
    rows = zip(named.keys, tensors, strict=True)
    return [ValueRequest(key, 0, tensor, None) for key, tensor in rows]


def _targets(
    leasing: Reading, entries: list[m.Entry], leased: bool, asks: Sequence[ValueRequest]
) -> tuple[list[Target], list[Plain], dict[int, int]]:
    """Check everything that was located, before any bytes are moved. What is given a destination
    again gets a new tensor, and comes with the first one; see :func:`_check_same`.
    """
    starts = leasing.granted(entries, leased)
    if leasing.avoid:
        leasing.check(entries)
    if len(asks) < MANY:
        found = zip(asks, entries, starts, strict=True)
        targets = [
            resolve(at, start, ask.key, entry, ask.tensor, ask.part)
            for at, (ask, entry, start) in enumerate(found)
        ]
        again = check_apart(targets, ()) if len(targets) > 1 else {}
        return _once(targets, again), [], again
    plain = plain_targets(
        [ask.key for ask in asks],
        entries,
        starts,
        [ask.tensor for ask in asks],
        [ask.part for ask in asks],
    )
    targets = [
        resolve(at, starts[at], ask.key, entries[at], ask.tensor, ask.part)
        for at, ask in enumerate(asks)
        if plain[at] is None
    ]
    whole = [one for one in plain if one is not None]
    again = check_apart(targets, whole)
    return _once(targets, again), _once(whole, again), again


def _once(targets: list[T], again: Mapping[int, int]) -> list[T]:
    if not again:
        return targets
    replace = msgspec.structs.replace
    return [replace(one, tensor=None) if one.at in again else one for one in targets]


def _check_same(
    values: Mapping[int, Any], again: Mapping[int, int], asks: Sequence[ValueRequest]
) -> None:
    """Check that values which were to be written to the same tensor are the same.

    Raises:
        LayoutMismatchError: two are not. The tensor has the first of them.
    """
    for at, first in differing(values, again):
        both = [asks[first].key, asks[at].key]
        raise LayoutMismatchError(
            f"{both[0]!r} and {both[1]!r} were to be written to the same tensor, and differ: "
            f"it has the value of {both[0]!r} now; give each of them memory of its own",
            key=both[1],
            details={"overlapping": sorted(both)},
        )


def differing(values: Mapping[int, Any], again: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Yield those values that are not the same as an earlier one, by their positions. A dtype that
    is not that of the earlier one is cast first.
    """
    for at, first in again.items():
        there = byte_like(values[first])
        other = byte_like(values[at].to(values[first].dtype))
        if not torch.equal(there, other.view(there.shape).to(there.device)):
            yield at, first


def _is_filling(targets: Sequence[Target], plain: Sequence[Plain]) -> bool:
    """Whether any of these is written to a tensor of the user's."""
    if any(target.tensor is not None for target in targets):
        return True
    return any(one.tensor is not None for one in plain)


class Reading(Leasing):
    """The lease of a get of tensors and objects."""

    async def read(
        self, targets: Sequence[Target], allow_pickle: bool, plain: Sequence[Plain] = ()
    ) -> dict[int, Any]:
        """Move the bytes; returns the values by the position of their target. Mapped values keep
        their part of the lease until their tensors are garbage-collected.

        Objects come before what is written to the user's tensors: one that cannot be rebuilt here
        ends the get before any of these has changed.
        """
        measured = self.clock.measured
        results = Results(allow_pickle=allow_pickle)
        rest = targets
        objects = [target for target in targets if target.codec is not None]
        if objects and _is_filling(targets, plain):
            rest = [target for target in targets if target.codec is None]
            await self._read(objects, (), results)
            results.finish(objects)
        await self._read(rest, plain, results)
        if measured is not None:
            pieces = [piece for target in targets for piece in target.pieces]
            measured.moved(sum([p.nbytes for p in pieces if p.grant is None]), "inline")
        if plain:
            results.filled(plain)
        values = results.finish(rest)
        self.clock.phase("copy")
        return values

    async def _read(
        self, targets: Sequence[Target], plain: Sequence[Plain], results: Results
    ) -> None:
        """Move the bytes of these that are not in the reply."""
        if not self.leased:
            return
        batches = get_batches(targets, results, plain)
        results.waited = True
        for mapped in await self.move(batches):
            results.values.update({t.at: tensor for t, tensor in mapped.values})
            self.keep(mapped.owner, [t.position for t, _ in mapped.values])

    async def read_columns(
        self, columns: m.EntryColumns, tensors: list[torch.Tensor] | None
    ) -> Sequence[torch.Tensor] | None:
        """Move the bytes of values that the reply has in columns; returns the tensors. None if they
        must be handled one by one; then nothing has been written.

        Args:
            tensors: the destinations; None: new tensors.
        """
        self.count = len(columns)
        if columns.volume in self.failed:  # there is no other copy
            raise self.failed[columns.volume]
        batch = batch_of(columns, tensors)
        if batch is None:
            return None
        try:
            await self.move([batch])
        except NotPlainError:
            return None
        if tensors is not None:
            were_written(tensors)
        self.clock.phase("copy")
        return batch.tensors
