"""The steps of a put and of a get, on an open session and lane."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from torchstore_core.clients.calls.clock import Clock, Seen
from torchstore_core.clients.session.lane import Lane
from torchstore_core.clients.session.session import Session
from torchstore_core.clients.transfer import reading, writing
from torchstore_core.clients.values.sharding import is_sharded, local_parts
from torchstore_core.clients.values.tensors import plain_slice
from torchstore_core.errors import (
    ConfigurationError,
    LayoutMismatchError,
    StoreFullError,
    TorchStoreError,
    TransportError,
    UnsupportedValueError,
    VersionGoneError,
)
from torchstore_core.values import ObjectRef, Request, TensorSlice
from torchstore_core.wire import messages as m

__all__ = ["Leasing", "Putting", "Unreachable", "Want", "asks_of"]
__all__ += ["check_version", "get_asks", "put_sources"]

# The server answers requests on up to this many entries faster than a task switch takes.
_QUICK_ENTRIES = 32
R = TypeVar("R", bound=m.Message)


class Want(msgspec.Struct, frozen=True, gc=False):
    """One value that is wanted, or a ``part`` of it. ``tensor``: to be filled; until
    :func:`asks_of` it may be sharded.
    """

    key: str
    version: int
    tensor: Any
    part: TensorSlice | None

    def wire(self) -> m.Want:
        """As a message says it."""
        part = self.part
        if part is None:
            return m.Want(self.key, self.version)
        return m.Want(self.key, self.version, (part.offsets, part.local_shape))

    @classmethod
    def make(cls, what: Any, tensor: Any = None, part: TensorSlice | None = None) -> Want:
        if part is not None and not isinstance(part, TensorSlice):
            raise UnsupportedValueError(
                f"tensor_slice_spec is a TensorSlice, not a {type(part).__qualname__}"
            )
        if part is not None:
            part = plain_slice(str(what), part)
        if isinstance(what, ObjectRef):
            return cls(writing.check_key(what.key), _exact(what.key, what.version), tensor, part)
        if isinstance(what, Request):
            version = 0 if what.version is None else _exact(what.key, what.version)
            if part is None and what.tensor_slice is not None:
                part = plain_slice(what.key, what.tensor_slice)
            return cls(writing.check_key(what.key), version, tensor, part)
        return cls(writing.check_key(what), 0, tensor, part)


def asks_of(want: Want) -> list[Want]:
    """What to ask of the server: one for each piece of a sharded destination, else the want itself.

    Raises:
        LayoutMismatchError, UnsupportedValueError: a destination that contradicts itself.
    """
    if want.tensor is None or not is_sharded(want.tensor):
        return [want]
    if want.part is not None:
        raise LayoutMismatchError(
            f"{want.key!r}: a {type(want.tensor).__name__} says itself which slice it is; give "
            "either it or a tensor slice",
            key=want.key,
        )
    return [
        Want(want.key, want.version, local.tensor, local.part)
        for local in local_parts(want.key, want.tensor)
    ]


def check_version(version: int | None) -> int:
    """The version that a put asks for, or a get names; 0 for None.

    Raises:
        ConfigurationError: not a version.
    """
    if version is None:
        return 0
    if type(version) is not int or not 0 < version < 1 << 62:
        raise ConfigurationError(f"a version is an int above 0 and below 2**62, not {version!r}")
    return version


def _exact(key: str, version: int) -> int:
    """A version that may exist: 0 would ask the server for the newest."""
    if not isinstance(version, int):
        raise UnsupportedValueError(f"a version is an int, not a {type(version).__qualname__}")
    if not 0 < version < 1 << 63:
        raise VersionGoneError(f"there never was a version {version} of {key!r}", key=key)
    return version


async def put_sources(
    session: Session,
    lane: Lane,
    sources: Sequence[writing.Source],
    nbytes: int,
    clock: Clock,
    *,
    version: int = 0,
    group: m.Publication | None = None,
) -> list[int]:
    """One message for small puts; else begin, write, commit. Undone if anything goes wrong.

    Returns:
        The versions, by source; of a state dict one.
    """
    if nbytes == 0 or nbytes <= session.inline_max():
        items = [source.item(writing.inline_bytes(source)) for source in sources]
        put = m.Put(lane.next_id(), session.next_id(), items, version, group)
        reply = await _begin(session, lane, put, m.Committed, clock)
        clock.phase("plan")
        if clock.seen is not None:
            clock.seen.moved(nbytes, "inline")
        return reply.versions
    with Putting(session, lane, sources, clock, version, group) as putting:
        await putting.begin()
        await putting.write()
        return await putting.commit()


class Putting:
    """A put in steps; left without a commit, it is undone."""

    def __init__(
        self,
        session: Session,
        lane: Lane,
        sources: Sequence[writing.Source],
        clock: Clock,
        version: int,
        group: m.Publication | None,
    ) -> None:
        self._session = session
        self._lane = lane
        self._sources = sources
        self.clock = clock
        self._version = version
        self._group = group
        self._txn = session.begin()
        self._grants: list[m.Grant | None] = []
        self._done = False

    def __enter__(self) -> Putting:
        return self

    async def begin(self) -> None:
        """Memory is granted."""
        items = [source.item(None if source.nbytes else b"") for source in self._sources]
        put = m.Put(self._lane.next_id(), self._txn, items, self._version, self._group)
        granted = await _begin(self._session, self._lane, put, m.Granted, self.clock)
        self._grants = granted.grants
        self.clock.phase("plan")

    async def write(self) -> None:
        """Move the bytes. Afterwards the sources may be changed."""
        placed = [source for source in self._sources if source.nbytes]
        if len(self._grants) > len(placed):  # a part as long as the first for each further copy
            placed *= len(self._grants) // len(placed)
        pairs = zip(placed, self._grants, strict=True)
        wanted = [(source, grant) for source, grant in pairs if grant is not None]
        work = writing.write(self._session, wanted)
        transports = await self.clock.within(work, self._lane)
        if self.clock.seen is not None:
            volumes = self._session.volumes
            kept = [(s, grant) for s, grant in wanted if not volumes[grant.volume].lost]
            ids = {volumes[grant.volume].info.id for _, grant in kept}
            self.clock.seen.moved(sum([source.nbytes for source, _ in kept]), transports, ids)
        self._sources = ()
        self.clock.phase("copy")

    async def commit(self) -> list[int]:
        """Make it visible; the versions."""
        commit = m.Commit(self._lane.next_id(), self._txn)
        quick = len(self._grants) <= _QUICK_ENTRIES
        done = await self._lane.call(commit, m.Committed, self.clock.left(), quick=quick)
        self._done = True
        self.clock.phase("commit")
        return done.versions

    def undo_with(self, owner: object) -> None:
        """It is over when ``owner`` dies: a task whose event loop has closed never ends."""
        weakref.finalize(owner, self._session.forsake, self._txn).atexit = False

    def __exit__(self, *_: object) -> None:
        if not self._done:
            # Unknown ids are ignored, so this is right whether or not the server has begun it.
            try:
                self._lane.send(m.Abort([self._txn]))
            except TorchStoreError:
                self._session.abort(self._txn)
        self._session.end(self._txn)


async def _begin(session: Session, lane: Lane, put: m.Put, expect: type[R], clock: Clock) -> R:
    """Send a Put; a second time if tensors that died here just now held the room it lacks."""
    quick = expect is m.Committed and len(put.items) <= _QUICK_ENTRIES
    try:
        return await lane.call(put, expect, clock.left(), quick=quick)
    except StoreFullError as full:
        if not full.details.get("leased_bytes"):
            raise
        if not await session.let_go(lane, clock.left()):
            raise
    again = msgspec.structs.replace(put, id=lane.next_id())
    return await lane.call(again, expect, clock.left())


async def get_asks(
    session: Session,
    lane: Lane,
    asks: Sequence[Want],
    clock: Clock,
    allow_pickle: bool,
    unreachable: Unreachable | None = None,
) -> tuple[reading.Result, list[m.Entry]]:
    """Locate and lease, check everything, then move bytes; give back what is not mapped. If a
    volume cannot be reached, again, with copies elsewhere.

    Returns:
        The values by position of their ask, and the entries.
    """
    if not asks:
        return reading.Result({}, set(), ""), []
    try:
        with Leasing(session, lane, clock) as leasing:
            wants = [ask.wire() for ask in asks]
            avoid = [] if unreachable is None else unreachable.volumes
            request = m.Locate(lane.next_id(), leasing.lease, wants, session.inline_max(), avoid)
            quick = len(wants) <= _QUICK_ENTRIES
            located = await lane.call(request, m.Located, clock.left(), quick=quick)
            starts = leasing.granted(located.entries, located.leased)
            if unreachable is not None:
                unreachable.check(located.entries)
            clock.phase("plan")
            found = zip(asks, located.entries, starts, strict=True)
            targets = [
                reading.resolve(at, start, ask.key, entry, ask.tensor, ask.part)
                for at, (ask, entry, start) in enumerate(found)
            ]
            result = await leasing.read(targets, allow_pickle)
            return result, located.entries
    except TransportError as error:
        unreachable = unreachable or Unreachable()
        unreachable.add(error)
    return await get_asks(session, lane, asks, clock, allow_pickle, unreachable)


class Unreachable:
    """Volumes that a get could not read from: it asks again, for copies elsewhere."""

    __slots__ = ("_errors", "volumes")

    def __init__(self) -> None:
        self.volumes: list[int] = []
        self._errors: dict[int, TransportError] = {}

    def add(self, error: TransportError) -> None:
        """A volume failed. Raises the error if it did before, or names no volume."""
        volume = error.details.get("volume")
        if not isinstance(volume, int) or volume in self._errors:
            raise error
        self._errors[volume] = error
        self.volumes.append(volume)

    def check(self, entries: Sequence[m.Entry | None]) -> None:
        """Raises the error of a volume that entries still name: there is no copy elsewhere."""
        for entry in entries:
            if entry is None:
                continue
            grants = [entry.grant, *(part.grant for part in entry.parts or ())]
            for grant in grants:
                if grant is not None and grant.volume in self._errors:
                    raise self._errors[grant.volume]


class Leasing:
    """A lease under way: left, what is not mapped is given back."""

    def __init__(self, session: Session, lane: Lane, clock: Clock) -> None:
        self._session = session
        self._lane = lane
        self._clock = clock
        self._leased = True
        self._count = 1
        self._mapped: set[int] = set()
        self.lease = session.next_id()

    def __enter__(self) -> Leasing:
        return self

    def granted(self, entries: Sequence[m.Entry | None], leased: bool) -> list[int]:
        """The server has answered; the position of each entry's first value in the lease."""
        self._leased = leased
        starts: list[int] = []
        count = 0
        for entry in entries:
            starts.append(count)
            if entry is not None:
                count += 1 if entry.parts is None else len(entry.parts)
        self._count = count
        return starts

    async def read(self, targets: Sequence[reading.Target], allow_pickle: bool) -> reading.Result:
        """Move the bytes."""
        if self._leased:
            work = reading.read(self._session, self.lease, targets, allow_pickle=allow_pickle)
            result = await self._clock.within(work)
            self._mapped = result.mapped
        else:
            result = reading.from_message(targets, allow_pickle=allow_pickle)
        if self._clock.seen is not None:
            self._account(self._clock.seen, targets, result.transport)
        self._clock.phase("copy")
        return result

    def _account(self, seen: Seen, targets: Sequence[reading.Target], transports: str) -> None:
        """What was moved. Some of it may have come inside the message."""
        inline, by_link = 0, 0
        volumes: set[str] = set()
        for piece in [piece for target in targets for piece in target.pieces]:
            if piece.grant is None:
                inline += piece.nbytes
            else:
                by_link += piece.nbytes
                volumes.add(self._session.volumes[piece.grant.volume].info.id)
        seen.moved(inline, "inline")
        seen.moved(by_link, transports, volumes)

    def __exit__(self, *_: object) -> None:
        if self._leased and len(self._mapped) < self._count:
            _release(self._session, self._lane, self.lease, self._mapped, self._count)


def _release(session: Session, lane: Lane, lease: int, mapped: set[int], count: int) -> None:
    """Give back the lease, or all of it but what lives on in mapped tensors."""
    rest = [at for at in range(count) if at not in mapped] if mapped else None
    message = m.Release([lease]) if rest is None else m.Release([], [(lease, rest)])
    try:
        lane.send(message)
    except TorchStoreError:
        session.give_back(lease, rest)
