"""Replies over the limit of a frame: they come in pages, and nobody else's call pays for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.integration.attacks.hostile import Raw
from tests.support import running_store, until
from tests.unit.remote.relays import Backstage, Relayed

import torchstore_core as ts
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import encode
from torchstore_core.wire.paging import joined

# Keys of 4 KB: the fewer of them, the less there is to do besides sending them.
COUNT = 17_000
LONG = 4000


def names(start: int, stop: int, letter: str = "k") -> list[str]:
    return [f"{i:06}" + letter * LONG for i in range(start, stop)]


async def fill(count: int = COUNT) -> list[str]:
    keys = names(0, count)
    for start in range(0, count, 6000):
        await ts.put_batch(dict.fromkeys(keys[start : start + 6000]))
    assert len(keys) * LONG > m.MAX_FRAME or count != COUNT
    return keys


async def test_keys_over_the_limit_of_a_frame() -> None:
    async with running_store():
        waiting = asyncio.create_task(ts.wait("later"))
        keys = await fill()
        listing = asyncio.create_task(ts.keys())
        others = 0
        while not listing.done():
            assert not await ts.exists("nothing")
            others += 1
        assert await listing == keys
        assert others > 1  # in between, on the same connection
        await ts.put("later", 1)
        assert (await waiting)["later"].version == 1
        # A request that is too long is that call's error alone, and nothing is sent of it.
        with pytest.raises(ts.ProtocolError, match="over the limit"):
            await ts.get_batch(keys)
        # Given up in the middle: what comes later is nobody's, and the connection goes on.
        for _ in range(3):
            listing = asyncio.create_task(ts.keys())
            assert not await ts.exists("nothing")
            listing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await listing
            assert await ts.exists(keys[0])
        assert await ts.delete_batch(keys[:6000]) == 6000
        assert len(await ts.keys("0")) == COUNT - 6000
        (session,) = (await ts.status()).sessions
        assert (session.leases, session.lanes) == (0, 1)


async def test_a_state_dict_that_partial_puts_made_long() -> None:
    """Whatever could be put can be read: whole, into one's own, and by entry."""
    async with running_store():
        entries = names(0, COUNT, "n")
        first, second, third = entries[:8000], entries[8000:-400], entries[-400:]
        await ts.put_state_dict(dict.fromkeys(first, 1), "policy")
        await ts.put_state_dict(dict.fromkeys(second, 2), "policy", partial=True)
        tensors = {name: torch.full((5000,), 3.0) for name in third}  # leased, not inline
        await ts.put_state_dict(tensors, "policy", partial=True)
        whole = await ts.get_state_dict("policy")
        assert list(whole) == entries
        assert [whole[first[0]], whole[second[-1]]] == [1, 2]
        assert all(torch.equal(whole[name], tensors[name]) for name in third)
        mine = dict.fromkeys([*first, *second], 0) | {n: torch.zeros(5000) for n in third[1:]}
        mine["unknown"] = 0
        with pytest.raises(ts.LayoutMismatchError) as caught:
            await ts.get_state_dict("policy", mine)
        assert caught.value.details["missing"] == ["unknown"]
        assert caught.value.details["unexpected"] == third[:1]
        del mine["unknown"]
        await ts.get_state_dict("policy", mine, strict=False)
        assert [mine[first[-1]], mine[second[0]]] == [1, 2]
        assert all(torch.equal(mine[name], tensors[name]) for name in third[1:])
        assert (await ts.get(f"policy/{third[0]}")).sum() == 15000
        del whole
        status = await until(lambda: _nothing_leased())
        assert status.volumes[0].leased_bytes == 0


async def _nothing_leased() -> ts.Client | None:
    status = await ts.status()
    return status if not any(s.leases for s in status.sessions) else None


async def test_others_are_answered_while_nobody_reads_a_long_reply() -> None:
    async with running_store() as client:
        keys = await fill(5000)  # 20 MB: some pages
        with Raw(client.address) as stuck:
            stuck.greet()
            stuck.send(encode(m.Keys(2, "")))
            await until(_has_listed)
            for number in range(20):
                await ts.put("mine", number)
                assert await ts.get("mine") == number
            stuck.send(encode(m.Exists(3, keys[:1])))
            # It sends nothing more, and reads: all that it has asked for comes. A short reply may
            # overtake the rest of a long one.
            replies = await asyncio.to_thread(stuck.finish)
            pages = [reply for reply in replies if isinstance(reply, m.KeyList)]
            assert joined(pages).keys == keys  # of the moment when it was asked for
            assert [reply for reply in replies if reply not in pages] == [m.Flags(3, [True])]


async def _has_listed() -> bool:
    return (await ts.status()).operations.get("Keys", 0) > 0


@pytest.fixture
def relayed(tmp_path: Path) -> Iterator[Relayed]:
    with Backstage() as stage, Relayed(stage, tmp_path) as made:
        yield made


async def test_long_replies_through_a_relay(relayed: Relayed) -> None:
    client = await ts.connect(relayed.address)
    try:
        keys = await fill(5000)
        assert await ts.keys() == keys
        assert relayed.uplink.calls["poll"] > 2
    finally:
        await ts.shutdown()
    assert client.address == relayed.address
