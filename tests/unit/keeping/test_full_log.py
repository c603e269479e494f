"""A log that cannot grow: what is refused, what goes on, what waits, and that nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.simulation.promises.states import state_of
from tests.support import until
from tests.unit.keeping.test_coming_back import (
    HERE,
    LinkToLogs,
    facts,
    inline,
    singleton,
    volumes,
)
from tests.unit.server.test_controller import META

from torchstore_core.errors import KeyNotFoundError, StoreFullError
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.keeping.compaction import Compaction
from torchstore_core.server.keeping.log import SPARE, Log
from torchstore_core.server.keeping.recorded import RecordedController
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.wire import messages as m

KIB = 1 << 10
TIMES = ("created", "closed", "since")


@contextmanager
def no_longer_files(most: int = 512 * KIB) -> Iterator[None]:
    """The system makes no file longer than that: a log of 1 MiB cannot grow, nor be made."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class Store:
    """A controller that writes a log."""

    def __init__(self, records: list[VolumeRecord]) -> None:
        self.numbers = itertools.count(1)
        self.log = Log()
        self.controller = RecordedController(self.log, records, singleton(), prefault=False)
        self.session = self.open()

    def open(self) -> SessionRecord:
        return self.controller.open_session(facts(), HERE)

    def put(self, key: str, nbytes: int) -> None:
        number = next(self.numbers)
        put = m.Put(number, number, [inline(key, bytes(nbytes))])
        self.controller.put(self.session, put)

    def begin_put(self, key: str, session: SessionRecord | None = None) -> int:
        number = next(self.numbers)
        put = m.Put(number, number, [m.PutItem(key, META, 4096)])
        self.controller.put(session or self.session, put)
        return number

    def get(self, key: str) -> int:
        lease = next(self.numbers)
        self.controller.locate(self.session, m.Locate(lease, lease, [m.Want(key)], 0))
        return lease

    def hold(self, key: str) -> int:
        hold = next(self.numbers)
        self.controller.holds.hold(self.session, m.Hold(hold, hold, key))
        return hold

    def fill_the_log(self) -> None:
        """Until nothing that can be refused has room: what is left is shorter than any record."""
        most = max(os.fstat(self.log.fd).st_size, resource.getrlimit(resource.RLIMIT_FSIZE)[0])
        while (room := most - SPARE - self.log.end) > 30_000:
            self.put("filler", 10_000)
        for size in range(room, 0, -1):
            with contextlib.suppress(StoreFullError):
                return self.put("filler", size)

    def use_the_spare(self) -> None:
        """Until what cannot be refused waits."""
        while self.controller.catch_up():
            self.controller.release(self.session, [], [])

    def again(self) -> RecordedController:
        """What the next life makes of the log."""
        records = [VolumeRecord(v.info, v.memory, v.halves) for v in self.controller.volumes]
        made = RecordedController(Log(os.dup(self.log.fd)), records, singleton(), prefault=False)
        made.restore()
        return made

    def check(self) -> None:
        """The next life has what this one has."""
        assert state_of(self.again(), TIMES) == state_of(self.controller, TIMES)


@pytest.fixture
def store() -> Iterator[Store]:
    with volumes(16 << 20) as records:
        yield Store(records)


def test_inline_values_stay_inline(store: Store) -> None:
    """If many are read together, they would move into the segment, but that needs a record."""
    keys = [f"k{at}" for at in range(40)]
    for key in keys:
        store.put(key, 1000)
    with no_longer_files():
        store.fill_the_log()
        before = state_of(store.controller)
        for request in (
            m.Locate(1, 1, [m.Want(key) for key in keys], 1000),
            m.LocateKeys(1, 1, [], 1000, [], keys),
        ):
            entries, leased = store.controller.locate(store.session, request)
            assert not leased
            assert isinstance(entries, list)
            assert [entry.data for entry in entries] == [bytes(1000)] * 40
            assert state_of(store.controller) == before
        store.check()
    store.controller.locate(store.session, m.LocateKeys(2, 2, [], 1000, [], keys))
    assert store.controller.catalog.newest["k0"].offset >= 0


def test_what_can_be_refused_changes_nothing(store: Store) -> None:
    store.put("there", 100)
    placed = store.begin_put("placed")
    store.controller.commit(store.session, placed)
    unfinished = store.begin_put("unfinished")
    held = store.hold("there")
    session, controller = store.session, store.controller
    with no_longer_files():
        store.fill_the_log()
        before, length = state_of(controller), store.log.nbytes
        number = next(store.numbers)
        item = inline("", b"x")
        for refused in (
            lambda: store.put("new", 10),
            lambda: store.begin_put("new"),
            lambda: controller.put_object(session, m.PutObject(number, number, item, number)),
            lambda: controller.commit(session, unfinished),
            lambda: controller.delete(["there"], strict=True),
            lambda: store.hold("there"),
            lambda: controller.holds.free([("there", 1, -1)]),
            lambda: store.get("placed"),
            lambda: controller.repairs.drain(controller.volumes[0], draining=True),
            store.open,
        ):
            with pytest.raises(StoreFullError, match="cannot grow"):
                refused()
            assert state_of(controller) == before
            assert store.log.nbytes == length
        with pytest.raises(StoreFullError, match=r"log.*cannot grow: File too large") as failed:
            store.put("new", 10)
        assert failed.value.details == {"log_bytes": length, "reason": os.strerror(errno.EFBIG)}
        store.check()
        with pytest.raises(KeyNotFoundError):
            controller.locate(session, m.Locate(1, 1, [m.Want("new")], KIB))
        # What needs no record is there.
        [entry], leased = controller.locate(session, m.Locate(1, 1, [m.Want("there")], KIB))  # type: ignore[misc]
        assert not leased
        assert entry.grant is None
        # What cannot be refused has room.
        controller.holds.unhold(session, [held])
        controller.abort(session, [unfinished])
        assert not session.holds
        assert not session.txns
        store.check()
    store.put("new", 10)
    store.get("placed")
    store.check()


