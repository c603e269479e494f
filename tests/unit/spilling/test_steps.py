"""What the event loop does when memory is full, step by step."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.simulation.promises.states import state_of
from tests.unit.server.test_controller import HERE, facts, inline, placed, volumes

from torchstore_core.contracts.strategy import Strategy
from torchstore_core.server.controller import Controller
from torchstore_core.server.keeping.log import Log
from torchstore_core.server.keeping.recorded import RecordedController
from torchstore_core.server.memory.allocator import ALIGNMENT
from torchstore_core.server.memory.segment import SegmentMemory
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.spilling.delays import Delayed
from torchstore_core.server.spilling.moves import Mover
from torchstore_core.server.spilling.policy import State
from torchstore_core.server.spilling.spill_file import SpillFile
from torchstore_core.wire import messages as m

_CAPACITY = 8 << 20
_MOST_AT_ONCE = 1024

_Ended = queue.SimpleQueue[Callable[[], None]]


class _Store:
    """A controller that spills, and the loop that it runs on."""

    def __init__(self, controller: Controller, ended: _Ended) -> None:
        self.controller = controller
        self.soon: deque[Callable[[], object]] = deque()
        self.session = controller.open_session(facts(), HERE)
        self._ended = ended
        self._numbers = iter(range(1, 1 << 30))
        self.jobs = 0

    def turn(self) -> None:
        """What the loop does next; if there is nothing, wait for a thread."""
        if self.soon:
            self.soon.popleft()()
        else:
            self.jobs += 1
            self._ended.get(timeout=30)()

    def ask(self, request: Callable[[int], object]) -> list[int]:
        """Have a request answered, which may be delayed; returns how many values left memory in
        each step.
        """
        steps: list[int] = []
        done: list[object] = []
        counts = self.controller.spilling.values.count_of

        def attempt() -> None:
            before = counts[State.ON_DISK]
            try:
                done.append(request(next(self._numbers)))
            except Delayed as delayed:
                delayed.then(attempt)
            steps.append(counts[State.ON_DISK] - before)

        attempt()
        while not done:
            self.turn()
        return steps

    def put(self, items: list[m.PutItem]) -> list[int]:
        return self.ask(lambda at: self.controller.put(self.session, m.Put(at, at, items)))

    def get(self, keys: list[str]) -> list[int]:
        wants = [m.Want(key) for key in keys]
        everything = 1 << 30
        return self.ask(
            lambda at: self.controller.locate(self.session, m.Locate(at, at, wants, everything))
        )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[_Store]:
    with volumes(_CAPACITY) as there:
        memories = [v.memory.fd for v in there if isinstance(v.memory, SegmentMemory)]
        ended: _Ended = queue.SimpleQueue()
        mover = Mover.here(SpillFile(str(tmp_path), None), there, memories, ended.put)

        def later(delay: float, call: Callable[[], None]) -> None:
            if not delay:
                store.soon.append(call)

        options = {"mover": mover, "when_full": m.SPILLABLE, "later": later}
        store = _Store(Controller(there, Strategy(), prefault=False, **options), ended)  # type: ignore[arg-type]
        yield store
        store.controller.spilling.close()


def test_many_leave_memory_in_many_steps(store: _Store) -> None:
    count, nbytes = 10_000, 800
    keys = [f"k{at:05}" for at in range(count)]
    store.put([inline(key, b"%5d" % at * (nbytes // 5)) for at, key in enumerate(keys)])
    steps = store.put([placed("large", _CAPACITY * 3 // 4)])
    assert sum(steps) >= count * 7 // 10
    assert max(steps) <= _MOST_AT_ONCE


def test_what_is_read_together_is_a_few_megabytes(store: _Store) -> None:
    count, nbytes = 100, 60_000
    keys = [f"k{at:05}" for at in range(count)]
    store.put([inline(key, bytes([at]) * nbytes) for at, key in enumerate(keys)])
    store.put([placed("large", _CAPACITY - 1000)])
    assert store.controller.spilling.values.count_of[State.ON_DISK] == count
    store.controller.abort(store.session, list(store.session.txns))
    jobs = store.jobs
    store.get(keys)
    assert store.jobs == jobs + 2
    values = store.controller.catalog.newest
    assert [values[key].data for key in keys] == [bytes([at]) * nbytes for at in range(count)]  # type: ignore[union-attr]


def test_who_waits_is_not_asked_again_before_something_happens(store: _Store) -> None:
    """A put for a named version that is retried frees what it was to replace, which is nothing."""
    half = _CAPACITY // 2
    store.put([placed("read", half)])
    store.controller.commit(store.session, 1)
    store.controller.locate(store.session, m.Locate(9, 9, [m.Want("read")], 0))
    waiting: list[str] = []

    def wait(key: str, number: int, version: int) -> None:
        request = m.Put(number, number, [placed(key, half + ALIGNMENT)], version)

        def attempt() -> None:
            with pytest.raises(Delayed) as caught:
                store.controller.put(store.session, request)
            waiting.append(key)
            caught.value.then(attempt)

        attempt()

    wait("named", 10, 3)
    wait("other", 11, 0)
    store.controller.spilling.retry_soon()
    for _ in range(50):
        if not store.soon:
            break
        store.soon.popleft()()
    assert not store.soon
    assert waiting == ["named", "other", "named"]


def test_a_log_that_is_written_anew_when_nothing_is_left_that_may_leave(tmp_path: Path) -> None:
    """What is recorded after that is repeated as it was done."""
    with volumes(_CAPACITY) as there:
        logs = Log(), Log()
        before = _recorded(logs[0], there, tmp_path)
        session = before.open_session(facts(), HERE)
        half = _CAPACITY // 2
        before.put(session, m.Put(1, 1, [placed("cached", half)], when_full=m.EVICTABLE))
        before.commit(session, 1)
        before.put(session, m.Put(2, 2, [placed("large", half + ALIGNMENT)]))
        assert "cached" not in before.catalog.newest
        before.write_state(logs[1])
        before.log = logs[1]
        with pytest.raises(Delayed):
            before.put(session, m.Put(3, 3, [placed("late", half)]))
        again = [VolumeRecord(v.info, v.memory, v.halves) for v in there]
        after = _recorded(logs[1], again, tmp_path)
        after.restore()
        assert state_of(after) == state_of(before)
        for controller in (before, after):
            controller.spilling.close()
        for log in logs:
            log.close()


def _recorded(log: Log, there: list[VolumeRecord], directory: Path) -> RecordedController:
    memories = [v.memory.fd for v in there if isinstance(v.memory, SegmentMemory)]
    mover = Mover.here(SpillFile(str(directory), None), there, memories, lambda call: None)
    return RecordedController(log, there, Strategy(), prefault=False, mover=mover)
