"""Networks that are slow, stall, break or damage bytes; transfers that are cancelled."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.support import until
from tests.transports.tcp.halves import MB, PEER, Local, linked, threads
from tests.transports.tcp.proxy import Proxy

from torchstore_core.contracts.transport import Copy
from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_core.testing.timers import ends_within, within
from torchstore_core.testing.transports.ends.memory import pattern


async def test_a_long_delay_costs_no_round_trip_a_unit() -> None:
    """25 ms each way; 96 MB are 12 units or more."""
    with Proxy() as proxy:
        async with linked(128 * MB, proxy.route) as (link, there):
            proxy.delay_s = 0.025
            data = pattern(1, 96 * MB)
            source, target = Local(96 * MB, data), Local(96 * MB)
            await link.write([source.copy()])
            assert there.holds(data)
            await link.read([target.copy()])
            assert target.holds(data)
            proxy.delay_s = 0.5
            small = Local(6, b"abcdef")
            began = time.monotonic()
            await link.write([small.copy(1000)])
            assert time.monotonic() - began >= 1.0
            # Several units on one stream: all are asked for before the first answer comes.
            link._reads.choose = lambda nbytes: 1  # type: ignore[method-assign]
            async with within(4):  # what four of them would take one by one
                await link.read([target.copy(nbytes=32 * MB)])


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("write", [True, False])
async def test_a_cut_is_an_error_that_says_what_has_arrived(write: bool, streams: int) -> None:
    with Proxy() as proxy:
        async with linked(256 * MB, proxy.route) as (link, there):
            for widths in (link._reads, link._writes):
                widths.choose = lambda nbytes: streams  # type: ignore[method-assign]
            data = pattern(2, 200 * MB)
            local = Local(200 * MB, data if write else b"")
            if not write:
                there.memory[: 200 * MB] = data
            copies = [Copy(local.address + i * MB, 7, i * MB, MB) for i in range(200)]
            idle, answered = link.progress(), proxy.forwarded["down"]
            proxy.stop_after("up" if write else "down", 150 * MB)  # of 200
            moving = asyncio.ensure_future((link.write if write else link.read)(copies))
            # Before one stream has sent so much ahead that it waits for an answer.
            most = (40 if streams == 1 else 60) * MB
            await until(lambda: link.progress() > idle + most, 20)
            await until(lambda: proxy.forwarded["down"] > answered, 20)
            proxy.open.clear()
            proxy.cut()
            proxy.open.set()
            with pytest.raises(TransportError) as caught:
                await moving
            done = caught.value.details["done"]
            # The first of several units under way may have been cut before its end.
            assert (0 if streams > 1 else 1) <= done < 200
            assert (there if write else local).holds(data, done * MB)
            assert link.unsettled == write
            if write:
                await there.server.disconnect(PEER)
            link.close()
            await until(lambda: "torchstore-tcp" not in threads())


async def test_progress_is_what_has_moved_and_nothing_else() -> None:
    with Proxy() as proxy:
        async with linked(128 * MB, proxy.route) as (link, _):
            local = Local(100 * MB)
            for move in (link.write, link.read):
                idle = link.progress()
                proxy.stop_after("up" if move == link.write else "down", 20 * MB)
                moving = asyncio.ensure_future(move([local.copy()]))
                await until(lambda idle=idle: link.progress() > idle + 10 * MB, 20)
                seen = [link.progress()]

                def still(seen: list[int] = seen) -> bool:
                    seen.append(link.progress())
                    return len(seen) > 10 and len(set(seen[-10:])) == 1

                await until(still, 20)
                assert not moving.done()
                proxy.go_on()
                await moving
                assert link.progress() >= idle + 100 * MB


async def test_a_stall_ends_and_nothing_was_lost() -> None:
    with Proxy() as proxy:
        async with linked(128 * MB, proxy.route) as (link, _):
            data = pattern(3, 100 * MB)
            source, target = Local(100 * MB, data), Local(100 * MB)
            for way, move in (
                ("up", link.write([source.copy()])),
                ("down", link.read([target.copy()])),
            ):
                most = proxy.stop_after(way, 10 * MB)
                moving = asyncio.ensure_future(move)
                await until(lambda way=way, most=most: proxy.forwarded[way] >= most, 20)
                done, _ = await asyncio.wait([moving], timeout=0.5)
                assert not done
                proxy.go_on()
                await moving
            assert target.holds(data)


@pytest.mark.parametrize("write", [True, False])
async def test_a_stall_that_lasts_is_an_error(write: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchstore_transports.tcp.wire.connection.STALL_S", 0.7)
    with Proxy() as proxy:
        async with linked(128 * MB, proxy.route) as (link, there):
            local = Local(100 * MB)
            proxy.open.clear()
            async with within(5):
                with pytest.raises(TransportError, match=r"nothing has moved|timed out"):
                    await (link.write if write else link.read)([local.copy()])
            assert link.unsettled == write
            proxy.open.set()
            await there.server.disconnect(PEER)


@pytest.mark.parametrize("stalled", [True, False])
async def test_a_cancelled_read_ends_at_once(stalled: bool) -> None:
    """And writes nothing to its memory afterwards, which others may have by then."""
    with Proxy() as proxy:
        async with linked(256 * MB, proxy.route) as (link, there):
            there.fill(b"r", 200 * MB)
            local = Local(200 * MB)
            proxy.stop_after("down", 150 * MB)  # so that it has not ended when it is cancelled
            reading = asyncio.ensure_future(link.read([local.copy()]))
            await until(lambda: proxy.forwarded["down"] > 30 * MB, 20)
            if stalled:
                proxy.open.clear()
            reading.cancel()
            assert await ends_within(reading, 0.5)
            assert reading.cancelled()
            local.fill(b"\0", 200 * MB)
            proxy.go_on()
            proxy.open.set()
            assert not link.unsettled
            # The link is as good as before.
            small = Local(MB)
            await link.read([small.copy()])
            assert small.raw == b"r" * MB
            assert local.is_full_of(b"\0", 200 * MB)


async def test_a_cancelled_read_has_ended_when_it_raises() -> None:
    """Whatever had arrived by then is not written any later."""
    async with linked(512 * MB) as (link, there):
        there.fill(b"r", 512 * MB)
        local = Local(4 * MB)
        copies = [local.copy(at * 4 * MB) for at in range(128)]
        for turn in range(40):
            reading = asyncio.ensure_future(link.read(copies))
            await asyncio.wait([reading], timeout=0.002 + 0.0005 * turn)
            reading.cancel()
            await asyncio.wait([reading])
            local.fill(b"\0", 4 * MB)
            await until(lambda: not link._streams._transfers)
            assert local.is_full_of(b"\0", 4 * MB)


async def test_a_cancelled_write_settles_if_it_can() -> None:
    with Proxy() as proxy:
        async with linked(512 * MB, proxy.route) as (link, there):
            proxy.stop_after("up", 350 * MB)  # so that it has not ended when it is cancelled
            local = Local(400 * MB)
            local.fill(b"w", 400 * MB)
            writing = asyncio.ensure_future(link.write([local.copy()]))
            await until(lambda: there.memory[0] == ord("w"), 20)
            writing.cancel()
            assert await ends_within(writing, 1.0)
            assert writing.cancelled()
            if not link.unsettled:
                proxy.go_on()
                there.fill(b"\0", 400 * MB)
                after = Local(5, b"after")
                await link.write([after.copy(400 * MB)])
                assert there.is_full_of(b"\0", 400 * MB)
            await there.server.disconnect(PEER)


async def test_a_cancelled_write_that_is_stalled_is_uncertain_until_disconnect() -> None:
    with Proxy() as proxy:
        async with linked(256 * MB, proxy.route) as (link, there):
            local = Local(200 * MB)
            local.fill(b"w", 200 * MB)
            most = proxy.stop_after("up", 20 * MB)
            writing = asyncio.ensure_future(link.write([local.copy()]))
            await until(lambda: proxy.forwarded["up"] >= most, 20)
            proxy.open.clear()
            writing.cancel()
            assert await ends_within(writing, 1.0)
            assert writing.cancelled()
            assert link.unsettled
            await there.server.disconnect(PEER)
            there.fill(b"\0", 256 * MB)
            proxy.open.set()
            proxy.cut()
            await until(lambda: "torchstore-tcp-serve" not in threads())
            assert there.is_full_of(b"\0", 256 * MB)


async def test_a_cancelled_batch_leaves_others_alone() -> None:
    async with linked(512 * MB) as (link, there):
        data = pattern(4, 150 * MB)
        there.memory[: 150 * MB] = data
        lasting, ending = Local(150 * MB), Local(150 * MB)
        works = [asyncio.ensure_future(link.read([one.copy()])) for one in (lasting, ending)]
        await until(lambda: ending.buffer[100] != b"\0" or works[1].done(), 20)
        works[1].cancel()
        await asyncio.wait(works)
        await works[0]
        assert lasting.holds(data)


@pytest.mark.parametrize(("write", "switch"), [(True, "1"), (False, "true")])
async def test_checksums(write: bool, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSTORE_TCP_CHECKSUM", switch)
    with Proxy() as proxy:
        async with linked(64 * MB, proxy.route) as (link, there):
            data = pattern(5, 20 * MB)
            source, target = Local(20 * MB, data), Local(20 * MB)
            await link.write([source.copy()])
            await link.read([target.copy()])
            assert target.holds(data)
            rows = Copy(target.address, 7, 0, 1000, 1000, 2000, 3000)
            await link.write([rows])
            await link.read([rows])
            assert target.holds(data)
            way = "up" if write else "down"
            proxy.flip_after[way] = proxy.forwarded[way] + 9 * MB
            with pytest.raises(TransportError, match="checksum is wrong"):
                await (link.write if write else link.read)([source.copy()])
            await there.server.disconnect(PEER)


async def test_a_switch_for_checksums_that_makes_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSTORE_TCP_CHECKSUM", "yes")
    with pytest.raises(TransportUnavailableError, match="TORCHSTORE_TCP_CHECKSUM is 0 or 1"):
        async with linked(1 * MB):
            pass


async def test_without_checksums_damage_is_not_noticed() -> None:
    """So the test above is about checksums."""
    with Proxy() as proxy:
        async with linked(64 * MB, proxy.route) as (link, there):
            source = Local(20 * MB, pattern(6, 20 * MB))
            proxy.flip_after["up"] = proxy.forwarded["up"] + 9 * MB
            await link.write([source.copy()])
            found = int.from_bytes(there.memory[: 20 * MB])
            assert (found ^ int.from_bytes(source.raw)).bit_count() == 1
