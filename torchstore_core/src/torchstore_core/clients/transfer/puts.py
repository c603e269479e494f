"""The steps of a put, over an open session and channel."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.calls.incarnations import refs_of
from torchstore_core.clients.moving import executor
from torchstore_core.clients.moving.batches import Batch
from torchstore_core.clients.session.channel import QUICK_ENTRIES, Channel
from torchstore_core.clients.session.session import Session
from torchstore_core.clients.transfer.allocations import allocation_of, seal
from torchstore_core.clients.transfer.columns.batches import ColumnsPut
from torchstore_core.clients.transfer.columns.sources import TensorColumns, total
from torchstore_core.clients.transfer.granting import PutOptions, give_up_put, lent_in
from torchstore_core.clients.transfer.moves import put_batches
from torchstore_core.clients.transfer.sources import Source, inline_bytes, release
from torchstore_core.values import ObjectRef
from torchstore_core.wire import messages as m
from torchstore_core.wire.columns import in_a_row


async def put_sources(
    session: Session,
    channel: Channel,
    sources: Sequence[Source] | TensorColumns,
    clock: Clock,
    how: PutOptions,
) -> m.Committed:
    """Put with one message if it is small; otherwise begin, write and commit. If anything fails,
    the put is undone.

    Returns:
        The reply, with the version of each source; for a state dict, a single one.
    """
    if session.allocations and (found := allocation_of(session, sources, how)) is not None:
        sealed = await seal(session, channel, *found, clock, how)
        if sealed is not None:
            return sealed
    if rides_in_message(session, sources):
        if type(sources) is TensorColumns:
            sources = sources.sources()
        items = []
        for one in sources:
            data = inline_bytes(one)
            items.append(
                m.PutItem(one.key, one.meta, one.nbytes, data, one.part, one.path, one.same_as)
            )
        lent = lent_in(session, channel, sources)
        txn = session.next_id()
        try:
            reply = await how.begin(session, channel, clock, txn, items, m.Committed, lent)
        except BaseException:
            if lent is not None:
                lent.undo(txn)
            raise
        if clock.measured is not None:
            clock.phase("plan")
            clock.measured.moved(total(sources), "inline")
        return reply
    with Putting(session, channel, sources, clock, how) as putting:
        await putting.begin()
        await putting.write()
        return await putting.commit()


def rides_in_message(session: Session, sources: Sequence[Source] | TensorColumns) -> bool:
    """Whether these values are put with one message. Values without bytes always are."""
    if type(sources) is TensorColumns:
        most = session.inline_max(len(sources), on_device=sources.on_device)
        return sources.nbytes <= most
    nbytes = 0
    for source in sources:
        nbytes += source.nbytes
    return not nbytes or nbytes <= session.inline_max()


class Putting:
    """A put in steps. If the ``with`` block exits without a commit, the put is undone."""

    def __init__(
        self,
        session: Session,
        channel: Channel,
        sources: Sequence[Source] | TensorColumns,
        clock: Clock,
        how: PutOptions,
    ) -> None:
        self._session = session
        self._channel = channel
        self._sources = sources
        self._entries = len(sources)
        self._lent = lent_in(session, channel, sources)
        self.clock = clock
        self._how = how
        self._txn = session.begin()
        self._grants: list[m.Grant | None] = []
        self._done = False
        self._begun: tuple[m.Commit, asyncio.Future[m.Message]] | None = None
        self._batches: Sequence[Batch] = ()  # that are being written

    def __enter__(self) -> Putting:
        return self

    async def begin(self) -> None:
        """Have the server grant memory for the values."""
        items: list[m.PutItem] = []
        columns: m.ItemColumns | None = None
        if type(self._sources) is TensorColumns:
            columns = self._sources.wire()
        else:
            items = [
                m.PutItem(
                    *(s.key, s.meta, s.nbytes, None if s.nbytes else b""),
                    *(s.part, s.path, s.same_as),
                )
                for s in self._sources
            ]
        where = self._session, self._channel, self.clock, self._txn
        granted = await self._how.begin(*where, items, m.Granted, self._lent, columns)
        self._grants = granted.grants
        self.clock.phase("plan")

    async def write(self) -> None:
        """Move the bytes. Afterwards, the caller may change the sources."""
        self._batches = self._planned()
        try:
            await executor.execute_within(self.clock, self._session, self._channel, self._batches)
        finally:
            if type(self._sources) is not TensorColumns:
                release(self._sources)
        self._sources = self._batches = ()
        self.clock.phase("copy")

    def _planned(self) -> Sequence[Batch]:
        """The plan: which source is written to which place."""
        sources, grants = self._sources, self._grants
        if type(sources) is TensorColumns:
            first = grants[0] if grants else None
            if len(grants) == 1 and first is not None:
                offsets = in_a_row(first.offset, sources.sizes)
                return [ColumnsPut(first.volume, first.segment, sources, offsets)]
            sources = sources.sources()
        placed = [source for source in sources if source.nbytes]
        if len(grants) > len(placed):  # each further copy has as many grants as the first
            placed *= len(grants) // len(placed)
        return put_batches(zip(placed, grants, strict=True))

    async def commit(self) -> m.Committed:
        """Make the values visible to readers; returns the reply, with their versions."""
        commit = m.Commit(self._channel.next_id(), self._txn)
        quick = self._entries <= QUICK_ENTRIES
        done = await self._channel.call(commit, m.Committed, self.clock.left(), quick=quick)
        return self._committed(done)

    def begin_commit(self) -> None:
        """Have the server commit, also if this event loop ends now, or this process."""
        commit = m.Commit(self._channel.next_id(), self._txn)
        self._begun = commit, self._channel.begin(commit, self.clock.left())

    async def end_commit(self) -> m.Committed:
        """The same as :meth:`commit`, if that has begun."""
        if self._begun is None:
            return await self.commit()
        return self._committed(await self._channel.finish(*self._begun, m.Committed))

    def _committed(self, done: m.Committed) -> m.Committed:
        self._done = True
        self.clock.phase("commit")
        return done

    def refs(self, keys: Sequence[str], reply: m.Committed) -> list[ObjectRef]:
        """The refs of what was committed, one for each key."""
        return refs_of(keys, reply, self._session.welcome.incarnation)

    def undo_with(self, owner: object) -> None:
        """Undo the put when ``owner`` is collected: the task of a closed event loop never ends."""
        session = self._session
        session.watch(owner, functools.partial(session.abort_if_unfinished, self._txn))

    def __exit__(self, *_: object) -> None:
        begun, self._begun = self._begun, None  # the future keeps its event loop
        if not self._done:
            if begun is not None:
                self._channel.forget(begun[0])
            unsettled = [
                (batch.volume, batch.unsettled) for batch in self._batches if batch.unsettled
            ]
            give_up_put(self._session, self._channel, self._txn, unsettled)
            if self._lent is not None:
                self._lent.take_back()
        self._session.end(self._txn)
