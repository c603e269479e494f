"""What the server half of a pair lets clients ask for."""

from __future__ import annotations

import asyncio

import pytest
from tests.support import turn

from torchstore_core.errors import TransportError
from torchstore_transports.pairs import protocol as p
from torchstore_transports.pairs.half import PairServer, _Served
from torchstore_transports.pairs.rendezvous import Board


async def test_a_pair_belongs_to_the_client_that_asked_for_it() -> None:
    """Numbers of pairs are easy to guess: another client neither moves bytes over one, nor meets
    there in the client's place, nor ends it.
    """
    half, board = PairServer(), Board()
    making = asyncio.get_running_loop().create_future()
    served = half._served[1] = _Served(b"one", b"link", board, making)
    for asked in (p.Transfer(1, True, []), p.StoreCall(1, "set", "0/1", value=b"address")):
        with pytest.raises(TransportError, match="no pair 1"):
            await asyncio.wait_for(half.handshake(b"other", p.encode(asked)), 50)
    assert await half.handshake(b"other", p.encode(p.Stop(1))) == b""
    assert half._served == {1: served}
    assert not served.given_up
    await half.handshake(b"one", p.encode(p.StoreCall(1, "set", "0/1", value=b"address")))
    assert board.wait("0/1", 0) == b"address"
    await half.handshake(b"one", p.encode(p.Stop(1)))
    assert served.given_up
    assert not half._served


@pytest.mark.parametrize("given_up", [False, True])
async def test_a_batch_is_watched_until_it_ends_or_is_given_up(given_up: bool) -> None:
    half, over = PairServer(), asyncio.get_running_loop().create_future()
    served = half._served[1] = _Served(b"one", b"link", Board(), over)
    batch = served._last = asyncio.get_running_loop().create_future()
    watching = asyncio.ensure_future(half.handshake(b"one", p.encode(p.Watch(1))))
    await turn()
    assert not watching.done()
    if given_up:
        await half.handshake(b"one", p.encode(p.Stop(1)))
        with pytest.raises(TransportError, match="given up"):
            await asyncio.wait_for(watching, 50)
    else:
        batch.set_result(None)
        assert await asyncio.wait_for(watching, 50) == p.ENDED


async def test_a_batch_that_takes_longer_than_a_handshake_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchstore_transports.pairs.half._WAIT_S", 0.01)
    half, loop = PairServer(), asyncio.get_running_loop()
    served = half._served[1] = _Served(b"one", b"link", Board(), loop.create_future())
    served._last = loop.create_future()
    assert await half.handshake(b"one", p.encode(p.Watch(1))) == p.GOES_ON
