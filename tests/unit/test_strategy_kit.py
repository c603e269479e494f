"""The public kit finds what is wrong with a strategy, and says it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from time import monotonic_ns
from typing import Any

import pytest

from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts
from torchstore_core.testing import StrategyConformance

_count = itertools.count()


class Broken(Strategy, frozen=True, tag="broken"):
    """Wrong in the way that it is told to be."""

    how: Any = ""

    @property
    def copies(self) -> int:
        return 0 if self.how == "copies" else 1

    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        everything = list(range(len(volumes)))
        living = [v.index for v in volumes if not v.lost]
        match self.how:
            case "beyond":
                return [*everything, len(volumes)]
            case "twice":
                return everything * 2
            case "few":
                return living[:1] or [0]
            case "random":
                return everything if next(_count) % 2 else everything[::-1]
            case "hash":
                first = hash(tuple(keys)) % len(volumes)
                return [*everything[first:], *everything[:first]]
            case "clock":
                return everything if time.time() // 60 % 2 else everything[::-1]
            case "uptime":
                return everything if monotonic_ns() // 10**12 % 2 else everything[::-1]
            case "date":
                return everything if datetime.now(UTC).day % 2 else everything[::-1]
            case "seldom":
                return everything if random.random() < 0.99 else everything[::-1]
            case "slow":
                return everything if next(_count) // 10_000 % 2 else everything[::-1]
            case "first key":
                return everything if keys[0] else everything[::-1]
            case "fails":
                raise ZeroDivisionError
            case "changes":
                if isinstance(volumes, list):
                    volumes.clear()
        return everything

    def choose(self, client: ClientFacts, copies: Sequence[VolumeFacts]) -> int:
        if self.how == "choose late":
            return int(time.monotonic() // 60) % len(copies)
        return len(copies) if self.how == "choose" else 0


class Kit(StrategyConformance):
    def __init__(self, how: Any) -> None:
        self._how = how

    def make(self) -> Strategy:
        return Broken(self._how)


LATER = "test_the_answer_is_the_same_later"
PLACES = "test_it_names_volumes_that_are_there_each_once"


@pytest.mark.parametrize(
    ("how", "test", "says"),
    [
        ("beyond", PLACES, "no position in a list"),
        ("twice", PLACES, "one of them twice"),
        ("fails", PLACES, "ZeroDivisionError"),
        ("first key", PLACES, r"keys \[\]\) raised IndexError"),
        ("clock", LATER, "s on"),
        ("uptime", LATER, "s on"),
        ("date", LATER, "s on"),
        ("seldom", LATER, "s on"),
        ("choose late", LATER, "choose gave .* s on"),
        ("slow", LATER, "other questions"),
        ("few", "test_it_names_enough_volumes", "uses_all"),
        ("random", "test_the_same_question_has_the_same_answer", "different answers"),
        ("hash", "test_another_process_gives_the_same_answers", "in another process"),
        ("changes", "test_it_changes_nothing_that_it_is_given", "changed the list"),
        ("copies", "test_copies_and_by_key_make_sense", "an int above 0"),
        ("choose", "test_it_chooses_a_copy_that_is_there", "no position in a list"),
        ([], "test_equal_ones_are_equal_and_can_be_hashed", "use tuples"),
        ("", "test_it_is_found_by_its_name", "no store can find it"),
    ],
)
def test_what_is_wrong_is_found_and_said(how: Any, test: str, says: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=says):
        getattr(Kit(how), test)()
    if how:
        getattr(Kit(""), test)()  # and only that


def test_a_kit_without_make_says_so() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"must define make\(\)"):
        StrategyConformance().test_copies_and_by_key_make_sense()
