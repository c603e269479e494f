"""Where the ends of a pair listen."""

from __future__ import annotations

import pytest

from torchstore_core.errors import ConfigurationError, TransportUnavailableError
from torchstore_core.machine.networks import BIND, LOOPBACK, Network, common, namespace_id
from torchstore_transports.pairs import protocol
from torchstore_transports.pairs.addresses import addresses_here, meeting_addresses


def _hello(namespace: str, *networks: Network, bound: bool = False) -> protocol.Hello:
    return protocol.Hello(protocol.VERSION, b"link", namespace, networks, bound)


def test_in_one_namespace_it_is_the_loopback() -> None:
    given = _hello(namespace_id(), Network("eth0", "192.0.2.7", 24))
    assert meeting_addresses(given) == (LOOPBACK, LOOPBACK)


def test_the_user_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BIND, "192.0.2.1")
    given = _hello(namespace_id(), Network("", "192.0.2.9", 32), bound=True)
    assert meeting_addresses(given) == ("192.0.2.1", "192.0.2.9")
    assert addresses_here() == ((Network("", "192.0.2.1", 32),), True)


def test_the_loopback_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its addresses are no network that hosts have in common."""
    monkeypatch.setenv(BIND, "lo")
    here, bound = addresses_here()
    assert bound
    assert Network("lo", LOOPBACK, 32) in here
    assert not common(here, here)


def test_what_is_no_address_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BIND, "no-such-interface")
    with pytest.raises(ConfigurationError, match="no-such-interface"):
        addresses_here()


def test_hosts_that_do_not_reach_each_other() -> None:
    with pytest.raises(TransportUnavailableError, match="no addresses"):
        meeting_addresses(_hello("another"))


def test_the_engine_may_say_where_this_host_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BIND, raising=False)
    told = (Network("eth0", "192.0.2.1", 24),)
    given = _hello("another", Network("a", "198.51.100.7", 24), Network("b", "192.0.2.7", 24))
    assert meeting_addresses(given, told) == ("192.0.2.1", "192.0.2.7")
    monkeypatch.setenv(BIND, "198.51.100.1")
    assert addresses_here(told) == ((Network("", "198.51.100.1", 32),), True)
