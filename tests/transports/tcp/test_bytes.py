"""Bytes between the halves of ``tcp``: runs, rows, many pieces, several loops; nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import socket
import threading
from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from tests.support import until
from tests.transports.tcp.halves import (
    MB,
    PEER,
    Local,
    linked,
    listening,
    opened_since,
    sockets,
    threads,
    volume,
)
from tests.transports.tcp.proxy import Proxy

from torchstore_core.contracts.transport import Copy
from torchstore_core.errors import TransportError, TransportNotReadyError
from torchstore_transports.tcp.moving.widths import LARGE


@pytest.mark.parametrize("nbytes", [1, 4095, 65536, 3 * MB + 1, 33 * MB])
async def test_runs(nbytes: int) -> None:
    async with linked() as (link, there):
        data = os.urandom(nbytes)
        source, target = Local(nbytes, data), Local(nbytes)
        await link.write([source.copy(5)])
        assert there.memory[5 : 5 + nbytes] == data
        assert there.memory[:5] == bytes(5)
        assert there.memory[5 + nbytes : 5 + nbytes + 8] == bytes(8)
        await link.read([target.copy(5)])
        assert target.raw == data


@pytest.mark.parametrize(
    ("row", "rows"), [(1, 2), (1, 5000), (100, 1500), (4096, 1500), (100_000, 200), (9 * MB, 3)]
)
async def test_rows(row: int, rows: int) -> None:
    """Rows with gaps on both sides: the bytes between them stay."""
    stride, step = row + 3, row + 7
    async with linked(rows * step + 64) as (link, there):
        data = os.urandom(rows * stride)
        source = Local(rows * stride, data)
        await link.write([Copy(source.address, 7, 11, row, rows, stride, step)])
        for i in range(rows):
            at = 11 + i * step
            assert there.memory[at : at + row] == data[i * stride : i * stride + row]
            assert there.memory[at + row : at + step] == bytes(7)[: step - row]
        target = Local(rows * stride)
        await link.read([Copy(target.address, 7, 11, row, rows, stride, step)])
        for i in range(rows):
            at = i * stride
            assert target.raw[at : at + row] == data[at : at + row]
            assert target.raw[at + row : at + stride] == bytes(3)


async def test_long_rows_are_sent_from_the_segment_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``sendfile``, where the client has another address: they are not copied on their way."""
    sent: list[int] = []
    sendfile = os.sendfile

    def counting(out: int, fd: int, offset: int, nbytes: int) -> int:
        sent.append(sendfile(out, fd, offset, nbytes))
        return sent[-1]

    monkeypatch.setattr(os, "sendfile", counting)
    with Proxy("127.0.0.2") as proxy:
        async with linked(route=proxy.route) as (link, there):
            data = there.memory[: 9 * MB] = os.urandom(9 * MB)
            target = Local(9 * MB)
            await link.read([target.copy()])
            assert target.raw == data
            await until(lambda: sum(sent) == 9 * MB)  # what was sent may be counted a moment later
            await link.read([Copy(target.address, 7, MB, 100_000, 20, 100_000, 200_000)])
            await until(lambda: sum(sent) == 9 * MB + 20 * 100_000)
            await link.read([Copy(target.address, 7, MB, 100, 20, 100, 200)])
            assert sum(sent) == 9 * MB + 20 * 100_000


async def test_rows_backwards_and_repeated() -> None:
    """A step or stride may be negative, and a source's stride zero."""
    async with linked() as (link, there):
        source = Local(8, b"abcdefgh")
        await link.write([Copy(source.address, 7, 30, 2, 4, 2, -10)])
        assert [there.memory[at : at + 2] for at in (30, 20, 10, 0)] == [b"ab", b"cd", b"ef", b"gh"]
        target = Local(8)
        await link.read([Copy(target.address + 6, 7, 0, 2, 4, -2, 10)])
        assert target.raw == b"abcdefgh"
        await link.write([Copy(source.address, 7, 100, 2, 3, 0, 2)])
        assert there.memory[100:106] == b"ababab"


