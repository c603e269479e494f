"""Runs that put to one key, and go back behind each other, against a small model.

Every entry says which run put it, and for which version. The model knows which contributions are
committed, and so which version is whole and whose it is. Whatever can be read must be what one run
put; a ref must give what it was made for, or nothing; and nobody waits for what cannot come.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.profiles import half
from tests.unit.server.put_model import leased, reachable
from tests.unit.server.test_controller import HERE, facts, volumes

from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import (
    KeyNotFoundError,
    TorchStoreError,
    VersionGoneError,
)
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.records import SessionRecord, Versions
from torchstore_core.server.memory.allocator import rounded
from torchstore_core.values import ObjectMeta
from torchstore_core.wire import messages as m

KEY = "k"
INLINE = 1 << 20
META = ObjectMeta("msgpack")


@dataclass(eq=False, repr=False)
class Run:
    """One run of a trainer: a process for each participant."""

    number: int
    sessions: list[SessionRecord]
    start: int  # the version that it goes back to; 0 for the first run
    #: By version, who has committed its part.
    committed: dict[int, set[int]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)  # of each participant
    newest: int = 0
    over: bool = False

    def __repr__(self) -> str:
        return f"<run {self.number} from {self.start}>"

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(repr(self))

    @property
    def size(self) -> int:
        return len(self.sessions)

    def living(self) -> list[int]:
        return [at for at, session in enumerate(self.sessions) if session.closed is None]


@dataclass(eq=False)
class Open:
    """A put that is being written."""

    run: Run
    who: int
    version: int
    before: int


@dataclass(eq=False)
class Waiting:
    """A wait; ``after``: the ref that it follows, None for a number."""

    least: int
    after: tuple[int, int] | None
    fired: list[list[int]] = field(default_factory=list)
    failed: list[TorchStoreError] = field(default_factory=list)


class Runs(RuleBasedStateMachine):
    """Puts, deaths, rewinds and reads in any order."""

    @initialize(keep=st.integers(1, 4), size=st.integers(1, 3))
    def start(self, keep: int, size: int) -> None:
        self.opened = volumes(1 << 18)
        self.controller = Controller(self.opened.__enter__(), Strategy(), prefault=False)
        self.catalog = self.controller.catalog
        self.keep = keep
        self.numbers = itertools.count(1)
        self.reader = self.session()
        self.pids = itertools.count(100)
        self.runs = [Run(0, [self.session() for _ in range(size)], 0)]
        self.main = self.runs[0]
        self.open: dict[tuple[SessionRecord, int], Open] = {}
        self.visible: dict[int, tuple[Run, int]] = {}  # version: whose, and its timeline
        #: What every ref that was ever returned names: (version, timeline): the run.
        self.refs: dict[tuple[int, int], Run] = {}
        self.waits: list[Waiting] = []
        self.leases: dict[int, list[tuple[m.Grant, bytes]]] = {}

    def session(self) -> SessionRecord:
        return self.controller.open_session(facts(next(self.numbers)), HERE)

    def teardown(self) -> None:
        """When everybody is gone and the key deleted, nothing is left."""
        if not hasattr(self, "controller"):
            return
        try:
            for session in [*self.controller.sessions.values()]:
                self.controller.close_session(session)
            self.controller.delete([KEY], strict=False)
            assert not self.catalog.histories
            for volume in self.controller.volumes:
                assert (volume.allocator.used, volume.inline) == (0, 0)
                assert (volume.leased, volume.unfinished) == (0, 0)
        finally:
            self.opened.__exit__(None, None, None)

    # ---- runs -----------------------------------------------------------------------------

    @precondition(lambda self: len(self.going()) < 3)
    @rule(data=st.data(), size=st.integers(1, 3), kill=st.booleans())
    def begin_run(self, data: st.DataObject, size: int, kill: bool) -> None:
        """A run goes back, or not so far; that before it may still go on."""
        highest = max(self.visible, default=0)
        start = data.draw(st.integers(max(1, highest - 4), highest + 2), "start")
        for run in self.runs:
            if not run.over and (run.start == start or (kill and run is self.main)):
                self.end(run)
        sessions = [self.session() for _ in range(size)]
        if data.draw(st.integers(0, 3), "same processes") == 0 and self.main.size == size:
            sessions = [
                new if old.closed is not None else old
                for old, new in zip(self.main.sessions, sessions, strict=True)
            ]
            self.main.over = True
        self.runs.append(Run(len(self.runs), sessions, start))

    def going(self) -> list[Run]:
        """The runs that somebody still puts for."""
        return [run for run in self.runs if not run.over and run.living()]

    def end(self, run: Run) -> None:
        """All its processes die."""
        run.over = True
        for at in run.living():
            self.die(run, at)

    def die(self, run: Run, at: int) -> None:
        self.controller.close_session(run.sessions[at])
        for key, one in sorted(self.open.items(), key=lambda item: -item[0][1]):
            if key[0] is run.sessions[at]:
                del self.open[key]
                one.run.last[one.who] = one.before

    @precondition(lambda self: self.going())
    @rule(data=st.data(), steps=st.integers(1, 3), number=st.booleans())
    def train(self, data: st.DataObject, steps: int, number: bool) -> None:
        """All participants of a run put some versions."""
        run = data.draw(st.sampled_from(self.going()), "run")
        for _ in range(steps):
            for who in run.living():
                if not run.over:
                    self.put_next(run, who, False, False, number)

    @precondition(lambda self: self.going())
    @rule(data=st.data(), placed=st.booleans(), leave_open=st.booleans(), number=st.booleans())
    def put(self, data: st.DataObject, placed: bool, leave_open: bool, number: bool) -> None:
        """A participant puts its next version."""
        run = data.draw(st.sampled_from(self.going()), "run")
        who = data.draw(st.sampled_from(run.living()), "participant")
        self.put_next(run, who, placed, leave_open, number)

    def put_next(self, run: Run, who: int, placed: bool, leave_open: bool, number: bool) -> None:
        fresh = run.start and not run.newest and run is not self.main
        last = run.last.get(who, 0)
        begun = any(who in some for some in run.committed.values())
        begun = begun or any((o.run, o.who) == (run, who) for o in self.open.values())
        rewind = bool(fresh) and not begun
        version = run.start if rewind else max(last, run.newest, run.start - 1) + 1
        if not rewind and not number:
            version = 0
        name = f"own{who}"
        group = m.Publication(KEY, str(who), run.size, False, self.keep)
        kind = m.Rewind if rewind else m.Put
        text = f"{run.number:04}".encode()
        large = text * 40
        items = [m.PutItem(name, META, len(large), None if placed else large)]
        items.append(m.PutItem(f"small{who}", META, len(text), text))
        txn = next(self.numbers)
        session = run.sessions[who]
        versions, grants = self.controller.put(session, kind(1, txn, items, version, group))
        if grants is None:
            version = versions[0]
            run.last[who] = max(last, version) if not rewind else version
            self.committed(Open(run, who, version, last), versions)
            return
        (grant,) = grants
        memory = self.controller.volumes[0].memory
        assert os.pwrite(memory.fd, large, grant.offset) == len(large)
        version = session.txns[txn].results[0].version
        self.open[session, txn] = Open(run, who, version, last)
        run.last[who] = version
        if not leave_open:
            self.commit_txn((session, txn))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.commit_txn(self.some_open(data))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        session, txn = self.some_open(data)
        one = self.open.pop((session, txn))
        self.controller.abort(session, [txn])
        if one.run.last.get(one.who) == one.version:
            one.run.last[one.who] = one.before

    def some_open(self, data: st.DataObject) -> tuple[SessionRecord, int]:
        every = sorted(self.open, key=lambda key: key[1])
        return every[data.draw(st.integers(0, len(every) - 1), "which")]

    def commit_txn(self, key: tuple[SessionRecord, int]) -> None:
        one = self.open.pop(key)
        self.committed(one, self.controller.commit(*key))

    def committed(self, one: Open, versions: list[int]) -> None:
        """A participant has committed: the model follows."""
        run, version = one.run, one.version
        assert [*versions] == [version]
        timeline = versions.timelines[0] if isinstance(versions, Versions) else 0
        assert self.refs.setdefault((version, timeline), run) is run
        if run.over and run is not self.main:
            return
        run.committed.setdefault(version, set()).add(one.who)
        if len(run.committed[version]) < run.size or version <= run.newest:
            return
        run.newest = version
        back = False
        if run is not self.main:
            back = max(self.visible, default=0) >= run.start
            self.visible = {v: there for v, there in self.visible.items() if v < run.start}
            for other in self.runs:
                if other is not run:
                    other.over = True
            self.main = run
        self.visible[version] = run, timeline
        for old in sorted(self.visible)[: -self.keep]:
            del self.visible[old]
        for wait in self.waits:
            if wait.after is None and back and wait.least > version and not wait.fired:
                assert wait.failed

    # ---- what was left behind -------------------------------------------------------------

    @precondition(lambda self: self.main.start)
    @rule(data=st.data(), size=st.integers(1, 3), ahead=st.sampled_from([None, 0, 1, 3]))
    def put_late(self, data: st.DataObject, size: int, ahead: int | None) -> None:
        """A process of a run that another one has gone back behind is refused."""
        now = {id(session) for session in self.main.sessions}
        behind = [run for run in self.runs if run.newest and run is not self.main]
        left = [s for run in behind for s in run.sessions if s.closed is None and id(s) not in now]
        if not left:
            return
        session = left[data.draw(st.integers(0, len(left) - 1), "process")]
        version = 0 if ahead is None else max(self.visible) + 1 + ahead
        group = m.Publication(KEY, "0", size)
        items = [m.PutItem("own0", META, 4, b"late")]
        with pytest.raises(VersionGoneError, match="was rewound"):
            self.controller.put(session, m.Put(1, next(self.numbers), items, version, group))

    # ---- readers --------------------------------------------------------------------------

    @rule(ahead=st.integers(0, 3))
    def wait(self, ahead: int) -> None:
        wait = Waiting(max(self.visible, default=0) + ahead, None)
        add = self.controller.waiting.add
        add([KEY], wait.least, wait.fired.append, -1, wait.failed.append)
        self.waits.append(wait)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def wait_after(self, data: st.DataObject) -> None:
        version, timeline = data.draw(st.sampled_from(sorted(self.refs)), "after")
        wait = Waiting(version + 1, (version, timeline))
        try:
            self.controller.waiting.add(
                [KEY], wait.least, wait.fired.append, timeline, wait.failed.append
            )
        except VersionGoneError as error:
            wait.failed.append(error)
        self.waits.append(wait)

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        if not self.visible:
            return
        version = data.draw(st.sampled_from(sorted(self.visible)))
        lease = next(self.numbers)
        reply = self.controller.fetch(self.reader, m.Fetch(1, lease, KEY, version, None, -1))
        held = [(e.grant, self.peek(e)) for e in reply.entries if e is not None and e.grant]
        if held:
            self.leases[lease] = held

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[lease]
        self.controller.release(self.reader, [lease], [])

    def peek(self, entry: m.Entry) -> bytes:
        if entry.data is not None:
            return entry.data
        return os.pread(self.controller.volumes[0].memory.fd, entry.nbytes, entry.grant.offset)

    def read(self, version: int, timeline: int | None = None) -> set[bytes]:
        """The runs whose bytes a version has."""
        lease = next(self.numbers)
        fetch = m.Fetch(1, lease, KEY, version, None, -1)
        if timeline is not None:
            fetch = m.FetchRef(1, lease, KEY, version, None, -1, [], timeline)
        reply = self.controller.fetch(self.reader, fetch)
        assert reply.version == version
        found = {self.peek(entry)[:4] for entry in reply.entries if entry is not None}
        if reply.leased:
            self.controller.release(self.reader, [lease], [])
        return found

    # ---- at any time ----------------------------------------------------------------------

    @invariant()
    def every_version_is_of_one_run(self) -> None:
        if not hasattr(self, "controller"):
            return
        assert self.catalog.versions(KEY) == sorted(self.visible)
        for version, (run, timeline) in self.visible.items():
            assert self.read(version) == {f"{run.number:04}".encode()}
            assert self.catalog.timeline(KEY, version) == timeline

    @invariant()
    def a_ref_names_what_it_was_made_for_or_nothing(self) -> None:
        for (version, timeline), run in getattr(self, "refs", {}).items():
            want = m.LocateRefs(1, next(self.numbers), [m.Want(KEY, version)], -1, [], [timeline])
            if self.visible.get(version) == (run, timeline):
                self.controller.locate(self.reader, want)
                assert self.read(version, timeline) == {f"{run.number:04}".encode()}
                continue
            with pytest.raises((VersionGoneError, KeyNotFoundError)):
                self.controller.locate(self.reader, want)
            with pytest.raises((VersionGoneError, KeyNotFoundError)):
                self.read(version, timeline)

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        newest = max(getattr(self, "visible", ()), default=0)
        for wait in list(getattr(self, "waits", ())):
            assert len(wait.fired) + len(wait.failed) <= 1
            if wait.fired or wait.failed:
                self.waits.remove(wait)
                continue
            if wait.after is None:
                assert newest < wait.least or not newest
                continue
            # What follows a ref is newer than it, or the ref is of what there is.
            assert self.catalog.timeline(KEY, wait.after[0]) == wait.after[1]
            assert newest <= wait.after[0]

    @invariant()
    def leased_memory_stays_and_all_other_is_accounted_for(self) -> None:
        if not hasattr(self, "controller"):
            return
        (volume,) = self.controller.volumes
        for held in self.leases.values():
            for grant, seen in held:
                assert os.pread(volume.memory.fd, len(seen), grant.offset) == seen
        there = {id(value): value for value in reachable(self.controller)}.values()
        lent = {id(value): value for value in leased(self.controller)}.values()
        placed = sum(rounded(v.nbytes) for v in there if v.data is None)
        assert volume.allocator.used == placed
        assert volume.inline == sum(len(v.data) for v in there if v.data is not None)
        assert volume.leased == sum(rounded(v.nbytes) for v in lent)


Runs.TestCase.settings = half()
TestRuns = pytest.mark.timeout(600)(Runs.TestCase)
