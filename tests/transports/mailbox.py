"""The test transports ``mailbox`` and ``mailbox-apart``: every byte travels in a handshake.

Both halves are as simple as a two-sided transport can be. The half of ``mailbox-apart`` runs in a
process of its own. Tests can have a write stop half-way (:data:`GATE`), as a slow network would.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import (
    Bid,
    Copy,
    Link,
    LinkContext,
    Refusal,
    Segment,
    ServerContext,
    TransportServer,
    TransportSpec,
)
from torchstore_core.errors import (
    TransportError,
    TransportNotReadyError,
    TransportUnavailableError,
)

#: Environment variable with a path. While that file exists, server halves hold back what is written
#: until their client disconnects, and only then write it. While one does, ``<path>.held`` exists.
#: With a number in the file, as many writes go through first.
GATE = "TORCHSTORE_TEST_GATE"
_CHUNK = 512 << 10
#: Seconds before each answer to a client that has asked the half to be slow.
SLOW_S = 0.3


class Letter(msgspec.Struct, frozen=True):
    """What a client half asks: to write ``data`` to a segment, to read ``nbytes``, or else who
    serves it.
    """

    what: str
    segment: int = 0
    offset: int = 0
    nbytes: int = 0
    data: bytes = b""


class MailboxServer(TransportServer):
    """Reads and writes segments through their descriptors."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._held: dict[bytes, list[Letter]] = {}
        self._peers: set[bytes] = set()
        self._odd: dict[bytes, str] = {}
        self._written = 0
        self._let_go = asyncio.Event()
        self._asked = 0  # how often it was asked for what is stuck

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        self._segments = {segment.id: segment for segment in segments}
        return b"mailbox"

    async def handshake(self, peer: bytes, request: bytes) -> bytes:
        try:
            letter = msgspec.msgpack.decode(request, type=Letter)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TransportError(f"that is no letter: {error}") from error
        self._peers.add(peer)
        match letter.what:
            case "who":
                return str(os.getpid()).encode()
            case "written":
                return str(self._written).encode()
            case "asked":
                return str(self._asked).encode()
            case "threads of numpy":
                before = len(os.listdir("/proc/self/task"))
                import numpy  # noqa: F401

                return str(len(os.listdir("/proc/self/task")) - before).encode()
            case "die":
                os._exit(1)
            case "hang":
                time.sleep(1000)
            case "fail":
                raise ValueError("a fault of the half")
            case "exit":
                raise SystemExit("the library's fault")
            case "let go":
                self._let_go.set()
                return b""
            case "nothing":
                return None  # type: ignore[return-value]
            case "disconnect fails" | "disconnect hangs" | "close fails":
                self._odd[peer] = letter.what
                return b""
            case "no count" | "count hangs" | "slow" | "thread hangs" | "threads are late":
                self._odd[peer] = letter.what
                return b""
            case "details":
                raise TransportNotReadyError("a reason", details={"left": 3, "why": ["a", "b"]})
            case "strange details":
                raise TransportError("a reason \udcff", details={"left": object()})
            case "cancelled":
                raise asyncio.CancelledError
            case "long error":
                raise TransportError("x" * (8 << 20))
            case "too much":
                return bytes(8 << 20)
            case "read":
                segment = self._checked(letter)
                if self._odd.get(peer) == "slow":
                    await asyncio.sleep(SLOW_S)
                return os.pread(segment.fd, letter.nbytes, letter.offset)
        self._checked(letter)
        gate = Path(os.environ.get(GATE, "") or os.devnull)
        if gate.is_file() and self._written >= int(gate.read_text() or 0):
            self._held.setdefault(peer, []).append(letter)
            gate.with_suffix(".held").touch()
            await asyncio.Event().wait()
        self._write(letter)
        self._written += 1
        return b""

    async def disconnect(self, peer: bytes) -> None:
        self._peers.discard(peer)
        match self._odd.get(peer):
            case "disconnect fails" | "close fails":
                raise ValueError("a fault of the half")
            case "disconnect hangs":
                await self._let_go.wait()
        for letter in self._held.pop(peer, []):
            self._write(letter)
            Path(os.environ[GATE]).with_suffix(".held").unlink(missing_ok=True)

    def registered(self, segment: int) -> int:
        if "no count" in self._odd.values():
            raise ValueError("a fault of the half")
        if "count hangs" in self._odd.values():
            time.sleep(1000)
        return self._segments[segment].nbytes if self._peers else 0

    def stuck(self) -> list[int]:
        self._asked += 1
        odd = self._odd.values()
        return [0] if "thread hangs" in odd else [self._asked] if "threads are late" in odd else []

    async def close(self) -> None:
        if "close fails" in self._odd.values():
            raise ValueError("a fault of the half")
        self._segments.clear()

    def _write(self, letter: Letter) -> None:
        os.pwrite(self._segments[letter.segment].fd, letter.data, letter.offset)

    def _checked(self, letter: Letter) -> Segment:
        segment = self._segments.get(letter.segment)
        if segment is None or not 0 <= letter.offset <= segment.nbytes - letter.nbytes:
            raise TransportError(f"{letter.offset} is outside of segment {letter.segment}")
        return segment


class MailboxLink(Link):
    """Sends one letter after the other."""

    def __init__(self, context: LinkContext) -> None:
        if context.handshake is None:
            raise TransportUnavailableError("there is no way to the volume")
        self._ask = context.handshake
        self._answers = 0
        self._closed = False

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> MailboxLink:
        made = cls(context)
        await made.ask(Letter("who"))
        return made

    async def ask(self, letter: Letter) -> bytes:
        """What the server half answers."""
        if self._closed:
            raise TransportError("this link was closed")
        answer = await self._ask(msgspec.msgpack.encode(letter))
        self._answers += 1
        return answer

    def progress(self) -> int:
        return self._answers

    async def write(self, copies: Sequence[Copy]) -> None:
        done = 0
        try:
            for copy in copies:
                for at, nbytes in _chunks(copy):
                    data = ctypes.string_at(copy.address + at, nbytes)
                    await self.ask(Letter("write", copy.segment, copy.offset + at, nbytes, data))
                done += 1
        except TransportError as error:
            self.unsettled = True
            raise TransportError(error.message, details={"done": done}) from error
        except BaseException:
            self.unsettled = True
            raise

    async def read(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            for at, nbytes in _chunks(copy):
                data = await self.ask(Letter("read", copy.segment, copy.offset + at, nbytes))
                ctypes.memmove(copy.address + at, data, nbytes)

    def close(self) -> None:
        self._closed = True


def _chunks(copy: Copy) -> Iterator[tuple[int, int]]:
    for at in range(0, copy.nbytes, _CHUNK):
        yield at, min(_CHUNK, copy.nbytes - at)


def _bid(context: LinkContext) -> Bid | Refusal:
    if context.offered and context.offer != b"mailbox":
        return Refusal("that is no mailbox")
    return Bid(1.0, 1e6, "a letter at a time")


@hookimpl
def torchstore_transport() -> TransportSpec:
    """See ``torchstore_core.contracts.hooks``."""
    return TransportSpec(
        "mailbox",
        bid=_bid,
        client=f"{__name__}:MailboxLink",
        server=f"{__name__}:MailboxServer",
    )
