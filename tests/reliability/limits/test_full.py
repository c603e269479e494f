"""A store without room: what readers hold counts, and comes back when they let go."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from tests.reliability import children
from tests.reliability.harness import MB, Account, Child, account, settled
from tests.support import running_store

import torchstore_core as ts

VALUE = 8 * MB


def full_of(number: int) -> torch.Tensor:
    return torch.full((VALUE,), number, dtype=torch.uint8)


async def test_what_was_dropped_makes_room_at_once():
    async with running_store(capacity=4 * VALUE):
        value = full_of(1)
        for _ in range(50):
            await ts.put_batch({"a": value, "b": value, "c": value, "d": value})
            held = [await ts.get(key) for key in "ab"]
            await ts.delete_batch(["a", "b"])
            with pytest.raises(ts.StoreFullError) as caught:
                await ts.put("e", value)
            assert caught.value.details["leased_bytes"] == 2 * VALUE
            assert await ts.keys() == ["c", "d"]
            assert [children.uniform(tensor) for tensor in held] == [1, 1]
            held.pop()
            await ts.put("e", value)
            with pytest.raises(ts.StoreFullError):
                await ts.put("f", value)
            held.pop()
            await ts.put("f", value)
            await ts.delete_batch(await ts.keys())
        await settled(Account(1, 0))


@asynccontextmanager
async def slow_liveness(address: str, path: Path, seconds: float) -> AsyncIterator[str]:
    """An address that leads to the server. What comes on its first connection, which gives leases
    back, arrives later.
    """
    first: list[asyncio.StreamReader] = []
    tasks: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                if first == [reader]:
                    loop.call_later(seconds, writer.write, data)
                else:
                    writer.write(data)
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not first:
            first.append(reader)
        from_server, to_server = await asyncio.open_unix_connection(address.removeprefix("unix:"))
        tasks.add(asyncio.ensure_future(carry(reader, to_server)))
        tasks.add(asyncio.ensure_future(carry(from_server, writer)))

    loop = asyncio.get_running_loop()
    listener = await asyncio.start_unix_server(serve, path)
    try:
        yield f"unix:{path}"
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_was_dropped_makes_room_however_late_it_arrives(tmp_path: Path):
    path = tmp_path / "control"
    async with (
        running_store(capacity=2 * VALUE) as owner,
        slow_liveness(owner.address, path, 0.3) as address,
    ):
        await ts.connect(address, store_name="slow")
        for number in range(3):
            await ts.put("a", full_of(number), store_name="slow")
            held = [await ts.get("a", store_name="slow")]
            await ts.delete("a", store_name="slow")
            held.pop()
            await ts.put("b", torch.zeros(2 * VALUE, dtype=torch.uint8), store_name="slow")
            await ts.delete("b", store_name="slow")
        await ts.put("a", full_of(1), store_name="slow")
        tensor = await ts.get("a", store_name="slow")
        with pytest.raises(ts.StoreFullError):  # it is full, not slow
            await ts.put("b", torch.zeros(2 * VALUE, dtype=torch.uint8), store_name="slow")
        del tensor
        await ts.shutdown("slow")


async def test_views_and_copies_of_views_hold_the_memory():
    async with running_store(capacity=2 * VALUE):
        await ts.put("a", full_of(1))
        view = (await ts.get("a"))[100:200].view(torch.int32)
        await ts.put("a", full_of(2))
        with pytest.raises(ts.StoreFullError):
            await ts.put("b", full_of(3))
        assert children.uniform(view) == 0x01010101
        view = view.clone()
        await ts.put("b", full_of(3))
        assert children.uniform(view) == 0x01010101


async def test_one_that_is_left_of_a_batch():
    async with running_store(capacity=4 * VALUE):
        await ts.put_batch({key: full_of(number) for number, key in enumerate("abcd")})
        got = await ts.get_batch(list("abcd"))
        await ts.delete_batch(list("abcd"))
        kept = got.pop("c")
        del got
        # Neighbours share a mapping, and are held together; none of them is lost.
        assert children.uniform(kept) == 2
        assert VALUE <= (await account()).leased <= 4 * VALUE
        del kept
        await settled(Account(1, 0))


async def test_what_dies_in_another_thread_or_in_a_cycle_comes_back():
    async with running_store(capacity=2 * VALUE):
        await ts.put("a", full_of(1))
        boxes = [[await ts.get("a")]]
        thread = threading.Thread(target=boxes.clear)
        thread.start()
        await asyncio.to_thread(thread.join)
        await settled(Account(1, VALUE))
        cycle: list[object] = [await ts.get("a")]
        cycle.append(cycle)
        del cycle
        gc.collect()
        await settled(Account(1, VALUE))


async def test_another_process_lets_go():
    async with running_store(capacity=2 * VALUE) as client:
        await ts.put_batch({"a": full_of(1), "b": full_of(2)})
        with Child(children.hold, client.address, ["a", "b"]) as reader:
            assert await reader.said() == [1, 2]
            await ts.delete_batch(["a", "b"])
            with pytest.raises(ts.StoreFullError) as caught:
                await ts.put("c", full_of(3))
            holders = caught.value.details["holders"]
            assert [holder["pid"] for holder in holders] == [reader.pid]
            reader.kill()
        await settled(Account(1, 0))
        await ts.put("c", torch.zeros(2 * VALUE, dtype=torch.uint8))
