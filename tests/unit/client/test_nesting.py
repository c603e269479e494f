"""Nested state dicts as flat names, and back."""

from __future__ import annotations

import enum
import time
import types
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import assume, given
from tests.trees import assert_same, state_dicts

import torchstore_core as ts
from torchstore_core.clients.state_dicts.ties import Ties
from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.nesting import flatten, replace, unflatten

T = torch.ones(1)


def _names(state_dict: Any) -> list[str]:
    return [leaf.name for leaf in flatten("k", state_dict)]


def _again(state_dict: Any) -> dict[str, Any]:
    return unflatten("k", ((x.name, x.path, x.value) for x in flatten("k", state_dict)))


def _flat(state_dict: Any) -> Any:
    """The leaves, unless two of them have one name."""
    try:
        return flatten("k", state_dict)
    except ts.UnsupportedValueError as error:
        assert "two entries are named" in str(error)  # noqa: PT017 - any other one is a failure
        assume(False)


# ---- there and back -----------------------------------------------------------------------


@given(state_dicts())
def test_unflatten_is_the_inverse_of_flatten(state_dict):
    leaves = _flat(state_dict)
    assert max(Counter(leaf.name for leaf in leaves).values(), default=1) == 1
    assert_same(unflatten("k", ((x.name, x.path, x.value) for x in leaves)), state_dict)


@given(state_dicts())
def test_replacing_every_leaf_replaces_exactly_the_leaves(state_dict):
    leaves = _flat(state_dict)
    assert replace(state_dict, leaves, lambda _name, value: value) is state_dict
    new = {leaf.name: f"new {leaf.name}" for leaf in leaves}
    got = replace(state_dict, leaves, lambda name, _value: new[name])
    assert got is state_dict
    assert_same(got, unflatten("k", ((x.name, x.path, new[x.name]) for x in leaves)))


def test_dicts_are_followed_and_sequences_if_there_are_tensors_in_them():
    state_dict = {
        "w": T,
        "module": {"w": T, "step": 3, "deep": {7: T, "x": None}},
        "list": [T, {"lr": 0.1, "state": T}, (T, 5)],
        "numbers": [1, 2, {"a": 3}],
        "pair": (1, "x"),
        "hyper": {"betas": (0.9, 0.99), "lr": 1e-3},
        5: T,
    }
    assert _names(state_dict) == [
        "w",
        "module.w",
        "module.step",
        "module.deep.7",
        "module.deep.x",
        "list.0",
        "list.1.lr",
        "list.1.state",
        "list.2.0",
        "list.2.1",
        "numbers",
        "pair",
        "hyper.betas",
        "hyper.lr",
        "5",
    ]
    assert_same(_again(state_dict), state_dict)


def test_empty_containers_are_values():
    state_dict = {"d": {}, "l": [], "t": (), "n": None, "in": {"d": {}, "l": [T, [], {}, ()]}}
    assert _names(state_dict) == [
        "d",
        "l",
        "t",
        "n",
        "in.d",
        "in.l.0",
        "in.l.1",
        "in.l.2",
        "in.l.3",
    ]
    assert_same(_again(state_dict), state_dict)
    assert _names({}) == []
    assert _again({}) == {}


def test_mappings_of_any_kind_are_followed():
    state_dict = OrderedDict(a=types.MappingProxyType({"b": T}), c=Counter({"x": 2}))
    assert _names(state_dict) == ["a.b", "c.x"]
    assert_same(_again(state_dict), {"a": {"b": T}, "c": {"x": 2}})


def test_a_dict_with_other_names_is_one_value_unless_it_holds_tensors():
    plain = {"lookup": {(1, 2): "x", None: "y"}, "flags": {True: 1}}
    assert _names(plain) == ["lookup", "flags"]
    assert_same(_again(plain), plain)
    for name in ((1, 2), None, True, 1.5, b"b"):
        with pytest.raises(
            ts.UnsupportedValueError, match="names of entries in 'lookup' are str or int"
        ):
            flatten("k", {"lookup": {name: T}})


def test_the_member_of_an_enum_is_the_name_it_is_equal_to():
    class Part(str, enum.Enum):  # noqa: UP042 - str() of a StrEnum would be right anyway
        ACTOR = "actor"

    state_dict = {Part.ACTOR: T, "in": {Part.ACTOR: 5, "w": T}}
    leaves = flatten("k", state_dict)
    assert [leaf.name for leaf in leaves] == ["actor", "in.actor", "in.w"]
    assert {type(leaf.name) for leaf in leaves} == {str}
    replace(state_dict, leaves, lambda _name, value: 6 if value == 5 else value)
    assert state_dict == {Part.ACTOR: T, "in": {Part.ACTOR: 6, "w": T}}


def test_only_what_is_not_its_own_name_has_a_path():
    leaves = flatten("k", {"a.b": T, "c": {"d": T}, 5: T})
    assert [bool(leaf.path) for leaf in leaves] == [False, True, True]


