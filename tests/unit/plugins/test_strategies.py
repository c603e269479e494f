"""Where a put goes, and which copy a get reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstore_core.contracts.runtime import StoreOptions
from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts
from torchstore_core.errors import ConfigurationError, PluginError
from torchstore_core.plugins.registry import Registry
from torchstore_core.plugins.strategy_data import (
    check_transport,
    decode_strategy,
    encode_strategy,
    plain_options,
)
from torchstore_core.server.__main__ import ProcessOptions
from torchstore_strategies import (
    HashStrategy,
    HostStrategy,
    LocalRankStrategy,
    ReplicatedStrategy,
    SingletonStrategy,
    SpreadStrategy,
)

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


@pytest.mark.parametrize(
    "strategy",
    [
        LocalRankStrategy(),
        HostStrategy(),
        Strategy(),
        HashStrategy(),
        SpreadStrategy(),
        ReplicatedStrategy(SingletonStrategy()),
        ReplicatedStrategy(HashStrategy(), 3),
    ],
)
@given(Clients, Volumes, st.integers(0, 1 << 40))
def test_every_volume_is_tried_once(
    strategy: Strategy, who: ClientFacts, where: list[VolumeFacts], nbytes: int
) -> None:
    """So a put fails only when no volume has room."""
    assert sorted(strategy.place(who, where, nbytes)) == list(range(len(where)))


@pytest.mark.parametrize(
    "strategy", [LocalRankStrategy(), HostStrategy(), HashStrategy(), ReplicatedStrategy()]
)
@given(Clients, Volumes)
def test_a_copy_on_the_clients_host_is_read_if_there_is_one(
    strategy: Strategy, who: ClientFacts, copies: list[VolumeFacts]
) -> None:
    chosen = copies[strategy.choose(who, copies)]
    assert (chosen.host_id == who.host_id) is any(v.host_id == who.host_id for v in copies)


@pytest.mark.parametrize("strategy", [ReplicatedStrategy(), ReplicatedStrategy(HashStrategy(), 3)])
@given(Clients, Volumes, st.integers(0, 1000), st.sets(st.integers(0, 8)))
def test_a_copy_is_made_again_on_the_host_with_the_fewest(
    strategy: Strategy, who: ClientFacts, where: list[VolumeFacts], nbytes: int, copies: set[int]
) -> None:
    there = [at for at in sorted(copies) if at < len(where)]
    order = strategy.place_copy(who, where, nbytes, "w", there)
    assert sorted(order) == list(range(len(where)))
    room = [v for v in where if v.free_bytes >= nbytes and v.index not in there]
    on_host = Counter(where[at].host_id for at in there)
    if room:
        assert on_host[where[order[0]].host_id] == min(on_host[v.host_id] for v in room)
    assert strategy.place_copy(who, where, nbytes, "w", ()) == strategy.place(
        who, where, nbytes, ["w"]
    )


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
    [
        ("singleton", SingletonStrategy),
        ("local-rank", LocalRankStrategy),
        ("host", HostStrategy),
        ("hash", HashStrategy),
        ("spread", SpreadStrategy),
        ("replicated", ReplicatedStrategy),
    ],
)
def test_they_are_plug_ins_and_cross_processes_as_data(name: str, cls: type[Strategy]) -> None:
    assert Registry().strategy(name) is cls
    made = cls()
    assert encode_strategy(made)[0] == name
    assert decode_strategy(*encode_strategy(made), Registry()) == made
    assert decode_strategy(name, b"{}", Registry()) == made
    with pytest.raises(AttributeError):
        made.extra = 1  # type: ignore[attr-defined]


# ---- hash ---------------------------------------------------------------------------------


def owners(where: Sequence[VolumeFacts], keys: Sequence[str]) -> dict[str, str]:
    return {key: where[HashStrategy().place(client(), where, 1, [key])[0]].id for key in keys}


def test_hash_spreads_keys_evenly() -> None:
    keys = [f"model/layers.{i}.weight" for i in range(4000)]
    for count in (2, 3, 8):
        found = Counter(owners(volumes(*["h"] * count), keys).values())
        assert len(found) == count
        assert all(abs(n - 4000 / count) < 5 * (4000 / count) ** 0.5 for n in found.values())


def test_without_a_volume_only_its_keys_move() -> None:
    keys = [f"k{i}" for i in range(2000)]
    five = volumes(*["h"] * 5)
    before, after = owners(five, keys), owners(five[:4], keys)
    moved = [key for key in keys if before[key] != after[key]]
    assert moved == [key for key in keys if before[key] == "v4"]
    assert len({after[key] for key in moved}) == 4, "to all of the others"


def test_a_lost_volume_keeps_its_rank() -> None:
    """The controller skips it, and the next in rank is the same for everybody."""
    four = volumes(*["h"] * 4)
    lost = [msgspec.structs.replace(v, lost=v.index == 1, free_bytes=0) for v in four]
    place = HashStrategy().place
    assert all(
        place(client(), four, 1, [f"k{i}"]) == place(client(), lost, 1, [f"k{i}"])
        for i in range(50)
    )


@given(Clients, Clients, Volumes, st.text(), st.integers(0, 1 << 40))
def test_hash_asks_for_nothing_but_the_key(
    one: ClientFacts, other: ClientFacts, where: list[VolumeFacts], key: str, nbytes: int
) -> None:
    place = HashStrategy().place
    emptier = [msgspec.structs.replace(v, free_bytes=0) for v in where]
    assert place(one, where, nbytes, [key]) == place(other, emptier, 0, [key, "other"])


def test_the_hash_does_not_change_between_releases() -> None:
    """Or the keys of a running job would be looked for elsewhere."""
    four = volumes(*["h"] * 4)
    assert [HashStrategy().place(client(), four, 1, [k])[0] for k in "abcdef"] == [0, 3, 1, 1, 2, 3]


# ---- replicated ---------------------------------------------------------------------------


@given(Clients, Volumes, st.integers(0, 1200))
def test_the_first_copies_are_on_different_hosts(
    who: ClientFacts, where: list[VolumeFacts], nbytes: int
) -> None:
    order = [where[i] for i in ReplicatedStrategy(LocalRankStrategy()).place(who, where, nbytes)]
    able = [v for v in order if v.free_bytes >= nbytes]
    assert order[: len(able)] == able, "those that can take it come first"
    hosts = {v.host_id for v in able}
    assert len({v.host_id for v in able[: len(hosts)]}) == len(hosts)


@given(Clients, Volumes)
def test_the_first_copy_is_where_the_base_says(who: ClientFacts, where: list[VolumeFacts]) -> None:
    for base in (LocalRankStrategy(), HostStrategy(), SpreadStrategy()):
        assert ReplicatedStrategy(base).place(who, where, 0)[0] == base.place(who, where, 0)[0]


def test_replicated_passes_on_what_its_base_says() -> None:
    made = ReplicatedStrategy(HashStrategy(transport=("a", "b")), copies=3)
    assert (made.copies, made.by_key, made.transport) == (3, True, ("a", "b"))
    assert ReplicatedStrategy(HashStrategy(transport="a"), transport="b").transport == "b"
    assert (HashStrategy().copies, HostStrategy().by_key) == (1, False)


class Doubled(Strategy, frozen=True, tag="doubled"):
    """Makes copies by itself."""

    @property
    def copies(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"copies": 0}, "at least 1, not 0"),
        ({"copies": "2"}, "whole number and at least 1, not '2'"),
        ({"copies": 2.0}, "whole number"),
        ({"copies": True}, "whole number"),
        ({"base": "hash"}, r"ReplicatedStrategy\(HashStrategy\(\)\), not 'hash'"),
        ({"base": HashStrategy}, "base is a strategy"),
        ({"base": None}, "base is a strategy"),
        ({"base": ReplicatedStrategy(HashStrategy(), 3)}, "makes copies itself"),
        ({"base": ReplicatedStrategy(copies=1)}, "makes copies itself"),
        ({"base": Doubled()}, "makes copies itself"),
    ],
)
def test_replicated_refuses_what_makes_no_sense(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        ReplicatedStrategy(**fields)


# ---- as data ------------------------------------------------------------------------------


def test_nested_strategies_cross_processes_as_data() -> None:
    nested = Several(
        maybe=ReplicatedStrategy(HashStrategy(transport="shm"), 4, transport="x"), transport="y"
    )
    name, fields = encode_strategy(nested)
    made = decode_strategy(name, fields, Known())
    assert made == nested
    assert type(made.maybe.base) is HashStrategy  # type: ignore[attr-defined]
    assert hash(made.maybe) == hash(nested.maybe)  # type: ignore[attr-defined]


class Several(Strategy, frozen=True, tag="several"):
    """One with strategies in all the ways that a field may have them."""

    all_of: tuple[Strategy, ...] = ()
    maybe: Strategy | None = None
    exactly: HashStrategy = HashStrategy()
    numbers: dict[str, tuple[int, float]] = {}  # noqa: RUF012 - msgspec copies it
    raw: bytes = b""


class Picky(Strategy, frozen=True, tag="picky"):
    """Checks itself, and raises what it likes."""

    def __post_init__(self) -> None:
        raise AttributeError("not today")


class Known(Registry):
    def strategy(self, name: str) -> type[Strategy]:
        known: dict[str, type[Strategy]] = {"several": Several, "picky": Picky}
        return known[name] if name in known else super().strategy(name)


@pytest.mark.parametrize(
    "made",
    [
        Several(),
        Several(all_of=(HostStrategy(), ReplicatedStrategy(HashStrategy()))),
        Several(maybe=Several(maybe=SpreadStrategy(transport=("a",)))),
        Several(exactly=HashStrategy(transport="q"), numbers={"a": (1, 2.5)}, raw=b"\x00\xff"),
    ],
)
def test_all_kinds_of_fields_come_back(made: Strategy) -> None:
    assert decode_strategy(*encode_strategy(made), Known()) == made


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("none-such", b"{}", "no strategy is called 'none-such'"),
        ("hash", b"{", "bad fields"),
        ("hash", b"[]", "bad fields"),
        ("hash", b'{"colour": 1}', "it has no 'colour'"),
        ("hash", b'{"transport": 1}', "bad fields"),
        ("replicated", b'{"copies": 0}', "at least 1"),
        ("replicated", b'{"base": {"type": "replicated"}}', "makes copies itself"),
        ("picky", b"{}", "not today"),
        ("replicated", b'{"base": {}}', "without its name"),
        ("replicated", b'{"base": {"type": "none-such"}}', "none-such"),
        ("replicated", b'{"base": {"type": "hash", "x": 1}}', "it has no 'x'"),
        ("replicated", b'{"base": 5}', "bad fields"),
        ("several", b'{"exactly": {"type": "host"}}', "HostStrategy is no HashStrategy"),
    ],
)
def test_bad_fields_are_named(name: str, fields: bytes, says: str) -> None:
    with pytest.raises(PluginError, match=says):
        decode_strategy(name, fields, Known())


class Untagged(Strategy, frozen=True):
    """Without a name."""


class Unplain(Strategy, frozen=True, tag="unplain"):
    """With something that is no data."""

    what: object = None


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (Untagged(), "with a tag"),
        (Strategy(), "with a tag"),
        (3, "derived from Strategy"),
        (HashStrategy, "derived from Strategy"),
        (Unplain(what=object()), "plain data"),
    ],
)
def test_what_is_no_plain_strategy_does_not_leave(made: object, says: str) -> None:
    with pytest.raises(PluginError, match=says):
        encode_strategy(made)


# ---- transports ---------------------------------------------------------------------------


@pytest.mark.parametrize("transport", [5, "", ("shm", ""), ("shm", None), b"shm"])
def test_a_transport_is_a_name_or_some(transport: Any) -> None:
    strategy = HashStrategy(transport=transport)
    for check in (encode_strategy, lambda s: check_transport(s, Registry())):
        with pytest.raises(ConfigurationError, match="it is the name of a transport"):
            check(strategy)


def test_a_transport_that_nobody_has_is_refused() -> None:
    for transport in ("nonsense", ("shm", "nonsense")):
        with pytest.raises(
            ConfigurationError, match=r"HashStrategy: no.* is called 'nonsense' \(.*inline.*, shm"
        ):
            check_transport(HashStrategy(transport=transport), Registry())
    with pytest.raises(ConfigurationError, match="'nonsense'"):
        check_transport(ReplicatedStrategy(HashStrategy(transport="nonsense")), Registry())
    with pytest.raises(ConfigurationError, match=r"'shm' \(installed: none\)"):
        check_transport(HashStrategy(transport="shm"), Registry([]))


def test_transports_that_are_installed_are_not_refused() -> None:
    """Blocked ones neither: who blocks one wants the strategy to do without it."""
    for transport in (None, (), "shm", ("inline", "shm")):
        check_transport(HashStrategy(transport=transport), Registry(block=["shm"]))
    check_transport(None, Registry())


# ---- a store's options --------------------------------------------------------------------


def test_options_are_plain_data_that_a_server_takes() -> None:
    """All of them, those included that there will be: a server has a field for each."""
    given = StoreOptions("s", 2, ReplicatedStrategy(copies=2), capacity=7, block=("tcp",))
    plain = {**plain_options(given), "keeper": True}  # None is for the runtime to decide
    assert plain.keys() == {*StoreOptions.__struct_fields__, "strategy_fields"}
    assert plain.keys() - {*ProcessOptions.__struct_fields__} == {"timeout"}
    made = msgspec.convert(msgspec.to_builtins(plain), ProcessOptions)
    assert (made.store_name, made.num_storage_volumes, made.capacity) == ("s", 2, 7)
    assert made.block == ("tcp",)
    assert decode_strategy(made.strategy, made.strategy_fields, Registry()) == given.strategy


def test_the_default_strategy_is_left_to_the_server() -> None:
    assert not {"strategy", "strategy_fields"} & plain_options(StoreOptions("s")).keys()
