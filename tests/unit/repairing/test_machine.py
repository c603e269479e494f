"""Repair and draining against a model: whatever happens in whatever order, accounts are exact, what
is leased stays as it is, and in the end every value has the copies that it can have.

The controller is the real one, on real (small) segments, and a copier really copies. Time is a list
of calls.
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.profiles import half

from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.errors import (
    DrainError,
    KeyNotFoundError,
    ObjectLostError,
    StoreFullError,
    TorchStoreError,
)
from torchstore_core.machine.topology import probe
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.records import SessionRecord, Value, all_values
from torchstore_core.server.memory.allocator import rounded
from torchstore_core.server.memory.segment import SegmentMemory
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.remote.attached_volume import AttachedHalves
from torchstore_core.server.remote.volume_line import VolumeLine
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_strategies import HashStrategy, ReplicatedStrategy

HERE = probe()
META = TensorMeta("uint8", (1,))
VOLUMES = 4
CAPACITY = 16 << 10
KEYS = st.sampled_from("abcdefgh")


class Repairing(RuleBasedStateMachine):
    """A store of four volumes, two copies of everything, a client, and a copier."""

    def __init__(self) -> None:
        super().__init__()
        self.memories = [SegmentMemory(f"repair-{i}", CAPACITY) for i in range(VOLUMES)]
        self.ids = iter(range(1, 1 << 30))
        self.wanted: list[int] = []  # volumes beside which a copier is to be started
        self.now = 0.0
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        records = [
            VolumeRecord(
                m.VolumeInfo(f"repair-{i}", i, os.getpid(), HERE, CAPACITY, {}),
                memory,
                AttachedHalves(f"repair-{i}", VolumeLine()),
            )
            for i, memory in enumerate(self.memories)
        ]
        self.controller = self.make(
            records,
            strategy=ReplicatedStrategy(HashStrategy(), copies=2),
            prefault=False,
            later=self.later,
            start_copier=lambda volume, again=False: self.wanted.append(volume.index),
            repair_bandwidth=1000,
        )
        self.client = self.session()
        self.copier: SessionRecord | None = None
        self.asking = False
        self.work: m.Copies | None = None
        self.taken: m.TakeCopies | None = None
        self.contents: dict[int, bytes] = {}  # by the id() of the value
        self.kept: list[Value] = []  # so that no id() is used again
        self.puts: dict[int, list[m.Grant]] = {}
        self.leases: dict[int, list[tuple[int, int, bytes]]] = {}

    def make(self, records: list[VolumeRecord], **options: Any) -> Controller:
        return Controller(records, **options)

    def session(self, role: str = "") -> SessionRecord:
        facts = ClientFacts(1, HERE.host_id, HERE.hostname, role=role)
        return self.controller.open_session(facts, HERE)

    def later(self, delay: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.due, (self.now + delay, next(self.ids), call))

    def read(self, volume: int, offset: int, nbytes: int) -> bytes:
        return os.pread(self.memories[volume].fd, nbytes, offset)

    @property
    def volumes(self) -> list[VolumeRecord]:
        return self.controller.volumes

    # ---- the client -----------------------------------------------------------------------

    @rule(keys=st.lists(KEYS, min_size=1, max_size=3, unique=True), nbytes=st.integers(1, 3000))
    def begin_put(self, keys: list[str], nbytes: int) -> None:
        txn = next(self.ids)
        items = [m.PutItem(key, META, nbytes) for key in keys]
        with contextlib.suppress(StoreFullError):
            self.controller.put(self.client, m.Put(txn, txn, items))
            for at, value in enumerate(self.client.txns[txn].values):
                content = bytes([(txn + at) % 251]) * nbytes
                self.kept.append(value)
                self.contents[id(value)] = content
                for volume, offset in value.places:
                    assert not self.volumes[volume].closed
                    os.pwrite(self.memories[volume].fd, content, offset)

    @precondition(lambda self: self.client.txns)
    @rule(data=st.data(), commit=st.integers(0, 3))
    def end_put(self, data: Any, commit: int) -> None:
        txn = data.draw(st.sampled_from(sorted(self.client.txns)))
        if commit:
            with contextlib.suppress(ObjectLostError):
                self.controller.commit(self.client, txn)
        else:
            self.controller.abort(self.client, [txn])

    @rule(keys=st.lists(KEYS, min_size=1, max_size=3, unique=True))
    def get(self, keys: list[str]) -> None:
        lease = next(self.ids)
        wants = [m.Want(key) for key in keys]
        try:
            entries, leased = self.controller.locate(self.client, m.Locate(lease, lease, wants, -1))
        except (KeyNotFoundError, ObjectLostError):
            return
        assert leased
        reads: list[tuple[int, int, bytes]] = []
        for key, entry in zip(keys, entries, strict=True):
            assert entry.grant is not None
            value = self.controller.catalog.newest[key]
            content = self.contents[id(value)]
            reads.append((entry.grant.volume, entry.grant.offset, content))
            staying = [at for at, _ in value.places if not self.volumes[at].draining]
            assert entry.grant.volume in staying or not staying
        self.leases[lease] = reads

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        reads = self.leases[lease]
        at = data.draw(st.integers(0, len(reads)))
        if at == len(reads):
            self.controller.release(self.client, [lease], [])
            del self.leases[lease]
        else:
            self.controller.release(self.client, [], [(lease, [at])])
            reads[at] = (-1, 0, b"")
            if all(volume < 0 for volume, _, _ in reads):
                del self.leases[lease]

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.controller.delete([key], strict=False)

    # ---- volumes --------------------------------------------------------------------------

    @rule(index=st.integers(0, VOLUMES - 1), undo=st.booleans())
    def drain(self, index: int, undo: bool) -> None:
        if not self.volumes[index].lost:
            with contextlib.suppress(DrainError):
                what = "undo" if undo else "begin"
                self.controller.drains.drain(m.Drain(1, str(index), what))

    @precondition(lambda self: sum(bool(v.lost) for v in self.controller.volumes) < 2)
    @rule(index=st.integers(0, VOLUMES - 1))
    def lose(self, index: int) -> None:
        self.controller.lose_volume(index, "a test")

    # ---- the copier -----------------------------------------------------------------------

    @rule()
    def time_passes(self) -> None:
        """Until the next call is due."""
        if self.due:
            self.now, _, call = heapq.heappop(self.due)
            call()

    @precondition(lambda self: self.wanted or (self.copier is not None and not self.asking))
    @rule()
    def take(self) -> None:
        if self.copier is None:
            self.copier = self.session(m.COPIER_ROLE)
        if self.asking or self.work is not None:
            return
        self.wanted.clear()
        self.asking = True
        txn, lease = next(self.ids), next(self.ids)
        self.taken = m.TakeCopies(txn, txn, lease, list(range(VOLUMES)))
        self.controller.repairs.take(self.copier, self.taken, self.answered)

    def answered(self, message: m.Message) -> None:
        assert isinstance(message, m.Copies)
        self.asking = False
        if message.pieces:
            assert len({piece.target[0] for piece in message.pieces}) == 1
            self.work = message
        elif self.copier is not None:
            self.controller.close_session(self.copier)
            self.copier = None

    @precondition(lambda self: self.work is not None)
    @rule(ending=st.sampled_from(["commit", "commit", "commit", "abort", "die"]))
    def copy(self, ending: str) -> None:
        work, self.work = self.work, None
        assert work is not None
        assert self.taken is not None
        assert self.copier is not None
        for piece in work.pieces:
            there = self.read(*piece.sources[-1], piece.nbytes)
            os.pwrite(self.memories[piece.target[0]].fd, there, piece.target[1])
        if ending == "die":
            self.controller.close_session(self.copier)
            self.copier = None
            return
        if ending == "abort":
            self.controller.abort(self.copier, [self.taken.txn])
        else:
            with contextlib.suppress(TorchStoreError):
                self.controller.commit(self.copier, self.taken.txn)
        self.controller.release(self.copier, [self.taken.lease], [])

    # ---- what must hold -------------------------------------------------------------------

    def values(self) -> list[Value]:
        """Everything that anybody holds, once."""
        found = {id(v): v for s in self.controller.catalog.newest.values() for v in all_values(s)}
        for session in self.controller.sessions.values():
            for txn in session.txns.values():
                found.update((id(v), v) for v in txn.values)
            for held in session.leases.values():
                found.update((id(v), v) for v in held if v is not None)
        return list(found.values())

    @invariant()
    def what_is_read_stays(self) -> None:
        for reads in self.leases.values():
            for volume, offset, content in reads:
                if volume >= 0 and not self.volumes[volume].lost:
                    assert self.read(volume, offset, len(content)) == content

    @invariant()
    def every_copy_is_right(self) -> None:
        for stored in self.controller.catalog.newest.values():
            for value in all_values(stored):
                if not self.volumes[value.volume].lost:
                    content = self.contents[id(value)]
                    for volume, offset in value.places:
                        assert self.read(volume, offset, len(content)) == content

    @invariant()
    def accounts_are_exact(self) -> None:
        leavings = self.controller.repairs.leavings
        for volume in self.volumes:
            if volume.lost:
                continue
            used = leased = 0
            ranges = volume.allocator.free_ranges()
            for value in self.values():
                for at, offset in leavings.places(value):
                    if at == volume.index:
                        used += rounded(value.nbytes)
                        leased += rounded(value.nbytes) * bool(value.pins)
                        ranges.append((offset, rounded(value.nbytes)))
            ranges.sort()
            end = 0
            for start, nbytes in ranges:
                assert start == end
                end += nbytes
            assert end == CAPACITY
            assert (volume.allocator.used, volume.leased) == (used, leased)
            txns = [t for s in self.controller.sessions.values() for t in s.txns.values()]
            assert volume.unfinished == sum(t.granted.get(volume.index, 0) for t in txns)

    def teardown(self) -> None:
        try:
            self.all_is_copied_in_the_end()
        finally:
            for memory in self.memories:
                memory.close()

    def all_is_copied_in_the_end(self) -> None:
        self.controller.close_session(self.client)
        self.leases.clear()
        for _ in range(300):
            self.time_passes()
            if self.work is not None:
                self.copy("commit")
            elif self.wanted or (self.copier is not None and not self.asking):
                self.take()
            self.accounts_are_exact()
            if self.controller.repairs.idle and self.work is None:
                break
        assert self.controller.repairs.idle
        opened = [v for v in self.volumes if not v.closed]
        parked = {id(entry.value) for entry in self.controller.repairs.parked}
        for stored in self.controller.catalog.newest.values():
            for value in all_values(stored):
                if not self.volumes[value.volume].lost and id(value) not in parked:
                    staying = [at for at, _ in value.places if not self.volumes[at].draining]
                    assert len(staying) == min(2, len(opened))
                    assert staying == [at for at, _ in value.places]
        self.every_copy_is_right()
        assert not len(self.controller.repairs.leavings)
        if not parked:
            for volume in self.volumes:
                if volume.draining and not volume.lost:
                    assert volume.allocator.used == 0


Repairing.TestCase.settings = half()
TestRepairing = Repairing.TestCase
