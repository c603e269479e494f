"""Asking the server for the memory of a put, and giving it back; what is lent with its values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

import msgspec

from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.session.channel import QUICK_ENTRIES, Channel
from torchstore_core.clients.session.held_ref import Lent
from torchstore_core.clients.session.session import Session
from torchstore_core.clients.transfer.columns.sources import TensorColumns
from torchstore_core.clients.transfer.sources import Source
from torchstore_core.errors import StoreFullError, TorchStoreError
from torchstore_core.wire import messages as m

R = TypeVar("R", bound=m.Message)


class PutOptions(msgspec.Struct, frozen=True, gc=False):
    """How values are put.

    Args:
        version, group, when_full: see ``messages.Put``.
        rewind: go back to that version, see ``messages.Rewind``.
        held_as: put an object without a key, see ``messages.PutObject``.
    """

    version: int = 0
    group: m.Publication | None = None
    rewind: bool = False
    when_full: int = 0
    held_as: tuple[int, str] | None = None

    async def begin(
        self,
        session: Session,
        channel: Channel,
        clock: Clock,
        txn: int,
        items: list[m.PutItem],
        expect: type[R],
        lent: InPut | None = None,
        columns: m.ItemColumns | None = None,
    ) -> R:
        """Send the message that begins the put. Retry once if tensors or references that have just
        ended in this process held the missing space.
        """
        number, tickets = channel.next_id(), [] if lent is None else lent.send()
        put: m.Put | m.PutObject
        if self.held_as is not None:
            put = m.PutObject(number, txn, items[0], *self.held_as, self.when_full, tickets)
        else:
            kind = m.Rewind if self.rewind else m.Put
            put = kind(
                number, txn, items, self.version, self.group, self.when_full, columns, tickets
            )
        quick = (len(items) if columns is None else len(columns.keys)) <= QUICK_ENTRIES
        try:
            return await channel.call(put, expect, clock.left(), quick=quick)
        except StoreFullError as full:
            if not (full.details.get("leased_bytes") or full.details.get("held_bytes")):
                raise
            if not await session.wait_released(channel, clock.left()):
                raise
        again = msgspec.structs.replace(put, id=channel.next_id())
        return await channel.call(again, expect, clock.left())


def lent_in(
    session: Session, channel: Channel, sources: Sequence[Source] | TensorColumns
) -> InPut | None:
    """The references that are in the values of a put; None: there are none, as usual.

    Raises:
        UnsupportedValueError: one of them belongs to another store.
    """
    if type(sources) is not TensorColumns:
        for source in sources:
            if source.lent is not None:
                return InPut(session, channel, sources)
    return None


class InPut:
    """The references that are in the values of a put; see :func:`lent_in`.

    The put says what is lent, so the server knows what its values have in them whatever becomes of
    the client. It does not know that of a put that it has refused, or has not read yet.
    """

    __slots__ = ("_channel", "_every", "_session", "_tickets")

    def __init__(self, session: Session, channel: Channel, sources: Sequence[Source]) -> None:
        self._session = session
        self._channel = channel
        self._every: list[Lent] = []
        self._tickets: m.Lent = []
        for at, source in enumerate(sources):
            if (lent := source.lent) is not None:
                self._every.append(lent)
                self._tickets.append((at, lent.at(source.key, session.holder.place)))

    def send(self) -> m.Lent:
        """What the put says, which is sent now."""
        for lent in self._every:
            lent.is_sent = True
        return self._tickets

    def undo(self, txn: int) -> None:
        """The put was refused, or is given up. It may have been read, but is not read later."""
        give_up_put(self._session, self._channel, txn)
        self.take_back()

    def take_back(self) -> None:
        """The put was aborted, too: nobody has the values, unless it was complete."""
        tickets = [number for _, numbers in self._tickets for number in numbers]
        try:
            if tickets:
                self._channel.send(m.TakeBack(tickets))
        except TorchStoreError:
            for lent in self._every:
                lent.take_back()


def give_up_put(
    session: Session, channel: Channel, txn: int, unsettled: Collection[tuple[int, str]] = ()
) -> None:
    """Abort a put, see ``messages.Abort``: behind what the channel has sent, or else, if that is
    down, in the background. The server ignores unknown ids, so this is right whether or not it has
    begun the put.
    """
    try:
        channel.send(m.Abort([txn], [*unsettled]))
    except TorchStoreError:
        session.abort(txn, unsettled)
