"""Volumes in other processes, and sessions whose relay is gone, of a controller that is made again
from its log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.simulation.promises.states import state_of
from tests.unit.server.test_controller import HERE, META, facts

from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import ObjectLostError, StoreFullError
from torchstore_core.machine.processes import Process
from torchstore_core.server.keeping.log import Log
from torchstore_core.server.keeping.recorded import RecordedController
from torchstore_core.server.remote.attached_volume import AttachedVolume, KnownVolume
from torchstore_core.wire import messages as m

CAPACITY = 64 << 10


class Lives:
    """One life after the other of a controller of two attached volumes.

    Args:
        anew: its log is written anew before each death.
    """

    def __init__(self, anew: bool) -> None:
        self._anew = anew
        self.log = Log()
        self.said: list[m.Message] = []
        self._begin()

    def _begin(self) -> None:
        self.controller = RecordedController(
            self.log,
            [self._volume(index) for index in range(2)],
            Strategy(),
            prefault=False,
            watch=lambda volume, wanted: volume.memory.watch(wanted),  # type: ignore[attr-defined]
        )
        self.controller.restore()
        for volume in self.controller.volumes:
            volume.connected(self.said.append)  # type: ignore[attr-defined]

    def _volume(self, index: int) -> AttachedVolume:
        info = m.VolumeInfo(f"v-{index}", index, 1, HERE, CAPACITY, {})
        return AttachedVolume(KnownVolume(info, 0, 0))

    def die(self) -> None:
        """The next life has the state of the one before."""
        if self._anew:
            old, self.log = self.log, Log()
            self.controller.write_state(self.log)
            old.close()
        before = self._state()
        self.said.clear()
        self._begin()
        assert self._state() == before
        assert not self.said

    def _state(self) -> Any:
        there = self.controller
        detached = {
            token: {lease: [v and v.key for v in held] for lease, held in left.leases.items()}
            for token, left in there.detached.sessions.items()
        }
        volumes = [(v.reserved, v.lost, v.lost and round(v.lost_at)) for v in there.volumes]
        return state_of(there), detached, dict(there.detached.processes), volumes

    def put(self, session: Any, txn: int, key: str, nbytes: int = 1024) -> None:
        item = m.PutItem(key, msgspec.structs.replace(META, shape=(nbytes,)), nbytes)
        self.controller.put(session, m.Put(1, txn, [item]))
        self.controller.commit(session, txn)


@pytest.fixture(params=[False, True], ids=["log", "state"])
def lives(request: pytest.FixtureRequest) -> Iterator[Lives]:
    made = Lives(anew=request.param)
    yield made
    made.log.close()


def test_a_session_that_was_detached_keeps_its_leases_until_its_process_ends(lives: Lives) -> None:
    via = m.Via(HERE, Process(17, 4), b"uplink")
    session = lives.controller.open_session(facts(), HERE, 0, via)
    assert session.peer.startswith(b"uplink")
    lives.put(session, 1, "k")
    lives.controller.locate(session, m.Locate(2, 3, [m.Want("k")], -1))
    lives.die()
    session = lives.controller.sessions[session.token]
    assert lives.controller.opened[session.token].via == via
    session.keeps_memory = True
    lives.controller.detached.detach(session, via.process)
    lives.die()
    assert lives.controller.detached.sessions[session.token].keeps_memory
    assert not lives.controller.sessions
    assert lives.controller.volumes[0].leased
    lives.controller.detached.watch_again(lives.controller.volumes[0])
    assert lives.said == [m.WatchProcess(session.token, 17, 4)]
    lives.controller.detached.process_ended(session.token)
    lives.die()
    assert not lives.controller.detached.sessions
    assert not lives.controller.volumes[0].leased


def test_a_volume_that_was_lost_stays_lost(lives: Lives) -> None:
    session = lives.controller.open_session(facts(), HERE)
    lives.put(session, 1, "k")
    lives.controller.lose_volume(0, "it was killed")
    for _ in range(2):
        lives.die()
        session = lives.controller.sessions[session.token]
        assert lives.controller.volumes[0].lost == "it was killed"
        with pytest.raises(ObjectLostError, match="it was killed"):
            lives.controller.locate(session, m.Locate(2, 3, [m.Want("k")], -1))
    lives.put(session, 4, "k")
    assert lives.controller.volumes[1].used


def test_nothing_is_placed_where_a_volume_was_trimming(lives: Lives) -> None:
    """Also if it has not answered when the server dies: it may still be about to."""
    session = lives.controller.open_session(facts(), HERE)
    lives.put(session, 1, "k", CAPACITY // 2)
    lives.put(session, 2, "other", 1024)
    lives.controller.volumes[0].memory.touched(CAPACITY)
    assert lives.controller.trim(0.0, 0)
    lives.die()
    session = lives.controller.sessions[session.token]
    lives.controller.volumes[1].lose("only the first is of interest")
    with pytest.raises(StoreFullError):
        lives.put(session, 3, "new")
    lives.controller.trimmed(0)
    lives.put(session, 4, "new")
