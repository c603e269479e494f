"""How the controller asks the strategy, and what becomes of a strategy that is broken."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.server.test_controller import facts, inline, placed, put, volumes

from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts
from torchstore_core.errors import (
    PluginError,
    StoreFullError,
)
from torchstore_core.machine.topology import probe
from torchstore_core.server.controller import Controller
from torchstore_core.server.memory.shortage import full_error, most_bytes
from torchstore_core.values import TensorMeta
from torchstore_core.wire import framing
from torchstore_core.wire import messages as m

HERE = probe()
META = TensorMeta("uint8", (1,))
PAGE = os.sysconf("SC_PAGE_SIZE")
KEYS = ("a", "ab", "abc", "b", "ü")


def test_a_state_dict_that_no_volume_has_room_for_is_told_of_hash() -> None:
    with volumes(4096, 4096) as records:
        controller = Controller(records, Strategy(), prefault=False)
        session = controller.open_session(facts(), HERE)
        with pytest.raises(StoreFullError, match="with strategy 'hash' it is spread"):
            put(controller, session, 1, placed("a", 3000), placed("b", 3000))
        with pytest.raises(StoreFullError, match=r"larger capacity$"):
            put(controller, session, 1, placed("a", 6000))


class Answers(Strategy, frozen=True, tag="answers"):
    """Names the volumes it is told to."""

    volumes: tuple[int, ...] = ()

    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        return self.volumes


@pytest.mark.parametrize(
    ("answer", "says"), [((), "named no volume"), ((2,), "volume 2 of 2"), ((-1,), "volume -1")]
)
def test_a_strategy_that_answers_nonsense_is_named(answer: tuple[int, ...], says: str) -> None:
    with volumes(4096, 4096) as records:
        controller = Controller(records, Answers(answer), prefault=False)
        session = controller.open_session(facts(), HERE)
        with pytest.raises(PluginError, match=says) as caught:
            put(controller, session, 1, placed("k", 64))
        assert "Answers" in caught.value.message
        assert [v.used for v in records] == [0, 0]
        assert not session.txns


class Unspeakable(Exception):
    def __repr__(self) -> str:
        raise ValueError("no repr")


FAILURES = {
    "error": KeyError("boom"),
    "exit": SystemExit(3),
    "ctrl-c": KeyboardInterrupt(),
    "cancel": asyncio.CancelledError(),
    "unspeakable": Unspeakable(),
    "surrogates": type("Odd", (Exception,), {"__repr__": lambda self: "\ud800" * 1000})(),
}


class Faulty(Strategy, frozen=True, tag="faulty"):
    """Fails where and how it is told to, or answers what it is told to."""

    where: str = ""
    answer: Any = None

    def _at(self, where: str, answer: Any) -> Any:
        if where != self.where:
            return answer
        if isinstance(self.answer, str) and self.answer in FAILURES:
            raise FAILURES[self.answer]
        return self.answer

    @property
    def copies(self) -> int:
        return int(self.where == "choose") + 1 if self.where != "copies" else self._at("copies", 1)

    @property
    def by_key(self) -> bool:
        answer: bool = self._at("by_key", False)
        return answer

    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        answer: Sequence[int] = self._at("place", range(len(volumes)))
        if self.answer == "clears":
            volumes.clear()  # type: ignore[attr-defined]
        return answer() if callable(answer) else answer

    def choose(self, client: ClientFacts, copies: Sequence[VolumeFacts]) -> int:
        answer: int = self._at("choose", 0)
        return answer


def refused(strategy: Strategy) -> str:
    """What the error of a put, or of a get, of two copies says; nothing is kept, or held."""
    with volumes(4096, 4096) as records:
        controller = Controller(records, strategy, prefault=False)
        session = controller.open_session(facts(), HERE)
        with pytest.raises(PluginError) as caught:  # noqa: PT012 - a put, or a get
            put(controller, session, 1, placed("k", 64))
            controller.commit(session, 1)
            controller.locate(session, m.Locate(1, 1, [m.Want("k")], -1))
        assert type(strategy).__name__ in caught.value.message
        framing.encode(m.Failure(1, caught.value.code, caught.value.message))
        assert not session.txns
        assert not session.leases
        assert [v.leased for v in records] == [0, 0]
    return caught.value.message


@pytest.mark.parametrize("where", ["place", "copies", "by_key", "choose"])
@pytest.mark.parametrize("how", FAILURES)
def test_a_strategy_that_fails_is_named_and_the_store_goes_on(where: str, how: str) -> None:
    message = refused(Faulty(where, how))
    said = {"ctrl-c": "KeyboardInterrupt", "unspeakable": "Unspeakable", "surrogates": "?..."}
    assert said.get(how, type(FAILURES[how]).__name__) in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("where", "answer", "says"),
    [
        ("copies", "2", "wants '2' copies"),
        ("copies", 2.5, "wants 2.5 copies"),
        ("copies", None, "wants None copies"),
        ("copies", True, "wants True copies"),
        ("copies", 0, "wants 0 copies"),
        ("by_key", "yes", "by_key is 'yes'"),
        ("place", None, "cannot place 'k': TypeError"),
        ("place", ([0],), "volume \\[0\\] of 2"),
        ("place", (True,), "volume True of 2"),
        ("place", (0.0,), "volume 0.0 of 2"),
        ("place", (0,) * 1000, "more than 16 volumes"),
        ("place", lambda: itertools.cycle([0, 1]), "more than 16 volumes"),
        ("place", range(1 << 60), "more than 16 volumes"),
        ("", "clears", "cannot place 'k'"),
        ("choose", None, "chose copy None of 2"),
        ("choose", -1, "chose copy -1 of 2"),
        ("choose", 2, "chose copy 2 of 2"),
    ],
)
def test_answers_that_make_no_sense_are_refused(where: str, answer: Any, says: str) -> None:
    assert re.search(says, refused(Faulty(where, answer)))


def test_any_iterable_of_volumes_will_do() -> None:
    for answer in ((1, 0, 1, 1), range(1, 2), lambda: iter([1, 0])):
        with volumes(4096, 4096) as records:
            controller = Controller(records, Faulty("place", answer), prefault=False)
            session = controller.open_session(facts(), HERE)
            (grant,) = put(controller, session, 1, placed("k", 64))
            assert grant.volume == 1


def test_a_batch_that_only_fits_over_several_volumes_is_told_of_hash() -> None:
    says = "spread over all volumes, key by key"
    with volumes(4096, 4096) as records:

        def said(*sizes: int, strategy: Strategy = Strategy(), keys: str = "abc") -> str:  # noqa: B008
            items = [placed(key, nbytes) for key, nbytes in zip(keys, sizes, strict=False)]
            return full_error(sum(sizes), records, (), (), {}, strategy, items).message

        assert says in said(3000, 3000)
        assert says not in said(3000, 3000, strategy=Faulty("by_key", True))
        assert says not in said(6000), "one value does not lie in two volumes"
        assert says not in said(3000, 3000, keys="aa"), "nor do the shards of one"
        assert says not in said(5000, 1000)
        assert says not in said(2000, 2000), "it is something else that is in the way"
        assert says not in said(3000, 3000, 3000), "it does not fit at all"
        assert [most_bytes(s, records) for s in (Strategy(), Faulty("by_key", True))] == [
            4096,
            8192,
        ]


@pytest.mark.parametrize("sizes", [(4096,), (2048, 2048)])
@pytest.mark.parametrize("by_key", [False, True])
def test_a_put_that_no_volume_can_ever_take_is_not_told_to_delete(
    sizes: tuple[int, ...], by_key: bool
) -> None:
    with volumes(*sizes) as records:
        controller = Controller(records, Faulty("by_key", by_key), prefault=False)
        session = controller.open_session(facts(), HERE)
        with pytest.raises(StoreFullError) as caught:
            put(controller, session, 1, placed("k", max(sizes) + 64))
        error = caught.value
        assert "No volume can ever take a value of so many: the largest has" in error.message
        assert f"{max(sizes):,}. Put the value in shards" in error.message
        assert ("use fewer volumes" in error.message) is (len(sizes) > 1)
        assert "larger capacity" in error.message
        assert "Delete" not in error.message
        assert error.details["largest_volume_bytes"] == max(sizes)
        with pytest.raises(StoreFullError) as caught:
            put(controller, session, 1, *(placed("k", max(sizes) // 2 + 64) for _ in range(2)))
        assert "together: the largest has" in caught.value.message
        assert "fewer values at once" in caught.value.message
        for txn, size in enumerate(sizes):
            put(controller, session, txn, placed(f"{txn}", size))  # this is the limit
        with pytest.raises(StoreFullError, match="Delete keys"):
            put(controller, session, 3, placed("m", max(sizes)))


def test_free_bytes_are_what_a_put_can_get() -> None:
    """Inline values lie nowhere in the segment, and count."""
    with volumes(4096, 4096) as records:
        controller = Controller(records, Answers((0,)), prefault=False)
        session = controller.open_session(facts(), HERE)
        put(controller, session, 1, inline("i", bytes(1000)))
        with pytest.raises(StoreFullError) as caught:
            put(controller, session, 2, placed("k", 4000))
        details = caught.value.details
        assert details["free_bytes"] == 2 * 4096 - 1000
        assert details["largest_free_bytes"] == 4096  # of the volume that it may not go to
        records[1].lose("gone")
        with pytest.raises(StoreFullError, match="3,096 are free, 3,096 of them in one piece"):
            put(controller, session, 2, placed("k", 4000))


def test_copies_count() -> None:
    with volumes(4096, 4096) as records:
        controller = Controller(records, Faulty("copies", 2), prefault=False)
        session = controller.open_session(facts(), HERE)
        put(controller, session, 1, placed("k", 2048))
        with pytest.raises(StoreFullError) as caught:
            put(controller, session, 2, placed("l", 3008))
        assert "a put of 3,008 bytes, in 2 copies (6,016 in all), does not" in caught.value.message
        assert caught.value.details["requested_bytes"] == 6016
        assert caught.value.details["copies"] == 2


def test_the_strategy_chooses_the_volume_and_the_next_one_when_it_is_full() -> None:
    with volumes(4096, 4096, 4096) as records:
        controller = Controller(records, Answers((2, 0)), prefault=False)
        session = controller.open_session(facts(), HERE)
        for txn, expected in ((1, 2), (2, 0)):
            (grant,) = put(controller, session, txn, placed("k", 3000))
            assert grant.volume == expected
        with pytest.raises(StoreFullError):  # volume 1 is empty, but not among the answers
            put(controller, session, 3, placed("k", 3000))
        assert put(controller, session, 3, inline("i", bytes(1000))) == [1]
        assert put(controller, session, 3, inline("j", bytes(1000))) == [1]
        with pytest.raises(StoreFullError):
            put(controller, session, 3, inline("l", bytes(1000)))
        assert [v.used for v in records] == [4008, 0, 4008]
