"""Environment variables that are on or off: one way for all."""

from __future__ import annotations

import pytest

from torchstore_core.clients.session.held_ref import caller
from torchstore_core.clients.stores.environment import allows_pickle
from torchstore_core.errors import ConfigurationError
from torchstore_core.machine.switches import is_on


@pytest.mark.parametrize(
    ("text", "on"), [("1", True), ("true", True), (" TRUE ", True), ("0", False), ("False", False)]
)
def test_what_a_switch_says(text: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``false`` traced references, and ``true`` checked nothing."""
    for variable in ("TORCHSTORE_ALLOW_PICKLE", "TORCHSTORE_TRACE_REFS", "TORCHSTORE_TCP_CHECKSUM"):
        monkeypatch.setenv(variable, text)
        assert is_on(variable, default=not on) is on
    assert allows_pickle() is on
    assert bool(caller()) is on


def test_a_switch_that_is_not_set_or_empty_is_at_its_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("A_SWITCH", raising=False)
    assert (is_on("A_SWITCH"), is_on("A_SWITCH", default=True)) == (False, True)
    monkeypatch.setenv("A_SWITCH", "")
    assert (is_on("A_SWITCH"), is_on("A_SWITCH", default=True)) == (False, True)


def test_what_is_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSTORE_TRACE_REFS", "yes")
    with pytest.raises(ConfigurationError, match="TORCHSTORE_TRACE_REFS is 0 or 1, not 'yes'"):
        caller()
