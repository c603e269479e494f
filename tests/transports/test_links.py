"""When a client uses which link, several at once, and how long it keeps one that has failed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import FrameType
from typing import cast

import msgspec
import pytest
import torch
from tests.support import SMALL, running_store, start_store
from tests.transports.mailbox import MailboxLink

import torchstore_core as ts
from torchstore_core.clients.session.volume_links import VolumeLinks
from torchstore_core.contracts.transport import Copy, Link
from torchstore_core.machine.tasks import together
from torchstore_core.plugins.ranking import Candidate

ALL_BUT_MAILBOX = ["shm", "tcp", "mailbox-apart"]
FAULT = ts.TransportError("a fault of the network")


@asynccontextmanager
async def _links() -> AsyncIterator[tuple[VolumeLinks, Candidate]]:
    """Of a client to the one volume of a store; the only transport is ``mailbox``."""
    async with running_store(block=ALL_BUT_MAILBOX, **SMALL) as client:
        (links,) = (await client._joined.session(10)).volumes
        (candidate,) = [c for c in links.candidates(1) if c.spec.name == "mailbox"]
        yield links, candidate


def _fail(links: VolumeLinks, candidate: Candidate, times: int = 1) -> tuple[float, float]:
    """Let transfers fail. Returns between what the seconds are until the transport is tried again,
    of which some may be over by now.
    """
    begun = time.monotonic()
    for _ in range(times):
        links.failed(candidate, FAULT)
    due = links._backoffs["mailbox"].due
    return due - time.monotonic(), due - begun


async def test_the_pause_gets_longer_until_something_is_moved_again() -> None:
    """Also if it can always be connected. There is one warning (any other is an error)."""
    async with _links() as (links, candidate):
        await links.connect(candidate)
        with pytest.warns(RuntimeWarning, match="'mailbox'.*failed"):
            least, most = _fail(links, candidate, 9)  # transfers with the same link
        assert least <= 1 <= most
        for pause in (2, 4):
            await links.connect(candidate)
            least, most = _fail(links, candidate)
            assert least <= pause <= most
        await links.connect(candidate)
        links.worked(candidate)
        with pytest.warns(RuntimeWarning, match="'mailbox'.*failed"):
            least, most = _fail(links, candidate)
        assert least <= 1 <= most


async def test_what_fails_because_the_volume_is_lost_says_which_one_that_is() -> None:
    """A handshake that its server refuses does not; and the get would not turn to other copies."""
    async with _links() as (links, candidate):
        links.lost = "its relay was silent"
        with pytest.raises(ts.TransportUnavailableError, match="relay was silent") as caught:
            links.failed(candidate, FAULT)
        assert caught.value.details["volume"] == links.info.index
        assert caught.value.__cause__ is FAULT


@pytest.mark.parametrize(
    "error",
    [ts.TransportUnavailableError("no common address"), OSError(errno.ENETUNREACH, "no network")],
)
async def test_what_has_worked_is_tried_again_whatever_it_says(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For instance while its network interface is down."""

    async def fails(*_: object) -> Link:
        raise error

    async with _links() as (links, candidate):
        await links.connect(candidate)
        with pytest.warns(RuntimeWarning, match="'mailbox'.*tried again"):
            links.failed(candidate, FAULT)
        with monkeypatch.context() as broken:
            broken.setattr(MailboxLink, "connect", fails)
            with pytest.raises(ts.TransportUnavailableError) as raised:
                await links.connect(candidate)
            links.failed(candidate, raised.value)
        assert links.candidates(1) == [candidate]
        await links.connect(candidate)
        assert links.ranking.order(1, in_band=False) == [candidate]


async def test_what_never_worked_and_never_will_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fails(*_: object) -> Link:
        raise ts.TransportUnavailableError("not from here")

    monkeypatch.setattr(MailboxLink, "connect", fails)
    with pytest.warns(RuntimeWarning, match="'mailbox'.*not used any more"):
        client = await start_store(block=ALL_BUT_MAILBOX)
    (links,) = (await client._joined.session(10)).volumes
    assert links.candidates(1) == []
    await ts.shutdown()


async def test_a_link_is_closed_when_the_transfers_that_may_use_it_have_ended() -> None:
    """However many later ones run."""
    async with _links() as (links, candidate):
        first, second = links.in_use(), links.in_use()
        first.__enter__()
        link = cast(MailboxLink, await links.connect(candidate))
        links.close_when_unused(link)
        second.__enter__()
        assert not link._closed
        first.__exit__(None, None, None)
        assert link._closed
        other = cast(MailboxLink, await links.connect(candidate))
        assert other is not link
        assert not other._closed
        second.__exit__(None, None, None)
        assert not other._closed


async def test_two_threads_may_close_them_at_once() -> None:
    """That of a client that leaves, and the one that hears that the server is gone."""
    async with _links() as (links, candidate):
        link = await links.connect(candidate)
    links._links["mailbox"] = link
    meeting = threading.Barrier(2)

    def meet_at_each_line(frame: FrameType, event: str, _: object) -> object:
        if frame.f_code is not VolumeLinks._close_links.__code__:
            return None
        with contextlib.suppress(threading.BrokenBarrierError):  # where one waits for a lock
            meeting.wait(0.3)
        return meet_at_each_line

    def close() -> None:
        sys.settrace(meet_at_each_line)
        try:
            links.close()
        finally:
            sys.settrace(None)

    await together(asyncio.to_thread(close) for _ in range(2))
    assert not links._links


async def test_a_forked_child_closes_what_transfers_of_its_parent_use() -> None:
    async with _links() as (links, candidate):
        link = cast(MailboxLink, await links.connect(candidate))
        with links.in_use():
            links.close_when_unused(link)
            links.close_in_child()
            assert link._closed


async def test_a_transport_that_waits_is_not_given_more_than_it_takes() -> None:
    async with _links() as (links, candidate):
        small = msgspec.structs.replace(candidate.spec, max_bytes=10)
        with pytest.warns(RuntimeWarning, match="'mailbox'.*failed"):
            links.failed(msgspec.structs.replace(candidate, spec=small), FAULT)
        assert [c.spec.name for c in links.candidates(10)] == ["mailbox"]
        assert links.candidates(11) == []


async def test_the_bytes_of_several_volumes_move_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link to each of two volumes waits, in a put and in a get, until the other one moves."""
    both = asyncio.Barrier(2)
    met: list[str] = []

    class Meeting(MailboxLink):
        async def write(self, copies: Sequence[Copy]) -> None:
            await self._meet("write")
            await super().write(copies)

        async def read(self, copies: Sequence[Copy]) -> None:
            await self._meet("read")
            await super().read(copies)

        async def _meet(self, what: str) -> None:
            async with asyncio.timeout(60):
                await both.wait()
            met.append(what)

    monkeypatch.setattr(MailboxLink, "connect", Meeting.connect)
    values = {key: torch.full((1 << 20,), ord(key), dtype=torch.uint8) for key in "abcdefgh"}
    arguments = {**SMALL, "num_storage_volumes": 2, "strategy": "hash"}
    async with running_store(block=ALL_BUT_MAILBOX, **arguments) as client:
        await client.put_batch(values)
        got = {key: torch.zeros_like(value) for key, value in values.items()}
        await client.get_batch(got)
    assert met == ["write", "write", "read", "read"]
    assert all(torch.equal(got[key], values[key]) for key in values)
