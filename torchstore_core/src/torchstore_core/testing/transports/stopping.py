"""Transfers that are cancelled, and either side's process dying or stopping."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
import pytest

from torchstore_core.contracts.transport import Copy, Link
from torchstore_core.errors import TransportError
from torchstore_core.testing import leftovers
from torchstore_core.testing.timers import clock, ends_within
from torchstore_core.testing.transports.base import (
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
from torchstore_core.testing.transports.ends.client import Client, Errand
from torchstore_core.testing.transports.ends.endpoints import Endpoints
from torchstore_core.testing.transports.ends.memory import Memory, pattern
from torchstore_core.testing.transports.ends.session import Session

__all__ = ["StoppingTests"]

_TRANSFER = 12 << 20
_PIECE = 1 << 20
# When transfers are cancelled, as fractions of the time that a transfer takes.
_MOMENTS = (0.0, 0.1, 0.3, 0.5, 0.8)
_CANCEL_S = 1.0
_DEADLINE_S = 0.5
_PATIENCE_S = 10.0
# How long a transfer may take to notice that the server half is dead, before it is cancelled.
_NOTICE_S = 1.5
# When clients are stopped, after their first transfers.
_SOME_TRANSFERS_S = 0.05
# How long a transfer may take that nothing is in the way of.
_HELD_UP_S = 3.0
# How long to watch memory that must no longer change.
_WATCH_S = 0.5
_WRITTEN, _POISON, _OURS = 0x11, 0x66, 0x99
# Memory to which a transport that fails a test may still write.
_kept: list[Memory] = []
_Work = Coroutine[Any, Any, None]
T = TypeVar("T")


def _copies(memory: Memory, offset: int) -> list[Copy]:
    """Return a transfer in pieces, so that it can stop between them."""
    return [
        Copy(memory.address + at, 0, offset + at, min(_PIECE, memory.nbytes - at))
        for at in range(0, memory.nbytes, _PIECE)
    ]


async def _cancelled(work: _Work, delay: float, what: str) -> None:
    """Cancel ``work`` after a delay, and fail the test if it does not end soon."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    if delay:
        await asyncio.wait([task], timeout=delay)
    task.cancel()
    await _ended(task, f"a cancelled {what}")


async def _limited(work: _Work, what: str) -> None:
    """Give ``work`` a deadline, and fail the test if it is not over soon after that, or if whoever
    has set the deadline is not told.
    """
    passed = False

    async def until_deadline() -> None:
        nonlocal passed
        deadline = asyncio.timeout(_DEADLINE_S)
        try:
            async with deadline:
                await work
            passed = deadline.expired()
        except TimeoutError:
            if not deadline.expired():
                raise

    what = f"a {what} whose deadline has passed"
    task = asyncio.ensure_future(until_deadline())
    await asyncio.wait([task], timeout=_DEADLINE_S)
    await _ended(task, what)
    check(not passed, f"{what} returned as if it had not been cancelled")


async def _ended(task: asyncio.Future[None], what: str) -> None:
    """Fail the test if ``task``, which has just been cancelled, does not end soon."""
    began = time.monotonic()
    in_time = await ends_within(task, _CANCEL_S)
    await asyncio.wait([task], timeout=_PATIENCE_S)
    took = time.monotonic() - began
    check(task.done(), f"{what} did not end within {_PATIENCE_S:g} s")
    check(in_time, f"{what} ended after {took:.1f} s, not within a second")
    check_raised(None if task.cancelled() else task.exception(), what)


