"""What is registered, how long, and that nothing is reached through what is stale."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
from pathlib import Path

import pytest
from tests.support import until

from torchstore_core.contracts.transport import Copy
from torchstore_core.errors import TransportError
from torchstore_core.machine.virtual_memory import unmap

from .pairs import FABRICS, MB, Memory, needs_nixl, pair

pytestmark = needs_nixl

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_MAP_FIXED = 0x10
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def _map(address: int | None, nbytes: int, fixed: int = 0) -> int:
    found = _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE | fixed, -1, 0)
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("devices", [0, 1], ids=["all memory", "each batch"])
async def test_memory_that_was_freed_and_mapped_anew(
    fabric: str, devices: int, tmp_path: Path
) -> None:
    """The same address has other pages now: theirs are the bytes that move."""
    size = 8 * MB
    async with pair(tmp_path, 64 * MB, fabric, devices) as volume:
        link = await volume.link()
        address = _map(None, size)
        for value in (1, 2, 3):
            ctypes.memset(address, value, size)
            await link.write([Copy(address, 0, 0, size)])
            assert volume.look(0, size) == bytes([value]) * size
            unmap(address, size)
            assert _map(address, size, _MAP_FIXED) == address
            await link.read([Copy(address, 0, 0, size)])
            assert ctypes.string_at(address, size) == bytes([value]) * size
            unmap(address, size)
            assert _map(address, size, _MAP_FIXED) == address
        unmap(address, size)


async def test_where_registering_pins_a_segment_is_registered_as_far_as_it_is_needed(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path, 2048 * MB, cuda_devices=1) as volume:
        assert volume.server.registered(0) == 0
        link, mine = await volume.link(), Memory(MB, 5)
        assert volume.server.registered(0) == 16 * MB
        await link.write([mine.copy(256 * MB - MB)])
        assert volume.server.registered(0) == 256 * MB
        moves = [link.write([mine.copy(at * MB)]) for at in (1, 255, 256, 700, 900, 2)]
        await asyncio.gather(*moves)
        assert volume.server.registered(0) == 1024 * MB
        for at in (1, 255, 256, 700, 900, 2):
            assert volume.look(at * MB, MB) == bytes([5]) * MB
        # What was pinned for the sake of the first connection is not pinned twice for long.
        other = await volume.link(b"other")
        await other.write([mine.copy(0)])
        await volume.server.disconnect(b"client")
        assert volume.server.registered(0) == 16 * MB
        await volume.server.disconnect(b"other")
        assert volume.server.registered(0) == 0


async def test_where_registering_pins_what_has_pages_is_registered_at_once(tmp_path: Path) -> None:
    async with pair(tmp_path, 2048 * MB, cuda_devices=1) as volume:
        os.pwrite(volume.fd, bytes(100 * MB), 0)
        link, mine = await volume.link(), Memory(MB, 5)
        assert volume.server.registered(0) == 100 * MB
        await link.write([mine.copy(99 * MB)])
        assert volume.server.registered(0) == 100 * MB
        await link.write([mine.copy(180 * MB - MB)])
        assert volume.server.registered(0) == 225 * MB  # a quarter more than is needed
        await volume.server.disconnect(b"client")


async def test_where_registering_is_free_it_holds_no_page(tmp_path: Path) -> None:
    """The volume may give pages back at any time: the next write has new ones."""
    async with pair(tmp_path) as volume:
        link, mine = await volume.link(), Memory(MB, 5)
        await link.write([mine.copy()])
        assert volume.server.registered(0) == 0
        os.ftruncate(volume.fd, 0)
        os.ftruncate(volume.fd, volume.nbytes)
        mine.fill(6)
        await link.write([mine.copy()])
        assert volume.look(0, MB) == bytes([6]) * MB


@pytest.mark.parametrize("fabric", FABRICS)
async def test_a_client_that_was_disconnected_reaches_nothing(fabric: str, tmp_path: Path) -> None:
    """Not even if it does not know: its writes go astray, and then it begins anew."""
    async with pair(tmp_path, 64 * MB, fabric) as volume:
        link, mine = await volume.link(), Memory(MB, 5)
        await link.write([mine.copy()])
        connection = link._connection
        assert connection is not None
        volume.fill(0)
        await volume.server.disconnect(b"client")

        stale = asyncio.ensure_future(_write_by(connection, mine))
        await asyncio.wait([stale], timeout=0.5)
        assert volume.count(5) == 0
        if not stale.done():
            connection.close()
        with pytest.raises(TransportError):
            await stale
        assert volume.count(5) == 0
        assert volume.is_alive()

        await link.write([mine.copy(MB)])
        assert volume.look(MB, MB) == bytes([5]) * MB


async def _write_by(connection: object, memory: Memory) -> None:
    from torchstore_rdma.connection import Connection
    from torchstore_rdma.engine import Job

    assert isinstance(connection, Connection)
    await connection.run(Job([memory.copy()], write=True))


async def test_clients_that_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    async with pair(tmp_path) as volume:
        mine = Memory(MB, 5)

        async def round_trip(peer: bytes) -> None:
            link = await volume.link(peer)
            await link.write([mine.copy()])
            link.close()
            await volume.server.disconnect(peer)

        await round_trip(b"first")
        theirs, ours = volume.descriptors(), len(os.listdir("/proc/self/fd"))
        for at in range(5):
            await round_trip(b"%d" % at)
        await until(lambda: volume.descriptors() <= theirs)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= ours)


async def test_links_of_one_client_that_were_closed_end_with_its_next_one(tmp_path: Path) -> None:
    """It need not disconnect in between: a link that failed is made anew for weeks."""
    async with pair(tmp_path) as volume:
        for _ in range(2):
            (await volume.link()).close()
        few = volume.descriptors()
        for _ in range(5):
            (await volume.link()).close()
        await until(lambda: volume.descriptors() <= few)
