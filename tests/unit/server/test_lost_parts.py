"""Values with copies, and volumes that are lost: in the controller, against a model."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.unit.server.put_model import reachable

from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts
from torchstore_core.errors import ObjectLostError, PluginError, StoreFullError
from torchstore_core.machine.topology import probe
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.memory.allocator import rounded
from torchstore_core.server.memory.segment import SegmentMemory
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.remote.attached_volume import AttachedHalves
from torchstore_core.server.remote.volume_line import VolumeLine
from torchstore_core.server.serving import inspection
from torchstore_core.values import ObjectMeta, TensorMeta, TensorSlice
from torchstore_core.wire import messages as m
from torchstore_strategies import (
    HashStrategy,
    HostStrategy,
    LocalRankStrategy,
    ReplicatedStrategy,
    SingletonStrategy,
    SpreadStrategy,
)

HERE = probe()
META = ObjectMeta("x")
EVERYTHING = 1 << 40
KEYS = ("a", "b", "c", "d")


@contextmanager
def controller_of(
    strategy: Strategy, *capacities: int, hosts: Sequence[str] = ()
) -> Iterator[Controller]:
    memories = [SegmentMemory(f"test-{i}", nbytes) for i, nbytes in enumerate(capacities)]
    try:
        yield Controller(
            [
                VolumeRecord(
                    m.VolumeInfo(
                        f"test-{i}",
                        i,
                        os.getpid(),
                        msgspec.structs.replace(HERE, host_id=hosts[i] if hosts else "h0"),
                        memory.nbytes,
                        {"shm": b""},
                    ),
                    memory,
                    AttachedHalves(f"test-{i}", VolumeLine()),
                )
                for i, memory in enumerate(memories)
            ],
            strategy,
            prefault=False,
        )
    finally:
        for memory in memories:
            memory.close()


def join(controller: Controller, host: str = "h0", pid: int = 1) -> SessionRecord:
    return controller.open_session(ClientFacts(pid, host, "name"), HERE)


def write(controller: Controller, grants: Sequence[m.Grant | None], contents: list[bytes]) -> None:
    """As a client does: the same contents for each further copy."""
    for grant, data in zip(grants, itertools.cycle(contents), strict=False):
        if grant is not None:
            os.pwrite(controller.volumes[grant.volume].memory.fd, data, grant.offset)


def begin(
    controller: Controller, session: SessionRecord, txn: int, **contents: bytes
) -> list[m.Grant | None]:
    items = [m.PutItem(key, META, len(data)) for key, data in contents.items()]
    _, grants = controller.put(session, m.Put(1, txn, items))
    assert grants is not None
    write(controller, grants, list(contents.values()))
    return grants


def put(controller: Controller, session: SessionRecord, txn: int = 1, **contents: bytes) -> None:
    begin(controller, session, txn, **contents)
    controller.commit(session, txn)


def get(controller: Controller, session: SessionRecord, key: str) -> bytes:
    """As the server reads it."""
    want = m.Locate(1, 1 << 50, [m.Want(key)], EVERYTHING)
    ((entry,), leased) = controller.locate(session, want)
    assert not leased
    assert entry.data is not None
    return entry.data


def grant_of(
    controller: Controller, session: SessionRecord, key: str, avoid: Sequence[int] = ()
) -> m.Grant:
    lease = next(_ids)
    want = m.Locate(1, lease, [m.Want(key)], -1, list(avoid))
    ((entry,), _) = controller.locate(session, want)
    controller.release(session, [lease], [])
    assert entry.grant is not None
    return entry.grant


_ids = itertools.count(1000)


def check_accounts(controller: Controller) -> None:
    """Every count is what the values that somebody holds add up to; no two share memory."""
    values = list({id(v): v for v in reachable(controller)}.values())
    for volume in controller.volumes:
        inline = sum(v.nbytes for v in values if v.data is not None and v.volume == volume.index)
        assert volume.inline == inline
        if volume.lost:
            assert (volume.used, volume.free, volume.leased, volume.unfinished) == (inline, 0, 0, 0)
            continue
        here = [(v, at[1]) for v in values for at in v.places if at[0] == volume.index]
        ranges = sorted((offset, offset + rounded(v.nbytes)) for v, offset in here)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert volume.used == inline + sum(end - start for start, end in ranges)
        assert volume.leased == sum(rounded(v.nbytes) for v, _ in here if v.pins)
        writing = {
            id(v) for s in controller.sessions.values() for t in s.txns.values() for v in t.values
        }
        assert volume.unfinished == sum(rounded(v.nbytes) for v, _ in here if id(v) in writing)
    for value in values:
        assert len({at for at, _ in value.places}) == len(value.places)
        assert not any(controller.volumes[at].lost for at, _ in value.more)


@dataclass(eq=False)
class Known:
    """One put, as the model sees it: what of each key it wrote to which volumes; ``version``: of a
    state dict, 0 of keys by themselves.
    """

    contents: dict[str, bytes]
    places: dict[str, set[int]] = field(default_factory=dict)
    version: int = 0


Strategies = st.sampled_from(
    [
        ReplicatedStrategy(HashStrategy(), 2),
        ReplicatedStrategy(SpreadStrategy(), 3),
        ReplicatedStrategy(SingletonStrategy(), 2),
        HashStrategy(),
        LocalRankStrategy(),
    ]
)


class LosingMachine(RuleBasedStateMachine):
    """Puts, gets, leases and deletes of one client, while one volume after the other is lost."""

    @initialize(
        strategy=Strategies, capacities=st.lists(st.integers(2048, 16384), min_size=4, max_size=4)
    )
    def start(self, strategy: Strategy, capacities: list[int]) -> None:
        hosts = ("h0", "h0", "h1", "h2")
        self.context = controller_of(strategy, *capacities, hosts=hosts)
        self.controller = self.context.__enter__()
        self.session = join(self.controller)
        self.ids = itertools.count(1)
        self.live: dict[str, tuple[Known, bytes]] = {}
        self.overtaken = 0
        self.open: dict[int, Known] = {}
        self.leases: dict[int, list[tuple[m.Grant, bytes]]] = {}

    def teardown(self) -> None:
        if hasattr(self, "context"):
            self.controller.close_session(self.session)
            check_accounts(self.controller)
            self.controller.delete([*KEYS, "sd"], strict=False)
            assert all(v.used == 0 for v in self.controller.volumes)
            self.context.__exit__(None, None, None)

    def is_gone(self, known: Known, key: str) -> bool:
        places = known.places[key.removeprefix("sd/")]
        return bool(places) and all(self.controller.volumes[at].lost for at in places)

    @property
    def living(self) -> list[VolumeRecord]:
        return [v for v in self.controller.volumes if not v.lost]

    @rule(
        sizes=st.dictionaries(st.sampled_from(KEYS), st.integers(1, 1500), min_size=1),
        small=st.booleans(),
        group=st.booleans(),
    )
    def begins(self, sizes: dict[str, int], small: bool, group: bool) -> None:
        """Keys by themselves, or as entries of a state dict."""
        txn = next(self.ids)
        contents = {key: bytes([txn % 251]) * n for key, n in sizes.items()}
        items = [
            m.PutItem(key, META, len(data), data if small and len(data) < 300 else None)
            for key, data in contents.items()
        ]
        before = [v.used for v in self.controller.volumes]
        of = m.Publication("sd", "0", 1) if group else None
        try:
            versions, grants = self.controller.put(self.session, m.Put(1, txn, items, 0, of))
        except StoreFullError as full:
            assert [v.used for v in self.controller.volumes] == before
            copies = self.controller.strategy.copies
            need = sum(rounded(n) for n in sizes.values())
            enough = need + sum(sizes.values())
            room = [v for v in self.living if min(v.free, v.allocator.largest_free) >= enough]
            if len(room) >= min(copies, len(self.living)) > 0:
                raise AssertionError("there is room") from full
            return
        known = Known(contents, {key: set() for key in contents})
        if grants is None:
            assert all(item.data is not None for item in items)
            known.version = versions[0] if group else 0
            self.becomes_visible(known)
            return
        if group:
            known.version = max(self.controller.catalog.histories["sd"].pending)
        placed = [item.key for item in items if item.data is None]
        write(self.controller, grants, [contents[key] for key in placed])
        for key, grant in zip(itertools.cycle(placed), grants, strict=False):
            if grant is not None:
                assert grant.volume not in known.places[key]
                known.places[key].add(grant.volume)
        wanted = min(self.controller.strategy.copies, len(self.living))
        assert {len(known.places[key]) for key in placed} == {wanted}
        assert not any(self.controller.volumes[g.volume].lost for g in grants if g is not None)
        self.open[txn] = known

    @rule(pick=st.integers(0))
    def commits(self, pick: int) -> None:
        if not self.open:
            return
        txn = sorted(self.open)[pick % len(self.open)]
        known = self.open.pop(txn)
        if any(self.is_gone(known, key) for key in known.contents):
            with pytest.raises(ObjectLostError, match="was being put"):
                self.controller.commit(self.session, txn)
            assert txn not in self.session.txns
            return
        versions = self.controller.commit(self.session, txn)
        if known.version:
            assert versions == [known.version]
        self.becomes_visible(known)

    def becomes_visible(self, known: Known) -> None:
        prefix = ""
        if known.version:
            if known.version <= self.overtaken:
                return
            self.overtaken = known.version
            self.deletes_dict()
            prefix = "sd/"
        self.live |= {prefix + key: (known, data) for key, data in known.contents.items()}

    def deletes_dict(self) -> None:
        self.live = {key: one for key, one in self.live.items() if not key.startswith("sd/")}

    @rule()
    def deletes_the_state_dict(self) -> None:
        group = self.controller.catalog.histories.get("sd")
        if group is not None and group.pending:
            self.overtaken = max(self.overtaken, *group.pending)
        self.controller.delete(["sd"], strict=False)
        self.deletes_dict()

    @rule(pick=st.integers(0))
    def aborts(self, pick: int) -> None:
        if self.open:
            txn = sorted(self.open)[pick % len(self.open)]
            del self.open[txn]
            self.controller.abort(self.session, [txn])

    @rule(key=st.sampled_from([*KEYS, "sd/a"]), avoid=st.lists(st.integers(0, 3), max_size=2))
    def leases_one(self, key: str, avoid: list[int]) -> None:
        if key not in self.live:
            return
        known, data = self.live[key]
        lease = next(self.ids)
        request = m.Locate(1, lease, [m.Want(key)], -1, avoid)
        if self.is_gone(known, key):
            with pytest.raises(ObjectLostError):
                self.controller.locate(self.session, request)
            return
        ((entry,), leased) = self.controller.locate(self.session, request)
        if entry.data is not None:
            assert entry.data == data
            return
        assert leased
        assert entry.grant is not None
        places = known.places[key.removeprefix("sd/")]
        alive = {at for at in places if not self.controller.volumes[at].lost}
        assert entry.grant.volume in (alive - set(avoid) or alive)
        self.leases[lease] = [(entry.grant, data)]

    @rule(pick=st.integers(0))
    def releases(self, pick: int) -> None:
        if self.leases:
            lease = sorted(self.leases)[pick % len(self.leases)]
            del self.leases[lease]
            self.controller.release(self.session, [lease], [])

    @rule(key=st.sampled_from(KEYS))
    def deletes(self, key: str) -> None:
        assert self.controller.delete([key], strict=False) == (key in self.live)
        self.live.pop(key, None)

    @rule(index=st.integers(0, 3))
    def loses(self, index: int) -> None:
        self.controller.lose_volume(index, "it burnt")

    @invariant()
    def accounts_are_exact(self) -> None:
        if hasattr(self, "controller"):
            check_accounts(self.controller)

    @invariant()
    def what_has_a_copy_can_be_read(self) -> None:
        for key, (known, data) in getattr(self, "live", {}).items():
            gone = self.is_gone(known, key)
            assert self.controller.exists([key]) == [not gone]
            if gone:
                with pytest.raises(ObjectLostError, match=r"put it\s*again|Put it again"):
                    get(self.controller, self.session, key)
            else:
                assert get(self.controller, self.session, key) == data
        if hasattr(self, "live"):
            entries = any(key.startswith("sd/") for key in self.live)
            assert self.controller.keys("") == sorted([*self.live, *["sd"] * entries])

    @invariant()
    def leased_copies_stay_as_they_are(self) -> None:
        for held in getattr(self, "leases", {}).values():
            for grant, data in held:
                volume = self.controller.volumes[grant.volume]
                if not volume.lost:
                    assert os.pread(volume.memory.fd, len(data), grant.offset) == data


TestLosing = LosingMachine.TestCase


def test_copies_lie_on_different_hosts_first() -> None:
    hosts = ("h0", "h0", "h1", "h1")
    with controller_of(ReplicatedStrategy(copies=3), *[4096] * 4, hosts=hosts) as controller:
        session = join(controller)
        grants = begin(controller, session, 1, k=bytes(100))
        where = [hosts[g.volume] for g in grants if g is not None]
        assert where[0] == "h0"
        assert where[1] == "h1"
        assert len({g.volume for g in grants if g is not None}) == 3


def test_a_get_reads_the_copy_on_its_own_host_unless_it_avoids_it() -> None:
    hosts = ("h0", "h1", "h2")
    with controller_of(ReplicatedStrategy(copies=2), *[4096] * 3, hosts=hosts) as controller:
        put(controller, join(controller), k=bytes(100))
        assert grant_of(controller, join(controller, "h0"), "k").volume == 0
        there = join(controller, "h1")
        assert grant_of(controller, there, "k").volume == 1
        assert grant_of(controller, there, "k", [1]).volume == 0
        assert grant_of(controller, there, "k", [0, 1]).volume == 1, "nothing better"
        assert grant_of(controller, join(controller, "h2"), "k").volume == 0, "the first"


def test_copies_that_do_not_all_fit_change_nothing() -> None:
    with controller_of(ReplicatedStrategy(copies=2), 8192, 4096) as controller:
        session = join(controller)
        with pytest.raises(StoreFullError):
            begin(controller, session, 1, k=bytes(5000))
        check_accounts(controller)
        assert [v.used for v in controller.volumes] == [0, 0]
        controller.lose_volume(1, "gone")  # then there is but one volume to go to
        put(controller, session, k=bytes(5000))


def test_a_copy_that_finds_no_range_gives_the_others_back() -> None:
    with controller_of(ReplicatedStrategy(LocalRankStrategy()), 16384, 8192) as controller:
        session = join(controller, pid=2)
        for name in "abcdefgh":
            put(controller, session, **{name: bytes(1000)})
        controller.delete([*"bdfh"], strict=True)
        assert controller.volumes[1].free == 4096, "in pieces"
        with pytest.raises(StoreFullError):
            begin(controller, session, 1, x=bytes(2000))
        check_accounts(controller)
        put(controller, session, 1, x=bytes(1000))


def test_a_batch_is_spread_by_key_and_a_full_volume_passes_its_keys_on() -> None:
    strategy = HashStrategy()
    with controller_of(strategy, *[4096] * 3) as controller:
        session = join(controller)
        known = [v.facts() for v in controller.volumes]
        names = [f"k{i}" for i in range(30)]
        owner = {n: strategy.place(session.facts, known, 64, (n,))[0] for n in names}
        begin(controller, session, 1, **{n: n.encode() * 8 for n in names})
        controller.commit(session, 1)
        for name in names:
            assert grant_of(controller, session, name).volume == owner[name]
            assert get(controller, session, name) == name.encode() * 8
        alone = next(n for n in names if owner[n] == 1)
        put(controller, session, 2, **{alone: b"again"})
        assert grant_of(controller, session, alone).volume == 1
        check_accounts(controller)
        big = next(
            f"b{i}"
            for i in range(99)
            if strategy.place(session.facts, known, 1, (f"b{i}",))[0] == 1
        )
        put(controller, session, 3, **{big: bytes(controller.volumes[1].free - 64)})
        put(controller, session, 4, **{alone: bytes(500)})
        assert grant_of(controller, session, alone).volume != 1


def test_a_spread_batch_needs_no_volume_that_takes_all_of_it() -> None:
    with controller_of(HashStrategy(), *[64 << 10] * 4) as controller:
        session = join(controller)
        put(controller, session, 1, **{f"k{i}": bytes(2000) for i in range(100)})
        assert sum(v.used for v in controller.volumes) == 100 * rounded(2000)
        check_accounts(controller)


def test_a_lost_key_says_everything_and_can_be_put_again() -> None:
    with controller_of(LocalRankStrategy(), 4096, 4096) as controller:
        session = join(controller, pid=1)
        put(controller, session, k=bytes(500))
        put(controller, session, 2, k=bytes(600))
        put(controller, join(controller, pid=2), 1, other=bytes(10))
        controller.put(session, m.Put(1, 3, [m.PutItem("small", META, 2, b"xy")]))
        controller.lose_volume(1, "process 7 was killed")
        controller.lose_volume(1, "said twice")
        with pytest.raises(ObjectLostError) as caught:
            get(controller, session, "k")
        error = caught.value
        assert error.key == "k"
        for word in ("version 2 of 'k'", "test-1", "process 7 was killed", "ReplicatedStrategy"):
            assert word in error.message
        assert error.details["volume"] == "test-1"
        assert error.details["version"] == 2
        assert get(controller, session, "other") == bytes(10)
        assert get(controller, session, "small") == b"xy", "it lies with the controller"
        assert controller.exists(["k", "other", "small", "none"]) == [False, True, True, False]
        assert controller.keys("") == ["k", "other", "small"]
        found = inspection.stat(controller.catalog, controller.volumes, "k")
        assert "process 7 was killed" in found.lost
        assert not inspection.stat(controller.catalog, controller.volumes, "other").lost
        listed, *_ = inspection.listing(controller.catalog, controller.volumes, "", "")
        assert [bool(one.lost) for one in listed] == [True, False, False]

        seen: list[list[int]] = []
        assert controller.waiting.add(["k"], 1, seen.append) is not None, "not there any more"
        put(controller, session, 5, k=bytes(700))
        assert seen == [[3]]
        assert get(controller, session, "k") == bytes(700)
        assert controller.volumes[1].info.lost == "process 7 was killed"
        assert not controller.volumes[1].info.offers
        assert controller.delete(["k"], strict=True) == 1


def test_a_lost_key_can_be_deleted() -> None:
    with controller_of(SingletonStrategy(), 4096) as controller:
        session = join(controller)
        put(controller, session, k=bytes(64))
        controller.lose_volume(0, "gone")
        assert controller.delete(["k"], strict=True) == 1
        assert controller.keys("") == []
        with pytest.raises(StoreFullError, match="all volumes are lost") as caught:
            begin(controller, session, 2, k=bytes(64))
        assert caught.value.details["lost"] == {"test-0": "gone"}
        check_accounts(controller)


def test_a_strategy_that_names_only_lost_volumes_is_named() -> None:
    with controller_of(SingletonStrategy(), 4096, 4096) as controller:
        session = join(controller)
        controller.lose_volume(0, "gone")
        with pytest.raises(StoreFullError, match="SingletonStrategy"):
            begin(controller, session, 1, k=bytes(64))


@pytest.mark.parametrize("strategy", [HostStrategy(), SpreadStrategy(), HashStrategy()])
def test_puts_go_on_with_the_volumes_that_live(strategy: Strategy) -> None:
    with controller_of(strategy, 4096, 4096, 4096) as controller:
        session = join(controller)
        for index in (1, 0):
            controller.lose_volume(index, "gone")
            for i in range(5):
                put(controller, session, i + 1, **{f"k{i}": bytes(100)})
                assert not controller.volumes[grant_of(controller, session, f"k{i}").volume].lost
        check_accounts(controller)


# ---- versions that several puts make ------------------------------------------------------


def shard(key: str, at: int, count: int) -> m.PutItem:
    part = TensorSlice((at,), (1,), (count,), (count,), (at,))
    return m.PutItem(key, TensorMeta("complex128", (count,)), 16, None, part)


def begin_joint(
    controller: Controller, session: SessionRecord, txn: int, request: m.Put
) -> list[m.Grant | None]:
    _, grants = controller.put(session, request)
    assert grants is not None
    write(controller, grants, [bytes([txn]) * 16])
    return grants


def put_shard(
    controller: Controller, session: SessionRecord, txn: int, at: int, count: int = 2
) -> list[int]:
    begin_joint(controller, session, txn, m.Put(1, txn, [shard("t", at, count)]))
    return controller.commit(session, txn)


def test_a_version_of_which_committed_shards_are_lost_is_lost_for_all_its_participants() -> None:
    """Who put and who did not yet: afterwards their n-th puts still belong together."""
    with controller_of(LocalRankStrategy(), *[4096] * 3) as controller:
        first, second, third = (join(controller, pid=pid) for pid in (3, 4, 5))
        assert put_shard(controller, first, 1, 0, 3) == [1]  # on volume 0
        begin_joint(controller, second, 1, m.Put(1, 1, [shard("t", 1, 3)]))  # on volume 1
        controller.lose_volume(0, "gone")
        with pytest.raises(ObjectLostError, match="before it was whole"):
            controller.commit(second, 1)
        assert not second.txns
        with pytest.raises(ObjectLostError, match="before it was whole"):
            controller.put(third, m.Put(1, 1, [shard("t", 2, 3)]))
        assert controller.catalog.versions("t") == []
        check_accounts(controller)
        sessions = enumerate((first, second, third))
        assert [put_shard(controller, s, 2, at, 3) for at, s in sessions] == [[2], [2], [2]]
        assert controller.catalog.versions("t") == [2]
        check_accounts(controller)


def test_a_lost_version_can_be_put_again_explicitly() -> None:
    with controller_of(LocalRankStrategy(), *[4096] * 2) as controller:
        first, second = join(controller, pid=2), join(controller, pid=3)
        for session, at in ((first, 0), (second, 1)):
            begin_joint(controller, session, 1, m.Put(1, 1, [shard("t", at, 2)], 7))
            if at == 0:
                controller.commit(session, 1)
        controller.lose_volume(0, "gone")
        with pytest.raises(ObjectLostError):
            controller.commit(second, 1)
        for session, at in ((first, 0), (second, 1)):
            begin_joint(controller, session, 2, m.Put(1, 2, [shard("t", at, 2)], 7))
            assert controller.commit(session, 2) == [7]
        assert controller.catalog.versions("t") == [7]
        (sequence,) = controller.catalog.histories["t"].sequences.values()
        assert (sequence.versions, sequence.lost) == ([7], {})


def test_a_put_of_which_only_unwritten_bytes_are_lost_is_undone_and_may_come_again() -> None:
    with controller_of(LocalRankStrategy(), *[4096] * 2) as controller:
        first, second = join(controller, pid=2), join(controller, pid=3)
        begin_joint(controller, first, 1, m.Put(1, 1, [shard("t", 0, 2)]))
        assert put_shard(controller, second, 1, 1) == [1]
        controller.lose_volume(0, "gone")
        with pytest.raises(ObjectLostError, match="was being put"):
            controller.commit(first, 1)
        assert put_shard(controller, first, 2, 0) == [1], "its turn came back"
        assert controller.catalog.versions("t") == [1]
        check_accounts(controller)


def test_with_copies_joint_puts_outlive_a_volume() -> None:
    strategy = ReplicatedStrategy(LocalRankStrategy(), 2)
    with controller_of(strategy, *[4096] * 3, hosts=("a", "b", "c")) as controller:
        first, second = join(controller, pid=3), join(controller, pid=4)
        assert put_shard(controller, first, 1, 0) == [1]
        begin_joint(controller, second, 1, m.Put(1, 1, [shard("t", 1, 2)]))
        controller.lose_volume(1, "gone")
        assert controller.commit(second, 1) == [1]
        ((entry,), _) = controller.locate(first, m.Locate(1, 9, [m.Want("t")], EVERYTHING))
        assert entry.parts is not None
        assert [part.data for part in entry.parts] == [b"\1" * 16, b"\1" * 16]
        check_accounts(controller)
        controller.lose_volume(0, "gone")
        controller.lose_volume(2, "gone")
        with pytest.raises(ObjectLostError):
            controller.locate(first, m.Locate(1, 10, [m.Want("t")], EVERYTHING))
        check_accounts(controller)


def put_state_dict(
    controller: Controller,
    session: SessionRecord,
    txn: int,
    *names: str,
    partial: bool = False,
    commit: bool = True,
) -> None:
    items = [m.PutItem(name, META, 100) for name in names]
    group = m.Publication("sd", "0", 1, partial)
    _, grants = controller.put(session, m.Put(1, txn, items, 0, group))
    assert grants is not None
    write(controller, grants, [f"{name}{txn}".ljust(100).encode() for name in names])
    if commit:
        controller.commit(session, txn)


def fetch(controller: Controller, session: SessionRecord, *names: str) -> list[str]:
    wants = [m.Want(name) for name in names] if names else None
    fetched = controller.fetch(session, m.Fetch(1, next(_ids), "sd", 0, wants, EVERYTHING))
    return [(entry.data or b"").decode().strip() for entry in fetched.entries if entry is not None]


def test_lost_entries_of_a_state_dict_leave_the_others_readable_and_come_back() -> None:
    names = [f"n{i}" for i in range(12)]
    with controller_of(HashStrategy(), *[8192] * 3) as controller:
        session = join(controller)
        put_state_dict(controller, session, 1, *names)
        put_state_dict(controller, session, 2, names[0], partial=True)
        where = {n: grant_of(controller, session, f"sd/{n}").volume for n in names}
        assert set(where.values()) == {0, 1, 2}, "entries are keys, and keys are spread"
        controller.lose_volume(1, "gone")
        gone = [n for n in names if where[n] == 1]
        there = [n for n in names if where[n] != 1]
        with pytest.raises(ObjectLostError, match=f"sd/{gone[0]}") as caught:
            fetch(controller, session)
        assert caught.value.key == f"sd/{gone[0]}"
        with pytest.raises(ObjectLostError):
            fetch(controller, session, there[0], gone[-1])
        expected = [f"{n}{2 if n == names[0] else 1}" for n in there]
        assert fetch(controller, session, *there) == expected
        assert controller.exists(["sd", f"sd/{gone[0]}", f"sd/{there[0]}"]) == [False, False, True]
        # A partial put takes the rest from the version before, lost entries as lost ones.
        put_state_dict(controller, session, 3, there[0], partial=True)
        assert fetch(controller, session, there[0]) == [f"{there[0]}3"]
        with pytest.raises(ObjectLostError):
            fetch(controller, session, gone[0])
        put_state_dict(controller, session, 4, *gone, partial=True)
        assert controller.exists(["sd"]) == [True]
        assert len(fetch(controller, session)) == len(names)
        check_accounts(controller)


def test_a_state_dict_that_loses_bytes_while_it_is_put_is_never_seen() -> None:
    names = [f"n{i}" for i in range(12)]
    with controller_of(HashStrategy(), *[8192] * 3) as controller:
        session = join(controller)
        put_state_dict(controller, session, 1, *names)
        put_state_dict(controller, session, 2, *names, commit=False)
        controller.lose_volume(2, "gone")
        with pytest.raises(ObjectLostError):
            controller.commit(session, 2)
        assert controller.catalog.newest_version("sd") == 1
        check_accounts(controller)


class Odd(Strategy, frozen=True, tag="odd"):
    """Says what it is told to."""

    chosen: int = 0
    amount: int = 2

    @property
    def copies(self) -> int:
        return self.amount

    def choose(self, client: ClientFacts, copies: Sequence[VolumeFacts]) -> int:
        if self.chosen == 99:
            raise LookupError("no idea")
        return self.chosen


@pytest.mark.parametrize(
    ("chosen", "says"), [(2, "chose copy 2 of 2"), (-1, "chose copy -1"), (99, "no idea")]
)
def test_a_strategy_that_chooses_nonsense_is_named_and_nothing_is_leased(
    chosen: int, says: str
) -> None:
    with controller_of(Odd(chosen), 4096, 4096) as controller:
        session = join(controller)
        put(controller, session, k=bytes(100))
        with pytest.raises(PluginError, match=says) as caught:
            grant_of(controller, session, "k")
        assert "Odd" in caught.value.message
        assert not session.leases
        assert not any(value.pins for value in reachable(controller))
        check_accounts(controller)


def test_copies_below_one_are_an_error_of_the_strategy() -> None:
    with controller_of(Odd(amount=0), 4096, 4096) as controller, pytest.raises(PluginError):
        begin(controller, join(controller), 1, k=bytes(10))


@pytest.mark.parametrize("key", ["w", ""])
def test_the_error_of_a_value_that_is_named_at_last_has_that_name(key: str) -> None:
    """It had the name that the value was given while it had none, which is nobody's business."""
    with controller_of(SingletonStrategy(), 1 << 20) as controller:
        session = join(controller)
        hidden = f"{m.HIDDEN}allocated-1"
        begin(controller, session, 1, **{hidden: bytes(4096)})
        controller.lose_volume(0, "its process has ended")
        with pytest.raises(ObjectLostError, match="what was being put to") as caught:
            controller.seal(session, m.Seal(1, 1, key, 7, 8, ""))
        assert caught.value.key == (key or "an object")
        assert hidden not in caught.value.message
