"""What is left of a transfer when its call has ended in any other way than well.

Large transfers over TCP, where bytes wait in sockets and both sides take part: to release a
transfer, to deregister memory or to remove a peer would stop none of them.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path

import pytest
from tests.support import halt, until

from torchstore_core.errors import TransportError
from torchstore_core.testing.timers import ends_within
from torchstore_rdma import connection as connections

from .pairs import MB, Memory, late_bytes, needs_nixl, pair, paused

pytestmark = needs_nixl
_BIG = 512 * MB
# More than is on its way to a peer that does not move.
_MORE = 64 * MB
# What crosses a network is what both sides take part in.
_FABRICS = (pytest.param("all", marks=pytest.mark.soak), "tcp")
# Both ways through the same steps: how a read ends that is cancelled or whose peer is stopped has
# tests here, and one whose half is killed, in the conformance kit.
_WRITES = (True, pytest.param(False, marks=pytest.mark.soak))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients wait for the server half to say that it is over for as long as this process may be
    kept from hearing it.
    """
    monkeypatch.setattr(connections, "_GOODBYE_S", 20.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("fabric", _FABRICS)
async def test_a_cancelled_write_ends_within_a_second_and_writes_no_more(
    fabric: str, tmp_path: Path
) -> None:
    async with pair(tmp_path, _BIG, fabric) as volume:
        link, source = await volume.link(), Memory(_BIG, 1)
        with paused(lambda: volume.look(0, 1) == b"\1") as jobs:
            writing = asyncio.ensure_future(link.write([source.copy()]))
            await until(lambda: jobs, 20)
            writing.cancel()
            await until(lambda: jobs[0].given_up)
        assert await ends_within(writing, 1)
        assert writing.cancelled()
        assert not link.unsettled  # the server half has said that it is over
        assert 0 < volume.count(1) < _BIG
        volume.fill(0)
        # Whoever moves next does not move what was given up.
        byte = Memory(1, 9)
        await link.write([byte.copy(5)])
        await late_bytes()
        assert volume.count(1) == 0
        assert volume.is_alive()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("fabric", _FABRICS)
async def test_a_cancelled_read_ends_within_a_second_and_reads_no_more(
    fabric: str, tmp_path: Path
) -> None:
    async with pair(tmp_path, _BIG, fabric) as volume:
        volume.fill(7)
        link, target = await volume.link(), Memory(_BIG)
        before = volume.pid
        with paused(lambda: target._buffer[0] == b"\7") as jobs:
            reading = asyncio.ensure_future(link.read([target.copy()]))
            await until(lambda: jobs, 20)
            reading.cancel()
            await until(lambda: jobs[0].given_up)
        assert await ends_within(reading, 1)
        assert reading.cancelled()
        assert 0 < target.count(7) < _BIG
        target.fill(0)
        byte = Memory(1)
        await link.read([byte.copy(5)])
        assert byte.bytes() == b"\7"
        await late_bytes()
        assert target.count(7) == 0
        assert volume.pid == before
        assert volume.is_alive()


@pytest.mark.parametrize("write", [True, False])
async def test_a_peer_that_is_stopped(write: bool, tmp_path: Path) -> None:
    """A write says that it is unsettled, and disconnecting ends that; nothing is read any more, and
    nobody hears of it again.
    """
    said: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: said.append(told["message"]))
    async with pair(tmp_path, _MORE, "tcp") as volume:
        volume.fill(7)
        link, mine = await volume.link(), Memory(_MORE, 1)
        await halt(volume.pid)
        moving = asyncio.ensure_future((link.write if write else link.read)([mine.copy()]))
        await asyncio.wait([moving], timeout=0.5)
        assert not moving.done()
        moving.cancel()
        assert await ends_within(moving, 1)
        assert moving.cancelled()
        assert link.unsettled is write
        mine.fill(2)
        os.kill(volume.pid, signal.SIGCONT)
        await volume.server.disconnect(b"client")
        volume.fill(0)
        await late_bytes()
        assert mine.count(2) == _MORE
        assert volume.count(0) == _MORE
        link.close()
        again = await volume.link()
        await again.write([mine.copy()])
        assert volume.count(2) == _MORE
    gc.collect()
    assert not said


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("write", _WRITES)
async def test_a_peer_that_goes_on_while_a_call_is_cancelled(write: bool, tmp_path: Path) -> None:
    """It says that it is over, and survives: the client must not leave before."""
    async with pair(tmp_path, _BIG, "tcp") as volume:
        volume.fill(7)
        link, mine = await volume.link(), Memory(_BIG, 1)
        before = volume.pid
        connection = link._connection
        assert connection is not None
        with paused(lambda: volume.look(0, 1) == b"\1" or mine._buffer[0] == b"\7") as jobs:
            moving = asyncio.ensure_future((link.write if write else link.read)([mine.copy()]))
            await until(lambda: jobs, 20)
            await halt(before)
        moving.cancel()
        await until(lambda: connection.gone)  # the time to end by itself is over
        os.kill(before, signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await moving
        assert not link.unsettled
        mine.fill(2)
        volume.fill(3)
        await late_bytes()
        assert mine.count(2) == _BIG
        assert volume.count(3) == _BIG
        await link.write([mine.copy()])
        assert volume.count(2) == _BIG
        assert volume.pid == before
        assert volume.is_alive()


@pytest.mark.parametrize("fabric", _FABRICS)
@pytest.mark.parametrize("write", _WRITES)
async def test_a_server_half_that_is_killed_is_replaced_within_the_call(
    fabric: str, write: bool, tmp_path: Path
) -> None:
    async with pair(tmp_path, _BIG, fabric) as volume:
        volume.fill(7)
        link, mine = await volume.link(), Memory(_BIG, 1)
        before = volume.pid
        with paused(lambda: volume.look(0, 1) == b"\1" or mine._buffer[0] == b"\7") as jobs:
            moving = asyncio.ensure_future((link.write if write else link.read)([mine.copy()]))
            await until(lambda: jobs, 20)
            os.kill(before, signal.SIGKILL)
        await moving
        assert not link.unsettled
        assert volume.pid != before
        if write:
            assert volume.count(1) == _BIG
        else:
            assert mine.count(7) == _BIG


async def test_a_server_half_that_died_after_a_call_was_cancelled_is_replaced_within_the_next(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path, _MORE, "tcp") as volume:
        volume.fill(7)
        link, mine = await volume.link(), Memory(_MORE)
        before = volume.pid
        await halt(before)
        reading = asyncio.ensure_future(link.read([mine.copy()]))
        await asyncio.wait([reading], timeout=0.1)
        reading.cancel()
        await asyncio.wait([reading])
        os.kill(before, signal.SIGKILL)
        await link.read([mine.copy()])
        assert mine.count(7) == _MORE
        assert volume.pid != before


async def test_a_server_half_that_is_gone_for_good_fails_the_call(tmp_path: Path) -> None:
    async with pair(tmp_path, _BIG, "tcp") as volume:
        link, mine = await volume.link(), Memory(_BIG, 1)
        with paused(lambda: volume.look(0, 1) == b"\1") as jobs:
            writing = asyncio.ensure_future(link.write([mine.copy()]))
            await until(lambda: jobs, 20)
            await volume.server.close()
        with pytest.raises(TransportError):
            await asyncio.wait_for(writing, 5)
        assert link.unsettled
        volume.server._process = None
