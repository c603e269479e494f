"""Where a put goes, and which copy a get reads."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts
from torchstore_core.plugins import Registry
from torchstore_strategies import HostStrategy, LocalRankStrategy, SingletonStrategy

HOSTS = ("h0", "h1", "h2")
Volumes = st.lists(
    st.tuples(st.sampled_from(HOSTS), st.integers(0, 1000)), min_size=1, max_size=9
).map(
    lambda some: [VolumeFacts(f"v{i}", i, host, 1000, free) for i, (host, free) in enumerate(some)]
)
Rank = st.none() | st.integers(0, 100_000)
Clients = st.builds(
    ClientFacts, st.integers(1, 1 << 22), st.sampled_from(HOSTS), st.just("name"), Rank, Rank
)


def client(*, pid: int = 7, host: str = "h0", **ranks: int) -> ClientFacts:
    return ClientFacts(pid, host, "name", **ranks)


def volumes(*hosts: str) -> list[VolumeFacts]:
    return [VolumeFacts(f"v{i}", i, host, 1000, 1000) for i, host in enumerate(hosts)]


@pytest.mark.parametrize("strategy", [LocalRankStrategy(), HostStrategy(), Strategy()])
@given(Clients, Volumes, st.integers(0, 1 << 40))
def test_every_volume_is_tried_once(
    strategy: Strategy, who: ClientFacts, where: list[VolumeFacts], nbytes: int
) -> None:
    """So a put fails only when no volume has room."""
    assert sorted(strategy.place(who, where, nbytes)) == list(range(len(where)))


@pytest.mark.parametrize("strategy", [LocalRankStrategy(), HostStrategy()])
@given(Clients, Volumes)
def test_a_copy_on_the_clients_host_is_read_if_there_is_one(
    strategy: Strategy, who: ClientFacts, copies: list[VolumeFacts]
) -> None:
    chosen = copies[strategy.choose(who, copies)]
    assert (chosen.host_id == who.host_id) is any(v.host_id == who.host_id for v in copies)


@given(Clients, Volumes, st.integers(0, 1 << 40))
def test_singleton_uses_the_first_volume_alone(
    who: ClientFacts, where: list[VolumeFacts], nbytes: int
) -> None:
    assert list(SingletonStrategy().place(who, where, nbytes)) == [0]


def test_local_rank_gives_each_rank_its_own_volume() -> None:
    four = volumes("h0", "h0", "h0", "h0")
    place = LocalRankStrategy().place
    assert [place(client(rank=r), four, 1)[0] for r in range(6)] == [0, 1, 2, 3, 0, 1]
    assert list(place(client(rank=2), four, 1)) == [2, 3, 0, 1]


def test_local_rank_asks_for_rank_first() -> None:
    """LOCAL_RANK repeats on every host; RANK does not."""
    place = LocalRankStrategy().place
    eight = volumes(*["h0"] * 4, *["h1"] * 4)
    assert place(client(rank=5, local_rank=1), eight, 1)[0] == 5
    assert place(client(rank=0, local_rank=3), eight, 1)[0] == 0
    assert place(client(local_rank=3), eight, 1)[0] == 3
    assert place(client(pid=14), eight, 1)[0] == 6


@given(Clients, Volumes, st.integers(0, 1 << 40))
def test_host_stays_on_the_host_and_fills_evenly(
    who: ClientFacts, where: list[VolumeFacts], nbytes: int
) -> None:
    order = [where[i] for i in HostStrategy().place(who, where, nbytes)]
    here = [v for v in order if v.host_id == who.host_id]
    assert order[: len(here)] == here
    for group in (here, order[len(here) :]):
        free = [v.free_bytes for v in group]
        assert free == sorted(free, reverse=True)


@pytest.mark.parametrize(
    ("name", "cls"),
    [("singleton", SingletonStrategy), ("local-rank", LocalRankStrategy), ("host", HostStrategy)],
)
def test_they_are_plug_ins_and_cross_processes_as_data(name: str, cls: type[Strategy]) -> None:
    assert Registry().strategy(name) is cls
    made = cls()
    assert msgspec.json.decode(msgspec.json.encode(made), type=cls) == made
    assert msgspec.json.decode(b"{}", type=cls) == made
    with pytest.raises(AttributeError):
        made.extra = 1  # type: ignore[attr-defined]
