"""The copiers of a store: which of them have nothing to do, where one starts, when one may end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from torchstore_core.errors import ProtocolError
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.wire import messages as m

# How long a copier may take to start, and how long it is kept without work, in seconds.
_START_S = 60.0
_LINGER_S = 20.0


class StartsCopier(Protocol):
    """Starts a copier beside a volume, unless there is one; ``again``: in place of that one."""

    def __call__(self, volume: VolumeRecord, *, again: bool = False) -> None: ...


class Copier(msgspec.Struct, eq=False):
    """A copier that has asked for something to do."""

    session: SessionRecord
    request: m.TakeCopies
    send: Callable[[m.Message], None]


class Copiers:
    """The copiers that wait for something to do.

    Args:
        sessions: the open sessions, by token.
        later: calls something after so many seconds.
        start: starts a copier beside a volume, unless there is one; see
            ``messages.StartCopier``.
        failed: called with the reason when a copier has not started.
    """

    def __init__(
        self,
        volumes: Sequence[VolumeRecord],
        sessions: Mapping[bytes, SessionRecord],
        later: Callable[[float, Callable[[], None]], object],
        start: StartsCopier,
        failed: Callable[[str], None],
    ) -> None:
        self._volumes = volumes
        self._sessions = sessions
        self._later = later
        self.start = start
        self._failed = failed
        self._waiting: list[Copier] = []
        self._starting: set[int] = set()  # volumes beside which a copier starts

    def add(
        self, session: SessionRecord, request: m.TakeCopies, send: Callable[[m.Message], None]
    ) -> None:
        """A copier asks for something to do.

        Raises:
            ProtocolError: the session is not that of a copier, or an id is in use.
        """
        if session.facts.role != m.COPIER_ROLE:
            raise ProtocolError("only a copier takes copies")
        if request.txn in session.txns or request.lease in session.leases:
            raise ProtocolError(f"id {request.txn} or {request.lease} is in use")
        self._starting.difference_update(request.volumes)
        self._waiting.append(Copier(session, request, send))

    def find(self, volume: int) -> Copier | None:
        """Return a copier for a volume that has nothing to do; start one if there is none."""
        self._waiting = [
            one
            for one in self._waiting
            if one.session.closed is None and one.session.token in self._sessions
        ]
        for copier in self._waiting:
            if volume in copier.request.volumes:
                return copier
        if volume not in self._starting:
            self._starting.add(volume)
            self.start(self._volumes[volume])
            self._later(_START_S, lambda: self.ended(volume))
        return None

    def remove(self, copier: Copier) -> None:
        """A copier is given something to do."""
        self._waiting.remove(copier)

    def ended(self, volume: int) -> None:
        """The copier beside a volume has ended, or has not begun in time."""
        if volume in self._starting:
            self._starting.discard(volume)
            self._failed(
                f"no copier has started beside volume {self._volumes[volume].info.id}; the log of "
                "the volume's process says why"
            )

    def dismiss(self, is_idle: Callable[[], bool]) -> None:
        """There is nothing to do: copiers for which that does not change may end."""
        for copier in self._waiting:

            def end(copier: Copier = copier) -> None:
                if copier in self._waiting and is_idle():
                    self._waiting.remove(copier)
                    copier.send(m.Copies(copier.request.id, []))

            gone = all(self._volumes[at].closed for at in copier.request.volumes)
            self._later(0 if gone else _LINGER_S, end)
