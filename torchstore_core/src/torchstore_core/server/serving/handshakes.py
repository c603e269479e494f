"""What clients' halves of transports ask the volumes' halves, and how what is under way ends.

A transport whose bytes travel for themselves, over a network, may still deliver some of them after
the client has died or has given up. The memory that they would land in is not used again before the
volume's half has said that it is done with that client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from torchstore_core.errors import (
    ProtocolError,
    StoreClosedError,
    TorchStoreError,
    TransportNotReadyError,
    TransportUnavailableError,
)
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import portable

__all__ = ["Handshakes"]

log = logging.getLogger(__name__)

# How much of the requests of one session the server keeps until they are answered, in bytes, and
# what each of them counts besides its own.
_MAX_ASKING = 128 << 20
_WEIGHT = 64 << 10
_MAX_NAME = 256


class Handshakes:
    """Those of all sessions. Everything here runs on the server's event loop.

    Args:
        volumes: of the store.
    """

    def __init__(self, volumes: list[VolumeRecord]) -> None:
        self._volumes = volumes
        self._tasks: set[asyncio.Task[None]] = set()
        # Ends that are under way, by the client, the index of the volume, and the transport; empty
        # for all.
        self._settling: dict[tuple[bytes, int, str], asyncio.Task[None]] = {}
        # What is to be done when all of a client's have ended.
        self._after: dict[bytes, list[Callable[[], None]]] = {}

    def answer(
        self, session: SessionRecord, request: m.Handshake, reply: Callable[[m.Reply], None]
    ) -> None:
        """Ask the server half, and reply what it says.

        Raises:
            ProtocolError: there is no such volume or transport, or the request is too long.
            TransportNotReadyError: the session has too many of them under way.
        """
        volume = self._volume(request.volume)
        if len(request.data) > m.MAX_HANDSHAKE:
            raise ProtocolError(
                f"a handshake of {len(request.data)} bytes is over the limit of {m.MAX_HANDSHAKE}"
            )
        if len(request.transport) > _MAX_NAME:
            raise ProtocolError(f"no transport has a name of {len(request.transport)} characters")
        weight = len(request.data) + _WEIGHT
        if session.asking + weight > _MAX_ASKING:
            raise TransportNotReadyError("this client has too many handshakes under way at once")
        session.asking += weight
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
                session.asking -= weight

        self._spawn(work())

    def settle(
        self,
        session: SessionRecord,
        uncertain: Iterable[tuple[int, str]],
        then: Callable[[], None],
    ) -> None:
        """Have volumes end what transports have under way for a session, and call ``then``.

        Args:
            uncertain: indices of volumes, each with the name of one of its transports, or with an
                empty one for all of them.

        Raises:
            ProtocolError: there is no such volume.
        """
        for volume, transport in [(self._volume(index), name) for index, name in uncertain]:
            if volume.index in session.met:
                known = transport if transport in volume.info.offers else ""
                self._disconnect(session, volume, known)
        self.when_settled(session, then)

    def ended(self, session: SessionRecord, then: Callable[[], None]) -> None:
        """A session, or its process, has ended: call ``then`` when no byte of it can move."""
        session.meets = False
        for index in session.met:
            self._disconnect(session, self._volumes[index], "")
        session.met.clear()
        self.when_settled(session, then)

    def when_settled(self, session: SessionRecord, then: Callable[[], None]) -> None:
        """Call ``then`` when nothing is being settled for that session, maybe at once."""
        after = self._after.get(session.peer)
        if after is not None:  # one task for all of them, and in order
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

        self._spawn(work())

    def _of(self, peer: bytes) -> list[asyncio.Task[None]]:
        return [task for (whose, _, _), task in self._settling.items() if whose == peer]

    def _at(self, peer: bytes, index: int, transport: str) -> list[asyncio.Task[None]]:
        names = (transport, "")
        found = [self._settling.get((peer, index, name)) for name in names]
        return [task for task in found if task is not None]

    def close(self) -> None:
        """The server ends, and the volumes with it."""
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

        self._settling[at] = self._spawn(work())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
