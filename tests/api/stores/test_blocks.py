"""Clients as context managers: a block leaves what the call that returned its client has opened."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
from tests.support import SMALL, running_store, server_children

import torchstore_core as ts
from torchstore_core import blocking

pytestmark = pytest.mark.local_only


async def test_a_block_ends_the_store_that_it_has_started():
    async with await ts.initialize(**SMALL) as client:
        await client.put("k", 1)
        assert await ts.get("k") == 1
    assert server_children() == set()
    assert "TORCHSTORE_ADDRESS" not in os.environ
    with pytest.raises(ts.StoreClosedError, match="was shut down"):
        await client.get("k")


async def test_also_if_it_fails_or_is_cancelled():
    begun = asyncio.Event()

    async def work(fails: bool) -> None:
        async with await ts.connect_or_initialize(**SMALL):
            if fails:
                raise KeyError("of the user")
            begun.set()
            await asyncio.Event().wait()

    with pytest.raises(KeyError):
        await work(fails=True)
    assert server_children() == set()
    task = asyncio.create_task(work(fails=False))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server_children() == set()


async def test_a_block_of_a_joined_store_leaves_it():
    async with running_store() as owner:
        async with await ts.connect(owner.address, store_name="joined") as client:
            await client.put("k", 1)
            assert await ts.get("k", store_name="joined") == 1
        for call in (client.get("k"), ts.get("k", store_name="joined")):
            with pytest.raises(ts.StoreClosedError):
                await call
        assert await owner.get("k") == 1


async def test_what_was_there_before_stays():
    async with running_store() as owner:
        for call in (
            ts.client(),
            ts.connect(owner.address),
            ts.connect_or_initialize(),
        ):
            async with await call as client:
                await client.put("k", 1)
            assert await ts.get("k") == 1


async def test_the_last_of_several_blocks_leaves_the_store():
    """In any order of their ends: that of the call that has opened the store may be the first."""
    async with running_store() as owner:
        first = await ts.connect(owner.address, store_name="joined")
        second = await ts.connect(owner.address, store_name="joined")
        async with second:
            async with first:
                await second.put("k", 1)
            assert await first.get("k") == 1
        with pytest.raises(ts.StoreClosedError):
            await second.get("k")


async def test_a_store_that_was_left_meanwhile_is_not_left_again():
    async with running_store() as owner:
        async with await ts.connect(owner.address, store_name="joined"):
            await ts.shutdown("joined")
            again = await ts.connect(owner.address, store_name="joined")
        await again.put("k", 1)
        assert await ts.get("k", store_name="joined") == 1
        await ts.shutdown("joined")


def test_blocks_of_the_blocking_api_in_several_threads():
    """The store that they have joined is left when the last of them has ended."""
    both = threading.Barrier(2, timeout=100)
    failed: list[BaseException] = []

    def work(address: str, name: str, *, leaves_first: bool) -> None:
        try:
            with blocking.connect(address, store_name="joined") as client:
                both.wait()
                if not leaves_first:
                    both.wait()
                client.put(name, 1)
            if leaves_first:
                both.wait()
        except BaseException as error:
            failed.append(error)
            both.abort()

    with blocking.initialize(**SMALL) as owner:
        threads = [
            threading.Thread(
                target=work, args=(owner.address, name), kwargs={"leaves_first": first}
            )
            for name, first in (("a", True), ("b", False))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert blocking.get_batch(["a", "b"]) == {"a": 1, "b": 1}
        with pytest.raises(ts.StoreClosedError):
            blocking.get("a", store_name="joined")
    assert server_children() == set()
