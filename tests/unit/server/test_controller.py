"""The controller against a model made of dicts, on real (small) segments that are really written.

The model knows what has been put and who holds what; the controller must place, count, keep and
free accordingly, whatever the order of requests, and whatever they ask for.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.profiles import half
from tests.support import until

from torchstore_core.contracts.strategy import ClientFacts, Strategy
from torchstore_core.errors import (
    KeyNotFoundError,
    ProtocolError,
    StoreClosedError,
    StoreFullError,
    VersionGoneError,
)
from torchstore_core.machine.topology import probe
from torchstore_core.server.controller import Controller
from torchstore_core.server.index import catalog
from torchstore_core.server.index.records import SessionRecord, Waiter
from torchstore_core.server.memory.allocator import ALIGNMENT
from torchstore_core.server.memory.segment import SegmentMemory
from torchstore_core.server.memory.shortage import session_bytes
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.remote.attached_volume import AttachedHalves
from torchstore_core.server.remote.volume_line import VolumeLine
from torchstore_core.server.serving import inspection
from torchstore_core.values import ObjectMeta, TensorMeta
from torchstore_core.wire import messages as m

HERE = probe()
META = TensorMeta("uint8", (1,))
PAGE = os.sysconf("SC_PAGE_SIZE")
KEYS = ("a", "ab", "abc", "b", "ü")


def lines(nbytes: int) -> int:
    """Cache lines that ``nbytes`` bytes take."""
    return -(-nbytes // ALIGNMENT)


def facts(pid: int = 1) -> ClientFacts:
    return ClientFacts(pid, HERE.host_id, HERE.hostname)


@contextmanager
def volumes(*capacities: int) -> Iterator[list[VolumeRecord]]:
    """Volumes on segments of their own."""
    memories = [SegmentMemory(f"test-{i}", nbytes) for i, nbytes in enumerate(capacities)]
    try:
        yield [
            VolumeRecord(
                m.VolumeInfo(f"test-{i}", i, os.getpid(), HERE, memory.nbytes, {}),
                memory,
                AttachedHalves(f"test-{i}", VolumeLine()),
            )
            for i, memory in enumerate(memories)
        ]
    finally:
        for memory in memories:
            memory.close()


def placed(key: str, nbytes: int) -> m.PutItem:
    return m.PutItem(key, META, nbytes)


def inline(key: str, data: bytes) -> m.PutItem:
    return m.PutItem(key, META, len(data), data)


class Stored:
    """One value, as the model sees it."""

    def __init__(self, key: str, data: bytes, volume: int, offset: int | None) -> None:
        self.key = key
        self.data = data
        self.volume = volume
        self.offset = offset  # None: inline
        self.version = 0
        self.pins = 0
        self.live = False
        self.unfinished = True

    @property
    def held(self) -> bool:
        return self.live or self.unfinished or self.pins > 0

    @property
    def taken(self) -> int:
        """Bytes of capacity."""
        return len(self.data) if self.offset is None else lines(len(self.data)) * ALIGNMENT


class Client:
    """One session: its record, and the model of what it holds."""

    def __init__(self, record: SessionRecord) -> None:
        self.record = record
        self.txns: dict[int, list[Stored]] = {}
        self.leases: dict[int, list[Stored | None]] = {}
        self.given_back: set[int] = set()


Size = st.integers(1, 6000) | st.integers(1, 300)
Data = st.binary(max_size=90)


class ControllerMachine(RuleBasedStateMachine):
    """Requests of several clients in any order."""

    @initialize()
    def start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(catalog, "_MAX_DELETED", 2)  # so that deleted keys are forgotten
        self.volumes_open = volumes(8192, 8192)
        records = self.volumes_open.__enter__()
        self.controller = Controller(records, Strategy(), prefault=False)
        self.clients: list[Client] = []
        self.stored: list[Stored] = []
        self.live: dict[str, Stored] = {}
        self.used_versions: set[tuple[str, int]] = set()
        self.waits: list[tuple[Waiter | None, list[str], int, list[list[int]]]] = []
        self.fulfilled: list[list[list[int]]] = []
        self.numbers = itertools.count(1)
        self.connect()
        self.connect()
        # Something to begin with: values, an unfinished put, and a lease.
        writer, reader = self.clients
        self.begin(writer, 1, [("a", 3000), ("ab", 700), ("b", b"inline")])
        self.commit_txn(writer, 1)
        self.begin(writer, 1, [("abc", 900), ("a", 100)])
        self.look(reader, 1, [("a", 0), ("b", 0), ("ab", 1)], -1)

    def teardown(self) -> None:
        """When everybody is gone and everything deleted, all memory is free, in one piece."""
        if not hasattr(self, "controller"):
            return
        try:
            for client in self.clients:
                self.controller.close_session(client.record)
            self.controller.delete(list(self.controller.catalog.newest), strict=True)
            for volume in self.controller.volumes:
                capacity = volume.info.capacity_bytes
                assert (volume.used, volume.inline, volume.leased, volume.unfinished) == (0,) * 4
                assert volume.allocator.free_ranges() == [(0, capacity)]
        finally:
            self.volumes_open.__exit__(None, None, None)
            self.patch.undo()

    # ---- the model --------------------------------------------------------------------------

    def held_in(self, volume: int) -> list[Stored]:
        return [s for s in self.stored if s.volume == volume and s.held]

    def used(self, volume: int) -> int:
        return sum(s.taken for s in self.held_in(volume))

    def place(self, sizes: Sequence[int], inline_bytes: int) -> tuple[int, list[int]] | None:
        """Volume and offsets, as the documentation promises them; None if it does not fit."""
        for volume in self.controller.volumes:
            capacity = volume.info.capacity_bytes
            asked = sum(lines(n) * ALIGNMENT for n in sizes) + inline_bytes
            if self.used(volume.index) + asked > capacity:
                continue
            taken = [False] * (capacity // ALIGNMENT)
            for s in self.held_in(volume.index):
                if s.offset is not None:
                    start = s.offset // ALIGNMENT
                    taken[start : start + lines(len(s.data))] = [True] * lines(len(s.data))
            extents = list(map(lines, sizes))
            starts = first_fits(list(taken), [sum(extents)])
            if starts is not None:  # one after the other
                starts = list(itertools.accumulate(extents, initial=starts[0]))[:-1]
            else:
                starts = first_fits(list(taken), extents)
            if starts is None:
                order = sorted(range(len(sizes)), key=lambda at: -sizes[at])
                found = first_fits(list(taken), [extents[at] for at in order])
                if found is None:
                    continue
                starts = [found[order.index(at)] for at in range(len(sizes))]
            return volume.index, [at * ALIGNMENT for at in starts]
        return None

    def commit_all(self, values: Iterable[Stored], versions: Sequence[int]) -> None:
        values = list(values)
        assert len(values) == len(versions)
        for value, version in zip(values, versions, strict=True):
            old = self.live.get(value.key)
            if old is not None:
                assert version == old.version + 1
                old.live = False
            assert version > max((v for k, v in self.used_versions if k == value.key), default=0)
            self.used_versions.add((value.key, version))
            value.version = version
            value.unfinished = False
            value.live = True
            self.live[value.key] = value

    def snapshot(self) -> Any:
        """Everything the controller knows, as plain data."""
        controller = self.controller
        return (
            {
                k: (v.version, v.uses, v.pins, v.offset)
                for k, v in controller.catalog.newest.items()
            },
            [
                (v.used, v.inline, v.leased, v.unfinished, v.allocator.free_ranges())
                for v in controller.volumes
            ],
            [(c.record.txns.copy(), c.record.leases.copy()) for c in self.clients],
            list(controller.sessions),
        )

    @contextmanager
    def refused(self, *errors: type[Exception]) -> Iterator[pytest.ExceptionInfo[Exception]]:
        """It raises one of ``errors``, and nothing changes."""
        before = self.snapshot()
        with pytest.raises(errors) as caught:
            yield caught
        assert self.snapshot() == before

    def client(self, data: st.DataObject, *, having: str = "") -> Client:
        """A client, if possible one that has txns or leases."""
        fit = [c for c in self.clients if having and getattr(c, having)]
        return data.draw(st.sampled_from(fit or self.clients), "client")

    def ids(self, data: st.DataObject, known: Iterable[int], most: int = 3) -> list[int]:
        """Ids, such as are in use more often than not."""
        one = st.sampled_from(sorted(known) * 4 + [0, 1])
        return data.draw(st.lists(one, min_size=1, max_size=most), "ids")

    def new_id(self, data: st.DataObject) -> int:
        """An id, unused more often than not."""
        fresh = next(self.numbers) + 10
        return data.draw(st.sampled_from([fresh, fresh, fresh, 0, 1]), "id")

    # ---- sessions ---------------------------------------------------------------------------

    @precondition(lambda self: len(self.clients) < 4)
    @rule()
    def connect(self) -> None:
        record = self.controller.open_session(facts(next(self.numbers)), HERE)
        assert self.controller.join_session(record.token) is record
        assert record.token not in [c.record.token for c in self.clients]
        self.clients.append(Client(record))

    @precondition(lambda self: len(self.clients) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        client = self.client(data)
        self.controller.close_session(client.record)
        self.clients.remove(client)
        for values in client.txns.values():
            for value in values:
                value.unfinished = False
        for held in client.leases.values():
            self.unpin(held)
        with self.refused(StoreClosedError):
            self.controller.join_session(client.record.token)
        self.controller.close_session(client.record)  # once more: nothing

    def unpin(self, held: Iterable[Stored | None]) -> None:
        for value in held:
            if value is not None:
                value.pins -= 1

    # ---- put --------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        items=st.lists(st.tuples(st.sampled_from(KEYS), Size | Data), min_size=1, max_size=5),
        commit=st.booleans(),
    )
    def put(self, data: st.DataObject, items: list[tuple[str, int | bytes]], commit: bool) -> None:
        client = self.client(data)
        txn = self.new_id(data)
        self.begin(client, txn, items)
        if commit and txn in client.txns:
            self.commit_txn(client, txn)

    def begin(self, client: Client, txn: int, items: list[tuple[str, int | bytes]]) -> None:
        request = m.Put(
            1,
            txn,
            [inline(k, v) if isinstance(v, bytes) else placed(k, v) for k, v in items],
        )
        if txn in client.txns:
            with self.refused(ProtocolError):
                self.controller.put(client.record, request)
            return
        if txn in client.given_back:
            with self.refused(ProtocolError):
                self.controller.put(client.record, request)
            client.given_back.remove(txn)
            return
        sizes = [v for _, v in items if isinstance(v, int)]
        where = self.place(sizes, sum(len(v) for _, v in items if isinstance(v, bytes)))
        if where is None:
            with self.refused(StoreFullError) as caught:
                self.controller.put(client.record, request)
            self.check_full(caught.value)
            return
        versions, grants = self.controller.put(client.record, request)
        volume, offsets = where
        values: list[Stored] = []
        at = iter(offsets)
        for key, value in items:
            if isinstance(value, bytes):
                values.append(Stored(key, value, volume, None))
            else:
                number = next(self.numbers)
                content = (number.to_bytes(4, "big") * (value // 4 + 1))[:value]
                values.append(Stored(key, content, volume, next(at)))
        self.stored += values
        if not sizes:
            assert grants is None
            self.commit_all(values, versions)
            return
        assert grants == [m.Grant(volume, 0, offset) for offset in offsets]
        fd = self.controller.volumes[volume].memory.fd
        for stored in values:
            if stored.offset is not None:
                assert os.pwrite(fd, stored.data, stored.offset) == len(stored.data)
        client.txns[txn] = values

    def check_full(self, error: StoreFullError) -> None:
        details = error.details
        capacities = [v.info.capacity_bytes for v in self.controller.volumes]
        assert details["capacity_bytes"] == sum(capacities)
        assert details["used_bytes"] == sum(self.used(i) for i in range(len(capacities)))
        holders = {h["pid"]: (h["leased"], h["unfinished"]) for h in details["holders"]}
        for client in self.clients:
            held = session_bytes(client.record)
            assert holders.pop(client.record.facts.pid, (0, 0)) == held
            for nbytes, text in zip(held, error.message.split(" in unfinished puts"), strict=True):
                assert not nbytes or f"pid {client.record.facts.pid}: {nbytes:,}" in text
        assert not holders

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        client = self.client(data, having="txns")
        (txn,) = self.ids(data, client.txns, most=1)
        if txn not in client.txns:
            with self.refused(ProtocolError):  # also when it is another client's
                self.controller.commit(client.record, txn)
            return
        self.commit_txn(client, txn)

    def commit_txn(self, client: Client, txn: int) -> None:
        versions = self.controller.commit(client.record, txn)
        self.commit_all(client.txns.pop(txn), versions)

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def seal(self, data: st.DataObject, key: str) -> None:
        """Commit a put of one value that gets its key now, and lease it."""
        client = self.client(data, having="txns")
        if data.draw(st.booleans(), "alone"):
            self.begin(client, txn := self.new_id(data), [("not yet", data.draw(Size, "size"))])
        else:
            (txn,) = self.ids(data, client.txns, most=1)
        lease = self.new_id(data)
        request = m.Seal(1, txn, key, lease)
        values = client.txns.get(txn, [])
        early = len(values) == 1 and lease in client.given_back
        if len(values) != 1 or lease in client.leases or early:
            with self.refused(ProtocolError):
                self.controller.seal(client.record, request)
            if early:
                client.given_back.remove(lease)
            return
        versions = self.controller.seal(client.record, request)
        (value,) = client.txns.pop(txn)
        value.key, value.pins = key, value.pins + 1
        client.leases[lease] = [value]
        self.commit_all([value], versions)

    @rule(data=st.data(), remember=st.booleans())
    def abort(self, data: st.DataObject, remember: bool) -> None:
        client = self.client(data, having="txns")
        txns = self.ids(data, client.txns)
        self.controller.abort(client.record, txns, remember=remember)
        for txn in txns:
            if txn in client.txns:
                for value in client.txns.pop(txn):
                    value.unfinished = False
            elif remember:
                client.given_back.add(txn)

    # ---- get --------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        wants=st.lists(
            st.tuples(st.sampled_from(KEYS), st.sampled_from(["newest", "exact", "other"])),
            min_size=1,
            max_size=6,
        ),
        all_there=st.sampled_from([True, True, False]),
        inline_max=st.sampled_from([-1, -1, 0, 50, 500, 1 << 62]),
    )
    def locate(
        self,
        data: st.DataObject,
        wants: list[tuple[str, str]],
        all_there: bool,
        inline_max: int,
    ) -> None:
        client = self.client(data)
        lease = self.new_id(data)
        if all_there:
            wants = [(k, "exact" if v == "other" else v) for k, v in wants if k in self.live]
        asked: list[tuple[str, int]] = []
        for key, how in wants:
            have = self.live[key].version if key in self.live else 0
            asked.append((key, {"newest": 0, "exact": have or 1, "other": have + 1}[how]))
        self.look(client, lease, asked, inline_max)

    def look(
        self, client: Client, lease: int, wants: list[tuple[str, int]], inline_max: int
    ) -> None:
        request = m.Locate(1, lease, [m.Want(*want) for want in wants], inline_max)
        newest = {key: value.version for key, value in self.live.items()}
        gone = any(version not in (0, newest.get(key, 0)) for key, version in wants)
        if gone:
            with self.refused(VersionGoneError) as caught:
                self.controller.locate(client.record, request)
            assert caught.value.details == {"current": newest.get(str(caught.value.key), 0)}
            return
        missing = [key for key, _ in wants if key not in self.live]
        if missing:
            with self.refused(KeyNotFoundError) as error:
                self.controller.locate(client.record, request)
            assert error.value.details["missing"] == missing
            return
        values = [self.live[key] for key, _ in wants]
        total = sum(len(v.data) for v in values)
        by_lease = total > inline_max and any(v.offset is not None for v in values)
        if by_lease and lease in client.leases:
            with self.refused(ProtocolError):
                self.controller.locate(client.record, request)
            return
        if by_lease and lease in client.given_back:
            with self.refused(ProtocolError):
                self.controller.locate(client.record, request)
            client.given_back.remove(lease)
            return
        entries, leased = self.controller.locate(client.record, request)
        assert leased is by_lease
        for entry, value in zip(entries, values, strict=True):
            assert (entry.version, entry.nbytes) == (value.version, len(value.data))
            if value.offset is None or not leased:
                assert entry.data == value.data
                assert entry.grant is None
            else:
                assert entry.data is None
                assert entry.grant == m.Grant(value.volume, 0, value.offset)
        if leased:
            client.leases[lease] = [v if v.offset is not None else None for v in values]
            for value in client.leases[lease]:
                if value is not None:
                    value.pins += 1

    @rule(data=st.data(), remember=st.booleans())
    def release(self, data: st.DataObject, remember: bool) -> None:
        client = self.client(data, having="leases")
        leases = self.ids(data, client.leases)
        self.controller.release(client.record, leases, [], remember=remember)
        for lease in leases:
            if lease in client.leases:
                self.unpin(client.leases.pop(lease))
            elif remember:
                client.given_back.add(lease)

    @rule(data=st.data(), positions=st.lists(st.integers(-2, 4), max_size=5))
    def release_parts(self, data: st.DataObject, positions: list[int]) -> None:
        """Some entries of a lease, also twice, also such as it does not have."""
        client = self.client(data, having="leases")
        parts = [(lease, positions) for lease in self.ids(data, client.leases)]
        self.controller.release(client.record, [], parts)
        for lease, positions in parts:
            held = client.leases.get(lease)
            if held is None:
                continue
            for at in positions:
                if 0 <= at < len(held):
                    self.unpin([held[at]])
                    held[at] = None
            if not any(held):
                del client.leases[lease]

    # ---- keys -------------------------------------------------------------------------------

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=2), strict=st.booleans())
    def delete(self, keys: list[str], strict: bool) -> None:
        missing = [key for key in keys if key not in self.live]
        if strict and missing:
            with self.refused(KeyNotFoundError) as caught:
                self.controller.delete(keys, strict)
            assert caught.value.details["missing"] == missing
            return
        there = {key for key in keys if key in self.live}
        assert self.controller.delete(keys, strict) == len(there)
        for key in there:
            self.live.pop(key).live = False

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True),
        min_version=st.integers(1, 12),
    )
    def wait(self, keys: list[str], min_version: int) -> None:
        fired: list[list[int]] = []
        waiter = self.controller.waiting.add(keys, min_version, fired.append)
        at_once = all(k in self.live and self.live[k].version >= min_version for k in keys)
        assert (waiter is None) is at_once
        assert fired == ([[self.live[k].version for k in keys]] if at_once else [])
        if waiter is not None:
            self.waits.append((waiter, keys, min_version, fired))

    @precondition(lambda self: self.waits)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        wait = data.draw(st.sampled_from(self.waits))
        self.waits.remove(wait)
        if wait[0] is not None:
            self.controller.waiting.forget(wait[0])

    @invariant()
    def waits_are_fulfilled_once_and_in_time(self) -> None:
        for wait in list(getattr(self, "waits", ())):
            _, keys, min_version, fired = wait
            newest = [self.live[k].version if k in self.live else 0 for k in keys]
            if not fired:
                assert min(newest) < min_version
                continue
            # It is fulfilled by the put that was just committed, so nothing has changed since.
            assert fired == [newest]
            assert min(newest) >= min_version
            self.waits.remove(wait)
            self.fulfilled.append(fired)
        assert all(len(fired) == 1 for fired in getattr(self, "fulfilled", ()))

    # ---- memory -----------------------------------------------------------------------------

    @rule(keep=st.sampled_from([0, 4096, 1 << 30]))
    def trim(self, keep: int) -> None:
        """Idle memory goes back to the system; what is in use keeps its bytes (see below)."""
        self.controller.trim(0.0, keep)
        for volume in self.controller.volumes:
            ends = [s.offset + s.taken for s in self.held_in(volume.index) if s.offset is not None]
            assert volume.memory.warm <= -(-max([*ends, keep]) // PAGE) * PAGE

    @invariant()
    def accounts_are_exact(self) -> None:
        if not hasattr(self, "controller"):
            return
        for volume in self.controller.volumes:
            held = self.held_in(volume.index)
            assert volume.used == sum(s.taken for s in held)
            assert volume.inline == sum(s.taken for s in held if s.offset is None)
            assert volume.leased == sum(s.taken for s in held if s.pins)
            unfinished = [s for s in held if s.unfinished and s.offset is not None]
            assert volume.unfinished == sum(s.taken for s in unfinished)
            assert volume.facts().free_bytes == volume.info.capacity_bytes - volume.used
        for client in self.clients:
            record = client.record
            assert set(record.txns) == set(client.txns)
            assert set(record.leases) == set(client.leases)
            assert record.ended_early == client.given_back
            leased = {id(s): s for held in client.leases.values() for s in held if s is not None}
            open_puts = [s for values in client.txns.values() for s in values]
            assert session_bytes(client.record) == (
                sum(len(s.data) for s in leased.values()),
                sum(s.taken for s in open_puts if s.offset is not None),
            )
        self.stored = [s for s in self.stored if s.held]

    @invariant()
    def what_is_held_keeps_its_bytes(self) -> None:
        """Live, leased or unfinished: nobody else has written there."""
        for stored in getattr(self, "stored", ()):
            if stored.held and stored.offset is not None:
                fd = self.controller.volumes[stored.volume].memory.fd
                assert os.pread(fd, len(stored.data), stored.offset) == stored.data

    @invariant()
    def index_agrees(self) -> None:
        if not hasattr(self, "controller"):
            return
        controller = self.controller
        assert set(controller.catalog.newest) == set(self.live)
        assert controller.keys("") == sorted(self.live)
        assert controller.keys("ab") == sorted(k for k in self.live if k.startswith("ab"))
        listed, _, more = inspection.listing(controller.catalog, controller.volumes, "", "")
        assert [(e.key, e.version, e.nbytes) for e in listed] == [
            (k, self.live[k].version, len(self.live[k].data)) for k in sorted(self.live)
        ]
        assert not more
        for key, value in self.live.items():
            found = inspection.stat(controller.catalog, controller.volumes, key)
            assert (found.key, found.version) == (key, value.version)
            assert found.leases == value.pins
            assert found.offset == (-1 if value.offset is None else value.offset)


def first_fits(taken: list[bool], pieces: Sequence[int]) -> list[int] | None:
    """Lowest start for each piece in turn; None if one finds no room."""
    starts: list[int] = []
    for piece in pieces:
        run = 0
        for at, full in enumerate(taken):
            run = 0 if full else run + 1
            if run == piece:
                starts.append(at + 1 - piece)
                taken[at + 1 - piece : at + 1] = [True] * piece
                break
        else:
            return None if piece else [0]
    return starts


ControllerMachine.TestCase.settings = half()
# When it fails, hypothesis takes its time to find a short example.
TestControllerMachine = pytest.mark.timeout(600)(ControllerMachine.TestCase)


# ---- one thing at a time --------------------------------------------------------------------


def put(controller: Controller, session: SessionRecord, txn: int, *items: m.PutItem) -> Any:
    versions, grants = controller.put(session, m.Put(1, txn, list(items)))
    return versions if grants is None else grants


@pytest.fixture
def small() -> Iterator[Controller]:
    with volumes(4096) as records:
        yield Controller(records, Strategy(), prefault=False)


@pytest.mark.parametrize(
    "item",
    [
        placed("a", 0),
        placed("a", -1),
        placed("a", 1 << 60),
        placed("", 1),
        placed("x" * (m.MAX_KEY + 1), 1),
        m.PutItem("a", META, 1, b""),
        m.PutItem("a", META, -1, b""),
        m.PutItem("a", META, 3, b"1234"),
    ],
)
def test_a_put_that_makes_no_sense_changes_nothing(small: Controller, item: m.PutItem) -> None:
    session = small.open_session(facts(), HERE)
    with pytest.raises(ProtocolError):
        put(small, session, 1, inline("b", b"b"), placed("c", 64), item)
    with pytest.raises(ProtocolError, match="at least one item"):
        put(small, session, 1)
    assert not small.catalog.newest
    assert not session.txns
    assert small.volumes[0].used == 0


def test_the_error_of_a_full_store_says_who_holds_what(small: Controller) -> None:
    writer = small.open_session(facts(11), HERE)
    reader = small.open_session(facts(22), HERE)
    put(small, writer, 1, placed("big", 1024))
    small.commit(writer, 1)
    small.locate(reader, m.Locate(1, 5, [m.Want("big")], -1))
    put(small, writer, 2, placed("half", 2000))
    with pytest.raises(StoreFullError) as caught:
        put(small, writer, 3, placed("more", 1100))
    assert caught.value.details == {
        "capacity_bytes": 4096,
        "used_bytes": 1024 + 2048,
        "requested_bytes": 1152,
        "free_bytes": 1024,
        "largest_free_bytes": 1024,
        "leased_bytes": 1024,
        "unfinished_bytes": 2048,
        "holders": [
            {"pid": 11, "leased": 0, "unfinished": 2048},
            {"pid": 22, "leased": 1024, "unfinished": 0},
        ],
        "largest": [["big", 1024]],
        "copies": 1,
        "largest_volume_bytes": 4096,
    }
    for part in ("1,152", "3,072 of 4,096", "pid 22: 1,024", "'big' 1,024"):
        assert part in caught.value.message


def test_an_overwritten_version_lives_as_long_as_its_lease(small: Controller) -> None:
    session = small.open_session(facts(), HERE)
    put(small, session, 1, placed("k", 1000))
    small.commit(session, 1)
    small.locate(session, m.Locate(1, 5, [m.Want("k", 1)], -1))
    put(small, session, 2, placed("k", 1000))
    assert small.commit(session, 2) == [2]
    volume = small.volumes[0]
    assert (volume.used, volume.leased) == (2048, 1024)
    small.release(session, [5], [])
    assert (volume.used, volume.leased) == (1024, 0)
    assert volume.allocator.free_ranges() == [(0, 1024), (2048, 2048)]


def test_a_batch_goes_in_pieces_when_there_is_no_run(small: Controller) -> None:
    session = small.open_session(facts(), HERE)
    put(small, session, 1, *(placed(f"k{i}", 1024) for i in range(4)))
    small.commit(session, 1)
    assert small.delete(["k0", "k2"], strict=True) == 2
    grants = put(small, session, 2, placed("x", 1000), placed("y", 900))
    assert [g.offset for g in grants] == [0, 2048]
    with pytest.raises(StoreFullError):
        put(small, session, 3, placed("w", 1), placed("z", 200))
    assert small.volumes[0].allocator.free_ranges() == [(2048 + 960, 64)]


def test_what_is_given_back_too_early_is_not_begun(small: Controller) -> None:
    """The abort came over the liveness connection, and overtook its put on the channel."""
    session = small.open_session(facts(), HERE)
    put(small, session, 1, inline("k", b"v"), placed("p", 64))
    small.commit(session, 1)
    small.abort(session, [7], remember=True)
    with pytest.raises(ProtocolError, match="put id 7 was aborted before it began"):
        put(small, session, 7, placed("p", 64))
    small.release(session, [8], [], remember=True)
    with pytest.raises(ProtocolError, match="lease id 8 was given back before it began"):
        small.locate(session, m.Locate(1, 8, [m.Want("p")], -1))
    assert (small.volumes[0].unfinished, small.volumes[0].leased) == (0, 0)


def test_what_rides_in_a_reply() -> None:
    """Inline values, in pages if they are many, where they cannot move into the segment (there is
    more than one volume); of others what was asked for, up to half of a frame.
    """
    half = m.MAX_FRAME // 2
    with volumes(4 * half, 4096) as records:
        controller = Controller(records, Strategy(), prefault=False)
        session = controller.open_session(facts(), HERE)
        put(controller, session, 1, inline("k", bytes(m.MAX_INLINE)))
        put(controller, session, 1, placed("large", half + 1))
        controller.commit(session, 1)
        many = [m.Want("k")] * (half // m.MAX_INLINE + 1)
        entries, leased = controller.locate(session, m.Locate(1, 1, many, -1))
        assert all(entry.data == bytes(m.MAX_INLINE) for entry in entries)
        assert not leased
        _, leased = controller.locate(session, m.Locate(1, 1, [m.Want("large")], 1 << 62))
        assert leased
        assert records[0].leased == half + 64


def test_sizes_that_add_up_to_nonsense_are_refused(small: Controller) -> None:
    """What goes into an error must fit the wire's integers."""
    session = small.open_session(facts(), HERE)
    with pytest.raises(ProtocolError):
        put(small, session, 1, *(placed("k", (1 << 60) - 64) for _ in range(20)))
    with pytest.raises(StoreFullError):
        put(small, session, 1, placed("k", (1 << 60) - 64))


