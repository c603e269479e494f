"""Sessions whose relay is gone, although their process may still run and read mapped memory.

Such a session has ended: the client can no longer make requests. But its zero-copy tensors are
mappings of volumes on its own host, and volumes that are still there would reuse their memory. So
the leases on values there stay until a volume of that host reports that the process has ended, or
until no volume of that host is left. Its holds stay until the
process is seen to end, because it may have its references as long as it lives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchstore_core.machine.processes import Process
from torchstore_core.server.index.records import SessionRecord, Value
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    from torchstore_core.server.controller import Controller


class DetachedSessions:
    """The detached sessions of one store.

    Args:
        watch: asks a live volume to report when a process has ended.

    Attributes:
        sessions: the remainders of the detached sessions, by token.
    """

    def __init__(
        self, controller: Controller, watch: Callable[[VolumeRecord, m.WatchProcess], None]
    ) -> None:
        self._controller = controller
        self._watch = watch
        self.sessions: dict[bytes, SessionRecord] = {}
        #: Their processes, as far as they are known.
        self.processes: dict[bytes, Process] = {}

    def detach(self, session: SessionRecord, process: Process | None) -> None:
        """End a session, except for the leases on values that its process may have mapped.

        ``process`` is the client's process. If it is None (unknown), the leases stay as long as the
        volumes. They also do if the process is dead already, because then a forked child of it kept
        the connection open.
        """
        token = session.token
        if token not in self._controller.sessions:
            return
        if session.closed is not None:
            process = None
        left = SessionRecord(token, session.facts, session.topology)
        left.opened = session.opened
        left.keeps_memory = session.keeps_memory
        for lease, held in session.leases.items():
            stays = [value is not None and self._may_be_mapped(left, value) for value in held]
            if any(stays):
                pairs = list(zip(held, stays, strict=True))
                left.leases[lease] = [value if kept else None for value, kept in pairs]
                session.leases[lease] = [None if kept else value for value, kept in pairs]
        left.holds, session.holds = session.holds, {}
        self.sessions[token] = left
        self._controller.close_session(session)
        if process is not None:
            self.processes[token] = process
        self._drop_if_empty(left)
        if token in self.processes:
            for volume in self._volumes_beside(left):
                self._watch_from(volume, token)

    def watch_again(self, volume: VolumeRecord) -> None:
        """A volume has connected again, and watches no process yet."""
        for token, left in self.sessions.items():
            if token in self.processes and _is_beside(left, volume):
                self._watch_from(volume, token)

    def _watch_from(self, volume: VolumeRecord, token: bytes) -> None:
        self._watch(volume, m.WatchProcess(token, *self.processes[token]))

    def process_ended(self, token: bytes) -> None:
        """Release the leases of a detached session whose process has ended. Idempotent."""
        left = self._pop(token)
        if left is not None:
            self._controller.holds.session_ended(left)
            self._controller.release(left, list(left.leases), [])

    def volume_lost(self) -> None:
        """Release leases on the memory of lost volumes: it is never reused, so needs no lease."""
        for left in list(self.sessions.values()):
            gone = [(lease, self._not_mapped(left, held)) for lease, held in left.leases.items()]
            self._controller.release(left, (), gone)
            self._drop_if_empty(left)

    def _drop_if_empty(self, left: SessionRecord) -> None:
        page_locked = left.keeps_memory and self._volumes_beside(left)
        if not (left.leases or left.holds or page_locked):
            self._pop(left.token)

    def _pop(self, token: bytes) -> SessionRecord | None:
        self.processes.pop(token, None)
        return self.sessions.pop(token, None)

    def _volumes_beside(self, left: SessionRecord) -> list[VolumeRecord]:
        """Return the live volumes on the session's host."""
        return [v for v in self._controller.volumes if _is_beside(left, v)]

    def _not_mapped(self, left: SessionRecord, held: list[Value | None]) -> list[int]:
        """Return the positions in a lease of the values that the process cannot have mapped."""
        there = ((at, value) for at, value in enumerate(held) if value is not None)
        return [at for at, value in there if not self._may_be_mapped(left, value)]

    def _may_be_mapped(self, left: SessionRecord, value: Value) -> bool:
        volumes = self._controller.volumes
        places = self._controller.repairs.leavings.places(value)
        return any(_is_beside(left, volumes[at]) for at, _ in places)


def _is_beside(left: SessionRecord, volume: VolumeRecord) -> bool:
    return not volume.lost and volume.info.topology.host_id == left.topology.host_id
