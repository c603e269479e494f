"""Server halves that are wrong in one way each."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
from collections.abc import Sequence
from typing import ClassVar

import msgspec
from tests.transports.kit.broken.simple import OFFER, OPEN, Plugin, Simple, SimpleLink, named

from torchstore_core.contracts.transport import (
    Bid,
    Copy,
    Link,
    LinkContext,
    Segment,
    ServerContext,
)
from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_core.machine.networks import local_address_to

_LETTER = 1 << 20
_ASK, _LEAVE, _NEXT = b"ask", b"leave", b"next"


class PostingLink(SimpleLink):
    """Sends what it writes by handshakes, many pieces in a letter."""

    rows: ClassVar[bool] = False

    async def write(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            self.check(copy)
        if self.closed:
            raise TransportError("this link was closed")
        try:
            letter: list[tuple[int, int, bytes]] = []
            filled = 0
            for copy in copies:
                for at in range(0, copy.nbytes, _LETTER):
                    size = min(_LETTER, copy.nbytes - at)
                    data = ctypes.string_at(copy.address + at, size)
                    letter.append((copy.segment, copy.offset + at, data))
                    filled += size
                    if filled >= _LETTER:
                        await self.post(letter)
                        letter, filled = [], 0
            await self.post(letter)
        except asyncio.CancelledError:
            self.unsettled = True
            raise

    async def post(self, letter: list[tuple[int, int, bytes]]) -> None:
        if self.context.handshake is not None and letter:
            await self.context.handshake(b"write" + msgspec.msgpack.encode(letter))


class Posting(Simple):
    """Writes what it is sent, a little later; correct, since it forgets that on a disconnect."""

    delay = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.tasks: dict[bytes, set[asyncio.Task[None]]] = {}

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        if not request.startswith(b"write"):
            return await super().handshake(peer, request)
        task = asyncio.ensure_future(self.later(request[5:]))
        self.tasks.setdefault(peer, set()).add(task)
        await task
        return b""

    async def later(self, letter: bytes) -> None:
        await asyncio.sleep(self.delay)
        try:
            pieces = msgspec.msgpack.decode(letter, type=list[tuple[int, int, bytes]])
        except msgspec.DecodeError as error:
            raise TransportError("that is no letter") from error
        for segment, offset, data in pieces:
            os.pwrite(self.segments[segment].fd, data, offset)

    async def disconnect(self, peer: bytes) -> None:
        await super().disconnect(peer)
        for task in self.tasks.pop(peer, set()):
            task.cancel()


class Late(Posting):
    """Writes what it has got when the client has been disconnected, too."""

    delay = 0.1

    async def disconnect(self, peer: bytes) -> None:
        return


class Later(Late):
    """Says that everything has arrived, and writes it when it finds the time."""

    delay = 0.4
    last = b""

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        if not request.startswith(b"write"):
            return await super().handshake(peer, request)
        self.last = request[5:]
        self._begin(peer)
        return b""

    def _begin(self, peer: bytes) -> None:
        task = asyncio.ensure_future(self.later(self.last))
        self.tasks.setdefault(peer, set()).add(task)

    async def disconnect(self, peer: bytes) -> None:
        if peer in self.tasks:  # on a busy machine, all has been written by now
            self._begin(peer)


class SettledLink(PostingLink):
    """Does not say that its peer may still be writing."""

    async def write(self, copies: Sequence[Copy]) -> None:
        try:
            await super().write(copies)
        finally:
            self.unsettled = False


class BoastingLink(PostingLink):
    """Says that all copies of a batch have arrived when it fails."""

    async def write(self, copies: Sequence[Copy]) -> None:
        try:
            await super().write(copies)
        except TransportError as error:
            raise TransportError(error.message, details={"done": len(copies)}) from error


class Keeping(Simple):
    """Stays registered when the last client has gone."""

    async def disconnect(self, peer: bytes) -> None:
        return


class Waiting(Simple):
    """Waits for the rest of what it does not understand."""

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        if request != OPEN:
            await asyncio.Event().wait()
        return await super().handshake(peer, request)


class Accepting(Simple):
    """Answers everything."""

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        return await super().handshake(peer, OPEN)


class Careless(Simple):
    """Looks up what it does not understand."""

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        return await super().handshake(peer, {OPEN: OPEN}[request])


class Confused(Simple):
    """Serves nobody any more after garbage."""

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        if request != OPEN:
            self.segments.clear()
        return await super().handshake(peer, request)


class Hoarding(Simple):
    """Keeps a descriptor for each client."""

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        os.open(os.devnull, os.O_RDONLY)
        return await super().handshake(peer, request)


class Forgetful(Simple):
    """Forgets all clients when one of them is disconnected."""

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        if request != _ASK:
            return await super().handshake(peer, request)
        if peer not in self.peers:
            raise TransportError("you are not known")
        return b""

    async def disconnect(self, peer: bytes) -> None:
        self.peers.clear()


class AskingLink(SimpleLink):
    """Asks before each transfer whether the client is still known."""

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        if self.context.handshake is not None:
            await self.context.handshake(_ASK)
        await super().move(copies, write=write)


class Counting(Simple):
    """Keeps a descriptor for each client that does not say that it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[bytes, int] = {}

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        if request == _LEAVE:
            os.close(self.kept.pop(peer))
            return b""
        if peer not in self.kept:
            self.kept[peer] = os.open(os.devnull, os.O_RDONLY)
        return await super().handshake(peer, request)


