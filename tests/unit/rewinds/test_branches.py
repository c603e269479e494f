"""What becomes of runs that are about to go back: requests that make no sense, shortage, and
volumes that are lost.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.server.test_controller import HERE, facts, volumes

from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import ProtocolError, VersionGoneError
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.gone import evictions
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.index.timelines import Timelines
from torchstore_core.values import ObjectMeta, TensorMeta, TensorSlice
from torchstore_core.wire import messages as m

META = ObjectMeta("msgpack")
ROWS = TensorMeta("uint8", (4,))


@pytest.fixture
def controller() -> Iterator[Controller]:
    with volumes(8192) as records:
        made = Controller(records, Strategy(), prefault=False)
        yield made
        for session in [*made.sessions.values()]:
            made.close_session(session)
        made.delete(["k"], strict=False)
        assert made.volumes[0].allocator.used == 0 or made.volumes[0].lost
        assert made.volumes[0].inline == 0


def client(controller: Controller, number: int) -> SessionRecord:
    return controller.open_session(facts(number), HERE)


def put(
    controller: Controller,
    session: SessionRecord,
    version: int,
    *,
    who: int = 0,
    of: int = 1,
    nbytes: int = 0,
    rewind: bool = False,
    commit: bool = True,
    partial: bool = False,
) -> list[int]:
    kind = m.Rewind if rewind else m.Put
    group = m.Publication("k", str(who), of, partial, 3)
    item = m.PutItem(f"e{who}", META, nbytes or 1, None if nbytes else b"x")
    txn = 100 * version + who + 1
    versions, grants = controller.put(session, kind(1, txn, [item], version, group))
    if grants is not None and commit:
        return controller.commit(session, txn)
    return versions


def pending(controller: Controller) -> list[tuple[int, list[str]]]:
    return [(one.version, one.committed) for one in controller.catalog.pending("k")]


def test_a_rewind_without_a_version_is_refused(controller: Controller) -> None:
    session = client(controller, 1)
    item = m.PutItem("k", META, 1, b"x")
    for version in (0, -1, 1 << 63):
        with pytest.raises(ProtocolError, match="is no version"):
            controller.put(session, m.Rewind(1, 1, [item], version))
    assert not controller.catalog.histories


def test_a_run_that_starts_again_finds_nothing_of_the_one_that_died(controller: Controller) -> None:
    for version in (1, 2, 3):
        put(controller, client(controller, 0), version)
    died = client(controller, 1)
    assert put(controller, died, 2, who=0, of=2, rewind=True) == [2]
    controller.close_session(died)
    assert pending(controller) == [(2, ["0"])]
    again = [client(controller, 2), client(controller, 3)]
    put(controller, again[1], 2, who=1, of=2, rewind=True)
    assert pending(controller) == [(2, ["1"])]
    assert controller.catalog.versions("k") == [1, 2, 3]
    put(controller, again[0], 2, who=0, of=2, rewind=True)
    assert controller.catalog.versions("k") == [1, 2]


def test_living_runs_of_another_size_do_not_meet(controller: Controller) -> None:
    first, second = client(controller, 1), client(controller, 2)
    put(controller, first, 2, of=2, rewind=True)
    with pytest.raises(VersionGoneError, match="another layout"):
        put(controller, second, 2, of=3, rewind=True)
    put(controller, second, 3, of=3, rewind=True)  # whichever is whole first
    assert pending(controller) == [(2, ["0"]), (3, ["0"])]
    put(controller, first, 2, who=1, of=2, rewind=True)
    assert pending(controller) == []
    assert controller.catalog.versions("k") == [2]


def test_a_branch_of_dead_processes_makes_room(controller: Controller) -> None:
    session = client(controller, 0)
    put(controller, session, 1, nbytes=2048)
    died = client(controller, 1)
    put(controller, died, 1, of=2, nbytes=4096, rewind=True)
    controller.close_session(died)
    put(controller, session, 2, nbytes=4096)
    assert pending(controller) == []
    assert not controller.catalog.histories["k"].branches
    assert controller.catalog.versions("k") == [1, 2]


def test_a_branch_outlives_what_is_remembered_of_its_evicted_key(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evictions, "_MAX_REMEMBERED", 1)
    session = client(controller, 0)

    def put_evictable(txn: int, *items: m.PutItem) -> None:
        controller.put(session, m.Put(1, txn, [*items], when_full=m.EVICTABLE))
        controller.commit(session, txn)

    put_evictable(1, m.PutItem("k", META, 4160))
    put_evictable(2, m.PutItem("a", META, 4160))
    put(controller, session, 1, of=2, rewind=True)
    put_evictable(3, m.PutItem("b", META, 4160))
    assert list(controller.catalog.evictions.remembered) == ["a"]
    assert put(controller, session, 1, who=1, of=2, rewind=True) == [1]
    assert controller.catalog.versions("k") == [1]
    controller.delete(["b"], strict=True)


def test_a_branch_on_a_lost_volume_is_lost(controller: Controller) -> None:
    session = client(controller, 0)
    put(controller, session, 3)
    put(controller, session, 2, of=2, nbytes=64, rewind=True)
    controller.lose_volume(0, "it was unplugged")
    assert pending(controller) == []
    assert not controller.catalog.histories["k"].branches
    assert controller.catalog.versions("k") == [3]


def shard(at: int, extent: int, coordinate: tuple[int, int]) -> m.PutItem:
    part = TensorSlice((at,), (extent,), (4,), (2, 2), coordinate)
    return m.PutItem("k", ROWS, extent, bytes(extent), part)


def test_a_replica_that_is_late_belongs_to_what_others_have_made(controller: Controller) -> None:
    """The shards of the first replica cover the tensor."""
    sessions = [client(controller, number) for number in range(4)]
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]

    def all_put(version: int, number: int, *, rewind: bool = False) -> list[int]:
        kind = m.Rewind if rewind else m.Put
        item = shard(2 * places[number][1], 2, places[number])
        put = kind(1, 7, [item], version)
        return controller.put(sessions[number], put)[0]

    for version in (5, 6):
        for number in range(4):
            assert all_put(version, number) == [version]
    for number in range(2):
        all_put(4, number, rewind=True)
    assert controller.catalog.versions("k") == [4]
    last = controller.catalog.timelines.last
    late = [all_put(4, number, rewind=True) for number in (2, 3)]
    assert [[*versions] for versions in late] == [[4], [4]]
    assert {versions.timelines[0] for versions in late} == {last}  # type: ignore[attr-defined]
    assert controller.catalog.timelines.last == last
    for number in (2, 3, 0, 1):  # and nobody is refused
        assert all_put(5, number) == [5]
    assert controller.catalog.versions("k") == [5]


def test_many_rewinds_forget_the_oldest_on_the_safe_side() -> None:
    timelines = Timelines()
    for number in range(1, 2000):
        timelines.rewound("k", 10 * number, timelines.begin(), used=10 * number + 5)
    for number in range(1990, 2000):
        assert timelines.of("k", 10 * number + 3) == number
    assert timelines.of("k", 15) > 1  # no ref has it
    assert timelines.of("k", 5) == 0
    assert timelines.forget("k") == 19995
    assert timelines.of("k", 15) == 0
