"""Drains volumes of a world that spills, with a copier that really copies."""

from __future__ import annotations

import os
import time
from typing import Any

from tests.unit.server.test_controller import HERE

from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.errors import DrainError, TorchStoreError
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.wire import messages as m

_GARBAGE = b"\xa5"
_ENDS_S = 60.0


class Draining:
    """What a world of several volumes needs to drain them."""

    world: Any

    def __init__(self, world: Any) -> None:
        self.world = world
        self.copier: SessionRecord | None = None
        self.taken: m.TakeCopies | None = None
        self.work: m.Copies | None = None
        self.wanted = self.asking = False
        self.copied = self.drains = 0

    def start(self, volume: VolumeRecord, *, again: bool = False) -> None:
        """A copier is to be started."""
        self.wanted = True

    def killed(self) -> None:
        """The server has come back; the copier has ended with it."""
        if self.copier is not None:
            controller = self.world.controller
            controller.close_session(controller.sessions[self.copier.token])
        self.copier, self.work = None, None
        self.wanted = self.asking = False

    def step(self) -> None:
        """Drain a volume, put one back in service, or let the copier do something."""
        chance = self.world.chance
        what = chance.random()
        if what < 0.04:
            at = chance.randrange(len(self.world.controller.volumes))
            self.drain(at, "undo" if chance.random() < 0.7 else "begin")
        else:
            self.copy(chance.random())

    def drain(self, at: int, what: str) -> Any:
        """Ask for it; what is answered, or None if that volume cannot be drained."""
        controller = self.world.controller
        if controller.volumes[at].lost:
            return None
        try:
            report = controller.drains.drain(m.Drain(1, str(at), what))
        except DrainError:
            return None
        self.drains += what == "begin"
        return report

    def copy(self, chance: float = 1.0) -> None:
        """The copier asks for something to do, or does it; by chance it fails, or dies."""
        controller = self.world.controller
        work, taken = self.work, self.taken
        if work is None:
            if not self.asking and (self.wanted or self.copier is not None):
                self._ask()
            return
        assert self.copier is not None
        assert taken is not None
        for piece in work.pieces:
            (volume, offset), (to, at) = piece.sources[0], piece.target
            there = os.pread(self._fd(volume), piece.nbytes, offset)
            os.pwrite(self._fd(to), there, at)
        self.work = None
        if chance < 0.05:
            controller.close_session(self.copier)
            self.copier = None
            return
        if chance < 0.1:
            controller.abort(self.copier, [taken.txn])
        else:
            try:
                controller.commit(self.copier, taken.txn)
            except TorchStoreError:  # a volume was lost
                controller.abort(self.copier, [taken.txn])
            else:
                self.copied += len(work.pieces)
        controller.release(self.copier, [taken.lease], [])

    def _ask(self) -> None:
        world = self.world
        if self.copier is None:
            facts = ClientFacts(1, HERE.host_id, HERE.hostname, role=m.COPIER_ROLE)
            self.copier = world.controller.open_session(facts, HERE)
        self.wanted, self.asking = False, True
        txn, lease = next(world.numbers), next(world.numbers)
        volumes = list(range(len(world.controller.volumes)))
        self.taken = m.TakeCopies(txn, txn, lease, volumes)
        world.controller.repairs.take(self.copier, self.taken, self._answered)

    def _answered(self, message: m.Message) -> None:
        assert isinstance(message, m.Copies)
        self.asking = False
        if message.pieces:
            self.work = message
        elif self.copier is not None:
            self.world.controller.close_session(self.copier)
            self.copier = None

    def _fd(self, volume: int) -> int:
        return int(self.world.records[volume].memory.fd)

    def take_away(self, at: int) -> bool:
        """Drain a volume to the end, and spoil what it has. False if there is no room for it."""
        world = self.world
        world.controller.release(world.session, world.leased, [])
        world.leased.clear()
        for other in range(len(world.controller.volumes)):
            self.drain(other, "undo")
        report = self.drain(at, "begin")
        start = time.monotonic()
        while not report.done:
            if report.stuck_values:
                return False
            world.turn(wait=not (self.work or self.wanted))
            self.copy()
            world.controller.release(world.session, world.leased, [])
            world.leased.clear()
            report = self.drain(at, "look")
            # Where the other disk is full, room is waited for some seconds before a value is stuck.
            assert time.monotonic() - start < _ENDS_S, str(report)
        nbytes = os.fstat(self._fd(at)).st_size
        os.pwrite(self._fd(at), _GARBAGE * nbytes, 0)
        world.spoil_disk(at)
        return True
