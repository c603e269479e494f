"""Closed links and disconnected clients leave nothing behind."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from torchstore_core.errors import TransportError
from torchstore_core.testing.timers import clock
from torchstore_core.testing.transports.base import (
    ROUNDS,
    Ends,
    TransportKit,
    check,
    check_raised,
    fail,
    must_refuse,
    outcome,
    over_a_link,
    run,
)
from torchstore_core.testing.transports.ends.client import Crowd, Errand
from torchstore_core.testing.transports.ends.memory import Memory, pattern
from torchstore_core.testing.transports.ends.session import Session

__all__ = ["ClosingTests"]

_NBYTES = 300_001
_LONG = 12 << 20
_ENDING = 3
_CLOSE_S, _CLOSES = 0.25, 5
_CONNECT_S = 10.0


class ClosingTests(TransportKit):
    """Tests of closing and disconnecting, and of what is left afterwards."""

    @over_a_link()
    async def test_close_is_quick_and_may_come_twice(self, ends: Ends) -> None:
        """``close`` neither blocks nor fails, before the first transfer and after one."""
        endpoints, session, _ = ends
        for used in (False, True):
            took = [math.inf]
            while len(took) <= _CLOSES and min(took) >= _CLOSE_S:  # the machine may be busy
                link = await session.connect()
                if used:
                    memory = Memory(pattern(1, _NBYTES))
                    await link.write([memory.copy(endpoints.take(_NBYTES))])
                began = clock()
                link.close()
                link.close()
                took.append(clock() - began)
            check(min(took) < _CLOSE_S, f"close() took {min(took):.2f} s: it must not block")

    def test_links_leave_nothing_behind(self) -> None:
        """After some rounds of connect, transfer, close and disconnect, neither this process nor
        the server half's has more descriptors, threads, mappings or child processes.
        """
        endpoints = self.anywhere()

        async def use_once() -> None:
            async with endpoints.session() as session:
                link = await session.connect()
                memory, offset = Memory(pattern(4, _NBYTES)), endpoints.take(_NBYTES)
                await link.write([memory.copy(offset)])
                await link.read([memory.copy(offset)])
                link.close()

        self.must_leave_nothing(endpoints, _in_one_loop(use_once), "links")

    def test_a_link_that_is_dropped_leaves_nothing_behind(self) -> None:
        """The resources of a link are freed with its event loop, which users may not close."""
        endpoints = self.anywhere()
        if not self.spec().loop_bound:
            pytest.skip("its links belong to no event loop (loop_bound is False)")

        async def drop() -> None:
            async with endpoints.session() as session:
                link = await self.link_class().connect(session.context.offer, session.context)
                memory, offset = Memory(pattern(5, _NBYTES)), endpoints.take(_NBYTES)
                await link.write([memory.copy(offset)])

        def rounds(count: int) -> None:
            for _ in range(count):
                run(drop())

        self.must_leave_nothing(endpoints, rounds, "dropped links and loops")

    def test_a_cancelled_connect_leaves_nothing_behind(self) -> None:
        """This holds for a cancellation at any moment, also just after the link has been made."""
        endpoints = self.anywhere()

        async def duration() -> float:
            async with endpoints.session() as session:
                began = time.monotonic()
                await session.connect()
                return time.monotonic() - began

        async def cancelled(delay: float) -> None:
            async with endpoints.session() as session:
                connecting = asyncio.ensure_future(session.connect())
                await asyncio.sleep(0)
                await asyncio.wait([connecting], timeout=delay)
                connecting.cancel()
                await asyncio.wait([connecting], timeout=_CONNECT_S)
                check(connecting.done(), f"a cancelled connect took more than {_CONNECT_S:g} s")
                raised = None if connecting.cancelled() else connecting.exception()
                check_raised(raised, "a cancelled connect")

        took = run(duration())

        def rounds(count: int) -> None:
            for at in range(count):
                run(cancelled(took * at / (count - 3)))  # the last ones come too late

        what, many = "cancelled connects", 2 * ROUNDS
        self.must_leave_nothing(endpoints, rounds, what, many, first=many)

    def test_failed_transfers_leave_nothing_behind(self) -> None:
        """What is refused costs nothing after the client has left, at either end."""
        endpoints = self.anywhere()
        end = endpoints.nbytes

        async def fail_once() -> None:
            async with endpoints.session() as session:
                link = await session.connect()
                memory = Memory(pattern(6, _NBYTES))
                copies = [memory.copy(endpoints.take(_NBYTES)), memory.copy(end - 1)]
                for what, move in (("write", link.write), ("read", link.read)):
                    what = f"a {what} across the segment's end"
                    await must_refuse(move(copies), what, _CONNECT_S)
                link.close()

        self.must_leave_nothing(endpoints, _in_one_loop(fail_once), "failed transfers")

    def test_cancelled_transfers_leave_nothing_behind(self) -> None:
        """Nor do links whose transfer was cancelled when it had just begun."""
        endpoints = self.anywhere()

        async def cancel_once() -> None:
            async with endpoints.session() as session:
                link = await session.connect()
                memory, offset = Memory(pattern(7, _LONG)), endpoints.take(_LONG)
                await link.write([memory.copy(offset, _NBYTES)])
                moving = asyncio.ensure_future(link.write([memory.copy(offset)]))
                await asyncio.sleep(0)
                await asyncio.wait([moving], timeout=0)
                moving.cancel()
                raised = await outcome(moving, _CONNECT_S, "a cancelled write")
                known = isinstance(raised, TransportError | asyncio.CancelledError | None)
                check(known, f"a cancelled write raised {raised!r}, which is no TransportError")
                link.close()

        self.must_leave_nothing(endpoints, _in_one_loop(cancel_once), "cancelled transfers")

    def test_killed_clients_leave_nothing_behind(self) -> None:
        """Nor does a client process that is killed leave anything at the server half, which is told
        to disconnect it.
        """
        endpoints = self.at("process")
        offset = endpoints.take(_NBYTES)

        async def leave(peers: list[bytes]) -> None:
            async with endpoints.session() as session:
                for session.peer in peers:
                    await session.disconnect()

        def rounds(count: int) -> None:
            errand = Errand("write", 4, offset, _NBYTES)
            crowd = Crowd(endpoints.reach, count, errand, self.environment)
            crowd.kill()
            run(leave(crowd.peers))

        self.must_leave_nothing(endpoints, rounds, "killed clients", first=ROUNDS)

    @over_a_link()
    async def test_the_end_of_a_link_is_nobody_elses(self, ends: Ends) -> None:
        """While a link moves bytes, others of the same client are closed, and other clients close
        theirs and are disconnected. The link goes on, and so does its transfer.
        """
        endpoints, session, link = ends
        memory, offset = Memory(pattern(8, _LONG)), endpoints.take(_LONG)
        small, other_offset = Memory(pattern(9, _NBYTES)), endpoints.take(_NBYTES)
        enough = asyncio.Event()

        async def go_on() -> None:
            while not enough.is_set():
                await link.write([memory.copy(offset)])
                await asyncio.sleep(0)

        async def end(others: Session, what: str) -> None:
            other = await others.connect()
            await other.write([small.copy(other_offset)])
            other.close()
            if others is not session:
                await others.disconnect()
            await asyncio.sleep(0)
            if going.done():
                fail(f"a write ended at {what}: {going.exception()!r}")

        going = asyncio.ensure_future(go_on())
        for _ in range(_ENDING):
            await end(session, "close() of another link of the client")
            async with endpoints.session() as others:
                await end(others, "disconnect() of another client")
        enough.set()
        raised = await outcome(going, _CONNECT_S, "a write while others left")
        check(raised is None, f"a write while others left raised {raised!r}")
        endpoints.put(offset, bytes(_LONG))
        raised = await outcome(
            link.write([memory.copy(offset)]), _CONNECT_S, "a write after others had left"
        )
        check(raised is None, f"a write after others had left raised {raised!r}")
        check(endpoints.look(offset, _LONG) == memory.data(), "other bytes arrived")

    def test_nothing_is_registered_after_the_last_client(self) -> None:
        """While clients are connected, ``registered`` is at most the size of the segment. After
        that it is 0, so that the volume can return memory to the system.
        """
        endpoints = self.anywhere()

        async def main() -> None:
            async with endpoints.session() as watching:
                async with endpoints.session() as one, endpoints.session() as other:
                    for session in (one, other):
                        link = await session.connect()
                        memory = Memory(pattern(1, _NBYTES))
                        await link.write([memory.copy(endpoints.take(_NBYTES))])
                    during = await watching.registered()
                    sane = 0 <= during <= endpoints.nbytes
                    check(sane, f"registered() is {during} of a segment of {endpoints.nbytes}")
                left = await watching.registered()
                check(left == 0, f"registered() is {left} after the last client has disconnected")

        run(main())

    @over_a_link()
    async def test_a_client_may_begin_anew_after_disconnect(self, ends: Ends) -> None:
        """The same peer can connect again, with a new link."""
        endpoints, session, link = ends
        for seed in range(3):
            memory, offset = Memory(pattern(seed, _NBYTES)), endpoints.take(_NBYTES)
            await link.write([memory.copy(offset)])
            check(endpoints.look(offset, _NBYTES) == memory.data(), "other bytes arrived")
            link.close()
            for _ in range(2):
                await session.disconnect()
            link = await session.connect()


def _in_one_loop(once: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[int], None]:
    """Return a function that runs ``once`` so many times on one event loop."""

    async def rounds(count: int) -> None:
        for _ in range(count):
            await once()

    return lambda count: run(rounds(count))
