"""The server half of a transport over pairs. It imports torch when its first client arrives."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pkgutil
import secrets
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TYPE_CHECKING, ClassVar

import msgspec

from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer
from torchstore_core.errors import (
    TransportError,
    TransportNotReadyError,
    TransportUnavailableError,
)
from torchstore_core.machine.networks import Network
from torchstore_core.machine.virtual_memory import map_shared, unmap
from torchstore_transports.pairs import protocol as p
from torchstore_transports.pairs.addresses import meeting_addresses
from torchstore_transports.pairs.threads import in_thread, kill_made, overdue

if TYPE_CHECKING:
    from torchstore_transports.pairs.connection import PairConnection
    from torchstore_transports.pairs.rendezvous import Board

__all__ = ["PairServer"]

log = logging.getLogger(__name__)

# How long an announced transfer waits for its pair to be made, and for the one before it to end.
_WAIT_S = 20.0
# Limit for one client. Additional pairs are left over only from links that were closed.
_MAX_PAIRS = 16


class _Served:
    """The server half's end of one pair."""

    def __init__(
        self, peer: bytes, link: bytes, board: Board, making: asyncio.Future[PairConnection]
    ):
        self.peer = peer
        self.link = link
        self.board = board
        self.making = making
        self.given_up = False
        self._failed = ""
        self._last: asyncio.Future[None] | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def move(self, runs: Sequence[tuple[int, int]], *, into: bool) -> None:
        """Begin to move a batch.

        Raises:
            TransportError: the pair could not be made, or was given up.
        """
        connection = await self._connection()
        if self._last is not None:
            await asyncio.wait([self._last], timeout=_WAIT_S)
            if not self._last.done():
                raise TransportError("the batch before this one has not ended")
        if self.given_up:
            raise TransportError("the pair was given up")

        def work() -> None:
            try:
                if into:
                    connection.take(runs)
                else:
                    connection.serve(runs)
            except TransportError as error:
                log.info("a batch over a pair failed: %s", error)
                self._failed = error.message
                connection.kill()

        self._last = in_thread(work)

    async def ended(self) -> bool:
        """Wait for the end of the batch that is under way, if there is one, but not longer than a
        handshake may take; whether it has ended.

        Raises:
            TransportError: it failed, or the pair was given up meanwhile.
        """
        if self._last is not None:
            both = [self._last, self._over]
            await asyncio.wait(both, timeout=_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        if self._failed or self.given_up:
            raise TransportError(self._failed or "the pair was given up")
        return self._last is None or self._last.done()

    async def give_up(self) -> None:
        """End the pair. When this returns, no byte of it reaches a segment any more."""
        self.given_up = True
        if not self._over.done():
            self._over.set_result(None)
        self.board.close()
        if not self.making.done():  # so no memory has been given to it yet
            self.making.add_done_callback(kill_made)
        elif not self.making.cancelled() and not self.making.exception():
            await in_thread(self.making.result().kill)

    async def _connection(self) -> PairConnection:
        await asyncio.wait([self.making], timeout=_WAIT_S)
        if not self.making.done():
            raise TransportNotReadyError(f"the pair was not made within {_WAIT_S:g} s")
        try:
            return self.making.result()
        except RuntimeError as error:
            raise TransportNotReadyError(f"the two ends do not meet: {error}") from error


class PairServer(TransportServer):
    """Makes an end of a pair for each link, and moves the batches that links announce.

    Messages are received directly into the mapped segments, and sent directly from them. What a
    client announces is checked against the segments before anything moves.

    Attributes:
        factory: the library's :data:`~.pair.PairFactory`, as ``"module:function"``.
    """

    factory: ClassVar[str]

    def __init__(self) -> None:
        self._segments: dict[int, tuple[int, int]] = {}
        self._told: tuple[Network, ...] = ()
        self._served: dict[int, _Served] = {}
        self._ending: dict[asyncio.Future[None], bytes] = {}  # pairs being ended, by client
        # A client that knows a pair of a process that has died must not end or use one of this one.
        self._numbers = itertools.count(secrets.randbits(48))

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        """See ``contracts.transport``."""
        for segment in segments:
            self._segments[segment.id] = map_shared(segment.fd, segment.nbytes), segment.nbytes
        self._told = context.told
        return b""

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        """See ``contracts.transport``."""
        try:
            asked = p.decode(request)
        except msgspec.DecodeError as error:
            raise TransportError(f"this is no request to this transport: {error}") from error
        if isinstance(asked, p.Hello):
            return await self._welcome(peer, asked)
        if isinstance(asked, p.Stop):
            served = self._served.get(asked.pair)
            if served is not None and served.peer == peer:
                await self._give_up([asked.pair])
            return b""
        served = self._served.get(asked.pair)
        if served is None or served.peer != peer:
            raise TransportError(f"there is no pair {asked.pair} any more")
        if isinstance(asked, p.StoreCall):
            call, board = asked, served.board
            return await in_thread(lambda: board.call(call))
        if isinstance(asked, p.Watch):
            return p.ENDED if await served.ended() else p.GOES_ON
        await served.move(self._checked(asked.extents), into=asked.into)
        return b""

    async def disconnect(self, peer: bytes) -> None:
        """See ``contracts.transport``."""
        # In the meantime, a pair may be made that was requested before.
        while numbers := [number for number, one in self._served.items() if one.peer == peer]:
            await self._give_up(numbers)
        if ending := [one for one, whose in self._ending.items() if whose == peer]:
            await asyncio.wait(ending)  # pairs that the client has given up itself

    def stuck(self) -> Collection[Hashable]:
        """See ``contracts.transport``."""
        return overdue()

    async def close(self) -> None:
        """See ``contracts.transport``."""
        await self._give_up(list(self._served))
        segments, self._segments = self._segments, {}
        for address, nbytes in segments.values():
            unmap(address, nbytes)

    async def _welcome(self, peer: bytes, hello: p.Hello) -> bytes:
        if hello.version != p.VERSION:
            raise TransportUnavailableError(
                f"the client and the volume have different versions of this transport "
                f"({hello.version} and {p.VERSION})"
            )
        mine, other = meeting_addresses(hello, self._told)
        prepare = await in_thread(lambda: _load(self.factory))
        of_peer = [number for number, one in self._served.items() if one.peer == peer]
        replaced = [number for number in of_peer if self._served[number].link == hello.link]
        await self._give_up([*replaced, *of_peer[: -_MAX_PAIRS + 1]])
        number = next(self._numbers)
        board, make = prepare(mine)
        self._served[number] = _Served(peer, hello.link, board, in_thread(make))
        return p.encode(p.Welcome(number, other))

    async def _give_up(self, numbers: Sequence[int]) -> None:
        """End pairs, and wait for that. They also end if the caller is cancelled."""
        given_up = [one for number in numbers if (one := self._served.pop(number, None))]
        ending: list[asyncio.Future[None]] = []
        for one in given_up:
            one.given_up = True
            ending.append(asyncio.ensure_future(one.give_up()))
            self._ending[ending[-1]] = one.peer
            ending[-1].add_done_callback(self._ending.pop)
        if ending:
            await asyncio.wait(ending)

    def _checked(self, extents: Sequence[p.Extent]) -> list[tuple[int, int]]:
        """Return the addresses of extents.

        Raises:
            TransportError: an extent is not inside its segment.
        """
        runs: list[tuple[int, int]] = []
        for number, offset, nbytes in extents:
            address, size = self._segments.get(number, (0, -1))
            if not (0 <= offset <= size and 0 <= nbytes <= size - offset):
                raise TransportError(
                    f"{nbytes} bytes at {offset} are not inside of segment {number}"
                )
            runs.append((address + offset, nbytes))
        return runs


def _load(factory: str) -> Callable[[str], tuple[Board, Callable[[], PairConnection]]]:
    """Import torch and the library, which blocks for seconds.

    Returns:
        A function that takes an address of this host, and returns a board, and a call that makes
        the connection, whose other end reaches this one at that address.
    """
    from torchstore_transports.pairs.meeting import meet
    from torchstore_transports.pairs.rendezvous import Board, LocalStore

    make = pkgutil.resolve_name(factory)

    def prepare(address: str) -> tuple[Board, Callable[[], PairConnection]]:
        board = Board()
        return board, lambda: meet(make, LocalStore(board), 0, address)

    return prepare
