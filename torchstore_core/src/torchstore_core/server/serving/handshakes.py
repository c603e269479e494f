"""Handshakes between the client halves and the server halves of transports, and the end of the
transfers between them.

A transport over a network may still deliver bytes after the client has died or has given up. The
memory that these bytes would be written to is not reused until the server half has confirmed that
it has disconnected the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from torchstore_core.errors import (
    ProtocolError,
    StoreClosedError,
    TorchStoreError,
    TransportNotReadyError,
    TransportUnavailableError,
)
from torchstore_core.machine.tasks import begin
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import portable

log = logging.getLogger(__name__)

# The limit on a session's unanswered handshakes, in bytes, and the bytes that each of them counts
# in addition to its own size.
_MAX_ASKING = 128 << 20
_WEIGHT = 64 << 10
_MAX_NAME = 256


class Handshakes:
    """The handshakes of all sessions. Everything here runs on the server's event loop.

    Args:
        volumes: the volumes of the store.
    """

    def __init__(self, volumes: list[VolumeRecord]) -> None:
        self._volumes = volumes
        self._tasks: set[asyncio.Task[None]] = set()
        # The disconnects that are under way, by client, index of the volume, and transport (empty:
        # all transports).
        self._settling: dict[tuple[bytes, int, str], asyncio.Task[None]] = {}
        # The calls to make when all disconnects of a client have ended.
        self._after: dict[bytes, list[Callable[[], None]]] = {}

    def answer(
        self, session: SessionRecord, request: m.Handshake, reply: Callable[[m.Reply], None]
    ) -> None:
        """Pass a handshake to the server half, and send its answer with ``reply``.

        Raises:
            ProtocolError: there is no such volume, or the request is too long.
            TransportNotReadyError: the session has too many handshakes under way.
        """
        volume = self._volume(request.volume)
        if len(request.data) > m.MAX_HANDSHAKE:
            raise ProtocolError(
                f"a handshake of {len(request.data)} bytes is over the limit of {m.MAX_HANDSHAKE}"
            )
        if len(request.transport) > _MAX_NAME:
            raise ProtocolError(f"no transport has a name of {len(request.transport)} characters")
        weight = len(request.data) + _WEIGHT
        if session.handshakes_weight + weight > _MAX_ASKING:
            raise TransportNotReadyError("this client has too many handshakes under way at once")
        session.handshakes_weight += weight
        session.met.add(volume.index)

        async def work() -> None:
            while settling := self._at(session.peer, volume.index, request.transport):
                await asyncio.wait(settling)
            try:
                if not session.meets:
                    raise StoreClosedError("this session has ended")
                halves = volume.halves
                data = await halves.handshake(session.peer, request.transport, request.data)
                reply(m.Handshaken(request.id, data))
            except TorchStoreError as error:
                message, details = portable(error)
                reply(m.Failure(request.id, error.code, message, None, details))
            finally:
                session.handshakes_weight -= weight

        begin(work(), self._tasks)

    def settle(
        self,
        session: SessionRecord,
        uncertain: Iterable[tuple[int, str]],
        then: Callable[[], None],
    ) -> None:
        """Ask volumes to end the transfers that are under way for a session, then call ``then``.

        Args:
            uncertain: indices of volumes, each with the name of one of its transports; an empty
                name stands for all of them.

        Raises:
            ProtocolError: there is no such volume.
        """
        for volume, transport in [(self._volume(index), name) for index, name in uncertain]:
            if volume.index in session.met:
                known = transport if transport in volume.info.offers else ""
                self._disconnect(session, volume, known)
        self.when_settled(session, then)

    def ended(self, session: SessionRecord, then: Callable[[], None]) -> None:
        """Disconnect a session that has ended, or whose process has; call ``then`` once no transfer
        of it can move any more bytes.
        """
        session.meets = False
        for index in session.met:
            self._disconnect(session, self._volumes[index], "")
        session.met.clear()
        self.when_settled(session, then)

    def when_settled(self, session: SessionRecord, then: Callable[[], None]) -> None:
        """Call ``then`` once no disconnect of the session is under way, maybe at once."""
        after = self._after.get(session.peer)
        if after is not None:  # one task makes all of the calls, in order
            after.append(then)
            return
        if not self._of(session.peer):
            then()
            return
        self._after[session.peer] = [then]

        async def work() -> None:
            while settling := self._of(session.peer):
                await asyncio.wait(settling)
            for one in self._after.pop(session.peer):
                try:
                    one()
                except Exception:
                    log.exception("what waited for the end of a client's writes has failed")

        begin(work(), self._tasks)

    def _of(self, peer: bytes) -> list[asyncio.Task[None]]:
        return [task for (whose, _, _), task in self._settling.items() if whose == peer]

    def _at(self, peer: bytes, index: int, transport: str) -> list[asyncio.Task[None]]:
        names = (transport, "")
        found = [self._settling.get((peer, index, name)) for name in names]
        return [task for task in found if task is not None]

    def close(self) -> None:
        """Cancel everything that is under way; the server and its volumes are about to end."""
        for task in self._tasks:
            task.cancel()

    def _volume(self, index: int) -> VolumeRecord:
        if not 0 <= index < len(self._volumes):
            raise ProtocolError(f"there is no volume {index}")
        return self._volumes[index]

    def _disconnect(self, session: SessionRecord, volume: VolumeRecord, transport: str) -> None:
        if self._at(session.peer, volume.index, transport):
            return
        at = session.peer, volume.index, transport

        async def work() -> None:
            try:
                await volume.halves.disconnect(session.peer, transport)
            except TransportUnavailableError:
                log.debug("volume %s is gone, and its memory with it", volume.info.id)
            except TorchStoreError as error:
                log.error("volume %s did not end a client: %s", volume.info.id, error)
            finally:
                del self._settling[at]

        self._settling[at] = begin(work(), self._tasks)
