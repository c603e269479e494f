"""Volumes in other processes: what the controller holds of one, and the volume's end of the line.

A volume connects like a client, but its first message is ``Attach``. From then on the server tells
it what to warm and what to give back, and it tells what is warm. The line's end is its end: a
volume that is gone is lost, and a volume whose server is gone has no use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

import msgspec

from torchstore_core.errors import (
    ProtocolError,
    StoreClosedError,
    StoreTimeoutError,
    TorchStoreError,
    from_wire,
    in_seconds,
)
from torchstore_core.machine.processes import Watcher
from torchstore_core.machine.unix_sockets import connect, unix_socket
from torchstore_core.server.memory.allocator import Allocator
from torchstore_core.server.memory.volume import Volume
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, decode_reply, encode

__all__ = ["AttachedMemory", "VolumeLine"]

log = logging.getLogger(__name__)


class AttachedMemory:
    """Memory in another process, as the controller's ``SegmentView``.

    Args:
        send: takes messages for the volume.
        allocator: of this very memory.
    """

    def __init__(self, send: Callable[[m.Message], None], allocator: Allocator) -> None:
        self._send = send
        self._allocator = allocator
        self._warm = 0
        self._target = 0
        self._reserved: tuple[int, int] | None = None

    @property
    def warm(self) -> int:
        """Bytes from the start that are warm, as far as is known here."""
        return self._warm

    def touched(self, end: int) -> None:
        """A client wrote up to ``end``."""
        self._warm = max(self._warm, end)

    def prefault(self, target: int, done: Callable[[], None]) -> None:
        """Ask for it; the volume tells all when it is done, so ``done`` is not called."""
        if target > max(self._target, self._warm):
            self._target = target
            self._send(m.Prefault(target))

    def trim(self, start: int) -> int:
        """Ask for pages from ``start`` on to be given back. Until the volume has answered, nothing
        is placed there: it would be thrown away with them.
        """
        if self._reserved is not None or start >= self._warm:
            return 0
        self._reserved = self._allocator.take_tail()
        given = self._warm - start
        self._send(m.Trim(start, self._warm))
        return given

    @property
    def is_trimming(self) -> bool:
        """Whether the volume has not answered yet."""
        return self._reserved is not None

    def read(self, offset: int, nbytes: int) -> None:
        """Not from here: clients read it, under a lease."""
        return None

    def watch(self, wanted: m.Watch) -> None:
        """Ask the volume, which is on the process's host."""
        self._send(wanted)

    def warmed(self, message: m.Warm) -> None:
        """The volume says how much is warm now."""
        self._warm = message.nbytes if message.trimmed else max(self._warm, message.nbytes)
        self._target = 0
        if message.trimmed and self._reserved is not None:
            self._allocator.free([self._reserved])
            self._reserved = None


class VolumeLine(asyncio.Protocol):
    """The volume's end; made by :meth:`open`.

    Args:
        volume: started.
        info: what ``volume.start()`` gave.
        lost: called once when the server is gone that the volume was attached to.
    """

    def __init__(self, volume: Volume, info: m.VolumeInfo, lost: Callable[[], None]) -> None:
        self._volume = volume
        self._info = info
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(m.MAX_FRAME)
        self._attached: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._watcher = Watcher(self._send)
        self._wanted = False
        self._closing = False

    @classmethod
    async def open(
        cls, path: str, volume: Volume, info: m.VolumeInfo, lost: Callable[[], None], timeout: float
    ) -> VolumeLine:
        """Attach the volume to the server whose control socket (or relay) is at ``path``.

        Raises:
            StoreClosedError: nobody answers there.
            StoreTimeoutError: not within ``timeout`` seconds.
            ProtocolError, ConfigurationError: the server does not want it.
        """
        made = cls(volume, info, lost)
        try:
            async with asyncio.timeout(timeout):
                with unix_socket() as sock:
                    await connect(sock, path)
                    await made._loop.create_unix_connection(lambda: made, sock=sock)
                await made._attached
        except TimeoutError as error:
            made.close()
            raise StoreTimeoutError(
                f"volume {info.id} could not attach within {in_seconds(timeout)}",
                details={"timeout": timeout, "volume": info.id},
            ) from error
        except OSError as error:
            raise StoreClosedError(f"volume {info.id}: no server at {path}: {error}") from error
        return made

    def close(self) -> None:
        """Leave the server; ``lost`` is not called any more."""
        self._closing = True
        self._watcher.close()
        if self._transport is not None:
            self._transport.close()

    # ---- asyncio.Protocol -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send(m.Attach(1, m.PROTOCOL_VERSION, self._info))

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                self._handle(decode_reply(body))
        except (ProtocolError, msgspec.DecodeError) as error:
            log.warning("volume %s: its server sent something unreadable: %s", self._info.id, error)
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._watcher.close()
        self._fail(StoreClosedError(f"volume {self._info.id}: its server is gone"))
        if self._wanted and not self._closing:
            self._closing = True
            self._lost()

    # ---- inside ---------------------------------------------------------------------------

    def _send(self, message: m.Message) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    def _handle(self, message: m.Reply) -> None:
        memory = self._volume.memory
        match message:
            case m.Done():
                self._wanted = True
                if not self._attached.done():
                    self._attached.set_result(None)
            case m.Failure():
                self._fail(from_wire(message.code, message.message, message.key, message.details))
            case m.Prefault():
                memory.prefault(message.nbytes, self._warmed_in_thread)
            case m.Trim():
                memory.touched(message.warm)  # clients write without telling this process
                memory.trim(message.start)
                self._tell(trimmed=True)
            case m.Watch():
                self._watcher.watch(message)
            case _:
                log.debug("volume %s: nothing to do for %s", self._info.id, type(message).__name__)

    def _fail(self, error: TorchStoreError) -> None:
        if not self._attached.done():
            self._attached.set_exception(error)

    def _warmed_in_thread(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._tell)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            log.debug("prefault ended after the volume")

    def _tell(self, *, trimmed: bool = False) -> None:
        self._send(m.Warm(self._volume.memory.warm, trimmed))
