"""Halves that listen do so while they have clients, and bear strangers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import pytest

from torchstore_core.contracts.transport import Link
from torchstore_core.testing import leftovers
from torchstore_core.testing.transports.base import TransportKit, check, outcome, run
from torchstore_core.testing.transports.ends.endpoints import Endpoints
from torchstore_core.testing.transports.ends.memory import Memory, pattern

__all__ = ["ListeningTests"]

_NBYTES = 300_001
_HELD_UP_S = 5.0
_DIAL_S = 1.0
# What strangers send, who then stay; some say nothing.
_SAID = (b"", b"", b"\x00", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, pattern(1, 100_000))
# Where somebody is reached on this host who listens at every address.
_REACHED = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
_Place = tuple[str, int]


class ListeningTests(TransportKit):
    """Tests of the TCP ports of both halves, if they have some."""

    def test_strangers_hold_nobody_up(self) -> None:
        """While strangers are connected to its ports, who say nothing or nonsense, links move
        bytes, and new ones are made. When the strangers have left, nothing of them is left.
        """
        endpoints = self.anywhere()
        before = leftovers.listening([os.getpid()])

        async def beside_strangers() -> None:
            async with endpoints.session() as session:
                link = await session.connect()
                await _moves(endpoints, link, "a link")
                places = _places(endpoints, before)
                if not places:
                    pytest.skip("it listens at no port of TCP")
                with contextlib.ExitStack() as strangers:
                    connected = await asyncio.to_thread(_let_in, places, strangers)
                    if not connected:
                        pytest.skip(f"nobody can connect to {places}")
                    await _moves(endpoints, link, "a link beside strangers")
                    async with endpoints.session() as another:
                        made = asyncio.ensure_future(another.connect())
                        what = "connect beside strangers"
                        raised = await outcome(_done(made), _HELD_UP_S, what)
                        check(raised is None, f"{what} raised {raised!r}")
                        await _moves(endpoints, made.result(), "a link made beside strangers")

        def rounds(count: int) -> None:
            for _ in range(count):
                run(beside_strangers())

        self.must_leave_nothing(endpoints, rounds, "rounds of strangers")

    def test_nobody_listens_without_clients(self) -> None:
        """When the last client has been disconnected, both halves listen where they did before the
        first one.
        """
        with self.fresh() as endpoints:
            before = _places(endpoints, set())

            async def main() -> set[_Place]:
                async with endpoints.session() as session:
                    await _moves(endpoints, await session.connect(), "a link")
                    return _places(endpoints, before)

            if not run(main()):
                pytest.skip("it does not begin to listen for its clients")
            left = leftovers.until_empty(lambda: _places(endpoints, before), self.gone_within)
            check(not left, f"it listens at {_named(left)} although its last client has left")


def _places(endpoints: Endpoints, besides: set[_Place]) -> set[_Place]:
    return leftovers.listening([os.getpid(), *endpoints.processes()]) - besides


def _named(places: set[_Place]) -> str:
    return ", ".join(f"port {port}" for _, port in sorted(places))


async def _moves(endpoints: Endpoints, link: Link, what: str) -> None:
    """Fail the test unless a link moves bytes in both directions, soon."""
    memory, offset = Memory(pattern(len(what), _NBYTES)), endpoints.take(_NBYTES)
    for direction, move in (("write", link.write), ("read", link.read)):
        moving = f"a {direction} over {what}"
        raised = await outcome(move([memory.copy(offset)]), _HELD_UP_S, moving)
        check(raised is None, f"{moving} raised {raised!r}")
        right = endpoints.look(offset, _NBYTES) == memory.data()
        check(right, f"{moving}: other bytes")


async def _done(work: asyncio.Future[Link]) -> None:
    await work


def _let_in(places: set[_Place], strangers: contextlib.ExitStack) -> int:
    """Connect to each place once for all that may be said, and stay. Return how many could."""
    connected = 0
    for place in places:
        for said in _SAID:
            with contextlib.suppress(OSError):  # nobody is let in there, or this is cut off
                sock = socket.create_connection(_dialled(place), _DIAL_S)
                strangers.enter_context(sock)
                connected += 1
                sock.setblocking(False)
                sock.send(said)
    return connected


def _dialled(place: _Place) -> _Place:
    """Return the address at which this host reaches a place that it listens at."""
    address = leftovers.readable(place[0])
    return _REACHED.get(address, address), place[1]
