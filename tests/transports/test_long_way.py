"""A whole store whose data travels a long way: every byte takes 50 ms, each way."""

from __future__ import annotations

import asyncio
import time

import torch
from tests.support import SMALL, running_store
from tests.transports.tcp.proxy import Proxy, lead_through

import torchstore_core as ts
from torchstore_core.testing.timers import within

_DELAY_S = 0.05
_ENTRIES = 300
# At a time: one after the other they would take 10 s at least, and they take 3.
_OPERATIONS = 100


def _tree(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(_ENTRIES, 64, 256, generator=generator)
    tree = {f"layer{i}": rows[i] for i in range(_ENTRIES)}
    return {**tree, "columns": torch.rand(4096, 512, generator=generator)[:, ::2]}


async def test_a_store_50_ms_away() -> None:
    """State dicts, tensors in place and several operations at a time: right, and with a few round
    trips an operation, not with one for each of its entries.
    """
    with Proxy() as proxy:
        async with running_store(prefer=["tcp"], block=["inline"], **SMALL) as client:
            await lead_through(client, proxy)
            proxy.delay_s = _DELAY_S
            for seed in (1, 2):
                wanted = _tree(seed)
                began = time.monotonic()
                # What would be 60 s with a round trip for each entry; the first connects, too.
                async with within(8):
                    await ts.put_state_dict(wanted, "tree")
                    got = await ts.get_state_dict("tree")
                assert time.monotonic() - began > 4 * _DELAY_S
                assert all(torch.equal(got[name], wanted[name]) for name in wanted)
            into = {name: torch.zeros_like(value) for name, value in wanted.items()}
            await ts.get_state_dict("tree", into)
            assert all(torch.equal(into[name], wanted[name]) for name in wanted)

            numbers = range(_OPERATIONS)
            async with within(2 * _DELAY_S * _OPERATIONS):
                await asyncio.gather(*(ts.put(f"k{i}", torch.full((1000,), i)) for i in numbers))
                values = await asyncio.gather(*(ts.get(f"k{i}") for i in numbers))
            assert all(bool((value == i).all()) for i, value in enumerate(values))
            assert {entry["chosen"] for entry in await client.explain()} == {"tcp"}
        assert min(proxy.forwarded.values()) > 2 * 4 * _ENTRIES * 64 * 256
