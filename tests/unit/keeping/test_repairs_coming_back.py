"""A store that copies values by itself is lost at any moment, and made again from its log: the same
requests in any order as in ``test_machine``, against the same model.
"""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule
from tests.profiles import half
from tests.unit.keeping.test_coming_back import inline, state_of
from tests.unit.keeping.test_full_log import no_longer_files
from tests.unit.repairing.test_machine import Repairing

from torchstore_core.errors import StoreFullError
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.records import Value, all_values
from torchstore_core.server.keeping.log import Log
from torchstore_core.server.keeping.recorded import RecordedController
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.wire import messages as m


def values_of(controller: Controller) -> dict[tuple[int, int], Value]:
    """All that is held, by where its copies lie, those that were dropped included."""
    found = [v for stored in controller.catalog.newest.values() for v in all_values(stored)]
    for session in controller.sessions.values():
        for txn in session.txns.values():
            found += txn.values
        for held in session.leases.values():
            found += [value for value in held if value is not None]
    leavings = controller.repairs.leavings
    return {place: value for value in found for place in leavings.places(value)}


def repairs_of(controller: Controller) -> Any:
    """What is state of the repairs and the draining of a store."""
    repairs = controller.repairs
    batch = repairs._batch
    left = [(one.volume, one.offset, sorted(one.readers)) for one in repairs.leavings.all]
    drained = [volume.draining for volume in controller.volumes]
    under_way = None if batch is None else (batch.session.token, batch.lease, batch.nbytes)
    return repairs.active, repairs.copied, drained, under_way, sorted(left)


class RepairsComingBack(Repairing):
    """Repairs, and controllers that are lost. A volume that is lost takes its server along, for it
    is in the same process: that does not happen here.
    """

    def make(self, records: list[VolumeRecord], **options: Any) -> Controller:
        self.options = options
        self.logs = [Log()]
        return RecordedController(self.logs[-1], records, **options)

    lose = None  # type: ignore[assignment]

    @rule(anew=st.booleans())
    def lose_the_controller(self, anew: bool) -> None:
        """``anew``: its log was written anew before."""
        log, lost = self.logs[-1], self.controller
        assert isinstance(lost, RecordedController)
        if anew:
            log = Log()
            self.logs.append(log)
            lost.write_state(log)
        state, repairs, values = state_of(lost), repairs_of(lost), values_of(lost)
        self.due.clear()
        self.wanted.clear()
        records = [VolumeRecord(v.info, v.memory, v.halves) for v in lost.volumes]
        made = RecordedController(log, records, **self.options)
        made.restore()
        assert state_of(made) == state
        assert repairs_of(made) == repairs
        self.controller = made
        self._go_on(values)

    def _go_on(self, before: dict[tuple[int, int], Value]) -> None:
        contents = {place: self.contents.get(id(value)) for place, value in before.items()}
        for place, value in values_of(self.controller).items():
            self.kept.append(value)
            if (content := contents[place]) is not None:
                self.contents[id(value)] = content
        sessions = self.controller.sessions
        self.client = sessions[self.client.token]
        if self.copier is not None:  # it ends with the server that has started it
            self.controller.close_session(sessions[self.copier.token])
        self.copier, self.asking, self.work = None, False, None

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            for log in self.logs:
                log.close()


RepairsComingBack.TestCase.settings = half()
TestRepairsComingBack = RepairsComingBack.TestCase


def test_copies_for_which_the_log_has_no_room_are_made_later() -> None:
    machine = RepairsComingBack()
    controller, client = machine.controller, machine.client
    assert isinstance(controller, RecordedController)

    def put(nbytes: int) -> None:
        number = next(machine.ids)
        controller.put(client, m.Put(number, number, [inline("filler", bytes(nbytes))]))

    def fill_the_log() -> None:
        for nbytes in (2000, 200, 20):
            with contextlib.suppress(StoreFullError):
                while True:
                    put(nbytes)
        while controller.catch_up():
            controller.release(client, [], [])

    try:
        machine.begin_put(["a", "b", "c"], 1000)
        controller.commit(client, *client.txns)
        machine.copier = machine.session(m.COPIER_ROLE)
        machine.drain(controller.catalog.newest["a"].volume, undo=False)
        with no_longer_files():
            fill_the_log()
            machine.take()
            while not controller.repairs.status().trouble:
                machine.time_passes()
            assert machine.work is None
            assert "cannot grow" in controller.repairs.status().trouble
            machine.accounts_are_exact()
        assert controller.catch_up()
        controller.delete(["filler"], strict=True)
        while machine.work is None:
            machine.time_passes()
        assert controller.repairs.status().trouble
        machine.copy("commit")
        assert not controller.repairs.status().trouble
    finally:
        machine.teardown()
