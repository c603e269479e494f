"""What shows only when links live long: memory that grows, reads of the past, a blocked loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from torchstore_core.contracts.transport import Copy, Link, SupportsWindow
from torchstore_core.errors import TransportError
from torchstore_core.testing.timers import clock
from torchstore_core.testing.transports.base import (
    Ends,
    TransportKit,
    check,
    fail,
    over_a_link,
    run,
)
from torchstore_core.testing.transports.ends.endpoints import Endpoints
from torchstore_core.testing.transports.ends.memory import Memory, give_back, pattern
from torchstore_core.testing.transports.ends.session import Session

__all__ = ["LastingTests"]

# What a page of a large size, or what a half reads ahead, may have.
_SOME_PAGES = 8 << 20
_MB = 1 << 20
# Enough that a kept copy of what was moved, or asked, is far more than what allocators keep.
_TRANSFERS, _TRANSFERRED = 32, 512 << 10
_HANDSHAKES, _ASKED = 64, 128 << 10
_CLIENTS = 12
# What may be left of each round. Memory that grows with use grows in all rounds, allocators do not.
# In a round or two, something else in the process may give back as much.
_OF_TRANSFERS, _OF_HANDSHAKES, _OF_CLIENTS = 4 * _MB, 2 * _MB, 4 * _MB
_ROUNDS, _QUIET = 8, 3
# On a busy machine, a half may be late to give back what a client had that has just left.
_LOOKS, _REST_S = 10, 0.2
_READ = 70_001
# An event loop may be late on a busy machine: not in all tries, and not for half of each.
_TRIES = 5
_WATCHED = 64 * _MB
_LATE_S = 10e-3
_BEAT_S = 1e-3


class LastingTests(TransportKit):
    """Tests of what a link or a half does not do while it is used again and again."""

    @over_a_link()
    async def test_memory_does_not_grow_with_transfers(self, ends: Ends) -> None:
        """Neither half keeps what it has moved, or as much beside it."""
        endpoints, session, link = ends
        source, target = Memory(pattern(3, _TRANSFERRED)), Memory(_TRANSFERRED)
        offset = endpoints.take(_TRANSFERRED)

        async def transfers() -> None:
            for _ in range(_TRANSFERS):
                await link.write([source.copy(offset)])
                await link.read([target.copy(offset)])
            session.requests.clear()  # bytes may travel in handshakes, which it remembers

        what = f"{_TRANSFERS} writes and reads of {_TRANSFERRED >> 10} KiB over one link"
        await _must_not_grow(endpoints, session, transfers, _OF_TRANSFERS, what)

    @over_a_link()
    async def test_memory_does_not_grow_with_handshakes(self, ends: Ends) -> None:
        """The server half forgets what it was asked, and refused."""
        endpoints, session, _ = ends

        async def handshakes() -> None:
            for at in range(_HANDSHAKES):
                with contextlib.suppress(TransportError):
                    await session.handshake(bytes([at]) * _ASKED)
                session.requests.clear()  # it would remember them

        what = f"{_HANDSHAKES} handshakes of {_ASKED >> 10} KiB"
        await _must_not_grow(endpoints, session, handshakes, _OF_HANDSHAKES, what)

    def test_memory_does_not_grow_with_clients(self) -> None:
        """Clients that connect, move something and leave cost nothing after that."""
        endpoints = self.anywhere()
        memory, offset = Memory(pattern(4, _READ)), endpoints.take(_READ)

        async def clients() -> None:
            for _ in range(_CLIENTS):
                async with endpoints.session() as session:
                    link = await session.connect()
                    await link.write([memory.copy(offset)])

        async def main() -> None:
            async with endpoints.session() as watching:
                what = f"{_CLIENTS} clients, one by one"
                await _must_not_grow(endpoints, watching, clients, _OF_CLIENTS, what)

        run(main())

    @over_a_link()
    async def test_a_read_is_of_what_is_there_now(self, ends: Ends) -> None:
        """A place that was read before, and has been written since, by this link, by another one,
        or by whoever else has the memory.
        """
        endpoints, session, link = ends
        offset = endpoints.take(_READ)
        other = await session.connect()

        async def by(writer: Link, data: bytes) -> None:
            memory = Memory(data)
            await writer.write([memory.copy(offset)])

        async def by_the_owner(data: bytes) -> None:
            endpoints.put(offset, data)

        ways: dict[str, Callable[[bytes], Coroutine[Any, Any, None]]] = {
            "the same link": lambda data: by(link, data),
            "the owner of the memory": by_the_owner,
            "another link": lambda data: by(other, data),
        }
        target = Memory(_READ)
        for seed, (who, write) in enumerate([*ways.items(), *ways.items()]):
            data = pattern(seed, _READ)
            await write(data)
            await link.read([target.copy(offset)])
            check(target.data() == data, f"a read did not see what {who} had written before")

    def test_it_makes_no_pages(self) -> None:
        """A segment gets memory where something is written, not because somebody is connected, or
        reads what is beside it.
        """
        if type(self).endpoints is not TransportKit.endpoints:
            pytest.skip("its volumes are its own (endpoints is overridden)")
        with self.fresh() as endpoints:

            async def work(_: Session, link: Link) -> None:
                memory = Memory(pattern(5, _READ))
                await link.write([memory.copy(13)])
                await link.read([memory.copy(13)])

            self.with_link(endpoints, work)
            made = endpoints.backed_bytes()
            few = made <= _READ + _SOME_PAGES
            check(few, f"a write of {_READ} bytes has made {made >> 20} MiB of pages")

    @over_a_link()
    async def test_the_event_loop_goes_on(self, ends: Ends) -> None:
        """While many bytes move, other tasks of the client's event loop run."""
        endpoints, _, link = ends
        if isinstance(self.link_class(), type) and issubclass(self.link_class(), SupportsWindow):
            pytest.skip("its bytes are copied by the store itself (SupportsWindow)")
        nbytes = min(self.large_bytes, _WATCHED)
        offset = endpoints.take(nbytes)
        memory = Memory(bytes(nbytes))
        for what, move in (("write", link.write), ("read", link.read)):
            await _must_go_on(what, move, memory.copy(offset))