class LeavingLink(SimpleLink):
    """Says that it leaves when it is closed."""

    telling: ClassVar[set[asyncio.Future[bytes]]] = set()

    def close(self) -> None:
        if not self.closed and self.context.handshake is not None:
            self.telling.add(asyncio.ensure_future(self.context.handshake(_LEAVE)))
        super().close()


class Complaining(Simple):
    """Keeps a descriptor for each complaint."""

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        if request == _ASK:
            os.open(os.devnull, os.O_RDONLY)
        return await super().handshake(peer, request)


class ComplainingLink(SimpleLink):
    """Tells the server half of what has failed."""

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        try:
            await super().move(copies, write=write)
        except TransportError:
            if self.context.handshake is not None:
                await self.context.handshake(_ASK)
            raise


class Anew(Simple):
    """Does not know a client again that it has disconnected."""

    gone: ClassVar[set[bytes]] = set()

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        if peer in self.gone:
            raise TransportError("that client has left")
        return await super().handshake(peer, request)

    async def disconnect(self, peer: bytes) -> None:
        await super().disconnect(peer)
        self.gone.add(peer)


class Single(Simple):
    """Serves one client at a time."""

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        if self.peers - {peer}:
            raise TransportError("somebody else is served")
        return await super().handshake(peer, request)


