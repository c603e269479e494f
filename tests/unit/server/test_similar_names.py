"""Names like one that does not exist: few are looked at, however many there are."""

from __future__ import annotations

from typing import Any

import pytest

from torchstore_core import moments
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.server.index.key_names import KeyNames
from torchstore_core.server.index.records import Manifest, Stored, Value
from torchstore_core.server.index.similar_names import SimilarNames, similar_names
from torchstore_core.values import ObjectMeta

ME = ClientFacts(1, "h", "h")


def value(key: str) -> Value:
    return Value(key, ObjectMeta("x"), 1, 0, None, 0, ME)


class _Counting(dict[str, Stored]):
    looked = 0

    def get(self, *args: Any) -> Any:
        self.looked += 1
        return super().get(*args)


@pytest.mark.parametrize("count", [10, 100_000])
def test_the_time_does_not_depend_on_how_many_there_are(count: int) -> None:
    newest = _Counting({key: value(key) for key in (f"step-{at:06}" for at in range(count))})
    names = KeyNames(newest)
    names.add(list(newest))
    assert similar_names(names, newest, "step-00000b")[0].startswith("step-00000")
    assert similar_names(names, newest, "step-000005/" * 10 + "x") == []
    assert newest.looked < 100


def test_of_a_large_state_dict_the_neighbours_are_looked_at() -> None:
    entries = {
        f"layers.{at:04}.experts.{which}": value("sd") for at in range(2000) for which in "ab"
    }
    newest: dict[str, Stored] = {"sd": Manifest("sd", dict(entries), {}, ME, 1, 0.0)}
    names = KeyNames(newest)
    names.add(["sd"])
    assert similar_names(names, newest, "sd/layers.1234.expert.a")[0] == "sd/layers.1234.experts.a"
    assert similar_names(names, newest, "layers.1999.experts.b") == ["sd/layers.1999.experts.b"]


def test_they_are_looked_for_some_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is asked for what it does not have answers as soon as before."""
    newest: dict[str, Stored] = {"weight": value("weight")}
    names = KeyNames(newest)
    names.add(["weight"])
    similar, now = SimilarNames(names, newest), 100.0
    monkeypatch.setattr(moments, "monotonic", lambda: now)
    assert [similar.of("wieght") for _ in range(100)].count(["weight"]) == 32
    now += 0.9
    assert similar.of("wieght") == []
    now += 0.2
    assert similar.of("wieght") == ["weight"]
