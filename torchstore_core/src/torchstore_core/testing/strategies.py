"""The requirements for strategies, as tests: subclass them and override ``make``."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import linecache
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import msgspec
import pytest

from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts
from torchstore_core.errors import PluginError
from torchstore_core.plugins.registry import Registry
from torchstore_core.plugins.strategy_data import decode_strategy, encode_strategy
from torchstore_core.server.stalled_loop import module_of, place_of

__all__ = ["StrategyConformance"]

T = TypeVar("T")

_GIB = 1 << 30
_CLIENTS = (
    ClientFacts(101, "host-a", "a"),
    ClientFacts(102, "host-b", "b", rank=0, local_rank=0),
    ClientFacts(103, "host-b", "b", rank=5, local_rank=1),
    ClientFacts(104, "elsewhere", "c", local_rank=3),
)
_KEYS = ("w", "layers/0/weight", "ключ 🔑", "k" * 300)
_SIZES = (0, 1, 4096, 5 << 20, _GIB, 1 << 50)

# Seconds by which clocks are set forward, spaced so densely that any alternation is detected; and
# the results of random.random() at these times.
_LATER = tuple(0.3 * 1.5**n for n in range(46))
_SHARE = 29  # one in this many questions is asked at each of these times
_NUMBERS = (0.0, 0.999, 0.5, 0.25, 0.75)
# A strategy that counts its calls is given this many calls, or seconds, to change an answer.
_ANSWERS, _ANSWERS_S = 30_000, 2.0

# A batch, and a store, that are as large as they get; and seconds of a processor that an answer may
# take, in which a server serves nobody else.
_MANY_KEYS, _MANY_VOLUMES, _ANSWER_S = 20_000, 500, 2.0

# What another process keeps of the environment: what an interpreter needs to start. A server may
# have been started by anybody.
_NEEDED = re.compile(r"PATH$|PYTHON|LD_|DYLD_|VIRTUAL_ENV|TMPDIR$|COV|SYSTEMROOT$")
# What a pure function does not do, as Python's audit events: to ask the system.
_OUTSIDE = re.compile(
    r"open$|socket\.|subprocess\.|os\.(listdir|scandir|system|exec|fork|posix_spawn)"
)

# A program that prints the answers of another process. That process has another hash seed, pid,
# environment and working directory, asks the last question first, and must not import torch.
_ELSEWHERE = """
import importlib, json, os, sys, warnings
name, fields, (module, cls), pid = json.loads(sys.stdin.read())
os.getpid = lambda: pid + 1
from torchstore_core.plugins.strategy_data import decode_strategy
from torchstore_core.testing.strategies import answers, audited, own_registry
warnings.simplefilter("ignore")
before = set(sys.modules)
strategy_class = getattr(importlib.import_module(module), cls)
strategy = decode_strategy(name, fields.encode(), own_registry(strategy_class))
with audited() as outside:
    found = answers(strategy, -1)
