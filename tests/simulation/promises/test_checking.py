"""The checker takes what a store may answer for right, and everything else for wrong."""

from __future__ import annotations

from typing import Any

import pytest
from tests.simulation.acting.operations import mark
from tests.simulation.plans import ROOMY, Operation, Plan
from tests.simulation.promises.checking import check
from tests.simulation.promises.histories import Call, History
from tests.simulation.promises.violations import Violation

PLAN = Plan((ROOMY,), (), keys=("a", "b", "dicts"))


class Told:
    """A history that a test makes up: calls one after the other."""

    def __init__(self) -> None:
        self.history = History()
        self._point = 0

    def call(
        self,
        kind: str,
        keys: tuple[str, ...],
        result: Any = None,
        *,
        code: str = "",
        version: int = 0,
        client: int = 0,
        begun: int = 0,
        **more: Any,
    ) -> Operation:
        """One that is answered now; ``begun``: how many calls ago it has begun."""
        self._point += 1
        number = len(self.history.calls) + 1
        operation = Operation(number, kind, keys, version=version, **more)
        call = Call(operation, client, self._point)
        call.reached(self._point - begun)
        call.at = self._point
        if code:
            call.failed(code, self._point)
        else:
            call.returned(result, self._point)
        self.history.calls.append(call)
        return operation

    def put(self, *keys: str, versions: list[int]) -> Operation:
        return self.call("put", keys, versions)

    def get(self, versions: dict[str, int], by: Operation, at: tuple[int, ...] = (0, 1)) -> None:
        """A get of what was put by one operation, as which of its values."""
        pieces = [
            (key, version, mark(by.number, entry))
            for (key, version), entry in zip(versions.items(), at, strict=False)
        ]
        self.call("get", tuple(versions), (0, pieces))

    def rank(self, who: int, version: int, name: str = "own", **more: Any) -> Operation:
        """One of two participants puts a state dict."""
        names = (f"{name}{who}",)
        more = {"participants": 2, "names": names, "lines": (1,), **more}
        return self.call("publish", ("dicts",), [version], client=who, **more)

    def fetch(self, version: int, **by: Operation) -> None:
        """All of a state dict, by the names of its entries."""
        pieces = [(name, version, mark(one.number)) for name, one in by.items()]
        self.call("fetch", ("dicts",), (version, pieces))

    def holds(self) -> None:
        check(self.history, PLAN)

    def is_wrong(self, why: str) -> None:
        with pytest.raises(Violation, match=why):
            check(self.history, PLAN)


@pytest.fixture
def told() -> Told:
    return Told()


def test_what_is_promised(told: Told) -> None:
    first = told.put("a", "b", versions=[1, 1])
    told.get({"a": 1, "b": 1}, by=first)
    second = told.put("a", versions=[2])
    told.get({"a": 2}, by=second)
    told.call("get", ("a",), code="version-gone", version=1)
    told.call("exists", ("a", "b"), [True, True])
    told.call("delete", ("a",), 1)
    told.call("get", ("a",), code="key-not-found")
    told.put("a", versions=[3])
    told.call("wait", ("a", "b"), [3, 1], version=1)
    told.call("versions", ("a",), [3])
    told.holds()


def test_an_acknowledged_put_is_not_lost(told: Told) -> None:
    first = told.put("a", versions=[1])
    told.put("a", versions=[2])
    told.get({"a": 1}, by=first)
    told.is_wrong("it sees version 1 of 'a', which is at 2")


def test_a_batch_is_not_seen_in_part(told: Told) -> None:
    old = told.put("a", "b", versions=[1, 1])
    new = told.put("a", "b", versions=[2, 2])
    pieces = [("a", 2, mark(new.number)), ("b", 1, mark(old.number, 1))]
    told.call("get", ("a", "b"), (0, pieces))
    told.is_wrong("it sees version 1 of 'b'")


def test_a_version_is_what_was_put_as_it(told: Told) -> None:
    told.put("a", "b", versions=[1, 1])
    second = told.put("b", versions=[2])
    told.get({"a": 1}, by=second)
    told.is_wrong("it reads #2 as version 1 of 'a'")


def test_numbers_only_grow_also_after_a_delete(told: Told) -> None:
    told.put("a", versions=[1])
    told.call("delete", ("a",), 1)
    told.put("a", versions=[1])
    told.is_wrong("version 1 of 'a' comes again")


@pytest.mark.parametrize(
    ("kind", "code"), [("get", "key-not-found"), ("get", "plugin"), ("put", "protocol")]
)
def test_no_call_fails_without_a_reason(told: Told, kind: str, code: str) -> None:
    told.put("a", versions=[1])
    told.call(kind, ("a",), code=code)
    told.is_wrong(code)


def test_a_wait_ends_when_it_can(told: Told) -> None:
    told.call("wait", ("a",), [1], version=1)
    (wait,) = told.history.calls
    wait.known, wait.ended, wait.unanswered = False, None, 2
    told.holds()
    told.put("a", versions=[1])
    told.put("b", versions=[1])
    wait.unanswered = 3
    told.is_wrong("was never answered")