async def test_ten_thousand_pieces() -> None:
    chance = random.Random(1)
    async with linked() as (link, there):
        data = os.urandom(16 * MB)
        source, target = Local(16 * MB, data), Local(16 * MB)
        copies, at = [], 0
        for _ in range(10_000):
            size = chance.randrange(2000)
            copies.append(Copy(source.address + at, 7, 32 * MB - at - size, size))
            at += size
        await link.write(copies)
        shift = target.address - source.address
        await link.read([replace(copy, address=copy.address + shift) for copy in copies])
        assert target.raw[:at] == data[:at]
        assert there.memory[32 * MB - copies[0].nbytes : 32 * MB] == data[: copies[0].nbytes]


async def test_nothing_to_move() -> None:
    async with linked() as (link, there):
        there.memory[:1024] = before = os.urandom(1024)
        await link.write([])
        await link.write([Copy(0, 7, 0, 0), Copy(0, 7, 5, 10, rows=0)])
        await link.read([])
        await link.read([Copy(0, 7, 0, 0), Copy(0, 7, 5, 10, rows=0)])
        assert there.memory[:1024] == before


@pytest.mark.parametrize(
    "copy",
    [
        Copy(0, 7, 64 * MB - 3, 4),
        Copy(0, 7, 64 * MB, 1),
        Copy(0, 8, 0, 4),
        Copy(0, 7, -1, 4),
        Copy(0, 7, 0, -4),
        Copy(0, 7, (1 << 64) - 2, 4),
        Copy(0, 7, 0, 4, 3, 4, 32 * MB),
        Copy(0, 7, 10, 4, 3, 4, -6),
        Copy(0, 7, 10, 4, 3, 4, 1 << 62),
        Copy(0, -1, 0, 4),
        Copy(0, 1 << 40, 0, 4),
    ],
)
@pytest.mark.parametrize("write", [True, False])
async def test_what_is_outside_is_refused(copy: Copy, write: bool) -> None:
    async with linked() as (link, there):
        local = Local(MB)
        there.memory[:4] = b"safe"
        copies = [Copy(local.address, 7, 100, 50), replace(copy, address=local.address)]
        with pytest.raises(TransportError, match=r"segment|sense"):
            await (link.write if write else link.read)(copies)
        assert there.memory[:4] == b"safe"
        await there.server.disconnect(PEER)
        again = await there.connect()
        await again.write([local.copy(0)])
        again.close()


async def test_many_batches_at_the_same_time() -> None:
    """Of different sizes, both ways, on one link."""
    async with linked(256 * MB) as (link, _):
        sizes = [1000, 3 * MB, 20 * MB, 17, 9 * MB, 40 * MB, 100_000, 12 * MB]
        batches = [Local(size, os.urandom(size)) for size in sizes]
        places = [sum(sizes[:at]) for at in range(len(sizes))]

        async def there_and_back(local: Local, offset: int) -> None:
            await link.write([local.copy(offset)])
            target = Local(len(local.buffer))
            await link.read([target.copy(offset)])
            assert target.raw == local.raw

        await asyncio.gather(*map(there_and_back, batches, places))
        assert len(link._streams._connections) <= 8


async def test_several_event_loops_share_a_link() -> None:
    async with linked() as (link, _):
        failures: list[BaseException] = []

        def run(number: int) -> None:
            async def work() -> None:
                source, target = Local(4 * MB, bytes([number]) * (4 * MB)), Local(4 * MB)
                for _ in range(5):
                    await link.write([source.copy(number * 4 * MB)])
                    await link.read([target.copy(number * 4 * MB)])
                    assert target.raw == source.raw

            try:
                asyncio.run(work())
            except BaseException as error:
                failures.append(error)

        running = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in running:
            thread.start()
        await asyncio.to_thread(lambda: [thread.join() for thread in running])
        assert not failures


async def test_connections_are_kept_and_made_again() -> None:
    async with linked() as (link, _):
        local = Local(1000, b"x" * 1000)
        await link.write([local.copy()])
        before = set(link._streams._connections)
        await link.read([local.copy()])
        assert before <= link._streams._connections
        for one in list(link._streams._connections):
            one.shut()
            before.add(one)
        await link.read([local.copy()])
        assert link._streams._connections - before