print(json.dumps([*found, sorted(outside), "torch" in set(sys.modules) - before]))
"""


class _Question(NamedTuple):
    client: ClientFacts
    volumes: Sequence[VolumeFacts]
    nbytes: int
    keys: Sequence[str]

    def __str__(self) -> str:
        lost = [v.index for v in self.volumes if v.lost]
        full = [v.index for v in self.volumes if not v.free_bytes]
        hosts = [v.host_id for v in self.volumes]
        return (
            f"place({self.client}, {len(self.volumes)} volumes (hosts {hosts}, lost {lost}, full "
            f"{full}), {self.nbytes} bytes, keys {list(self.keys)})"
        )


def _volumes(count: int, hosts: int, *, lost: int = 0, full: int = 0) -> tuple[VolumeFacts, ...]:
    """Return ``count`` volumes on ``hosts`` hosts; ``lost`` and ``full`` are masks of indices."""
    return tuple(
        VolumeFacts(
            f"store-{at}",
            at,
            f"host-{'abcdefgh'[at * hosts // count]}",
            16 * _GIB,
            0 if (lost | full) >> at & 1 else (16 - at % 5) * _GIB,
            bool(lost >> at & 1),
            f"{'abcdefgh'[at * hosts // count]}",
        )
        for at in range(count)
    )


def questions(strategy: Strategy) -> Iterator[_Question]:
    """Yield calls that a controller may make: any size, one to eight volumes, some lost or full."""
    batches: Sequence[Sequence[str]] = [_KEYS, _KEYS[:1], ()]
    if strategy.by_key:
        batches = [(key,) for key in _KEYS]
    for count, hosts in ((1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (8, 4)):
        states = [(0, 0), (0, (1 << count) - 1), (0, 1)]
        states += [(1 << at, 0) for at in range(count) if count > 1]
        states += [((1 << count) - 2, 0)] if count > 2 else []
        for lost, full in states:
            volumes = _volumes(count, hosts, lost=lost, full=full)
            for client, keys in itertools.product(_CLIENTS, batches):
                for size in _SIZES:
                    yield _Question(client, volumes, size, keys)


def _choices() -> Iterator[tuple[ClientFacts, Sequence[VolumeFacts]]]:
    """Yield readers and the copies they can read: some of four volumes in any order, or eight."""
    for client in _CLIENTS:
        for count in range(1, 5):
            for copies in itertools.permutations(_volumes(4, 2), count):
                yield client, copies
        yield client, _volumes(8, 4)


def _copies_left(question: _Question) -> Iterator[Sequence[int]]:
    """Yield copies that may be left of a value when others are lost, or on drained volumes."""
    living = [v.index for v in question.volumes if not v.lost]
    yield ()
    for count in (1, 2):
        if len(living) > count:
            yield living[-count:]


def _further(strategy: Strategy) -> Iterator[tuple[_Question, Sequence[int]]]:
    """Yield calls of ``place_copy``: in stores of several volumes, one key at a time."""
    for question in questions(strategy):
        if len(question.volumes) > 1 and len(question.keys) == 1:
            for copies in _copies_left(question):
                yield question, copies


def _placed(strategy: Strategy, question: _Question) -> list[int]:
    return list(strategy.place(*question))


def _place_copy(strategy: Strategy, question: _Question, copies: Sequence[int]) -> list[int]:
    client, volumes, nbytes, (key,) = question
    return list(strategy.place_copy(client, volumes, nbytes, key, copies))


def answers(strategy: Strategy, step: int = 1) -> tuple[list[list[int]], list[int], list[str]]:
    """Return a strategy's answers to all questions (those for further copies, too) and choices, and
    the names of the environment variables that it has read.

    Args:
        step: -1 asks the last question first; the order of the results is the same.
    """
    read: set[str] = set()
    environ = type(os.environ)
    get = environ.__getitem__

    def noted(self: Any, name: Any) -> Any:
        if not _importing():
            read.add(os.fsdecode(name))
        return get(self, name)

    with pytest.MonkeyPatch.context() as patch:
        asked, choices = list(questions(strategy))[::step], list(_choices())[::step]
        patch.setattr(environ, "__getitem__", noted)
        further = list(_further(strategy))[::step]
        placed = [_placed(strategy, question) for question in asked]
        copied = [_place_copy(strategy, *question) for question in further]
        chosen = [strategy.choose(*choice) for choice in choices]
    return placed[::step] + copied[::step], chosen[::step], sorted(read)


@contextlib.contextmanager
def audited() -> Iterator[set[str]]:
    """Collect what is done in the block that :data:`_OUTSIDE` names, except by imports. For a
    process that ends soon: what Python calls for it stays.
    """
    found: set[str] = set()
    is_on = [True]

    def note(event: str, given: tuple[Any, ...]) -> None:
        if is_on[0] and _OUTSIDE.match(event) and not _importing():
            found.add(f"{event} {given[0]!r}"[:200] if given else event)

    sys.addaudithook(note)
    try:
        yield found
    finally:
        is_on[0] = False


def _importing() -> bool:
    """Return whether a module is being imported, or its source is shown in a log: such reads do not
    count as the strategy's.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename in ("<frozen importlib._bootstrap>", linecache.__file__):
            return True
        frame = frame.f_back
    return False


