"""The copier of a simulated store: it moves what a volume that is drained has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.machine.memory import Holder

from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.errors import TorchStoreError
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["Copier"]


class Copier:
    """A process that copies, when there is something to copy. It asks the controller directly: it
    is about what is copied when, and not about its messages. It ends with the server.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._session: SessionRecord | None = None
        self._is_starting = False
        self._turns = 0
        self._ids = 0

    def start(self, volume: VolumeRecord, *, again: bool = False) -> None:
        """See ``messages.StartCopier``."""
        if again:
            self.leave()
        if self._session is None and not self._is_starting:
            self._is_starting = True
            self._turn(self._begin)

    def server_died(self) -> None:
        """Its process is killed; the next life of the server is told of that some time."""
        self._session, self._is_starting = None, False
        controller = self._world.server.controller
        for session in list(controller.sessions.values()):
            if session.facts.role == m.COPIER_ROLE:
                self._turn(functools.partial(self._gone, session))

    def leave(self) -> None:
        """It ends."""
        session, self._session = self._session, None
        if session is not None:
            self._gone(session)

    def _gone(self, session: SessionRecord) -> None:
        server = self._world.server
        if session.token in server.controller.sessions:
            if server.returning is not None:
                server.returning.gone(session)
            server.controller.close_session(session)

    def _turn(self, run: Callable[[], None]) -> None:
        """Do something, some time, unless its server has died by then."""
        self._turns += 1
        life = len(self._world.lives.deaths)

        def happen() -> None:
            if life == len(self._world.lives.deaths):
                self._world.touched = True
                self._world.point += 1
                run()

        self._world.once(("copier", self._turns), happen)

    def _begin(self) -> None:
        facts = ClientFacts(1, self._world.here.host_id, "", role=m.COPIER_ROLE)
        session = self._world.server.controller.open_session(facts, self._world.here)
        self._session, self._is_starting = session, False
        self._ask(session)

    def _ask(self, session: SessionRecord) -> None:
        if session is not self._session:
            return
        self._ids += 2
        volumes = list(range(len(self._world.plan.capacities)))
        take = m.TakeCopies(self._ids, self._ids, self._ids + 1, volumes)

        def answered(message: m.Message) -> None:
            assert isinstance(message, m.Copies)
            work = functools.partial(self._copy, session, take, message)
            self._turn(work if message.pieces else self.leave)

        self._world.server.controller.repairs.take(session, take, answered)

    def _copy(self, session: SessionRecord, take: m.TakeCopies, work: m.Copies) -> None:
        if session is not self._session:
            return
        owners = self._world.owners
        who: Holder = ("copier", -2, len(self._world.lives.deaths), take.txn)
        for piece in work.pieces:
            volume, offset = piece.sources[0]
            owners.write(who, *piece.target, owners.read(volume, offset, piece.nbytes))
        self._world.tell(f"the copier has copied {len(work.pieces)} values")
        self._turn(functools.partial(self._commit, session, take, len(work.pieces)))

    def _commit(self, session: SessionRecord, take: m.TakeCopies, count: int) -> None:
        if session is not self._session:
            return
        controller = self._world.server.controller
        try:
            controller.commit(session, take.txn)
        except TorchStoreError:
            controller.abort(session, [take.txn])
        else:
            self._world.copied += count
        controller.release(session, [take.lease], [])
        self._ask(session)
