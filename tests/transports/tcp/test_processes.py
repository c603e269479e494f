"""The halves of ``tcp`` in two processes: deaths and stops."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from tests.support import halt, until
from tests.transports.tcp.apart import Apart
from tests.transports.tcp.halves import MB, PEER, Local, threads

from torchstore_core.errors import TransportError
from torchstore_core.testing.timers import ends_within
from torchstore_transports.tcp.link import TcpLink

_LARGE = 96 * MB  # far more than the buffers of all sockets hold


@pytest.mark.parametrize("write", [True, False])
async def test_a_volume_that_is_killed(write: bool) -> None:
    with Apart(128 * MB) as there:
        link = await there.connect()
        local = Local(_LARGE)
        began = asyncio.Event()
        moving = asyncio.ensure_future(_repeat(link, local, began, write=write))
        await began.wait()
        os.kill(there.pid, signal.SIGKILL)
        with pytest.raises(TransportError):
            await asyncio.wait_for(moving, 50)
        assert link.unsettled == write
        link.close()
        await until(lambda: "torchstore-tcp" not in threads())


async def _repeat(link: TcpLink, local: Local, began: asyncio.Event, *, write: bool) -> None:
    while True:
        await (link.write if write else link.read)([local.copy()])
        began.set()


@pytest.mark.parametrize("write", [True, False])
async def test_a_volume_that_is_stopped(write: bool) -> None:
    """A caller that has no more time gets away within a second, and memory stays its own."""
    with Apart(128 * MB) as there:
        link = await there.connect()
        await there.ask("write", 0, b"r".hex() * MB)
        local = Local(_LARGE)
        await halt(there.pid)
        moving = asyncio.ensure_future((link.write if write else link.read)([local.copy()]))
        assert not (await asyncio.wait([moving], timeout=0.3))[0]
        moving.cancel()
        assert await ends_within(moving, 1.0)
        assert moving.cancelled()
        assert link.unsettled == write
        local.buffer.raw = bytes(_LARGE)
        os.kill(there.pid, signal.SIGCONT)
        if write:
            await there.ask("disconnect", PEER.hex())
            link.close()
            link = await there.connect()
        first = Local(MB)
        await link.read([first.copy()])
        # A write has nothing but zeros: it either overwrote the start of the segment or not.
        assert first.raw == b"r" * MB or (write and set(first.raw) <= {0, ord("r")})
        assert local.raw == bytes(_LARGE)
        link.close()