def _connected() -> Iterator[socket.socket]:
    """Copies of the TCP connections that this process has."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(entry)))
            if one.family == socket.AF_INET and not one.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                yield one
            else:
                one.close()


async def test_small_messages_are_not_delayed_and_dead_peers_are_noticed() -> None:
    """What the sockets of both ends are set to: no Nagle, keep-alive, an end for lost packets."""
    async with linked() as (link, there):
        local = Local(1000, b"x" * 1000)
        await link.write([local.copy()])
        port, found = there.endpoint[1], 0
        for one in _connected():
            with one:
                try:
                    ports = one.getsockname()[1], one.getpeername()[1]
                except OSError:  # of something else in this process, and not connected
                    continue
                if port not in ports:
                    continue
                found += 1
                assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert 0 < one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 20_000
        assert found >= 2


@pytest.mark.parametrize("write", [True, False])
async def test_how_fast_large_batches_were_decides_how_many_streams_the_next_has(
    write: bool,
) -> None:
    async with linked(LARGE) as (link, _):
        local = Local(LARGE)
        widths = link._writes if write else link._reads
        first = widths.choose(LARGE)
        for _ in range(2):  # from then on, it is known
            assert widths.choose(LARGE) == first
            await (link.write if write else link.read)([local.copy()])
        assert widths.choose(LARGE) != first


async def test_nothing_is_open_without_clients_and_nothing_is_left() -> None:
    await until(lambda: not threads())  # of the test before
    before = sockets()
    async with volume() as there:
        assert not opened_since(before)
        assert not threads()
        link = await there.connect()
        port = there.endpoint[1]
        assert there.endpoint[0] == "127.0.0.1"
        assert listening(port)
        other = await there.connect(b"other")
        local = Local(40 * MB)
        await link.write([local.copy()])
        await other.read([local.copy()])
        link.close()
        await there.server.disconnect(PEER)
        assert listening(port)
        await other.read([local.copy()])
        other.close()
        await there.server.disconnect(b"other")
        assert not listening(port)
        await until(lambda: not threads())
        assert not opened_since(before)
        # A client may come again.
        link = await there.connect()
        await link.read([local.copy()])
        link.close()
    await until(lambda: not threads())
    assert not opened_since(before)


async def test_a_link_that_is_dropped_closes_its_connections() -> None:
    async with volume() as there:
        before = sockets()
        link = await there.connect()
        local = Local(20 * MB)
        await link.write([local.copy()])
        del link
        gc.collect()
        await until(lambda: not any(name == "torchstore-tcp" for name in threads()))
        await there.server.disconnect(PEER)
        assert not opened_since(before)


async def test_a_closed_link_and_a_closed_volume() -> None:
    local = Local(10)
    async with linked() as (link, there):
        link.close()
        link.close()
        with pytest.raises(TransportError, match="closed"):
            await link.read([local.copy()])
        assert not link.unsettled
        link = await there.connect()
        await there.server.close()
        with pytest.raises(TransportError):
            await link.write([local.copy()])
        with pytest.raises(TransportError, match="not served any more"):
            await there.connect()


async def test_an_endpoint_that_nobody_listens_at() -> None:
    async with volume() as there:
        with pytest.raises(TransportNotReadyError, match="cannot be reached"):
            await there.connect(route=lambda _: (("127.0.0.1", 1),))
        await there.connect(route=lambda known: (("127.0.0.1", 1), *known))


async def test_a_forked_child_leaves_the_connections_of_its_parent_alone() -> None:
    async with linked() as (link, _):
        local = Local(10 * MB, b"y" * 10 * MB)
        await link.write([local.copy()])
        pid = os.fork()
        if not pid:
            link.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        before = set(link._streams._connections)
        target = Local(10 * MB)
        await link.read([target.copy()])
        assert target.raw == local.raw
        assert before <= link._streams._connections
