"""Transfers that stand still in operations shorter than any limit of their transport."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.support import SMALL, running_store, until
from tests.transports.asking import ask, nothing_unfinished
from tests.transports.mailbox import SLOW_S, Letter
from tests.transports.tcp.proxy import Proxy, lead_through

import torchstore_core as ts
from torchstore_core.testing.timers import within

MB = 1 << 20
APART = "mailbox-apart"
VALUE = torch.arange(4 * MB // 8)  # eight letters
STALLED = r"'mailbox-apart'.*nothing has moved"


@asynccontextmanager
async def _store(
    timeout: float, *, same_host: bool = False, **more: Any
) -> AsyncIterator[tuple[ts.Client, int]]:
    """A client with that time for each operation, and the half's process."""
    async with running_store(prefer=[APART], **SMALL, **more):
        address = await ts.address()
        client = await ts.connect(address, store_name="far", prefer=[APART], timeout=timeout)
        apart = int(await ask(client, Letter("who"), APART))
        (volume,) = (await client._joined.session(10)).volumes
        volume.context = msgspec.structs.replace(volume.context, same_host=same_host)
        await client.put("t", VALUE)
        yield client, apart
        await ts.shutdown("far")


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def _get(client: ts.Client, **how: float) -> float:
    """Returns the seconds that it took."""
    began = time.monotonic()
    assert torch.equal(await client.get("t", torch.zeros_like(VALUE), **how), VALUE)
    return time.monotonic() - began


async def _chosen(client: ts.Client) -> str:
    (entry,) = await client.explain(4 * MB)
    return str(entry["chosen"])


@pytest.mark.parametrize("same_host", [False, True])
async def test_the_next_transport_ends_the_get_and_the_first_comes_back(same_host: bool) -> None:
    async with _store(6.0, same_host=same_host) as (client, apart):
        with _stopped(apart):
            with pytest.warns(RuntimeWarning, match=STALLED):
                assert await _get(client) > 1.9
            for _ in range(3):  # nothing is lost a second time
                async with within(1.5):
                    await _get(client)

        async def back() -> bool:
            await _get(client)
            return await _chosen(client) == APART

        await until(back, 20)


async def test_a_port_of_this_host_that_stalls() -> None:
    """A cable between containers of one machine, for instance."""
    with Proxy() as proxy:
        async with running_store(prefer=["tcp"], **SMALL) as client:
            await lead_through(client, proxy)
            await client.put("t", VALUE)
            assert proxy.forwarded
            proxy.open.clear()
            with pytest.warns(RuntimeWarning, match=r"'tcp'.*nothing has moved"):
                got = await client.get("t", torch.zeros_like(VALUE), timeout=6)
            assert torch.equal(got, VALUE)
            async with within(1.5):
                await _get(client)
            proxy.open.set()


@pytest.mark.parametrize("same_host", [False, True])
async def test_what_was_written_in_part_is_settled_first(same_host: bool) -> None:
    async with _store(18.0, same_host=same_host) as (client, apart):
        os.kill(apart, signal.SIGSTOP)
        with pytest.warns(RuntimeWarning, match=STALLED):
            await client.put("t", VALUE + 1)
        assert torch.equal(await client.get("t"), VALUE + 1)
        await until(lambda: nothing_unfinished(client), 10)


@pytest.mark.soak
async def test_a_half_that_stays_stopped_is_replaced_though_its_client_only_reads() -> None:
    async with _store(6.0, same_host=True) as (client, apart):
        os.kill(apart, signal.SIGSTOP)
        with pytest.warns(RuntimeWarning, match=STALLED):
            await _get(client)

        async def back() -> bool:
            assert await _get(client) < 6
            return await _chosen(client) == APART

        await until(back, 60)
        assert not Path(f"/proc/{apart}").exists()


async def test_an_operation_that_ends_meanwhile_makes_the_next_begin_with_another() -> None:
    async with _store(20.0) as (client, apart):
        with _stopped(apart):
            with (
                pytest.warns(RuntimeWarning, match=STALLED),
                pytest.raises(ts.StoreTimeoutError),
            ):
                await _get(client, timeout=0.9)
            await _get(client)
            assert await _chosen(client) != APART


async def test_a_put_over_a_half_that_is_stopped_ends_in_its_time() -> None:
    """Whether what it has written may still arrive is not known by then, so that memory waits."""
    async with _store(3.0) as (client, apart):
        with _stopped(apart):
            async with within(6):
                with (
                    pytest.warns(RuntimeWarning, match=STALLED),
                    pytest.raises(ts.StoreTimeoutError),
                ):
                    await client.put("t", VALUE + 1)
            await client.put("t", VALUE + 2)
        assert torch.equal(await client.get("t"), VALUE + 2)
        await until(lambda: nothing_unfinished(client), 10)


async def test_the_last_transport_is_waited_for() -> None:
    strategy = ts.SingletonStrategy(transport=APART)
    async with _store(20.0, strategy=strategy) as (client, apart):
        os.kill(apart, signal.SIGSTOP)
        getting = asyncio.ensure_future(_get(client, timeout=8.0))
        try:  # others would give up after a third of that
            done, _ = await asyncio.wait([getting], timeout=3.5)
            assert not done
        finally:
            os.kill(apart, signal.SIGCONT)
        await getting


async def test_a_slow_transfer_does_not_stall() -> None:
    """Any warning would be an error."""
    async with _store(6.0) as (client, _):
        await ask(client, Letter("slow"), APART)
        assert await _get(client) > 8 * SLOW_S > 2.1  # a third of the operation's time
        assert await _chosen(client) == APART


async def test_a_cancelled_operation_says_nothing_of_its_link() -> None:
    async with _store(6.0) as (client, apart):
        with _stopped(apart):
            getting = asyncio.ensure_future(_get(client))
            done, _ = await asyncio.wait([getting], timeout=0.8)
            assert not done
            getting.cancel()
            await asyncio.wait([getting])
            assert getting.cancelled()
        assert await _chosen(client) == APART
        await _get(client)