async def test_the_next_put_of_the_same_size_finds_warm_memory() -> None:
    mib = 1 << 20
    with volumes(64 * mib) as records:
        ends: list[int] = []
        memory = records[0].memory
        controller = Controller(
            records, Strategy(), warmed=lambda: ends.append(memory.warm), prefault=True
        )
        session = controller.open_session(facts(), HERE)
        put(controller, session, 1, placed("k", 10 * mib))
        controller.commit(session, 1)
        await until(lambda: ends)
        assert memory.warm >= 20 * mib
        assert ends[-1] == memory.warm


def test_a_session_is_remembered_by_a_secret(small: Controller) -> None:
    sessions = [small.open_session(facts(), HERE) for _ in range(50)]
    assert len({s.token for s in sessions}) == 50
    assert all(len(s.token) == 16 for s in sessions)
    for wrong in (b"", b"x", bytes(16), sessions[0].token[:-1]):
        with pytest.raises(StoreClosedError):
            small.join_session(wrong)


def test_versions_go_on_above_everything_that_was_deleted(small: Controller) -> None:
    session = small.open_session(facts(), HERE)
    for expected in (1, 2, 3):
        assert put(small, session, 1, inline("k", b"x")) == [expected]
    small.delete(["k"], strict=True)
    assert put(small, session, 1, inline("k", b"x")) == [4]
    assert put(small, session, 1, inline("new", b"x"))[0] >= 1
    put(small, session, 1, m.PutItem("k", ObjectMeta("msgpack"), 1, b"x"))
    with pytest.raises(VersionGoneError, match="it is at 5 now"):
        small.locate(session, m.Locate(1, 1, [m.Want("k", 3)], -1))


def test_one_put_may_name_a_key_twice(small: Controller) -> None:
    """The last one wins, and the first one's memory comes back."""
    session = small.open_session(facts(), HERE)
    put(small, session, 1, placed("k", 640), placed("k", 64))
    assert small.commit(session, 1) == [1, 2]
    assert small.catalog.newest["k"].nbytes == 64
    assert small.volumes[0].used == 64


def test_deleted_keys_are_remembered_one_by_one_up_to_a_bound(small: Controller) -> None:
    """A key never seen starts at 1, whatever was deleted; only what was forgotten moves that."""
    session = small.open_session(facts(), HERE)
    txn = iter(range(1, 1_000_000))
    for _ in range(100):
        put(small, session, next(txn), inline("a", b"x"))
    small.delete(["a"], True)
    assert put(small, session, next(txn), inline("fresh", b"x")) == [1]
    assert put(small, session, next(txn), inline("a", b"x")) == [101]
    small.delete(["a"], True)
    for i in range(5000):
        put(small, session, next(txn), inline(f"k{i}", b"x"))
        small.delete([f"k{i}"], True)
    assert put(small, session, next(txn), inline("a", b"x"))[0] > 101, "forgotten, never repeated"
