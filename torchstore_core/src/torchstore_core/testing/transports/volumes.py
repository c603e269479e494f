"""Several volumes of one process, as a store with several volumes on a host has them."""

from __future__ import annotations

import asyncio

from torchstore_core.contracts.transport import Link
from torchstore_core.testing.transports.base import TransportKit, check
from torchstore_core.testing.transports.ends.memory import Memory, pattern
from torchstore_core.testing.transports.ends.session import Session

__all__ = ["VolumeTests"]

_NBYTES = 300_001


class VolumeTests(TransportKit):
    """Tests that the halves and links of several volumes know which one is theirs."""

    def test_volumes_of_one_process_do_not_mix(self) -> None:
        """One client has links to both. What it writes is in the volume that it is for, and when it
        has left one of them, or that one is closed, it has the other one as before.
        """
        endpoints = self.anywhere()
        offset = endpoints.take(_NBYTES)

        async def work(session: Session, early: Link) -> None:
            async with endpoints.another() as (beside, memory):
                beside.peer = session.peer
                other, late = await beside.connect(), await session.connect()
                for seed, link in enumerate((early, late)):
                    ours, theirs = Memory(pattern(seed, _NBYTES)), Memory(pattern(9, _NBYTES))
                    endpoints.put(offset, bytes(_NBYTES))
                    memory[offset : offset + _NBYTES] = bytes(_NBYTES)
                    await asyncio.gather(
                        link.write([ours.copy(offset)]), other.write([theirs.copy(offset)])
                    )
                    right = endpoints.look(offset, _NBYTES) == ours.data()
                    check(right, "a write to one of two volumes is not there")
                    right = memory[offset : offset + _NBYTES] == theirs.data()
                    check(right, "a write to the other one of two volumes is not there")
                    for mine, volume in ((ours, link), (theirs, other)):
                        target = Memory(_NBYTES)
                        await volume.read([target.copy(offset)])
                        check(target.data() == mine.data(), "a read is of the other volume")
                other.close()
                await beside.disconnect()
                for seed, when in ((3, "the client has left the other one"), (4, "that is closed")):
                    ours = Memory(pattern(seed, _NBYTES))
                    await late.write([ours.copy(offset)])
                    right = endpoints.look(offset, _NBYTES) == ours.data()
                    check(right, f"what is written to one of two volumes when {when} is not there")
                    await beside.close_volume()

        self.with_link(endpoints, work)