class StoppingTests(TransportKit):
    """Tests of cancelled transfers, and of processes that are killed or stopped."""

    @over_a_link()
    async def test_a_cancelled_transfer_ends_within_a_second(self, ends: Ends) -> None:
        """Cancel a write and a read, each at several moments."""
        endpoints, session, link = ends
        took = await _duration(endpoints, link)
        source = Memory(pattern(3, _TRANSFER))
        _kept.append(source)
        offset = endpoints.take(_TRANSFER)
        for what in ("write", "read"):
            for moment in _MOMENTS[:3]:
                link = await session.connect()
                move = link.write if what == "write" else link.read
                await _cancelled(move(_copies(source, offset)), moment * took, what)
                if link.unsettled:
                    link.close()
                    await session.disconnect()
        _kept.remove(source)

    @over_a_link()
    async def test_after_a_cancelled_write_no_byte_moves(self, ends: Ends) -> None:
        """No byte is written after ``write`` has raised, or, if the link says ``unsettled``, after
        the server half has disconnected the client.
        """
        endpoints, session, link = ends
        took = await _duration(endpoints, link)
        watched: list[int] = []
        for moment in _MOMENTS:
            link = await session.connect()
            source = Memory(bytes([_WRITTEN]) * _TRANSFER)
            _kept.append(source)
            offset = endpoints.take(_TRANSFER)
            await _cancelled(link.write(_copies(source, offset)), moment * took, "write")
            if link.unsettled:
                link.close()
                await session.disconnect()
            source.fill(_POISON)
            endpoints.put(offset, bytes([_OURS]) * _TRANSFER)
            watched.append(offset)
        await asyncio.sleep(_WATCH_S)
        for offset in watched:
            found = endpoints.look(offset, _TRANSFER)
            if found != bytes([_OURS]) * _TRANSFER:
                moved = _TRANSFER - found.count(_OURS)
                fail(f"{moved} bytes were written after a write had been cancelled")
        del _kept[-len(_MOMENTS) :]

    @over_a_link()
    async def test_after_a_cancelled_read_no_byte_moves(self, ends: Ends) -> None:
        """When ``read`` has raised, nothing more may be written to its destination."""
        endpoints, session, link = ends
        took = await _duration(endpoints, link)
        targets: list[Memory] = []
        for moment in _MOMENTS:
            link = await session.connect()
            target = Memory(_TRANSFER)
            _kept.append(target)
            offset = endpoints.take(_TRANSFER)
            endpoints.put(offset, bytes([_WRITTEN]) * _TRANSFER)
            await _cancelled(link.read(_copies(target, offset)), moment * took, "read")
            target.fill(_OURS)
            targets.append(target)
        await asyncio.sleep(_WATCH_S)
        for target in targets:
            moved = _TRANSFER - target.data().count(_OURS)
            check(not moved, f"{moved} bytes came after a read had been cancelled")
        del _kept[-len(_MOMENTS) :]

    @over_a_link()
    async def test_after_a_failed_transfer_no_byte_moves(self, ends: Ends) -> None:
        """A batch of which one copy is refused raises, and no byte is moved after that; of a write
        whose link says ``unsettled``, after the server half has disconnected the client.
        """
        endpoints, session, link = ends
        nowhere = (
            ("out of range", {"offset": endpoints.nbytes - 1}),
            ("of an unknown segment", {"segment": len(endpoints.segments)}),
        )
        watched: list[tuple[str, Memory, int]] = []
        for (where, there), at in itertools.product(nowhere, (0.5, 1)):
            for what in ("write", "read"):
                link = await session.connect()
                local, offset = Memory(bytes([_WRITTEN]) * _TRANSFER), endpoints.take(_TRANSFER)
                _kept.append(local)
                watched.append((f"{what} with a copy {where}", local, offset))
                copies = _copies(local, offset)
                last = int((len(copies) - 1) * at)
                copies[last] = msgspec.structs.replace(copies[last], **there)
                move = link.write if what == "write" else link.read
                await must_refuse(move(copies), watched[-1][0])
                if link.unsettled:
                    link.close()
                    await session.disconnect()
                local.fill(_POISON)
                endpoints.put(offset, bytes([_OURS]) * _TRANSFER)
        await asyncio.sleep(_WATCH_S)
        for what, local, offset in watched:
            moved = _TRANSFER - endpoints.look(offset, _TRANSFER).count(_OURS)
            moved += _TRANSFER - local.data().count(_POISON)
            check(not moved, f"{moved} bytes were moved after a {what} had failed")
        del _kept[-len(watched) :]

    def test_a_killed_client_writes_no_more(self) -> None:
        """Once ``disconnect`` has returned, no byte from the killed client arrives."""
        endpoints = self.at("process")
        client = Client(endpoints.reach, environment=self.environment)
        try:
            offset = endpoints.take(_TRANSFER)
            client.tell(Errand("flood", 1, offset, _TRANSFER))
            answer = client.answer()
            check(answer == "ok", f"a client process cannot write: {answer}")
            first = pattern(1, _TRANSFER)
            deadline = time.monotonic() + _PATIENCE_S
            while endpoints.look(offset, _TRANSFER) == first:
                check(time.monotonic() < deadline, "a client process has stopped writing")
            client.kill()

            async def main() -> None:
                async with endpoints.session() as session:
                    session.peer = client.peer
                    await session.disconnect()
                    endpoints.put(offset, bytes([_OURS]) * _TRANSFER)
                    await asyncio.sleep(_WATCH_S)
                    moved = _TRANSFER - endpoints.look(offset, _TRANSFER).count(_OURS)
                    check(not moved, f"{moved} bytes of a dead client came after disconnect()")

            run(main())
        finally:
            client.close()

    @over_a_link("process")
    async def test_a_disconnected_client_begins_anew_or_is_refused(self, ends: Ends) -> None:
        """After ``disconnect``, what a link of the client was writing, and all that it is asked
        for, moves no byte before the link has asked the server half again.
        """
        endpoints, session, _ = ends
        before = endpoints.held_here()
        link = await session.connect()
        took = await _duration(endpoints, link)
        if endpoints.held_here() > before:
            pytest.skip("its clients have the memory themselves: nobody can take it from them")
        source, target = Memory(bytes([_WRITTEN]) * _TRANSFER), Memory(_TRANSFER)
        _kept.append(source)
        offset = endpoints.take(_TRANSFER)
        writing = asyncio.ensure_future(link.write(_copies(source, offset)))
        await asyncio.wait([writing], timeout=took / 2)
        await session.disconnect()
        endpoints.put(offset, bytes([_OURS]) * _TRANSFER)
        session.requests.clear()
        raised = await outcome(writing, _PATIENCE_S, "a write at a disconnect")
        check_raised(raised, "a write at a disconnect")
        for name, move, memory in (("read", link.read, target), ("write", link.write, source)):
            if session.requests:
                break
            what = f"a {name} over a link of a client that was disconnected"
            raised = await outcome(move(_copies(memory, offset)), _PATIENCE_S, what)
            refused = isinstance(raised, TransportError)
            check(refused or bool(session.requests), f"{what} ended with {raised!r}")
        else:
            await asyncio.sleep(_WATCH_S)
            moved = _TRANSFER - endpoints.look(offset, _TRANSFER).count(_OURS)
            check(not moved, f"{moved} bytes of a client came after it was disconnected")
        _kept.remove(source)

    @over_a_link("apart")
    async def test_a_killed_half_is_noticed(self, ends: Ends) -> None:
        """Transfers, and the next connect, fail with a TransportError, or succeed if they need no
        process. What a failed write says to be done has arrived, and no byte moves after it.
        """
        endpoints, session, link = ends
        source = Memory(pattern(1, _TRANSFER))
        _kept.append(source)
        offset = endpoints.take(_TRANSFER)

        pause = 0.0

        async def for_ever() -> None:
            while True:
                endpoints.put(offset, bytes(_TRANSFER))
                await link.write(_copies(source, offset))
                await asyncio.sleep(pause)

        task = asyncio.ensure_future(for_ever())
        await asyncio.wait([task], timeout=0.05)
        endpoints.signal(signal.SIGKILL)
        pause = 0.02  # those that need no process go on for all of the time
        await asyncio.wait([task], timeout=_NOTICE_S)
        await _failed_or_cancelled(task, "write to a half that was killed")
        raised = None if task.cancelled() else task.exception()
        if isinstance(raised, TransportError):
            done = raised.details.get("done", 0)
            there = endpoints.look(offset, min(done * _PIECE, _TRANSFER))
            true = there == source.data()[: done * _PIECE]
            what = f'details["done"] of a write to a half that was killed is {done}'
            check(true, f"{what}, and not all of these copies are there")
        source.fill(_POISON)
        endpoints.put(offset, bytes([_OURS]) * _TRANSFER)
        await asyncio.sleep(_WATCH_S)
        moved = _TRANSFER - endpoints.look(offset, _TRANSFER).count(_OURS)
        check(not moved, f"{moved} bytes came after a write to a killed half had failed")
        for what, again in (("write", link.write), ("read", link.read)):
            task = asyncio.ensure_future(again(_copies(source, offset)))
            await asyncio.wait([task], timeout=1.0)
            await _failed_or_cancelled(task, f"{what} after the half was killed")
        link.close()
        connecting = asyncio.ensure_future(session.connect())
        await asyncio.wait([connecting], timeout=2.0)
        await _failed_or_cancelled(connecting, "connect after the half was killed")
        _kept.remove(source)

    def test_a_stopped_half_holds_nobody_up(self) -> None:
        """While the half's process is stopped (SIGSTOP), transfers and connects can be cancelled,
        and a link can be closed; when it continues, no cancelled transfer moves a byte.
        """

        async def cancelled(session: Session, *moves: tuple[str, _Work]) -> None:
            await asyncio.gather(*(_cancelled(work, 0.3, what) for what, work in moves))
            other = asyncio.ensure_future(session.connect())
            await asyncio.wait([other], timeout=0.2)
            await _failed_or_cancelled(other, "connect while the half was stopped")

        self._while_stopped(cancelled)

    @over_a_link("process")
    async def test_a_stopped_client_holds_nobody_up(self, ends: Ends) -> None:
        """While client processes are stopped (SIGSTOP), one in the middle of its writes and one of
        its reads, another client connects, writes and reads as if nothing were.
        """
        endpoints, session, _ = ends
        memory = Memory(pattern(2, _TRANSFER))
        _kept.append(memory)
        offset = endpoints.take(_TRANSFER)
        stopped = [Client(endpoints.reach, environment=self.environment) for _ in range(2)]
        try:
            for client, what in zip(stopped, ("flood", "follow"), strict=True):
                place = endpoints.take(_TRANSFER)
                endpoints.put(place, pattern(1, _TRANSFER))
                client.tell(Errand(what, 1, place, _TRANSFER))
            for client in stopped:
                answer = await asyncio.to_thread(client.answer)
                check(answer == "ok", f"a client process cannot move bytes: {answer}")
            await asyncio.sleep(_SOME_TRANSFERS_S)
            for client in stopped:
                client.signal(signal.SIGSTOP)
            _await_state([client.pid for client in stopped], "T", "stopped")
            link = await _at_once(session.connect(), "connect")
            await _at_once(link.write(_copies(memory, offset)), "write")
            await _at_once(link.read(_copies(memory, offset)), "read")
            link.close()
        finally:
            for client in stopped:
                client.close()
        check(memory.data() == pattern(2, _TRANSFER), "other bytes came")
        _kept.remove(memory)
        for client in stopped:
            async with endpoints.session() as dead:
                dead.peer = client.peer
                await asyncio.wait_for(dead.disconnect(), 20)

    def test_a_deadline_ends_what_a_stopped_half_does_not(self) -> None:
        """While the half's process is stopped, a write and a read end when their caller's
        ``asyncio.timeout`` has passed, and let it raise; when the half continues, no byte of
        theirs moves.
        """

        async def limited(_: Session, *moves: tuple[str, _Work]) -> None:
            await asyncio.gather(*(_limited(work, what) for what, work in moves))

        self._while_stopped(limited)

    def _while_stopped(self, ending: Callable[..., Coroutine[Any, Any, None]]) -> None:
        """While the half's process is stopped, let ``ending`` end a write and a read, which it is
        given with the session; the links are closed then, and when the half continues, no byte
        may move.
        """
        with self.apart() as endpoints:

            async def work(session: Session, link: Link) -> None:
                source = Memory(bytes([_WRITTEN]) * _TRANSFER)
                target = Memory(_TRANSFER)
                _kept.extend((source, target))
                offset = endpoints.take(_TRANSFER)
                read_from = endpoints.take(_TRANSFER)
                await link.write(_copies(source, offset))
                await link.write(_copies(source, read_from))
                reading = await session.connect()
                _stop(endpoints)
                try:
                    await ending(
                        session,
                        ("write (stopped)", link.write(_copies(source, offset))),
                        ("read (stopped)", reading.read(_copies(target, read_from))),
                    )
                    unsettled = link.unsettled
                    began = clock()
                    link.close()
                    reading.close()
                    took = clock() - began
                    check(took < _CANCEL_S, f"close() took {took:.1f} s while the half was stopped")
                    source.fill(_POISON)
                    target.fill(_OURS)
                    if not unsettled:
                        endpoints.put(offset, bytes([_OURS]) * _TRANSFER)
                finally:
                    endpoints.signal(signal.SIGCONT)
                await asyncio.wait_for(session.disconnect(), 20)
                if unsettled:
                    endpoints.put(offset, bytes([_OURS]) * _TRANSFER)
                await asyncio.sleep(_WATCH_S)
                there = endpoints.look(offset, _TRANSFER)
                for what, found in (("write", there), ("read", target.data())):
                    moved = _TRANSFER - found.count(_OURS)
                    when = f"a {what} had ended, when the half went on"
                    check(not moved, f"{moved} bytes were moved after {when}")
                del _kept[-2:]

            self.with_link(endpoints, work)

    def test_an_isolated_half_that_was_killed_is_made_anew(self) -> None:
        """Links to the killed process may fail, but a new link works."""
        if not self.spec().isolated:
            pytest.skip("its server half is not isolated")
        with self.apart() as endpoints:

            async def work(session: Session, link: Link) -> None:
                source = Memory(pattern(4, _PIECE))
                offset = endpoints.take(_PIECE)
                await link.write(_copies(source, offset))
                below = [pid for pid in endpoints.processes() if pid != endpoints.root]
                check(bool(below), "the isolated half has no process")
                for pid in below:
                    os.kill(pid, signal.SIGKILL)
                _await_state(below, "X", "killed")
                deadline = time.monotonic() + _PATIENCE_S
                while True:
                    endpoints.put(offset, bytes(_PIECE))
                    link.close()
                    try:
                        link = await session.connect()
                        await link.write(_copies(source, offset))
                        break
                    except TransportError as error:
                        if time.monotonic() > deadline:
                            fail(f"no link to a half that was made anew: {error}")
                found = endpoints.look(offset, _PIECE)
                check(found == source.data(), "a half that was made anew writes other bytes")

            self.with_link(endpoints, work)


