"""A store is left, or its client reset, while another thread copies from or to its memory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from tests.reliability import children
from tests.reliability.harness import MB, Child
from tests.support import until

import torchstore_core as ts

SIDE = 7168  # of a square of 49 MB; transposed, it takes long to copy
ROOM = 60 * MB  # for one such value


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.parametrize("end", ["reset", "leave"])
@pytest.mark.parametrize("call", ["put", "get"])
def test_memory_is_not_reused_under_a_copy_of_another_thread(call: str, end: str, rounds: int):
    """Leaving a store gives everything back, but not before the last byte is moved."""

    async def put() -> torch.Tensor:
        source = torch.full((SIDE, SIDE), 3, dtype=torch.uint8).t()
        await ts.put("a", source, store_name="tight")
        return source

    async def get() -> torch.Tensor:
        target = torch.zeros(SIDE, SIDE, dtype=torch.uint8).t()
        return await ts.get("a", target, store_name="tight")

    async def copying() -> bool:
        volume = (await ts.status(store_name="tight")).volumes[0]
        return volume.unfinished_bytes + volume.leased_bytes > 0

    async def state(other: Future[torch.Tensor]) -> str:
        return "copying" if await copying() else "over" if other.done() else ""

    for _ in range(rounds):
        address = asyncio.run(ts.initialize(capacity=ROOM, prefault=0)).address
        asyncio.run(ts.connect(address, store_name="tight"))
        if call == "get":
            asyncio.run(ts.put("a", torch.full((SIDE, SIDE), 3, dtype=torch.uint8)))
        with ThreadPoolExecutor(1) as pool, Child(children.replace, address, SIDE) as child:
            assert asyncio.run(child.said()) == "ready"
            while True:  # on a busy machine it may be over before anybody looks
                other = pool.submit(asyncio.run, put() if call == "put" else get())
                if asyncio.run(until(functools.partial(state, other))) == "copying":
                    break
                assert children.uniform(other.result()) == 3
                if call == "put":
                    asyncio.run(ts.delete("a"))
            asyncio.run(ts.reset_client("tight") if end == "reset" else ts.shutdown("tight"))
            child.tell("go")
            assert asyncio.run(child.said()) == "replaced"
            with contextlib.suppress(ts.StoreClosedError):
                assert children.uniform(other.result(60)) == 3
        assert children.uniform(asyncio.run(ts.get("b"))) == 9
        asyncio.run(ts.shutdown("tight"))
        asyncio.run(ts.shutdown())