# ---- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state_dict", "name"),
    [
        ({"a": {"b": T}, "a.b": T}, "a.b"),
        ({1: T, "1": T}, "1"),
        ({"l": [T, T], "l.1": 5}, "l.1"),
        ({"l": {0: T, "0": T}}, "l.0"),
        ({"a.b": {"c": 1}, "a": {"b.c": 2}}, "a.b.c"),
    ],
)
def test_two_entries_of_one_name_are_refused(state_dict, name):
    with pytest.raises(ts.UnsupportedValueError) as caught:
        flatten("k", state_dict)
    assert str(caught.value) == f"'k': two entries are named {name!r}"
    assert caught.value.key == "k"


def test_a_clash_among_many_entries_is_found_quickly():
    many = {f"layer.{i}": T for i in range(50_000)}
    with pytest.raises(ts.UnsupportedValueError, match=r"'layer\.49999'"):
        flatten("k", {**many, "layer": {49_999: T}})


def test_names_that_cannot_be():
    for wrong in ({"": T}, {b"w": T}, {None: T}, {True: T}, {(1,): T}, {1 << 70: T}):
        with pytest.raises(ts.UnsupportedValueError, match="name"):
            flatten("k", wrong)
    with pytest.raises(ts.UnsupportedValueError, match="name"):
        flatten("k", {"a": {"\ud800": T}})


@pytest.mark.parametrize("wrong", [None, 5, "name", [T], T, (("a", T),)], ids=repr)
def test_only_a_dict_is_a_state_dict(wrong):
    with pytest.raises(ts.UnsupportedValueError, match="a state dict is a dict of names"):
        flatten("k", wrong)


def test_endless_nesting_is_refused():
    deep: Any = {"w": T}
    for _ in range(63):
        deep = {"x": deep}
    assert _names(deep) == ["x." * 63 + "w"]
    with pytest.raises(ts.UnsupportedValueError, match="nested deeper than 64"):
        flatten("k", {"x": deep})


def test_what_contains_itself_is_refused_and_says_where():
    circle: dict[str, Any] = {"w": T}
    circle["self"] = circle["again"] = circle
    with pytest.raises(
        ts.UnsupportedValueError, match=r"'k': the state dict contains itself, at 'self': .*leave"
    ):
        flatten("k", circle)
    inner: list[Any] = [T]
    inner.append({"back": inner})
    for sd, where in (({"a": {"b": inner}}, "a.b"), ({"b": T, "a": [T, inner]}, "a.1")):
        message = f"what is at '{where}' contains itself, at '{where}.1.back'"
        with pytest.raises(ts.UnsupportedValueError, match=message):
            flatten("k", sd)
    twice = {"w": T}
    assert _names({"a": twice, "b": {"c": twice}}) == ["a.w", "b.c.w"]


def test_a_value_that_contains_itself_many_times_is_looked_into_once():
    """Following every way through it would take 2^64 steps."""
    shared: Any = []
    for _ in range(60):
        shared = [shared, shared]
    assert _names({"plain": shared}) == ["plain"]
    endless: list[Any] = []
    endless += [endless, endless]
    assert _names({"endless": endless}) == ["endless"]


@pytest.mark.parametrize(
    "entries",
    [
        [("a", b"", 1), ("a.b", msgspec.msgpack.encode(["a", "b"]), 2)],
        [("a.b", msgspec.msgpack.encode(["a", "b"]), 2), ("a", b"", 1)],
        [
            ("l.0", msgspec.msgpack.encode(["l", [0, 0]]), 1),
            ("l.1", msgspec.msgpack.encode(["l", 1]), 2),
        ],
        [("a", b"\xc1", 1)],
        [("a", msgspec.msgpack.encode({"a": 1}), 1)],
        [("a", msgspec.msgpack.encode([]), 1), ("a", b"", 2)],
    ],
    ids=["inside", "around", "two kinds", "no msgpack", "no path", "twice"],
)
def test_entries_that_contradict_each_other_are_no_state_dict(entries):
    """Two participants that nest differently, or a broken client: nothing is lost in silence."""
    with pytest.raises((ts.LayoutMismatchError, ts.ProtocolError), match="'k'"):
        unflatten("k", iter(entries))


def test_an_empty_container_gives_way_to_what_others_have_in_it():
    """A rank without optimizer state, say, beside one that has some."""
    inner = ("opt.s", msgspec.msgpack.encode(["opt", "s"]), 1)
    for entries in ([("opt", b"", {}), inner], [inner, ("opt", b"", {})]):
        assert unflatten("k", iter(entries)) == {"opt": {"s": 1}}
    first = ("l.0", msgspec.msgpack.encode(["l", [0, 0]]), 5)
    assert unflatten("k", iter([("l", b"", []), first])) == {"l": [5]}
    assert unflatten("k", iter([("opt", b"", {})])) == {"opt": {}}


# ---- replacing ----------------------------------------------------------------------------