async def _duration(endpoints: Endpoints, link: Link) -> float:
    """Return the seconds that one transfer takes, once it is warm."""
    source, offset = Memory(_TRANSFER), endpoints.take(_TRANSFER)
    began = 0.0
    for _ in range(2):
        began = time.monotonic()
        await link.write(_copies(source, offset))
    return time.monotonic() - began


async def _at_once(work: Coroutine[Any, Any, T], what: str) -> T:
    """Return the result of ``work``, and fail the test if that takes long."""
    task = asyncio.ensure_future(work)
    if not await ends_within(task, _HELD_UP_S):
        task.cancel()
        fail(f"a {what} took more than {_HELD_UP_S:g} s while other clients were stopped")
    return task.result()


async def _failed_or_cancelled(task: asyncio.Future[Any], what: str) -> None:
    """Check that ``task`` has ended or can be cancelled, and raised at most a TransportError."""
    if not task.done():
        task.cancel()
        check(await ends_within(task, _CANCEL_S), f"a cancelled {what} did not end within a second")
    raised = None if task.cancelled() else task.exception()
    check_raised(raised, f"a {what}")


def _stop(endpoints: Endpoints) -> None:
    """Stop the half's processes, and wait until they have stopped."""
    pids = endpoints.processes()
    endpoints.signal(signal.SIGSTOP)
    _await_state(pids, "TX", "stopped")


def _await_state(pids: Sequence[int], states: str, what: str) -> None:
    """Wait until all of the processes are in one of these states."""

    def others() -> list[int]:
        return [pid for pid in pids if leftovers.state(pid) not in states]

    left = leftovers.until_empty(others, _PATIENCE_S)
    check(not left, f"the processes {left} could not be {what}")