def own_registry(cls: type[Strategy]) -> Registry:
    """Return a registry of the installed plug-ins and ``cls``, whether that is installed or not."""

    class Own(Registry):
        def strategy(self, name: str) -> type[Strategy]:
            return cls if name == cls.__struct_config__.tag else super().strategy(name)

    return Own()


def _put_clocks_on(
    patch: pytest.MonkeyPatch, cls: type[Strategy], seconds: float, number: float
) -> None:
    """Change the times and random numbers that the standard library returns, also in modules of the
    strategy's classes that have imported such a function by ``from time import ...``.
    """

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return super().now(tz) + datetime.timedelta(seconds=seconds)

        @classmethod
        def utcnow(cls) -> Any:
            return cls.now(datetime.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return cls.now()

    changed: list[tuple[Any, str, Any]] = [
        (datetime, "datetime", Later),
        (random, "random", lambda: number),
    ]
    for name in ("time", "monotonic", "perf_counter", "process_time"):
        for clock, by in ((name, seconds), (f"{name}_ns", int(seconds * 1e9))):
            real: Callable[[], float] = getattr(time, clock)
            changed.append((time, clock, lambda real=real, by=by: real() + by))
    modules = [vars(sys.modules[c.__module__]) for c in cls.__mro__ if c.__module__ in sys.modules]
    for owner, name, new in changed:
        old = getattr(owner, name)
        for names in modules:
            for known in [n for n, value in names.items() if value is old]:
                patch.setitem(names, known, new)
        patch.setattr(owner, name, new)


@contextlib.contextmanager
def _interrupted(after: float) -> Iterator[None]:
    """Interrupt what takes longer than ``after`` seconds, if this is the main thread."""
    main = threading.main_thread()
    if threading.current_thread() is not main or main.ident is None:
        yield
        return

    def late(_: int, frame: FrameType | None) -> NoReturn:
        theirs: list[FrameType] = []
        while frame is not None and module_of(frame) != __name__:
            theirs.append(frame)
            frame = frame.f_back
        where = "the kit still asks"
        if theirs:
            call = theirs[-1].f_code.co_qualname
            where = f"{call} has not returned, it is at {place_of(theirs[0])}"
        pytest.fail(f"not done after {after:g} s: {where}", pytrace=False)

    before = signal.signal(signal.SIGUSR2, late)
    timer = threading.Timer(after, signal.pthread_kill, (main.ident, signal.SIGUSR2))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR2, before)


def _check(holds: bool, what: str) -> None:
    if not holds:
        pytest.fail(what, pytrace=False)


def _answer(what: object, ask: Callable[[], T]) -> T:
    """Return what the strategy answers, and fail the test if it raises."""
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        pytest.fail(f"{what} raised {error!r}", pytrace=False)


def _check_volumes(what: object, answer: Sequence[Any], count: int) -> None:
    """Fail the test unless an answer names some of ``count`` volumes, each of them once."""
    _check(bool(answer), f"{what} named no volume")
    for index in answer:
        _check(
            type(index) is int and index in range(count),
            f"{what} gave {answer}: {index!r} is no position in a list of {count}",
        )
    _check(len(set(answer)) == len(answer), f"{what} gave {answer}: one of them twice")


def _check_not_read(names: Sequence[str]) -> None:
    _check(
        not names,
        f"it read the environment ({', '.join(names[:5])}), and a server has another one; make it "
        "a field of the strategy",
    )


def _where(client: ClientFacts, copies: Sequence[VolumeFacts]) -> str:
    return f"choose({client}, copies on {[v.host_id for v in copies]})"


