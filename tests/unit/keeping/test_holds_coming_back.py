"""Holds, tickets and their times survive a controller that is made again from its log.

The same requests in any order as in ``test_holds``, against the same model; but from time to time
another controller takes over that has nothing but the log.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis.stateful import rule
from tests.profiles import half
from tests.unit.references.test_holds import GRACE_S, HoldsMachine, Store, singleton

from torchstore_core import moments
from torchstore_core.server.keeping.log import Log
from torchstore_core.server.keeping.recorded import RecordedController
from torchstore_core.server.memory.volume_record import VolumeRecord


class RecordedStore(Store):
    """A store whose controller can be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = [Log()]
        self._use(self._made(self.controller.volumes))

    def _made(self, volumes: list[VolumeRecord]) -> RecordedController:
        options = {"prefault": False, "later": self.clock.later, "grace_s": GRACE_S}
        return RecordedController(self.logs[-1], volumes, singleton(), **options)

    def _use(self, controller: RecordedController) -> None:
        self.controller = self.recorded = controller
        self.holds = controller.holds

    def lose_the_controller(self, *, anew: bool) -> None:
        lost = self.recorded
        if anew:
            self.logs.append(Log())
            lost.write_state(self.logs[-1])
        self.clock.forget()
        made = self._made([VolumeRecord(v.info, v.memory, v.halves) for v in lost.volumes])
        made.restore()
        assert made.opened == lost.opened
        # The test goes on with the objects that it has.
        for token, session in list(made.sessions.items()):
            known = lost.sessions[token]
            for name in session.__struct_fields__:
                setattr(known, name, getattr(session, name))
            made.sessions[token] = known
            for ticket in made.holds._tickets.values():
                if ticket.sender.token == token:
                    ticket.sender = known
            if session in made.holds._dying:
                made.holds._dying.remove(session)
                made.holds._dying.add(known)
            made.holds._deadlines = [
                (at, n, known if what is session else what) for at, n, what in made.holds._deadlines
            ]
        self._use(made)

    def close(self) -> None:
        for log in self.logs:
            log.close()
        super().close()


class HoldsComingBack(HoldsMachine):
    """Requests, and controllers that are lost."""

    make_store = RecordedStore

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(moments, "monotonic", self.store.clock.time)

    def teardown(self):
        super().teardown()
        self.patch.undo()

    def _lose(self, *, anew):
        self.store.lose_the_controller(anew=anew)
        for ticket in self.tickets.values():  # nobody could claim anything meanwhile
            if ticket.due is not None:
                ticket.due = max(ticket.due, self.store.clock.now + GRACE_S)

    @rule()
    def lose_the_controller(self):
        self._lose(anew=False)

    @rule()
    def lose_it_after_its_log_was_written_anew(self):
        self._lose(anew=True)


HoldsComingBack.TestCase.settings = half()
TestHoldsComingBack = pytest.mark.timeout(600)(HoldsComingBack.TestCase)


def test_every_attribute_of_a_hold_is_in_the_state() -> None:
    store = RecordedStore()
    try:
        session = store.session()
        ref = store.put_object(session, 7, b"value")
        store.holds.lend(session, 7, 99)
        store.lose_the_controller(anew=True)
        hold = store.recorded.sessions[session.token].holds[7]
        assert msgspec.structs.asdict(hold.version.stored)["data"] == b"value"
        assert (hold.version.key, hold.version.version) == ref
        assert hold.version.count == 2
        assert store.put_object(session, 8, b"next")[1] == ref[1] + 1
    finally:
        store.close()


@pytest.mark.parametrize("anew", [False, True])
def test_what_is_in_a_value_is_known_again(anew: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RecordedStore()
    monkeypatch.setattr(moments, "monotonic", store.clock.time)
    try:
        sender = store.session()
        inner = store.put_object(sender, 1, b"inner")
        store.holds.lend(sender, 1, 77)
        store.put_value(sender, "key", b"outer", 77)
        store.holds.unhold(sender, [1])
        store.lose_the_controller(anew=anew)
        store.controller.close_session(store.controller.sessions[sender.token])
        store.clock.advance(10 * GRACE_S)
        assert store.has(inner)
        store.lose_the_controller(anew=anew)
        store.controller.delete(["key"], True)
        store.clock.advance(10 * GRACE_S)
        assert not store.has(inner)
        assert store.used == 0
    finally:
        store.close()
