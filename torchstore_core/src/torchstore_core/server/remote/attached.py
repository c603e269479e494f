"""The connection of a volume in another process to its server.

A volume connects like a client, but its first message is ``Attach``. From then on the server tells
it what to warm and what to return to the system, and asks how far its memory may grow; the volume
reports what is warm. When the connection closes, the volume is lost to the server, and of no more
use itself; unless the server has died and comes back: then the volume attaches again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from torchstore_core.errors import (
    StoreClosedError,
    StoreTimeoutError,
    TorchStoreError,
    from_wire,
    in_seconds,
)
from torchstore_core.machine.sockets.unix import connect, unix_socket
from torchstore_core.machine.tasks import begin, call_from_thread
from torchstore_core.server.memory.volume import Volume
from torchstore_core.server.remote.process_watches import ProcessWatches
from torchstore_core.server.remote.spill_files import VolumeFile
from torchstore_core.server.repairing.copier_process import CopierProcess
from torchstore_core.server.serving.frames import FrameProtocol
from torchstore_core.wire import framing
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, encode, portable

log = logging.getLogger(__name__)

# Between two attempts to connect to a server that comes back.
_PAUSE_S = 0.02


class VolumeConnection(FrameProtocol):
    """A volume's connection to its server; made by :meth:`open`. If the server comes back when it
    dies, so does this connection.

    Args:
        volume: the volume, which has been started.
        info: the result of ``volume.start()``.
        lost: called once, when the server of an attached volume is gone for good.
        spill: the volume's spill file, which ends with this connection; None: it has none.
    """

    def __init__(
        self,
        volume: Volume,
        info: m.VolumeInfo,
        lost: Callable[[], None],
        spill: VolumeFile | None = None,
    ) -> None:
        super().__init__(m.MAX_FRAME)
        self._volume = volume
        self._info = info
        self._lost = lost
        self._spill = spill
        self._loop = asyncio.get_running_loop()
        self._attached: asyncio.Future[int] = self._loop.create_future()
        self._returning: asyncio.Task[None] | None = None
        self._watcher = ProcessWatches(self._send)
        self._answers: set[asyncio.Task[None]] = set()
        self._copier = CopierProcess([info.index], self._copier_ended_in_thread)
        self._path = ""
        self._closing = False

    @classmethod
    async def open(
        cls,
        path: str,
        volume: Volume,
        info: m.VolumeInfo,
        lost: Callable[[], None],
        timeout: float,
        spill: VolumeFile | None = None,
    ) -> VolumeConnection:
        """Attach a volume to the server whose control socket, or relay, is at ``path``.

        Raises:
            StoreClosedError: there is no server at ``path``.
            StoreTimeoutError: it took longer than ``timeout`` seconds.
            ProtocolError, ConfigurationError: the server rejected the volume.
        """
        made = cls(volume, info, lost, spill)
        made._path = path
        try:
            async with asyncio.timeout(timeout):
                await made._attach()
        except TimeoutError as error:
            made.close()
            raise StoreTimeoutError(
                f"volume {info.id} could not attach within {in_seconds(timeout)}",
                details={"timeout": timeout, "volume": info.id},
            ) from error
        except OSError as error:
            made.close()
            raise StoreClosedError(f"volume {info.id}: no server at {path}: {error}") from error
        except BaseException:
            made.close()
            raise
        return made

    async def _attach(self) -> None:
        """Connect, and wait until the server has accepted the volume.

        Raises:
            StoreClosedError: the connection was lost.
            OSError: nobody listens there.
            TorchStoreError: the server has rejected the volume.
        """
        with unix_socket() as sock:
            await connect(sock, self._path)
            await self._loop.create_unix_connection(lambda: self, sock=sock)
        await self._attached

    async def _return(self) -> None:
        """Attach again to a server that comes back, as often as that takes."""
        while not self._closing:
            self._attached = self._loop.create_future()
            if self._spill is not None:
                await self._spill.drop()
            try:
                await self._attach()
            except StoreClosedError:  # it has died again
                await asyncio.sleep(_PAUSE_S)
            except (TorchStoreError, OSError) as error:
                log.info("volume %s: its server does not come back: %s", self._info.id, error)
                self._closing = True
                self._lost()
            else:
                self._tell()
                return

    def close(self) -> None:
        """Disconnect from the server; ``lost`` is not called after this."""
        self._closing = True
        if self._returning is not None:
            self._returning.cancel()
        self._watcher.close()
        self._copier.stop()
        super().close()
        if self._spill is not None:
            self._spill.close()

    # ---- FrameProtocol --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.reader = FrameReader(m.MAX_FRAME)
        self._watcher = ProcessWatches(self._send)
        memory = self._volume.memory
        usable = memory.may_grow(memory.warm)
        spill = None if self._spill is None else self._spill.place
        self._send(m.Attach(1, m.PROTOCOL_VERSION, self._info, usable, spill))

    def received(self, bodies: list[bytes]) -> None:
        """Handle the messages that the server has sent."""
        try:
            for body in bodies:
                self._handle(framing.decode_reply(body))
        except msgspec.DecodeError as error:
            self.unreadable(error)

    def unreadable(self, error: Exception) -> None:
        """Disconnect from a server whose messages cannot be decoded."""
        log.warning("volume %s: its server sent something unreadable: %s", self._info.id, error)
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watcher.close()
        self._copier.stop()
        for task in self._answers:
            task.cancel()
        if not self._attached.done():
            self._fail(StoreClosedError(f"volume {self._info.id}: its server is gone"))
        elif self._closing or self._attached.cancelled() or self._attached.exception():
            return  # it has never been attached
        elif self._attached.result():
            self._returning = self._loop.create_task(self._return())
        else:
            self._closing = True
            self._lost()

    # ---- inside ---------------------------------------------------------------------------

    def _send(self, message: m.Message) -> None:
        self.write(encode(message))

    def _handle(self, message: m.Reply) -> None:
        memory = self._volume.memory
        match message:
            case m.Attached():
                if not self._attached.done():
                    self._attached.set_result(message.life)
            case m.Failure():
                self._fail(from_wire(message.code, message.message, message.key, message.details))
            case m.Prefault():
                memory.prefault(message.nbytes, self._warmed_in_thread)
            case m.Trim():
                memory.touched(message.warm)  # clients write without telling this process
                memory.trim(message.start)
                self._tell(trimmed=True)
            case m.MayGrow():
                usable = memory.may_grow(message.end)
                self._send(m.Grown(message.end, usable, memory.left))
            case m.WatchProcess():
                self._watcher.watch(message)
            case (
                m.WriteValues()
                | m.WriteTogether()
                | m.ReadPieces()
                | m.ReadTogether()
                | m.CutSpill()
                | m.FreeSpill()
                | m.KeepSpill()
            ) if self._spill is not None:
                self._spill.order(message, self._send)
            case m.HurrySpill() if self._spill is not None:
                self._spill.hurry()
            case m.StartCopier():
                self._copier.start(self._path, again=message.again)
            case m.PeerHandshake() | m.PeerGone():
                begin(self._answer(message), self._answers)
            case _:
                log.debug("volume %s: nothing to do for %s", self._info.id, type(message).__name__)

    async def _answer(self, message: m.PeerHandshake | m.PeerGone) -> None:
        data = b""
        try:
            if isinstance(message, m.PeerGone):
                await self._volume.disconnect(message.peer, message.transport)
            else:
                data = await self._volume.handshake(message.peer, message.transport, message.data)
        except TorchStoreError as error:
            self._send(m.PeerReply(message.id, b"", error.code, *portable(error)))
        else:
            self._send(m.PeerReply(message.id, data))

    def _fail(self, error: TorchStoreError) -> None:
        if not self._attached.done():
            self._attached.set_exception(error)

    def _copier_ended_in_thread(self) -> None:
        call_from_thread(self._loop, lambda: self._send(m.CopierEnded()))

    def _warmed_in_thread(self) -> None:
        call_from_thread(self._loop, self._tell)

    def _tell(self, *, trimmed: bool = False) -> None:
        self._send(m.Warm(self._volume.memory.warm, trimmed))