def test_a_state_dict_is_visible_when_all_have_put(told: Told) -> None:
    own0 = told.rank(0, 1)
    told.call("fetch", ("dicts",), code="partial-put")
    own1 = told.rank(1, 1)
    told.fetch(1, own0=own0, own1=own1)
    told.holds()
    told.call("fetch", ("dicts",), code="key-not-found")
    told.is_wrong("all keys are there")


def test_a_state_dict_is_of_one_version(told: Told) -> None:
    told.rank(0, 1)
    own1 = told.rank(1, 1)
    own0 = told.rank(0, 2)
    told.fetch(1, own0=own0, own1=own1)
    told.is_wrong("it reads #3 as 'own0' of version 1")


def test_a_state_dict_is_not_visible_before(told: Told) -> None:
    own0 = told.rank(0, 1)
    told.fetch(1, own0=own0)
    told.is_wrong("it sees version 1 of 'dicts', which is at 0")


def test_a_partial_version_is_based_on_the_one_before(told: Told) -> None:
    own0, own1 = told.rank(0, 1), told.rank(1, 1)
    told.fetch(1, own0=own0, own1=own1)
    new0, new1 = told.rank(0, 2, "new", partial=True), told.rank(1, 2, "new", partial=True)
    told.fetch(2, own0=own0, own1=own1, new0=new0, new1=new1)
    told.holds()
    told.fetch(2, new0=new0, new1=new1)
    told.is_wrong(r"it reads \['new0', 'new1'\]")


def test_a_partial_version_waits_for_older_ones(told: Told) -> None:
    told.rank(0, 1)
    told.rank(1, 1)
    told.rank(0, 3, "new", partial=True)
    new1 = told.rank(1, 3, "new", partial=True)
    told.call("versions", ("dicts",), [3])
    told.rank(0, 2, "old", partial=True, begun=4)  # it had begun when version 3 was complete
    told.rank(1, 2, "old", partial=True)
    assert new1.partial
    told.is_wrong("it sees version 3 of 'dicts', which is at 1")


@pytest.mark.parametrize("begun", [0, 3])
def test_a_partial_version_may_wait_for_one_whose_commit_is_refused(told: Told, begun: int) -> None:
    """Until that is given up, of which nobody is told."""
    first = [told.rank(who, 1) for who in range(2)]
    more: Any = {"participants": 2, "names": ("own0",), "lines": (1,)}
    last = [told.rank(0, 3, partial=True), told.rank(1, 3, partial=True)]
    told.call("publish", ("dicts",), code="store-full", begun=begun, **more)
    told.fetch(1, own0=first[0], own1=first[1])
    if not begun:  # it was refused at once
        told.is_wrong("it sees version 1 of 'dicts', which is at 3")
        return
    told.fetch(3, own0=last[0], own1=last[1])
    told.holds()
    told.fetch(1, own0=first[0], own1=first[1])
    told.is_wrong("it sees version 1 of 'dicts', which is at 3")


@pytest.mark.parametrize("begun", [1, 2])
def test_a_delete_ends_puts_that_are_refused_later(told: Told, begun: int) -> None:
    def refused(code: str, version: int, begun: int = 0) -> None:
        more: Any = {"participants": 2, "names": ("own0",), "lines": (1,)}
        told.call("publish", ("dicts",), code=code, version=version, begun=begun, **more)

    told.call("exists", ("dicts",), [False])
    told.call("delete", ("dicts",), 1)
    refused("store-full", 3, begun)  # it had begun with the delete, or before
    refused("version-gone", 3)
    if begun == 1:
        told.is_wrong("only versions up to 0 were used")
    else:
        told.holds()
        refused("version-gone", 4)
        told.is_wrong("only versions up to 3 were used")


def read(told: Told, by: Operation, name: tuple[str, int, int], **how: Any) -> None:
    """A read of a reference that finds what was put by one operation."""
    sure, code = how.get("sure", True), how.get("code", "")
    told.call("read", (), (0, [(name[0], name[1], mark(by.number))]), code=code)
    told.history.calls[-1].about = name, sure


def test_what_is_referred_to_stays_what_it_was(told: Told) -> None:
    made = told.call("object", ("a",), [7])
    first = told.put("a", versions=[1])
    told.call("hold", ("a",), [1])
    told.history.calls[-1].about = ("a", 1, 0), True
    second = told.put("a", versions=[2])
    read(told, made, ("", 7, 0))
    read(told, first, ("a", 1, 0))
    read(told, first, ("a", 1, 0), sure=False, code="version-gone")
    told.holds()
    read(told, second, ("a", 1, 0))
    told.is_wrong("it reads #4 as version 1")


def test_what_is_referred_to_is_there(told: Told) -> None:
    made = told.call("object", ("a",), [7])
    read(told, made, ("", 7, 0), code="version-gone")
    told.is_wrong("what is referred to cannot be read")


def test_a_hold_is_of_the_newest_version(told: Told) -> None:
    told.put("a", versions=[1])
    told.put("a", versions=[2])
    told.call("hold", ("a",), [1])
    told.is_wrong("it sees version 1 of 'a', which is at 2")