def test_a_put_is_refused_again_if_the_log_lacks_where_it_goes() -> None:
    """Also if that was the last thing that the life before has done."""
    with volumes(16 << 20, 16 << 20) as records:
        store = Store(records)
        with no_longer_files():
            store.fill_the_log()
        store.check()


def test_what_waits_is_done_in_order_when_there_is_room(store: Store) -> None:
    controller = store.controller
    controller.commit(store.session, store.begin_put("placed"))
    lease, hold = store.get("placed"), store.hold("placed")
    other = store.open()
    store.begin_put("unfinished", other)
    order: list[str] = []
    with no_longer_files():
        store.fill_the_log()
        store.use_the_spare()
        assert store.log._size - store.log.end < 40
        before = state_of(controller)
        controller.release(store.session, [lease], [])
        controller.holds.unhold(store.session, [hold])
        assert controller.when_recorded(lambda: order.append(f"{len(controller.sessions)}"))
        controller.close_session(other)
        assert controller.when_recorded(lambda: order.append(f"{len(controller.sessions)}"))
        assert state_of(controller) == before
        assert lease in store.session.leases
        assert other.txns
        with pytest.raises(StoreFullError):
            store.put("new", 1)
        assert not controller.catch_up()
        store.check()
    store.put("new", 1)  # which does what came before it first
    assert order == ["2", "1"]
    assert not store.session.leases
    assert not store.session.holds
    assert not other.txns
    assert controller.catch_up()
    store.check()


def test_a_session_that_is_refused_is_not_there(store: Store) -> None:
    with no_longer_files():
        store.fill_the_log()
        with pytest.raises(StoreFullError):
            store.open()
        assert list(store.controller.sessions.values()) == [store.session]
    other = store.open()
    assert other.serial == store.session.serial + 1


async def test_a_log_that_cannot_be_written_anew_stays(store: Store) -> None:
    keeper = LinkToLogs()
    compaction = Compaction(store.controller, keeper)
    with no_longer_files():
        store.fill_the_log()
        compaction.look()
        assert not compaction.is_running
        assert not keeper.kept
        store.use_the_spare()
        compaction.look()
    store.check()
    compaction.look()
    assert store.controller.catch_up()
    store.put("new", 1)
    store.check()
    compaction.close()


async def test_a_state_that_cannot_be_written_leaves_the_log(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    for at in range(8):
        store.put(f"k{at}", 256 * KIB)
    keeper = LinkToLogs()
    compaction = Compaction(store.controller, keeper)
    with no_longer_files(1024 * KIB):  # enough for the first memory of a log
        compaction.begin()
    await until(lambda: not compaction.is_running, 20)
    assert "the process that was writing another ended with status 1" in caplog.text
    assert not keeper.kept
    store.check()
    compaction.begin()
    await until(lambda: not compaction.is_running, 20)
    assert store.controller.log is not store.log
    compaction.close()


async def test_a_state_that_is_shorter_than_its_log_makes_room(store: Store) -> None:
    """Although the log that there is cannot grow."""
    compaction = Compaction(store.controller, LinkToLogs())
    lease = next(store.numbers)
    with no_longer_files(4096 * KIB):
        store.fill_the_log()
        store.use_the_spare()
        store.controller.release(store.session, [lease], [], remember=True)
        compaction.look()
        assert compaction.is_running
        await until(lambda: not compaction.is_running, 20)
        assert store.controller.log is not store.log
        store.log = store.controller.log
        compaction.look()  # as it is called once a second
        assert store.controller.catch_up()
        assert lease in store.session.ended_early
        store.put("new", 1)
        store.check()
    compaction.close()


def test_memory_that_the_system_does_not_have_is_no_bus_error(tmp_path: Path) -> None:
    """Where there is no memfd, a log is a file, and its file system may be full."""
    program = Path(__file__).with_name("full_tmpfs.py")
    mount = f'mount -t tmpfs -o size=3m tmpfs {tmp_path} && exec "$@"'
    for unshare in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        command = [*unshare, "sh", "-c", mount, "sh"]
        if subprocess.run([*command, "true"], check=False, capture_output=True).returncode == 0:
            break
    else:
        pytest.skip("no mount namespaces here")
    done = subprocess.run(
        [*command, sys.executable, program, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_address_space_that_is_used_up(store: Store) -> None:
    """The file can grow, but not be mapped."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    store.put("there", 10)
    before = store.log.end
    body = bytes(600 * KIB)
    store.log.append(9, 0, body)
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE, limits[1]))
    try:
        with pytest.raises(StoreFullError, match="Cannot allocate memory"):
            store.log.append(9, 0, body)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert store.log.end < before + 2 * len(body)
    store.log.append(9, 0, body)
    assert len(list(Log(os.dup(store.log.fd)))) == len(list(store.log)) > 3


def test_the_spare_stays_when_memory_is_given_back(store: Store) -> None:
    store.put("k", 200 * KIB)
    store.log.give_back()
    assert store.log._ready - store.log.end >= SPARE