async def _must_not_grow(
    endpoints: Endpoints,
    watching: Session,
    work: Callable[[], Coroutine[Any, Any, None]],
    limit: int,
    what: str,
) -> None:
    """Fail the test if nearly every one of several rounds of work leaves more than ``limit``
    bytes.
    """
    await work()
    before = await _memory(endpoints, watching)
    quiet, left = 0, (0, "")
    for _ in range(_ROUNDS):
        await work()
        for look in range(_LOOKS):
            await asyncio.sleep(_REST_S if look else 0)
            after = await _memory(endpoints, watching)
            grown = max((after[who] - before.get(who, 0), who) for who in after)
            if grown[0] <= limit:
                break
        if grown[0] <= limit:
            quiet += 1
            if quiet == _QUIET:
                return
        else:
            left = grown
        before = after
    fail(f"{what} leave {left[0] / _MB:.1f} MiB in {left[1]}, each time")


async def _memory(endpoints: Endpoints, watching: Session) -> dict[str, int]:
    """Bytes of private memory of this process and of the server half's, without what is free."""
    give_back()
    await watching.give_back()
    pids = endpoints.processes()
    found = {f"the server half ({pid})": _private(pid) for pid in pids if pid != os.getpid()}
    return {"this process": _private(os.getpid()), **found}


def _private(pid: int) -> int:
    """Bytes of memory of a process that are no file's, swapped ones included."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    wanted = ("RssAnon:", "VmSwap:")
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(wanted))


async def _must_go_on(
    what: str, move: Callable[[list[Copy]], Coroutine[Any, Any, None]], copy: Copy
) -> None:
    """Fail the test if the event loop waits for most of a transfer, whenever it is tried."""
    longest = took = 0.0
    for _ in range(_TRIES):
        gaps: list[float] = []
        beating = asyncio.ensure_future(_beat(gaps))
        await asyncio.sleep(0)
        began = clock()
        await move([copy])
        took = clock() - began
        await asyncio.sleep(0)  # a gap at the end shows only in the next beat
        await asyncio.sleep(2 * _BEAT_S)
        beating.cancel()
        await asyncio.wait([beating])
        longest = max(gaps, default=0.0)
        if longest <= max(_LATE_S, took / 2):
            return
    fail(
        f"a {what} of {copy.nbytes >> 20} MiB took {took * 1e3:.0f} ms, and no other task of its "
        f"event loop ran for {longest * 1e3:.0f} ms of them: it must not block"
    )


async def _beat(gaps: list[float]) -> None:
    """Note how long the event loop did not come back, each time."""
    last = clock()
    while True:
        await asyncio.sleep(_BEAT_S)
        now = clock()
        gaps.append(now - last)
        last = now
