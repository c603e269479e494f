"""At which addresses a server half listens for a client, so that no others are open."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Sequence

from torchstore_core.errors import ConfigurationError
from torchstore_core.machine.networks import (
    LOOPBACK,
    Network,
    common,
    local_address_to,
    namespace_id,
    networks,
)
from torchstore_transports.tcp.wire.protocol import Greeting

__all__ = ["BIND", "addresses_for"]

#: Environment variable with addresses or names of interfaces, comma-separated: server halves of
#: ``tcp`` listen there and nowhere else.
BIND = "TORCHSTORE_BIND"

_MOST = 8


def addresses_for(client: Greeting) -> list[str]:
    """The addresses of this host at which the client may reach it, the best first.

    Raises:
        ConfigurationError: ``TORCHSTORE_BIND`` names what is neither an address nor an interface.
        OSError: the system does not tell its addresses.
    """
    here = networks()
    if given := os.environ.get(BIND, ""):
        return _given(given, here)
    if client.namespace and client.namespace == namespace_id():
        return [LOOPBACK]
    own = {one.address for one in here}
    found = [mine.address for mine, _ in common(here, client.networks)]
    fastest = sorted(client.networks, key=lambda one: one.mbits_per_s, reverse=True)
    found += _routed([one.address for one in fastest if one.address not in own])
    return list(dict.fromkeys(found))[:_MOST]


def _routed(others: Iterable[str]) -> list[str]:
    """Where packets to those addresses would come from."""
    found = [local_address_to(address) for address in others]
    return [
        address
        for address in found
        if address is not None and not ipaddress.ip_address(address).is_loopback
    ]


def _given(text: str, here: Sequence[Network]) -> list[str]:
    found: list[str] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        of_interface = [one.address for one in here if one.interface == name]
        if of_interface:
            found += of_interface
            continue
        try:
            found.append(str(ipaddress.ip_address(name)))
        except ValueError as error:
            raise ConfigurationError(
                f"{BIND} names {name!r}, which is neither an address nor an interface that is up"
            ) from error
    return found