def test_containers_stay_the_same_objects_but_for_what_cannot_change():
    Pair = namedtuple("Pair", "weight step")
    inner, members = {"step": 1, "w": T}, [T, 2]
    plain, pair = (T, 3), Pair(T, 4)
    fixed = types.MappingProxyType({"w": T, "step": 5})
    state_dict = OrderedDict(inner=inner, list=members, tuple=plain, pair=pair, fixed=fixed, s=6)
    leaves = flatten("k", state_dict)
    got = replace(
        state_dict, leaves, lambda _name, value: value + 10 if type(value) is int else value
    )
    assert got is state_dict
    assert got["inner"] is inner
    assert inner == {"step": 11, "w": T}
    assert got["list"] is members
    assert members == [T, 12]
    assert got["tuple"] == (T, 13)
    assert got["pair"] == Pair(T, 14)
    assert type(got["pair"]) is Pair
    assert got["fixed"] == {"w": T, "step": 15}
    assert got["s"] == 16
    untouched = {"t": plain}
    replace(untouched, flatten("k", untouched), lambda _name, value: value)
    assert untouched["t"] is plain


def test_a_leaf_is_not_taken_for_a_container_of_the_same_name():
    """The entries are ``a.b`` and ``a.b.c``; the dict at ``a``, ``b`` is neither."""
    state_dict = {"a.b": 1, "a": {"b": {"c": 2}}, "l": [1, 2], "l.0": 3}
    new = {"a.b": 10, "a.b.c": 20, "l.0": 30}
    got = replace(state_dict, flatten("k", state_dict), lambda n, value: new.get(n, value))
    assert got == {"a.b": 10, "a": {"b": {"c": 20}}, "l": [1, 2], "l.0": 30}


# ---- containers in several places ---------------------------------------------------------


@pytest.fixture
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sixteenth of the limit takes a sixteenth of the time, on the same way."""
    monkeypatch.setattr(nesting, "_MAX_AGAIN", 1 << 12)


def _graph(levels: int, kind: str, leaf: Any) -> Any:
    """``2 ** levels`` leaves, of few containers."""
    for _ in range(levels):
        leaf = {
            "dict": {"a": leaf, "b": leaf},
            "list": [leaf, leaf],
            "tuple": (leaf, leaf),
            "mixed": {"a": [leaf], "b": (leaf, 1)},
        }[kind]
    return leaf


@pytest.mark.parametrize("kind", ["dict", "list", "tuple", "mixed"])
@pytest.mark.parametrize("leaf", [T, [0] * 1000 + [T]], ids=["tensor", "list"])
@pytest.mark.parametrize("levels", [17, pytest.param(30, marks=pytest.mark.soak)])
def test_shared_containers_of_too_many_entries_are_refused_at_once(
    kind, leaf, levels, few_places: None
):
    _are_refused(kind, leaf, levels)


def test_shared_containers_of_a_billion_entries_are_refused_at_once():
    _are_refused("mixed", T, 30)


def _are_refused(kind: str, leaf: Any, levels: int) -> None:
    before = time.process_time()
    graph = _graph(levels, kind, leaf)
    for use in (
        lambda: flatten("k", {"w": graph}),
        lambda: ts.TorchStoreStateDict.from_state_dict({"w": graph}),
    ):
        with pytest.raises(ts.UnsupportedValueError, match="in so many places"):
            use()
    assert time.process_time() - before < 5


def test_shared_containers_without_tensors_are_one_value():
    graph = _graph(30, "tuple", 1)
    assert _names({"a": graph, "b": [graph]}) == ["a", "b"]


@pytest.mark.parametrize("kind", ["dict", "list", "tuple", "mixed"])
def test_some_shared_containers_are_fine(kind):
    group = {"lr": 0.1, "betas": (0.9, 0.95), "state": [T, T]}
    state_dict = {"w": _graph(6, kind, T), "groups": [group] * 1000}
    assert_same(_again(state_dict), state_dict)


def test_containers_made_on_the_fly_are_no_shared_ones(few_places: None):
    """Their ids are those of others, once they are gone."""

    class Lazy(dict):
        def items(self):
            return [(str(i), [T, T]) for i in range(5000)]

        def values(self):
            return [[T, T]]

    assert len(_names(Lazy({"a": 1}))) == 10_000
    assert len(_names({"n": Lazy({"a": 1})})) == 10_000


# ---- tied weights -------------------------------------------------------------------------


def test_many_views_of_one_place_are_told_apart_in_linear_time():
    base = torch.zeros(20_000)
    views = [base[:i] for i in range(1, 20_000)]
    before = time.process_time()
    ties = Ties()
    assert [ties.find(view, at) for at, view in enumerate(views)] == [None] * len(views)
    assert [ties.find(base[: at + 1], -1) for at in (0, 1, 77, 19_998)] == [0, 1, 77, 19_998]
    assert time.process_time() - before < 2


def test_ties_of_shards_with_lists_in_their_slices():
    shards = [
        ts.TensorShard(T, ts.TensorSlice(offsets, (1,), (2,)))  # type: ignore[arg-type]
        for offsets in ([0], [0], (0,), [1])
    ]
    ties = Ties()
    assert [ties.find(shard, at) for at, shard in enumerate(shards)] == [None, 0, None, None]
