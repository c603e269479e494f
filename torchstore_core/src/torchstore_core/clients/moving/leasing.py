"""The lease of a get: what is read stays where it is meanwhile, and as long as it is mapped."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.moving import executor
from torchstore_core.clients.moving.batches import Batch, Mapped
from torchstore_core.clients.session.channel import Channel
from torchstore_core.clients.session.session import Session
from torchstore_core.errors import TorchStoreError, TransportError
from torchstore_core.wire import messages as m


class Leasing(msgspec.Struct, eq=False):
    """The lease of a get. Each attempt is a ``with`` block, which releases on exit everything that
    is not mapped. An attempt that fails because a volume cannot be read from ends without an error
    the first time: the next one gets copies on other volumes.

    Args:
        failed: the volumes that failed, and how.
        avoid: the same volumes.
        lease: the id of this attempt's lease.
        leased: whether there is one, as far as is known.
        count: how many values it has.
        mapped: the positions of those that are mapped.
    """

    session: Session
    channel: Channel
    clock: Clock
    failed: dict[int, TransportError] = {}
    avoid: list[int] = []
    lease: int = 0
    leased: bool = True
    count: int = 1
    mapped: set[int] = set()

    def __enter__(self) -> None:
        self.lease = self.session.next_id()
        self.session.leases_in_use.add(self.lease)

    def granted(self, entries: Sequence[m.Entry | None], leased: bool) -> list[int]:
        """Record the reply; returns the position of each entry's first value in the lease."""
        self.leased = leased
        starts: list[int] = []
        count = 0
        for entry in entries:
            starts.append(count)
            if entry is not None:
                count += 1 if entry.parts is None else len(entry.parts)
        self.count = count
        return starts

    def check(self, entries: Sequence[m.Entry | None]) -> None:
        """Raise the error of a failed volume that entries still name: there is no other copy."""
        for entry in entries:
            if entry is None:
                continue
            grants = [entry.grant, *(part.grant for part in entry.parts or ())]
            for grant in grants:
                if grant is not None and grant.volume in self.failed:
                    raise self.failed[grant.volume]

    async def move(self, batches: Sequence[Batch]) -> list[Mapped]:
        """Move the bytes; returns what was mapped instead."""
        where = self.session, self.channel
        done = await executor.execute_within(self.clock, *where, batches)
        return [one for moved in done for one in moved.mappings]

    def keep(self, owner: object, positions: list[int]) -> None:
        """What is mapped keeps its part of the lease until its owner is garbage-collected."""
        self.mapped.update(positions)
        self.session.hold(owner, self.lease, positions)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if self.leased and len(self.mapped) < self.count:
            _release(self.session, self.channel, self.lease, self.mapped, self.count)
        self.session.leases_in_use.discard(self.lease)
        return isinstance(error, TransportError) and self._avoids(error)

    def _avoids(self, error: TransportError) -> bool:
        """Avoid the volume of this error; returns False if it is not the first of that volume."""
        volume = error.details.get("volume")
        if not isinstance(volume, int) or volume in self.failed:
            return False
        self.failed[volume] = error
        self.avoid.append(volume)
        self.leased, self.count, self.mapped = True, 1, set()
        return True


def _release(session: Session, channel: Channel, lease: int, mapped: set[int], count: int) -> None:
    """Release the lease, except for the positions that mapped tensors still use."""
    rest = [at for at in range(count) if at not in mapped] if mapped else None
    message = m.Release([lease]) if rest is None else m.Release([], [(lease, rest)])
    try:
        channel.send(message)
    except TorchStoreError:
        session.release(lease, rest)
