"""The kit says which call of a half hangs, whether that waits or blocks its event loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.transports.kit.broken import hanging

from torchstore_core.errors import TransportError
from torchstore_core.testing import TransportTests
from torchstore_core.testing.transports import base
from torchstore_core.testing.transports.ends import client, host, session
from torchstore_core.testing.transports.ends.client import Client, Errand

AT = r"has not returned: it is at hanging\.py:\d+"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(base, "_TEST_S", 2.0)
    monkeypatch.setattr(base, "_STRAY_S", 0.2)
    monkeypatch.setattr(session, "_SETTLE_S", 1.0)
    monkeypatch.setattr(host, "_OPEN_S", 2.0)
    monkeypatch.setattr(host, "_ABANDON_S", 0.2)
    hanging.go_on.clear()
    yield
    hanging.go_on.set()


def made(name: str) -> TransportTests:
    """The kit for one of them. Volumes are shared by class."""

    class Kit(TransportTests):
        entry = f"{hanging.__name__}:plugin_{name}"

    Kit.name = "broken"
    Kit.light_halves = True
    Kit.large_bytes = 1 << 20
    return Kit()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Connecting", rf"Connecting\.connect {AT}"),
        ("Reading", rf"Reading\.read {AT}"),
        ("Writing", rf"Writing\.write {AT}"),
        ("Closing", rf"Closing\.close {AT}"),
        ("Shaking", r"SimpleLink\.connect has not returned: it waits for the .* half's 'handshak"),
        ("Disconnecting", "the server half's 'disconnect' has not returned within 1 s"),
        ("Starting", rf"Starting\.start {AT}"),
        ("Blocking", rf"Blocking\.start {AT}"),
    ],
)
def test_the_call_that_hangs_is_named(name: str, says: str) -> None:
    kit = made(name)
    try:
        with pytest.raises((pytest.fail.Exception, TransportError), match=says):
            kit.test_every_size_arrives("here")
    finally:
        hanging.go_on.set()
        kit.teardown_class()


@pytest.mark.soak  # the time of these processes is the kit's own
@pytest.mark.parametrize("name", ["Starting", "Blocking"])
def test_a_half_that_hangs_in_a_process_of_its_own_is_named(name: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=rf"{name}\.start {AT}"):
        made(name).test_every_size_arrives("process")


@pytest.mark.soak
@pytest.mark.parametrize("name", ["Connecting", "Writing"])
def test_a_client_process_that_hangs_says_where(name: str) -> None:
    kit = made(name)
    try:
        other = Client(kit.at("process").reach)
        try:
            other.tell(Errand("write", 1, 0, 1000))
            assert f"{client._ERRAND_S:.0f} s: {name}" in other.answer()
        finally:
            other.close()
    finally:
        kit.teardown_class()
