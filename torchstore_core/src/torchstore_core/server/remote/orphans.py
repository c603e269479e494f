"""Sessions whose relay is gone, though their process may live and read what it has mapped.

Such a session is over: nothing can be said for it any more. But zero-copy tensors are mappings of
volumes of the client's own host, and those that live would use the memory again. So the leases on
what lies there stay until a volume of that host has seen the process end, or is none left.
"""

from __future__ import annotations

from collections.abc import Callable

from torchstore_core.machine.processes import Process
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.records import SessionRecord, Value, VolumeRecord
from torchstore_core.wire import messages as m

__all__ = ["Orphans"]


class Orphans:
    """All of one store.

    Args:
        watch: ask a volume, which lives, to answer when a process has ended.
    """

    def __init__(
        self, controller: Controller, watch: Callable[[VolumeRecord, m.Watch], None]
    ) -> None:
        self._controller = controller
        self._watch = watch

    def take(self, session: SessionRecord, process: Process | None) -> None:
        """End a session, but for the leases on what its process may have mapped.

        ``process``: of the client; None: nobody knows, so its leases stay as long as the volumes.
        So they do if it is dead already: then a forked child of it kept the connection open.
        """
        controller = self._controller
        if session.token not in controller.sessions:
            return
        if session.closed is not None:
            process = None
        token = session.token
        orphan = SessionRecord(token, session.facts, session.topology)
        orphan.opened = session.opened
        orphan.keeps_memory = session.keeps_memory
        for lease, held in session.leases.items():
            stays = [value is not None and self._may_be_mapped(orphan, value) for value in held]
            if any(stays):
                pairs = list(zip(held, stays, strict=True))
                orphan.leases[lease] = [value if kept else None for value, kept in pairs]
                session.leases[lease] = [None if kept else value for value, kept in pairs]
        controller.orphans[token] = orphan
        controller.close_session(session)
        self._drop_if_empty(token)
        if token in controller.orphans and process is not None:
            for volume in self._volumes(orphan):
                self._watch(volume, m.Watch(token, *process))

    def died(self, token: bytes) -> None:
        """Its process has ended. Idempotent."""
        orphan = self._controller.orphans.pop(token, None)
        if orphan is not None:
            self._controller.release(orphan, list(orphan.leases), [])

    def volume_lost(self) -> None:
        """What is gone is never used again, so no lease has to keep it."""
        for token, orphan in list(self._controller.orphans.items()):
            gone = [
                (
                    lease,
                    [
                        at
                        for at, value in enumerate(held)
                        if value is not None and not self._may_be_mapped(orphan, value)
                    ],
                )
                for lease, held in orphan.leases.items()
            ]
            self._controller.release(orphan, (), gone)
            self._drop_if_empty(token)

    def _drop_if_empty(self, token: bytes) -> None:
        orphan = self._controller.orphans[token]
        pinned = orphan.keeps_memory and self._volumes(orphan)
        if not (orphan.leases or pinned):
            del self._controller.orphans[token]

    def _volumes(self, orphan: SessionRecord) -> list[VolumeRecord]:
        """Those of its host that live."""
        return [v for v in self._controller.volumes if self._is_beside(orphan, v)]

    def _may_be_mapped(self, orphan: SessionRecord, value: Value) -> bool:
        volumes = self._controller.volumes
        return any(self._is_beside(orphan, volumes[at]) for at, _ in value.places)

    @staticmethod
    def _is_beside(orphan: SessionRecord, volume: VolumeRecord) -> bool:
        return not volume.lost and volume.info.topology.host_id == orphan.topology.host_id
