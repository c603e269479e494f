"""The public conformance kit for runtimes, on those that are here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest
from tests.integration.plugins import wrong_runtimes as wrong

from torchstore_core.contracts.runtime import Runtime, RuntimeSpec
from torchstore_core.errors import ConfigurationError
from torchstore_core.runtimes.local import LocalRuntime
from torchstore_core.testing import RuntimeConformance
from torchstore_core.testing.leftovers import at_rest, left_by


class TestLocal(RuntimeConformance):
    """The embedded server."""

    name = "local"

    def make(self) -> Runtime:
        return LocalRuntime()


class TestMonarchInPart(RuntimeConformance):
    """Actors; this process is the root of the job."""

    name = "monarch"

    @pytest.fixture(autouse=True)
    def _job(self) -> None:
        """What the engine makes once for a job is not of the store."""
        import monarch.actor  # noqa: F401

    def make(self) -> Runtime:
        from torchstore_monarch.runtime import MonarchRuntime

        return MonarchRuntime()


@pytest.mark.soak
class TestMonarch(TestMonarchInPart):
    """All of it."""


# Its own tests have stores side by side, that cannot start, and whose start is cancelled.
for _name in [name for name in dir(RuntimeConformance) if name.startswith("test_")]:
    if not any(word in _name for word in ("serves", "blocked", "twice", "descriptor", "name")):
        setattr(TestMonarchInPart, _name, None)
        setattr(TestMonarch, _name, getattr(RuntimeConformance, _name))


class TestNamed(RuntimeConformance):
    """An engine that knows its stores by name, in this process; only what is about names."""

    def make(self) -> Runtime:
        return wrong.Named()

    def spec(self) -> RuntimeSpec | None:
        return wrong.spec()


# The local runtime is tested above: what this one has from it is not done again.
for _name in [name for name in dir(RuntimeConformance) if name.startswith("test_")]:
    if not any(word in _name for word in ("name", "descriptor")):
        setattr(TestNamed, _name, None)


def _kit(make: Callable[[], Runtime], **attributes: Any) -> RuntimeConformance:
    others = _threads()  # of tests before, which may end at any time

    class Kit(RuntimeConformance):
        gone_within = 0.5
        ends_within = 0.5

        def make(self) -> Runtime:
            return make()

        def held(self) -> dict[str, int]:
            return {**super().held(), "threads": len(_threads() - others)}

    for name, value in attributes.items():
        setattr(Kit, name, value)
    return Kit()


def _threads() -> set[str]:
    return {*os.listdir("/proc/self/task")}


def _noticed(says: str) -> Any:
    return pytest.raises(pytest.fail.Exception, match=says)


def test_a_server_that_is_left() -> None:
    made = wrong.Forgetful()
    try:
        with _noticed("left behind.*directory.*process"):
            _kit(lambda: made).test_stop_may_come_twice_and_without_a_start()
    finally:
        asyncio.run(made.really_stop())


def test_a_directory_that_is_left() -> None:
    with _noticed("left behind.*litter-"):
        _kit(wrong.Littering).test_stop_may_come_twice_and_without_a_start()


@pytest.mark.parametrize(
    ("leaking", "what"), [(wrong.Leaking, "descriptors"), (wrong.Threading, "threads")]
)
def test_a_process_that_grows(leaking: Any, what: str) -> None:
    try:
        with _noticed(f"3 times.*{what}"):
            _kit(leaking).test_this_process_does_not_grow()
    finally:
        leaking.clean()


def test_what_is_about_to_end_does_not_count_as_there_before() -> None:
    """The thread of the session that was closed last, for instance."""
    looks = iter([{"threads": 9, "descriptors": 5}, {"threads": 9, "descriptors": 5}])

    def look() -> dict[str, int]:
        return next(looks, {"threads": 8, "descriptors": 6})

    assert at_rest(look, 20) == {"threads": 8, "descriptors": 5}


def test_what_ends_meanwhile_hides_nothing() -> None:
    """Of something else in this process, which ends while the rounds go on."""
    there = {"threads": 5, "descriptors": 5}
    others = [1, 0, 0]

    def rounds() -> None:
        there["threads"] += 3 - others.pop(0)

    assert left_by(rounds, there.copy, 3, 0.1) == ["threads: 7 before, 10 after"]
    others[:] = [3]
    assert left_by(rounds, there.copy, 3, 0.1) == []


def test_options_that_are_ignored() -> None:
    """Name, volumes and capacity."""
    with _noticed("asked for"):
        _kit(wrong.Deaf).test_options_reach_the_store(2)


def test_block_that_is_ignored() -> None:
    with _noticed(r"asked for block=\('singleton',\)"):
        _kit(wrong.Unblocking).test_what_is_blocked_is_not_loaded_by_the_server()


def test_what_outlives_its_owner() -> None:
    kit = _kit(wrong.Orphaning, factory=f"{wrong.HERE}:Orphaning")
    with _noticed("after its owner was killed.*sleep"):
        kit.test_the_store_ends_when_its_owner_is_killed()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"find": "find_nothing"}, "does not know the store that was started"),
        ({"find": "find_anything"}, "a store that never was"),
        ({"end": "end_nothing"}, "did not know the store"),
        ({"end": "end_anything"}, "said that it ended it"),
    ],
)
def test_names_that_lead_elsewhere(changed: dict[str, str], says: str) -> None:
    kit = _kit(wrong.Named, spec=lambda self: wrong.spec(**changed))
    with _noticed(says):
        kit.test_it_finds_and_ends_stores_by_name()


def test_an_end_that_is_only_said() -> None:
    """The name is not free then."""
    kit = _kit(wrong.Named, spec=lambda self: wrong.spec(end="end_in_words"))
    with pytest.raises(ConfigurationError, match="already"):
        kit.test_it_finds_and_ends_stores_by_name()


def test_a_name_that_is_taken_twice() -> None:
    with _noticed("a second store of the same name"):
        _kit(wrong.Careless).test_a_shared_name_is_taken_once()


def test_a_descriptor_of_another_runtime() -> None:
    kit = _kit(wrong.Named, spec=lambda self: wrong.spec(factory="Careless"))
    with _noticed("does not make a Named"):
        kit.test_its_descriptor_leads_to_it()


def test_a_kit_without_make_says_what_is_missing() -> None:
    """The first mistake of everybody."""
    with pytest.raises(TypeError, match="make"):
        RuntimeConformance().test_stop_may_come_twice_and_without_a_start()