class Queueing(Simple):
    """Serves one transfer at a time. Clients ask for a turn, and for the next one when it ends, so
    that there is always one whose turn it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turn = asyncio.Lock()

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        if request == _ASK:
            await self.turn.acquire()
        elif request == _NEXT:
            self.turn.release()
            await self.turn.acquire()  # when all others have had theirs that wait
        else:
            return await super().handshake(peer, request)
        return b""


class QueueingLink(SimpleLink):
    """Transfers when it is its turn."""

    has_turn = False

    async def move(self, copies: Sequence[Copy], *, write: bool) -> None:
        if self.context.handshake is None:
            raise TransportError("there is nobody to ask")
        if not self.has_turn:
            await self.context.handshake(_ASK)
            self.has_turn = True
        try:
            await super().move(copies, write=write)
        finally:
            await self.context.handshake(_NEXT)


class Common(Simple):
    """Its segments are those of its class."""

    common: ClassVar[dict[int, Segment]] = {}

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        offer = await super().start(context, segments)
        self.common.update(self.segments)
        self.segments = self.common
        return offer


class Endless(Simple):
    """Its close never ends."""

    async def close(self) -> None:
        await asyncio.Event().wait()


class Undying(Simple):
    """Its offer works on after close: nobody asks the server half."""

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        fd = os.dup(segments[0].fd)
        return f"{fd}:{os.getpid()}:{segments[0].nbytes}".encode()


class UndyingLink(SimpleLink):
    """The client half of :class:`Undying`."""

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> Link:
        try:
            fd, pid, nbytes = map(int, offer.split(b":"))
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        except (ValueError, OSError) as error:
            raise TransportUnavailableError("that is no offer") from error
        return cls({0: (opened, nbytes)}, context)


class Local(Simple):
    """Listens, on the loopback only."""

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        await super().start(context, segments)
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen()
        return OFFER + str(self.listener.getsockname()[1]).encode()

    async def close(self) -> None:
        await super().close()
        self.listener.close()


class LocalLink(SimpleLink):
    """Looks whether there is somebody."""

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> Link:
        try:
            with socket.create_connection(("127.0.0.1", int(offer[len(OFFER) :])), 1):
                return await super().connect(OFFER, context)
        except (ValueError, OSError) as error:
            raise TransportUnavailableError(f"nobody is there: {error}") from error


class Everywhere(Simple):
    """Listens at every address of its host, whatever it is told."""

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        offer = await super().start(context, segments)
        self.listener = socket.create_server(("", 0))
        return offer

    async def close(self) -> None:
        await super().close()
        self.listener.close()


class Listening(Simple):
    """Correct: listens while it has clients, who send a word first."""

    def __init__(self) -> None:
        super().__init__()
        self.listener: socket.socket | None = None

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        places = await super().handshake(peer, request)
        if self.listener is None:
            self.listener = socket.create_server((self.address(), 0))
            self.listener.setblocking(False)
            asyncio.get_running_loop().add_reader(self.listener, self.accept, self.listener)
        return msgspec.msgpack.encode((self.listener.getsockname(), places))

    def address(self) -> str:
        return os.environ.get("TORCHSTORE_BIND", "127.0.0.1")

    def accept(self, listener: socket.socket) -> None:
        listener.accept()[0].close()

    async def disconnect(self, peer: bytes) -> None:
        await super().disconnect(peer)
        if not self.peers:
            await self.close()

    async def close(self) -> None:
        if self.listener is not None:
            asyncio.get_running_loop().remove_reader(self.listener)
            self.listener.close()
            self.listener = None


class Courteous(Listening):
    """Waits for a word of everybody who connects, and for nothing else meanwhile."""

    def accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(OSError):
            sock.settimeout(10)
            sock.recv(1)


class Hospitable(Listening):
    """Keeps the connections of strangers."""

    def __init__(self) -> None:
        super().__init__()
        self.guests: list[socket.socket] = []

    def accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        self.guests.append(sock)


class Persistent(Listening):
    """Listens on when its last client has gone."""

    async def disconnect(self, peer: bytes) -> None:
        self.peers.discard(peer)


class Elsewhere(Listening):
    """Listens where the kernel would send from, whatever it is told."""

    def address(self) -> str:
        told = os.environ.get("TORCHSTORE_BIND", "127.0.0.1")
        return local_address_to(told.rpartition(".")[0] + ".250") or told


class ListeningLink(SimpleLink):
    """The client half of :class:`Listening`."""

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> Link:
        asking = context.handshake
        if asking is None:
            raise TransportUnavailableError("there is nobody to ask")
        place: tuple[str, int] = ("", 0)

        async def ask(request: bytes) -> bytes:
            nonlocal place
            answer = await asking(request)
            place, places = msgspec.msgpack.decode(answer, type=tuple[tuple[str, int], bytes])
            return places

        link = await super().connect(offer, msgspec.structs.replace(context, handshake=ask))
        _, writer = await asyncio.open_connection(*place)
        writer.write(_ASK)
        writer.close()
        return link


class Refusing(Simple):
    """Serves nowhere."""

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        raise TransportUnavailableError("not on a day like this")


def everywhere(context: LinkContext) -> Bid:
    """A bid for other hosts, too."""
    return Bid(1e-3, 1e9, "everywhere")


plugin_Posting = Plugin(PostingLink, Posting)
plugin_Boasting = Plugin(BoastingLink, Posting)
plugin_Late = Plugin(PostingLink, Late)
plugin_Later = Plugin(PostingLink, Later)
plugin_Settled = Plugin(SettledLink, Late)
plugin_Undying = Plugin(UndyingLink, Undying)
plugin_Forgetful = Plugin(AskingLink, Forgetful)
plugin_Queueing = Plugin(QueueingLink, Queueing)
plugin_Counting = Plugin(LeavingLink, Counting)
plugin_Complaining = Plugin(ComplainingLink, Complaining)
plugin_Everywhere = Plugin(SimpleLink, Everywhere, everywhere, listens=True)
plugin_Listening = Plugin(ListeningLink, Listening, listens=True)
plugin_Courteous = Plugin(ListeningLink, Courteous, listens=True)
plugin_Hospitable = Plugin(ListeningLink, Hospitable, listens=True)
plugin_Persistent = Plugin(ListeningLink, Persistent, listens=True)
plugin_Elsewhere = Plugin(ListeningLink, Elsewhere, everywhere, listens=True)
plugin_Local = Plugin(LocalLink, Local, everywhere)


def __getattr__(name: str) -> Plugin:
    """``plugin_X``: the plug-in with the half ``X``."""
    return named(name, globals())
