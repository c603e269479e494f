"""What the log of a store with a keeper takes."""

from __future__ import annotations

from tests.support import running_store, until

import torchstore_core as ts

MIB = 1 << 20


async def log_bytes() -> int:
    return (await ts.status()).log_bytes


async def test_the_log_is_as_long_as_what_is_there_not_as_what_was_put() -> None:
    """It is written anew while values come, and gives back its memory when none come."""
    async with running_store(timeout=30, capacity=64 * MIB):
        put = most = 0
        while put < 200 * MIB:
            for _ in range(700):
                await ts.put("k", bytes(60_000))
            put += 700 * 60_000
            most = max(most, await log_bytes())
        assert most < put // 2

        async def has_given_back() -> bool:
            return await log_bytes() <= 12 * MIB

        await until(has_given_back)
        assert "its log " in str(await ts.status())
        assert await ts.get("k") == bytes(60_000)


async def test_a_store_without_a_keeper_has_no_log() -> None:
    async with running_store(timeout=30, capacity=MIB, keeper=False):
        assert await log_bytes() == 0
        assert "no keeper: " in str(await ts.status())