class StrategyConformance:
    """Subclass this, under a name that pytest collects, in a test module of your package::

        from torchstore_core.testing import StrategyConformance

        class TestMine(StrategyConformance):
            def make(self) -> Strategy:
                return Mine(size=3)

    Attributes:
        installed: whether the strategy's package is installed, so that stores find it by name.
        uses_all: whether a put is tried on every volume before it fails. Set this to False for a
            strategy that deliberately restricts itself; if volumes are lost, there may then be no
            volume for some of its keys.
        gives_up_after: seconds after which a test fails, and says where the strategy is.
    """

    installed: ClassVar[bool] = True
    uses_all: ClassVar[bool] = True
    gives_up_after: ClassVar[float] = 60.0

    @pytest.fixture(autouse=True)
    def _gives_up(self) -> Iterator[None]:
        """Fail a test in which the strategy does not return; pytest would wait for ever."""
        with _interrupted(self.gives_up_after):
            yield

    def make(self) -> Strategy:
        """Return the strategy to test; every call must return a new, equal one."""
        pytest.fail(f"{type(self).__name__} must define make(), which returns your strategy")

    # ---- data -----------------------------------------------------------------------------

    def test_it_is_a_frozen_struct_with_its_name_as_tag(self) -> None:
        strategy = self.make()
        name = type(strategy).__name__
        _check(isinstance(strategy, Strategy), f"{name} must derive from Strategy")
        config = type(strategy).__struct_config__
        _check(config.frozen, f"declare it `class {name}(Strategy, frozen=True, tag=...)`: frozen")
        _check(
            isinstance(config.tag, str),
            f'declare it `class {name}(Strategy, frozen=True, tag="its-entry-point-name")`',
        )

    def test_it_decides_something(self) -> None:
        cls = type(self.make())
        names = ("place", "place_copy", "choose", "copies", "by_key")
        _check(
            any(getattr(cls, name) is not getattr(Strategy, name) for name in names),
            f"{cls.__name__} has none of {', '.join(names)}, so it is like Strategy itself; is one "
            "of them misspelt?",
        )

    def test_it_is_found_by_its_name(self) -> None:
        if not self.installed:
            pytest.skip("said to be not installed")
        cls = type(self.make())
        try:
            found = Registry().strategy(str(cls.__struct_config__.tag))
        except PluginError as error:
            pytest.fail(f"no store can find it: {error}", pytrace=False)
        _check(found is cls, f"the name {cls.__struct_config__.tag!r} leads to {found}, not {cls}")

    def test_equal_ones_are_equal_and_can_be_hashed(self) -> None:
        one, other = self.make(), self.make()
        _check(one == other, f"make() gave {one}, then {other}; they must be equal")
        try:
            same = hash(one) == hash(other)
        except TypeError as error:
            pytest.fail(f"it cannot be hashed: {error}; use tuples, not lists", pytrace=False)
        _check(same, "equal strategies have different hashes")

    def test_it_survives_the_trip_to_a_server(self) -> None:
        strategy = self.make()
        name, fields = encode_strategy(strategy)
        again = decode_strategy(name, fields, own_registry(type(strategy)))
        _check(again == strategy, f"{strategy} was sent, {again} came (as {fields!r})")

    def test_it_takes_transport_by_keyword(self) -> None:
        strategy = self.make()
        for transport in ("some", ("some", "other"), None):
            changed = msgspec.structs.replace(strategy, transport=transport)
            _check(
                transport is None or changed.transport == transport,
                f"with transport={transport!r} it has {changed.transport!r}",
            )

    def test_copies_and_by_key_make_sense(self) -> None:
        strategy = self.make()
        copies, by_key = strategy.copies, strategy.by_key
        _check(type(copies) is int and copies >= 1, f"copies is an int above 0, not {copies!r}")
        _check(type(by_key) is bool, f"by_key is a bool, not {by_key!r}")
        for _ in range(100):
            again = strategy.copies, strategy.by_key
            _check(
                again == (copies, by_key),
                f"copies and by_key were {(copies, by_key)}, and then {again}",
            )

    # ---- place ----------------------------------------------------------------------------

    def test_it_names_volumes_that_are_there_each_once(self) -> None:
        self._ask(lambda q, answer: _check_volumes(q, answer, len(q.volumes)))

    def test_it_names_enough_volumes(self) -> None:
        """It names enough live volumes for all copies, and all live volumes if it uses all."""
        strategy = self.make()

        def check(question: _Question, answer: list[Any]) -> None:
            living = {v.index for v in question.volumes if not v.lost}
            named = len(living.intersection(answer))
            wanted = len(living) if self.uses_all else min(strategy.copies, len(living))
            if not self.uses_all and strategy.copies == 1:
                return
            _check(
                named >= wanted,
                f"{question} gave {answer}: of the {len(living)} volumes that live it should name "
                f"{wanted}. If it leaves some out on purpose, set uses_all = False",
            )

        self._ask(check)

    def test_the_same_question_has_the_same_answer(self) -> None:
        """A strategy is a pure function: no clock, no random numbers, no counters."""
        first, second = self.make(), self.make()
        for question in questions(first):
            answers = [_placed(first, question) for _ in range(2)]
            answers.append(_placed(second, question))
            as_lists = _Question(
                question.client, list(question.volumes), question.nbytes, list(question.keys)
            )
            answers.append(_placed(first, as_lists))
            _check(
                all(answer == answers[0] for answer in answers),
                f"{question} gave different answers: {answers}",
            )

    def test_the_answer_is_the_same_later(self) -> None:
        """Ask again after many other questions, at other times, and with other random numbers."""
        strategy = self.make()
        asked = list(questions(strategy))
        first = [_placed(strategy, question) for question in asked]
        chosen = [strategy.choose(question.client, question.volumes) for question in asked]

        def again(question: _Question, place: list[int], choice: int, when: str) -> None:
            answer = _placed(strategy, question)
            _check(answer == place, f"{question} gave {place}, and {answer} {when}")
            copy = strategy.choose(question.client, question.volumes)
            _check(copy == choice, f"choose gave {choice}, and {copy} {when}")

        before = list(zip(asked, first, chosen, strict=True))
        for at, seconds in enumerate(_LATER):
            with pytest.MonkeyPatch.context() as patch:
                _put_clocks_on(patch, type(strategy), seconds, _NUMBERS[at % len(_NUMBERS)])
                for known in before[at % _SHARE :: _SHARE]:
                    again(*known, f"when the clocks were {seconds:g} s on")
        ends = time.monotonic() + _ANSWERS_S
        for count, known in enumerate(itertools.islice(itertools.cycle(before), _ANSWERS)):
            again(*known, f"after {count} other questions")
            if time.monotonic() > ends:
                break

    def test_it_changes_nothing_that_it_is_given(self) -> None:
        strategy, new = self.make(), self.make()
        for question in questions(strategy):
            volumes, keys = list(question.volumes), list(question.keys)
            strategy.place(question.client, volumes, question.nbytes, keys)
            strategy.choose(question.client, volumes)
            _check(
                volumes == list(question.volumes) and keys == list(question.keys),
                f"{question} changed the list that it was given",
            )
            _check(strategy == new, f"{question} changed the strategy: {new} became {strategy}")
        for question, copies in _further(strategy):
            volumes, left = list(question.volumes), list(copies)
            _place_copy(strategy, question._replace(volumes=volumes), left)
            _check(
                volumes == list(question.volumes) and left == list(copies),
                f"place_copy, for {question}, changed the list that it was given",
            )
        _check(strategy == new, f"place_copy changed the strategy: {new} became {strategy}")

    def test_it_reads_no_environment_variable(self) -> None:
        """The server that calls the strategy has another environment."""
        _, _, read = answers(self.make())
        _check_not_read(read)

    def test_another_process_gives_the_same_answers(self) -> None:
        """The other process has another hash seed (``hash()`` of a str differs), process id,
        environment and working directory, is asked in another order (so that remembered answers
        show), and must not import torch. Nor may a strategy open files, or ask the system for the
        name of its host: it is to be a pure function of what it is given.
        """
        strategy = self.make()
        cls = type(strategy)
        if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
            pytest.skip("other processes cannot import it from here")
        name, fields = encode_strategy(strategy)
        places, choices, _ = answers(strategy)
        about = [name, fields.decode(), [cls.__module__, cls.__name__], os.getpid()]
        done = subprocess.run(
            [sys.executable, "-c", _ELSEWHERE],
            input=msgspec.json.encode(about),
            env={
                **{name: value for name, value in os.environ.items() if _NEEDED.match(name)},
                "PYTHONHASHSEED": "12345",
                "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
            },
            cwd="/",
            capture_output=True,
            timeout=60,
            check=False,
        )
        _check(done.returncode == 0, f"another process failed:\n{done.stderr.decode()}")
        there, chosen, read, outside, torch = msgspec.json.decode(done.stdout.splitlines()[-1])
        _check(not torch, f"{cls.__module__} imports torch, maybe when asked: servers must not")
        _check(len(there) == len(places), "by_key was another one in another process")
        asked_before = "in another process, which was asked in another order"
        asked = [str(question) for question in questions(strategy)]
        asked += [f"place_copy, beside {copies}, for {q}" for q, copies in _further(strategy)]
        for question, one, other in zip(asked, places, there, strict=True):
            if one != other:
                pytest.fail(f"{question} gave {one} here, {other} {asked_before}", pytrace=False)
        for (client, copies), mine, other in zip(_choices(), choices, chosen, strict=True):
            if mine != other:
                where = _where(client, copies)
                pytest.fail(f"{where} gave {mine} here, {other} {asked_before}", pytrace=False)
        _check_not_read(read)
        _check(
            not outside,
            f"it asked for what is outside of it ({', '.join(outside[:3])}), which a server "
            "may not have, and waits for; make what it needs a field of the strategy",
        )

    def test_it_is_quick_in_a_large_store(self) -> None:
        """A batch may have hundreds of thousands of keys, and a store hundreds of volumes."""
        strategy = self.make()
        volumes = tuple(
            VolumeFacts(
                f"store-{at}", at, f"host-{at // 4}", _GIB, _GIB - at % 7, hostname=f"{at // 4}"
            )
            for at in range(_MANY_VOLUMES)
        )
        keys = [f"layers/{at}" for at in range(1 if strategy.by_key else _MANY_KEYS)]
        question = _Question(_CLIENTS[0], volumes, _MANY_KEYS, keys)
        known = range(_MANY_VOLUMES)
        what = f"place for {len(keys):,} keys on {_MANY_VOLUMES} volumes"
        before = time.thread_time()
        answer = _answer(what, partial(_placed, strategy, question))
        took = time.thread_time() - before
        _check(bool(answer) and all(at in known for at in answer), f"{what} gave {answer}")
        _check(
            took <= _ANSWER_S,
            f"{what} took {took:.1f} s of a processor, in which a server serves nobody else",
        )

    # ---- place_copy -----------------------------------------------------------------------

    def test_it_names_volumes_for_a_further_copy(self) -> None:
        """Where a copy is to be made again, it names volumes that are there, each once."""
        strategy = self.make()
        for question, copies in _further(strategy):
            what = f"place_copy, beside copies on {list(copies)}, for {question},"
            ask = partial(_place_copy, strategy, question, copies)
            answer, again = (_answer(what, ask) for _ in range(2))
            _check(answer == again, f"{what} gave {answer}, then {again}")
            _check_volumes(what, answer, len(question.volumes))

    # ---- choose ---------------------------------------------------------------------------

    def test_it_chooses_a_copy_that_is_there(self) -> None:
        strategy = self.make()
        for client, copies in _choices():
            chosen = [strategy.choose(client, copies) for _ in range(2)]
            where = _where(client, copies)
            _check(
                type(chosen[0]) is int and 0 <= chosen[0] < len(copies),
                f"{where} gave {chosen[0]!r}: no position in a list of {len(copies)}",
            )
            _check(chosen[0] == chosen[1], f"{where} gave {chosen[0]}, then {chosen[1]}")

    # ---- inside ---------------------------------------------------------------------------

    def _ask(self, check: Callable[[_Question, list[Any]], None]) -> None:
        strategy = self.make()
        for question in questions(strategy):
            check(question, _answer(question, partial(_placed, strategy, question)))
