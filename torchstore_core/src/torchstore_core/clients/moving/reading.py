"""Gets without torch: the values of a state dict as the bytes that they are."""

from __future__ import annotations

from collections.abc import Sequence

from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.moving.bytes import BytesGet
from torchstore_core.clients.moving.entries import entries_of
from torchstore_core.clients.moving.leasing import Leasing
from torchstore_core.clients.session.channel import Channel
from torchstore_core.clients.session.session import Session
from torchstore_core.errors import UnsupportedValueError
from torchstore_core.wire import messages as m


async def read_bytes(
    session: Session, channel: Channel, key: str, clock: Clock
) -> dict[str, memoryview]:
    """Return the newest version of a state dict: the bytes of each entry, by its name. Tensors are
    row-major. Large ones are not copied; their memory stays leased while somebody refers to it.

    Raises:
        KeyNotFoundError: there is no version.
        UnsupportedValueError: an entry is stored in shards.
    """
    leasing = Leasing(session, channel, clock)
    while True:
        with leasing:
            request = m.Fetch(
                channel.next_id(), leasing.lease, key, 0, None, session.inline_max(), leasing.avoid
            )
            reply = await channel.call(request, m.Fetched, clock.left())
            columns = reply.columns
            entries = reply.entries if columns is None else entries_of(columns)
            starts = leasing.granted(entries, reply.leased)
            if leasing.avoid:
                leasing.check(entries)
            clock.phase("plan")
            found = await _read(leasing, key, entries, starts)
            for tied, first in reply.same_as:
                found[tied] = found[first]
            clock.entries, clock.version = len(found), reply.version
            clock.phase("copy")
            return {name: found[at] for at, name in enumerate(reply.names)}


async def _read(
    leasing: Leasing, key: str, entries: Sequence[m.Entry | None], starts: Sequence[int]
) -> dict[int, memoryview]:
    found: dict[int, memoryview] = {}
    wanted: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for at, entry in enumerate(entries):
        if entry is None:
            continue
        if entry.parts is not None:
            raise UnsupportedValueError(f"{key!r} is stored in shards, not in one piece")
        if entry.grant is None:
            found[at] = memoryview(entry.data or b"")
        else:
            grant = entry.grant
            there = wanted.setdefault((grant.volume, grant.segment), [])
            there.append((grant.offset, entry.nbytes, at))
    batches = [BytesGet(place, some, found) for place, some in wanted.items()]
    for mapped in await leasing.move(batches):
        found.update(mapped.values)
        leasing.keep(mapped.owner, [starts[at] for at, _ in mapped.values])
    return found
