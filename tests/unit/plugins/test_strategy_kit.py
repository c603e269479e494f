"""The public kit finds what is wrong with a strategy, and says it."""

from __future__ import annotations

import importlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic_ns
from typing import Any

import pytest
from msgspec.structs import force_setattr

from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts
from torchstore_core.testing import StrategyConformance, strategies

pytestmark = pytest.mark.thorough

# As somebody reads a configuration who has tried it on one machine.
RANK = os.environ.get("RANK_OF_THE_KIT")

_count = itertools.count()
_remembered: dict[tuple[str, ...], int] = {}


class Broken(Strategy, frozen=True, tag="broken"):
    """Wrong in the way that it is told to be."""

    how: Any = ""
    asked: int = 0

    @property
    def copies(self) -> int:
        return 0 if self.how == "copies" else 1

    @property
    def by_key(self) -> bool:
        return self.how == "by_key" and next(_count) % 10 == 9

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
            case "large":
                return everything if nbytes < 1 << 20 else living[:1] or [0]
            case "some sizes":
                return everything if not 1 << 20 < nbytes < 1 << 24 else living[:1] or [0]
            case "env":
                return everything if os.environ.get("NOBODY_HAS_THIS") is None else everything[::-1]
            case "has env":
                return everything if "PATH" in os.environ else everything[::-1]
            case "pid":
                first = os.getpid() % len(volumes)
                return [*everything[first:], *everything[:first]]
            case "remembers":
                first = _remembered.setdefault(tuple(keys), len(volumes)) % len(volumes)
                return [*everything[first:], *everything[:first]]
            case "torch":
                import torch  # noqa: F401 - as somebody does who wants to be quick at import
            case "imports":
                importlib.import_module("reads_environment")
            case "file":
                first = len(Path(__file__).read_bytes()) % len(volumes)
                return [*everything[first:], *everything[:first]]
            case "host name":
                return everything if socket.gethostname() != client.hostname else everything[::-1]
            case "folder":
                first = len(Path.cwd().parts) % len(volumes)
                return [*everything[first:], *everything[:first]]
            case "env at import":
                first = int(RANK or -1) % len(volumes)
                return [*everything[first:], *everything[:first]]
            case "many keys":
                return everything if all(keys.count(key) for key in keys) else everything[::-1]
            case "many volumes":
                return everything if len(volumes) < 100 else [everything["abc"]]  # type: ignore[call-overload]
            case "its own field":
                force_setattr(self, "asked", self.asked + 1)
            case "fails":
                raise ZeroDivisionError
            case "changes":
                if isinstance(volumes, list):
                    volumes.clear()
        return everything

    def place_copy(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        key: str,
        copies: Sequence[int],
    ) -> Sequence[int]:
        others = [at for at in range(len(volumes)) if at not in copies]
        match self.how:
            case "copy beyond":
                return [*others, len(volumes)]
            case "copy twice":
                return others * 2
            case "copy nowhere":
                return []
            case "copy random":
                return others if next(_count) % 2 else others[::-1]
            case "copy first":
                return others if copies[0] else others[::-1]
            case "copy hash":
                first = hash(key) % len(others)
                return [*others[first:], *others[:first]]
            case "copy changes":
                if isinstance(copies, list):
                    copies.append(0)
            case "copy field":
                force_setattr(self, "asked", self.asked + 1)
        return others

    def choose(self, client: ClientFacts, copies: Sequence[VolumeFacts]) -> int:
        if self.how == "choose late":
            return int(time.monotonic() // 60) % len(copies)
        if self.how == "choose pid":
            return os.getpid() % len(copies)
        if self.how == "choose env":
            return len(os.getenv("NOBODY_HAS_THIS", "")) % len(copies)
        return len(copies) if self.how == "choose" else 0


class Kit(StrategyConformance):
    def __init__(self, how: Any) -> None:
        self._how = how

    def make(self) -> Strategy:
        return Broken(self._how)


LATER = "test_the_answer_is_the_same_later"
PLACES = "test_it_names_volumes_that_are_there_each_once"
ENOUGH = "test_it_names_enough_volumes"
ELSEWHERE = "test_another_process_gives_the_same_answers"
COPY = "test_it_names_volumes_for_a_further_copy"
CHANGES = "test_it_changes_nothing_that_it_is_given"
LARGE = "test_it_is_quick_in_a_large_store"
ENVIRONMENT = "test_it_reads_no_environment_variable"


WRONG = [
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
    ("few", ENOUGH, "uses_all"),
    ("large", ENOUGH, "uses_all"),
    ("some sizes", ENOUGH, "5242880 bytes"),
    ("random", "test_the_same_question_has_the_same_answer", "different answers"),
    ("hash", ELSEWHERE, "in another process"),
    ("pid", ELSEWHERE, "place.* in another process"),
    ("choose pid", ELSEWHERE, "choose.* in another process"),
    ("remembers", ELSEWHERE, "asked in another order"),
    ("torch", ELSEWHERE, "imports torch"),
    ("env", ELSEWHERE, "NOBODY_HAS_THIS"),
    ("env", ENVIRONMENT, "NOBODY_HAS_THIS"),
    ("has env", ENVIRONMENT, "PATH"),
    ("choose env", ENVIRONMENT, "NOBODY_HAS_THIS"),
    ("by_key", "test_copies_and_by_key_make_sense", "by_key were .* and then"),
    ("changes", CHANGES, "changed the list"),
    ("its own field", CHANGES, "changed the strategy"),
    ("copy changes", CHANGES, "place_copy.* changed the list"),
    ("copy field", CHANGES, "place_copy changed the strategy"),
    ("copy beyond", COPY, "no position in a list"),
    ("copy twice", COPY, "one of them twice"),
    ("copy nowhere", COPY, "named no volume"),
    ("copy random", COPY, "gave .*, then"),
    ("copy first", COPY, r"beside copies on \[\].* raised IndexError"),
    ("copy hash", ELSEWHERE, "place_copy, beside .* in another process"),
    ("file", ELSEWHERE, "open .*test_strategy_kit.py"),
    ("host name", ELSEWHERE, "socket.gethostname"),
    ("folder", ELSEWHERE, "in another process"),
    ("env at import", ELSEWHERE, "in another process"),
    ("many keys", LARGE, "s of a processor"),
    ("many volumes", LARGE, "raised TypeError"),
    ("copies", "test_copies_and_by_key_make_sense", "an int above 0"),
    ("choose", "test_it_chooses_a_copy_that_is_there", "no position in a list"),
    ([], "test_equal_ones_are_equal_and_can_be_hashed", "use tuples"),
    ("", "test_it_is_found_by_its_name", "no store can find it"),
]


@pytest.mark.parametrize(("how", "test", "says"), WRONG)
def test_what_is_wrong_is_found_and_said(
    how: Any, test: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "RANK", "3")
    with pytest.raises(pytest.fail.Exception, match=says):
        getattr(Kit(how), test)()


@pytest.mark.parametrize("test", sorted({test for how, test, _ in WRONG if how}))
def test_nothing_else_is_found(test: str) -> None:
    getattr(Kit(""), test)()


def test_what_an_import_reads_is_not_what_place_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "reads_environment"
    (tmp_path / f"{name}.py").write_text("import os\nos.environ.get('NOBODY_HAS_THIS')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    Kit("imports").test_it_reads_no_environment_variable()
    assert sys.modules.pop(name, None) is not None


class Misspelt(Strategy, frozen=True, tag="misspelt"):
    def placed(self, client: ClientFacts, volumes: Sequence[VolumeFacts]) -> Sequence[int]:
        return [0]


def test_a_strategy_that_decides_nothing_is_found() -> None:
    class MisspeltKit(StrategyConformance):
        def make(self) -> Strategy:
            return Misspelt()

    with pytest.raises(pytest.fail.Exception, match=r"Misspelt has none of place, .* misspelt"):
        MisspeltKit().test_it_decides_something()


def test_a_kit_without_make_says_so() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"must define make\(\)"):
        StrategyConformance().test_copies_and_by_key_make_sense()


BLOCKING = """
import time
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.testing import StrategyConformance

class Blocking(Strategy, frozen=True, tag="blocking"):
    def place(self, client, volumes, nbytes, keys=()):
        while True:
            time.sleep(0.01)

class TestBlocking(StrategyConformance):
    gives_up_after = 0.1

    def make(self):
        return Blocking()
"""


def test_a_place_that_does_not_return_is_named(tmp_path: Path) -> None:
    """The kit waited for ever, and said nothing."""
    path = tmp_path / "test_blocking.py"
    path.write_text(BLOCKING)
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "-k", "names_enough"]
    command = [sys.executable, "-m", "pytest", *options, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "not done after 0.1 s: Blocking.place has not returned" in done.stdout
    assert "it is at test_blocking.py:" in done.stdout


def test_what_returns_in_time_is_not_interrupted() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with strategies._interrupted(60):
        assert signal.getsignal(signal.SIGUSR2) is not before
    assert signal.getsignal(signal.SIGUSR2) is before
