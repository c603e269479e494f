"""A controller that is made again from its log, at any moment, goes on as if nothing had happened.

The same requests in any order as in ``test_joint_puts``, against the same model; but from time to
time the controller is lost, and another one takes its place that has nothing of it but its log.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from tests.profiles import half
from tests.simulation.promises.states import state_of
from tests.unit.references.test_holds import singleton
from tests.unit.server.test_controller import HERE, META, facts, inline, volumes
from tests.unit.server.test_joint_puts import JointPuts

from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import StoreFullError
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.catalog import Catalog
from torchstore_core.server.keeping.compaction import Compaction
from torchstore_core.server.keeping.link import LOG, NEXT_LOG, KeeperLink
from torchstore_core.server.keeping.log import Log
from torchstore_core.server.keeping.recorded import RecordedController
from torchstore_core.server.keeping.state import CATALOG
from torchstore_core.server.memory.allocator import Allocator
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import HEADER, encode

#: What a controller and a catalog have that is no state, or that a log says in another way.
WIRING = {
    *("volumes", "strategy", "detached", "_holders", "catalog", "operations", "_prefault"),
    *("_warmed", "_last_put", "lost_volumes", "waiting", "_leases", "sessions", "incarnation"),
    *("spilling", "holds", "repairs", "drains", "unfinished", "_reads"),
}
INDEX = {"newest", "names", "timelines", "evictions", "_similar"}


class LinkToLogs(KeeperLink):
    """To a keeper that holds what it is asked to, or says that it cannot.

    Attributes:
        kept: the descriptors of the logs that took the place of the one before.
        is_full: whether it has none left.
    """

    def __init__(self) -> None:
        self.kept: list[int] = []  # type: ignore[assignment]
        self.is_full = False
        self._next = -1

    def ask_to_keep(self, name: str, fd: int, answered: Callable[[bool], None]) -> None:
        assert name == NEXT_LOG
        self._next = fd
        answered(not self.is_full)

    def rename(self, name: str, to: str) -> None:
        assert (name, to) == (NEXT_LOG, LOG)
        self.kept.append(self._next)

    def drop(self, name: str) -> None:
        assert name == NEXT_LOG
        self._next = -1


class ComingBack(JointPuts):
    """Requests, and controllers that are lost."""

    @initialize(mixed=st.booleans())
    def start(self, mixed: bool) -> None:
        super().start(mixed)
        for client in self.clients:
            self.controller.close_session(client.record)
        self.logs = [Log()]
        volumes = self.controller.volumes
        self.use(RecordedController(self.logs[-1], volumes, Strategy(), prefault=False))
        self.clients = [self.new_client() for _ in range(3)]

    def use(self, controller: RecordedController) -> None:
        self.controller = self.recorded = controller
        self.catalog = controller.catalog
        self.model.controller, self.model.catalog = controller, controller.catalog

    @rule(anew=st.booleans())
    def lose_the_controller(self, anew: bool) -> None:
        """``anew``: its log was written anew before."""
        log, lost = self.logs[-1], self.recorded
        if anew:
            log = Log()
            self.logs.append(log)
            lost.write_state(log)
        before = state_of(lost)
        volumes = [VolumeRecord(v.info, v.memory, v.halves) for v in lost.volumes]
        made = RecordedController(log, volumes, Strategy(), prefault=False)
        made.restore()
        assert state_of(made) == before
        assert made.opened == lost.opened
        self.use(made)
        for client in self.clients + self.forked:
            client.record = made.sessions[client.record.token]
        waits, self.waits = self.waits, []
        for _, name, least, fired in waits:  # which their clients send again
            waiter = made.waiting.add([name], least, fired.append)
            assert waiter is not None
            self.waits.append((waiter, name, least, fired))

    @invariant()
    def nothing_is_state_that_the_log_does_not_know(self) -> None:
        if hasattr(self, "recorded"):
            plain = Controller(self.recorded.volumes, Strategy())
            assert set(vars(plain)) == WIRING
            assert set(vars(self.catalog)) == {*CATALOG, *INDEX}

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            for log in getattr(self, "logs", ()):
                log.close()


ComingBack.TestCase.settings = half()
TestComingBack = pytest.mark.timeout(600)(ComingBack.TestCase)


def test_every_attribute_of_a_catalog_is_state_or_wiring() -> None:
    assert set(vars(Catalog())) == {*CATALOG, *INDEX}


def test_what_is_evicted_next_is_what_would_have_been() -> None:
    """Also after gets, which change it; and after a log that was written anew."""
    chance = random.Random(7)
    with volumes(16 << 10) as there:
        logs = [Log()]

        def made(of: list[VolumeRecord]) -> RecordedController:
            again = [VolumeRecord(v.info, v.memory, v.halves) for v in of]
            one = RecordedController(logs[-1], again, singleton(), prefault=False)
            one.restore()
            return one

        controller = made(there)
        session = controller.open_session(facts(), HERE)
        token = session.token
        numbers = itertools.count(1)
        for step in range(400):
            key = f"k{chance.randrange(40)}"
            number = next(numbers)
            if chance.random() < 0.5:
                item = inline(key, bytes(chance.randrange(1, 1500)))
                put = m.Put(number, number, [item], when_full=m.EVICTABLE)
                controller.put(session, put)
            elif key in controller.catalog.newest:
                controller.locate(session, m.Locate(number, number, [m.Want(key)], 1 << 20))
            if step % 40 == 39:
                if step % 80 == 79:
                    logs.append(Log())
                    controller.write_state(logs[-1])
                before = state_of(controller)
                controller = made(controller.volumes)
                session = controller.sessions[token]
                assert state_of(controller) == before
        assert controller.spilling.evicted[0] > 50
        for log in logs:
            log.close()


def test_memory_that_the_host_did_not_have_is_refused_again() -> None:
    """What else uses memory is different when requests are repeated."""
    with volumes(1 << 20) as there:
        room = [4096]
        log = Log()

        def made() -> RecordedController:
            again = [
                VolumeRecord(v.info, v.memory, v.halves, Allocator(1 << 20, lambda end: room[0]))
                for v in there
            ]
            one = RecordedController(log, again, singleton(), prefault=False)
            one.restore()
            return one

        controller = made()
        session = controller.open_session(facts(), HERE)

        def put(number: int, nbytes: int) -> None:
            item = m.PutItem(f"k{number}", META, nbytes)
            controller.put(session, m.Put(number, number, [item]))

        put(1, 4096)
        with pytest.raises(StoreFullError):
            put(2, 4096)
        room[0] = 1 << 20
        put(3, 4096)
        before = state_of(controller)
        room[0] = 0  # nor is it asked any more
        controller = made()
        assert state_of(controller) == before
        session = controller.sessions[session.token]
        put(4, 4096)  # and it need not ask again
        log.close()


def _restored(log: Log, there: Sequence[VolumeRecord]) -> RecordedController:
    """A controller of volumes that are there already, made from its log."""
    again = [VolumeRecord(v.info, v.memory, v.halves) for v in there]
    one = RecordedController(log, again, singleton(), prefault=False)
    one.restore()
    return one


def test_requests_are_recorded_as_they_arrived() -> None:
    """A put and a commit are not encoded again, and repeated all the same."""
    with volumes(1 << 20) as there:
        log = Log()

        made = partial(_restored, log, there)
        controller = made()
        session = controller.open_session(facts(), HERE)
        small = m.Put(1, 1, [inline("small", b"\x01" * 1000)])
        large = m.Put(2, 2, [m.PutItem("large", META, 4096)])
        # They say something else about what does not matter.
        others = [msgspec.structs.replace(one, id=9) for one in (small, large, m.Commit(3, 2))]
        bodies = [bytes(encode(one)[HEADER:]) for one in others]
        assert controller.put(session, small, bodies[0]) == ([1], None)
        assert controller.put(session, large, bodies[1])[1] is not None
        assert controller.commit(session, 2, bodies[2]) == [1]
        assert [record.body for record in log if record.body in bodies] == bodies
        before = state_of(controller)
        again = made()
        assert state_of(again) == before
        answers = again.results[session.token]
        assert answers["Put", 1] == m.Committed(0, [1])
        assert isinstance(answers["Put", 2], m.Granted)
        assert answers["Commit", 2] == m.Committed(0, [1])
        log.close()


def test_what_was_sealed_has_its_key_and_its_lease_again() -> None:
    """And what is still to be, its memory."""
    with volumes(1 << 20) as there:
        log = Log()

        made = partial(_restored, log, there)
        controller = made()
        session = controller.open_session(facts(), HERE)
        for number in (1, 2, 3):
            put = m.Put(number, number, [m.PutItem("not yet", META, 4096)])
            assert controller.put(session, put)[1] is not None
        assert controller.seal(session, m.Seal(4, 1, "key", 7)) == [1]
        before = state_of(controller)
        assert state_of(made()) == before
        (number,) = controller.seal(session, m.Seal(5, 2, "", 8, 9, "a line"))
        again = made()
        answers = again.results[session.token]
        assert answers["Seal", 1] == m.Committed(0, [1])
        assert answers["Seal", 2] == m.Committed(0, [number])
        session = again.sessions[session.token]
        assert session.holds[9].version.version == number
        again.delete(["key"], strict=True)
        assert again.volumes[0].leased == 2 * 4096
        assert again.volumes[0].unfinished == 4096
        again.close_session(session)
        assert not again.volumes[0].used
        log.close()


async def test_a_log_that_begins_with_a_large_state_is_not_written_anew_at_once() -> None:
    """When the server comes back, that would cost the first requests most."""
    with volumes(64 << 20) as there:
        logs = [Log(), Log()]

        controller = _restored(logs[0], there)
        session = controller.open_session(facts(), HERE)
        for number in range(1, 400):
            item = inline(f"k{number}", bytes(40_000))
            controller.put(session, m.Put(number, number, [item]))
        assert Compaction(_restored(logs[0], there), LinkToLogs()).is_due
        controller.write_state(logs[1])
        again = _restored(logs[1], there)
        compaction = Compaction(again, LinkToLogs())
        assert not compaction.is_due
        session = again.sessions[session.token]
        for number in range(400, 700):
            item = inline(f"k{number}", bytes(40_000))
            again.put(session, m.Put(number, number, [item]))
        assert compaction.is_due
        for log in logs:
            log.close()
