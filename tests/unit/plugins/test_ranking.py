"""Who moves the bytes: bids, a cost model, and the user's word."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec
from torchstore_core.errors import ConfigurationError
from torchstore_core.machine.topology import probe
from torchstore_core.plugins.ranking import Policy, Ranking, rank

HERE = probe()
ELSEWHERE = msgspec.structs.replace(HERE, host_id="another", hostname=HERE.hostname)
SAME = LinkContext(HERE, HERE, same_host=True, offered=False)
LARGE = 1 << 62


def spec(name: str, answer: Bid | Refusal, **fields: object) -> TransportSpec:
    """A transport that always answers the same; with halves unless it is in-band."""
    halves = {} if fields.get("in_band") else {"client": "x:X", "server": "x:Y"}
    return TransportSpec(name, bid=lambda context: answer, **(halves | fields))  # type: ignore[arg-type]


def bid(latency_s: float, bytes_per_s: float) -> Bid:
    return Bid(latency_s, bytes_per_s, "because")


def ranked(*specs: TransportSpec, policy: Policy | None = None) -> Ranking:
    return rank(specs, SAME, {s.name: b"" for s in specs}, policy or Policy())


def names(ranking: Ranking, nbytes: int, in_band: bool | None = None) -> list[str]:
    return [c.spec.name for c in ranking.order(nbytes, in_band=in_band)]


@dataclasses.dataclass(frozen=True)
class Some:
    """A generated transport."""

    name: str
    latency_s: float
    bytes_per_s: float
    in_band: bool
    max_bytes: int | None

    def make(self) -> TransportSpec:
        return spec(
            self.name,
            bid(self.latency_s, self.bytes_per_s),
            in_band=self.in_band,
            max_bytes=self.max_bytes,
        )


Names = ("a", "b", "c", "d", "e")
Any_ = st.builds(
    Some,
    st.sampled_from(Names),
    st.just(0.0) | st.floats(0, 1e-2),
    st.floats(1e6, 1e12),
    st.booleans(),
    st.none() | st.integers(0, 1 << 24),
)
Several = st.lists(Any_, max_size=5, unique_by=lambda s: s.name)
Preferred = st.lists(st.sampled_from(Names), max_size=2, unique=True).map(tuple)
Sizes = st.integers(0, 1 << 21) | st.integers(0, 1 << 40)


@given(Several, Preferred, Sizes)
def test_the_cheapest_that_takes_it_wins(some: list[Some], prefer: tuple[str, ...], n: int) -> None:
    ranking = ranked(*(s.make() for s in some), policy=Policy(prefer=prefer))
    fit = [s for s in some if s.max_bytes is None or n <= s.max_bytes]
    wanted = [s for s in fit if s.name in prefer] or fit
    assert set(names(ranking, n)) == {s.name for s in fit}
    if not fit:
        return
    best = ranking.order(n)[0]
    assert best.spec.name in {s.name for s in wanted}
    assert best.cost_s(n) == min(s.latency_s + n / s.bytes_per_s for s in wanted)
    assert best.preferred is (best.spec.name in prefer)


@given(Several, Preferred, Sizes)
def test_the_order_is_by_cost_preferred_ones_first(
    some: list[Some], prefer: tuple[str, ...], n: int
) -> None:
    ranking = ranked(*(s.make() for s in some), policy=Policy(prefer=prefer))
    order = ranking.order(n)
    keys = [(not c.preferred, c.cost_s(n)) for c in order]
    assert keys == sorted(keys)
    in_band = names(ranking, n, in_band=True)
    out = names(ranking, n, in_band=False)
    assert [c.spec.name for c in order if c.spec.in_band] == in_band
    assert [c.spec.name for c in order if not c.spec.in_band] == out


@given(Several, Preferred, st.lists(Sizes, min_size=1, max_size=20))
def test_up_to_inline_max_and_no_further_values_ride_in_the_message(
    some: list[Some], prefer: tuple[str, ...], sizes: list[int]
) -> None:
    """Where one in-band transport and others without limits compete, as always so far."""
    in_band = [s for s in some if s.in_band]
    assume(len(in_band) <= 1)
    some = [s if s.in_band else dataclasses.replace(s, max_bytes=None) for s in some]
    # A faster in-band transport would win again for large sizes.
    assume(all(o.bytes_per_s > i.bytes_per_s for i in in_band for o in some if not o.in_band))
    ranking = ranked(*(s.make() for s in some), policy=Policy(prefer=prefer))
    limit = ranking.inline_max()
    for n in (*sizes, *(x for x in (limit - 1, limit, limit + 1) if 0 <= x < LARGE)):
        order = ranking.order(n)
        assert bool(order and order[0].spec.in_band) is (n <= limit)


def test_the_crossover_is_where_the_costs_meet() -> None:
    inline = spec("inline", bid(0.0, 1e9), in_band=True, max_bytes=1 << 20)
    link = spec("link", bid(100e-6, 10e9))
    ranking = ranked(inline, link)
    expected = 100e-6 / (1 / 1e9 - 1 / 10e9)
    assert ranking.inline_max() == pytest.approx(expected, abs=1)
    assert (names(ranking, 1)[0], names(ranking, 1 << 20)[0]) == ("inline", "link")


def test_inline_max_at_its_edges() -> None:
    inline = spec("inline", bid(0.0, 1e9), in_band=True, max_bytes=4096)
    link = spec("link", bid(0.0, 1e9))
    assert ranked().inline_max() == -1
    assert ranked(link).inline_max() == -1
    assert ranked(inline).inline_max() == 4096
    slow = spec("slow", bid(1.0, 1e6))
    assert ranked(inline, slow).inline_max() == 4096
    assert ranked(inline, slow, policy=Policy(prefer=("slow",))).inline_max() == -1
    assert ranked(inline, link, policy=Policy(prefer=("inline",))).inline_max() == 4096
    unlimited = spec("u", bid(0.0, 1e12), in_band=True)
    assert ranked(unlimited, slow).inline_max() >= LARGE - 1


def test_a_preferred_one_wins_whatever_it_bids_for_what_it_takes() -> None:
    fast, slow = spec("fast", bid(0.0, 1e12)), spec("slow", bid(1.0, 1.0), max_bytes=100)
    ranking = ranked(fast, slow, policy=Policy(prefer=("slow", "missing")))
    assert names(ranking, 100) == ["slow", "fast"]
    assert names(ranking, 101) == ["fast"]


def test_equal_bids_have_one_order_in_every_process() -> None:
    specs = [spec(name, bid(1e-6, 1e9)) for name in "cab"]
    assert names(ranked(*specs), 10) == names(ranked(*specs[::-1]), 10) == ["a", "b", "c"]


# ---- refusals -------------------------------------------------------------------------------


def test_every_refusal_is_kept_with_its_reason() -> None:
    asked: list[str] = []

    def never(context: LinkContext) -> Bid:
        asked.append("bid")
        return bid(0, 1)

    specs = [
        TransportSpec("blocked", bid=never, client="x:X"),
        TransportSpec("absent", bid=never, client="x:X"),
        TransportSpec("unusable", bid=never, client="x:X", probe=lambda: "no such device"),
        spec("elsewhere", Refusal("another host")),
        TransportSpec("fine", bid=lambda c: bid(0, 1), client="x:X", probe=lambda: None),
    ]
    offers = dict.fromkeys(("blocked", "unusable", "elsewhere", "fine"), b"")
    ranking = rank(specs, SAME, offers, Policy(block=("blocked",)))
    assert names(ranking, 5) == ["fine"]
    assert asked == []
    assert ranking.refusals == {
        "blocked": "blocked by configuration",
        "absent": "the volume does not offer it (not installed there, or refused)",
        "unusable": "no such device",
        "elsewhere": "another host",
    }


def fails(*_: object) -> Bid:
    raise OSError("no such device")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            TransportSpec("bad", bid=fails, in_band=True),
            "its bid failed: OSError('no such device')",
        ),
        (
            TransportSpec("bad", bid=lambda c: bid(0, 1), probe=fails, in_band=True),
            "its bid failed: OSError('no such device')",
        ),
        (spec("bad", bid(0.0, 0.0)), "makes no sense"),
        (spec("bad", bid(-1.0, 1e9)), "makes no sense"),
        (spec("bad", bid(math.nan, 1e9)), "makes no sense"),
        (spec("bad", None), "its bid failed"),  # type: ignore[arg-type]
    ],
)
def test_a_transport_that_answers_nonsense_spoils_no_other(made: TransportSpec, says: str) -> None:
    ranking = ranked(made, spec("good", bid(1.0, 1.0)))
    assert names(ranking, 1 << 20) == ["good"]
    assert says in ranking.refusals["bad"]


def test_a_bid_is_made_from_the_facts_of_the_link() -> None:
    seen: list[LinkContext] = []

    def look(context: LinkContext) -> Bid:
        seen.append(context)
        return bid(0, 1)

    context = LinkContext(HERE, ELSEWHERE, same_host=False, offered=False)
    rank([TransportSpec("a", bid=look, client="x:X")], context, {"a": b"x", "z": b""}, Policy())
    rank([TransportSpec("in", bid=look, in_band=True)], context, {}, Policy())
    offered, in_band = seen
    assert offered == LinkContext(HERE, ELSEWHERE, same_host=False, offered=True, offer=b"x")
    assert in_band == context


def test_the_error_names_who_refused_and_why() -> None:
    small = spec("small", bid(0, 1), max_bytes=10)
    ranking = ranked(
        spec("far", Refusal("the volume is on another host")),
        spec("unwanted", bid(0, 1)),
        small,
        policy=Policy(block=("unwanted",)),
    )
    said = ranking.unavailable(11)
    for part in (
        "11 bytes",
        "far: the volume is on another host",
        "unwanted: blocked by configuration",
        "small: takes at most 10 bytes",
    ):
        assert part in said.message
    assert said.details == {
        "refusals": {
            "far": "the volume is on another host",
            "unwanted": "blocked by configuration",
        },
        "nbytes": 11,
    }
    assert ranking.order(10)[0].spec is small


def test_where_nothing_is_installed_the_error_says_that() -> None:
    assert "none is installed" in ranked().unavailable(1).message


def test_a_dropped_transport_is_never_chosen_again() -> None:
    inline = spec("inline", bid(0.0, 1e9), in_band=True, max_bytes=1 << 20)
    ranking = ranked(inline, spec("one", bid(1e-6, 1e12)), spec("two", bid(1e-3, 1e10)))
    before = ranking.inline_max()
    ranking.drop("one", "its link failed: cable")
    assert names(ranking, 1 << 30) == ["two"]
    assert ranking.refusals == {"one": "its link failed: cable"}
    assert ranking.inline_max() > before  # the alternative costs more now
    ranking.drop("two", "it too")
    assert ranking.inline_max() == 1 << 20
    why = "one: its link failed: cable; two: it too"
    assert why in ranking.unavailable(1 << 30).message
    ranking.drop("two", "again")  # not there any more
    assert names(ranking, 1) == ["inline"]


# ---- the user's word ------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["prefer", "block"])
def test_arguments_come_before_the_environment(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = f"TORCHSTORE_{field.upper()}"
    monkeypatch.delenv("TORCHSTORE_BLOCK", raising=False)
    assert getattr(Policy.unchecked(), field) == ()
    assert getattr(Policy.unchecked(**{field: ["x"]}), field) == ("x",)
    monkeypatch.setenv(variable, " tcp, shm ,,rdma,")
    assert getattr(Policy.unchecked(), field) == ("tcp", "shm", "rdma")
    assert getattr(Policy.unchecked(**{field: ["shm", "x"]}), field) == ("shm", "x", "tcp", "rdma")
    other = {"prefer": "block", "block": "prefer"}[field]
    assert getattr(Policy.unchecked(), other) == ()
    monkeypatch.setenv(variable, "")
    assert getattr(Policy.unchecked(), field) == ()


def test_what_is_both_preferred_and_blocked_is_blocked() -> None:
    ranking = ranked(spec("a", bid(0, 1)), policy=Policy(prefer=("a",), block=("a",)))
    assert names(ranking, 1) == []
    assert ranking.refusals == {"a": "blocked by configuration"}


def test_a_bids_cost_is_latency_and_bytes() -> None:
    assert bid(2e-3, 1e9).cost_s(0) == 2e-3
    assert math.isclose(bid(2e-3, 1e9).cost_s(10**9), 1.002)


# ---- the word of the store's strategy -------------------------------------------------------


def test_a_forced_transport_is_the_only_one() -> None:
    fast, slow = spec("fast", bid(0.0, 1e12)), spec("slow", bid(1.0, 1.0), max_bytes=100)
    inline = spec("inline", bid(0.0, 1e12), in_band=True)
    ranking = ranked(fast, slow, inline, policy=Policy(prefer=("fast",)).with_transport("slow"))
    assert names(ranking, 10) == ["slow"]
    assert ranking.inline_max() == -1, "small values, too"
    assert ranking.forced == "slow"
    why = "the store's strategy forces transport 'slow'"
    assert ranking.refusals == {"fast": why, "inline": why}
    assert "'slow', which the store's strategy forces" in ranking.unavailable(101).message


def test_the_users_choice_is_stronger_than_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """But what fits into a control message still rides in one."""
    fast, slow = spec("fast", bid(0.0, 1e12)), spec("slow", bid(1.0, 1.0), max_bytes=100)
    inline = spec("inline", bid(0.0, 1.0), in_band=True)
    monkeypatch.setenv("TORCHSTORE_TRANSPORT", "slow")
    policy = Policy.unchecked(prefer=("fast",)).with_transport("fast")
    ranking = ranked(fast, slow, inline, policy=policy)
    assert sorted(names(ranking, 10)) == ["inline", "slow"]
    assert ranking.order(10, in_band=False)[0].spec.name == "slow"
    assert ranking.refusals == {"fast": "TORCHSTORE_TRANSPORT forces transport 'slow'"}
    alone = ranked(fast, policy=policy)
    assert alone.order(1) == []
    assert "which TORCHSTORE_TRANSPORT forces" in alone.unavailable(1).message


def test_of_a_forced_transport_the_error_says_why_that_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = [spec(name, bid(0.0, 1e12)) for name in ("aaa", "zzz")]
    inline = spec("inline", bid(0.0, 1e12), in_band=True, max_bytes=10)
    for name, why in {
        "odd": "odd: no such card",
        "little": "little: takes at most 10 bytes",
        "inline": "inline: carries only what fits into a control message",
    }.items():
        monkeypatch.setenv("TORCHSTORE_TRANSPORT", name)
        odd, little = spec("odd", Refusal("no such card")), spec("little", bid(1, 1), max_bytes=10)
        ranking = ranked(*others, inline, odd, little, policy=Policy.unchecked())
        said = ranking.unavailable(11)
        assert f"({why}). " in said.message
        assert "or choose another one with TORCHSTORE_TRANSPORT" in said.message
        assert {"aaa", "zzz"} <= said.details["refusals"].keys()


def test_a_choice_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSTORE_TRANSPORT", "carrier-pigeon")
    with pytest.raises(
        ConfigurationError,
        match=r"carrier-pigeon.*TORCHSTORE_TRANSPORT|TORCHSTORE_TRANSPORT.*carrier-pigeon",
    ):
        Policy.make()


def test_the_summary_names_the_carrier_and_how_to_choose() -> None:
    ranking = ranked(spec("fast", bid(0.0, 1e12)), spec("slow", bid(1.0, 1.0)))
    text = ranking.summary(1)
    assert text.startswith("fast (")
    assert "then slow" in text
    assert "TORCHSTORE_TRANSPORT" in text
    assert ranked().summary(1) == "no transport reaches the volume"


@pytest.mark.parametrize(
    ("block", "says"), [(("a",), "a: blocked by configuration"), ((), "a: not installed here")]
)
def test_a_forced_transport_that_is_not_there_is_an_error(
    block: tuple[str, ...], says: str
) -> None:
    ranking = ranked(spec("b", bid(0, 1)), policy=Policy(block=block).with_transport("a"))
    said = ranking.unavailable(1)
    assert says in said.message
    assert said.details["forced"] == "a"
    assert ranked(policy=Policy()).forced is None


def test_a_strategy_prefers_in_its_order_after_what_the_user_prefers() -> None:
    some = [spec(name, bid(float(ord(name)), 1e9)) for name in "abcde"]
    policy = Policy(prefer=("e",), block=("b",)).with_transport(("d", "none-such", "b", "c"))
    assert names(ranked(*some, policy=policy), 1) == ["e", "d", "c", "a"]
    preferred = [c.preferred for c in ranked(*some, policy=policy).order(1)]
    assert preferred == [True, True, True, False]
    assert names(ranked(*some, policy=Policy().with_transport(None)), 1) == list("abcde")
