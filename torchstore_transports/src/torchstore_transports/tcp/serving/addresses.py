"""The addresses at which a server half listens for a client, so that no others are open."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from torchstore_core.machine.networks import (
    LOOPBACK,
    Network,
    bound,
    common,
    local_address_to,
    namespace_id,
    networks,
)
from torchstore_transports.tcp.wire.protocol import Greeting

__all__ = ["addresses_for"]

_MOST = 8


def addresses_for(client: Greeting, told: Sequence[Network] = ()) -> list[str]:
    """Return the addresses of this host at which the client may reach it, the best first.

    Args:
        told: see ``ServerContext``. A client in this network namespace reaches it at the loopback
            all the same.

    Raises:
        ConfigurationError: ``TORCHSTORE_BIND`` names what is neither an address nor an interface.
        OSError: the system cannot list its addresses.
    """
    if chosen := bound():
        return [one.address for one in chosen]
    if client.namespace and client.namespace == namespace_id():
        return [LOOPBACK]
    if told:
        return [one.address for one in told]
    here = networks()
    own = {one.address for one in here}
    found = [mine.address for mine, _ in common(here, client.networks)]
    fastest = sorted(client.networks, key=lambda one: one.mbits_per_s, reverse=True)
    found += _routed([one.address for one in fastest if one.address not in own])
    return list(dict.fromkeys(found))[:_MOST]


def _routed(others: Iterable[str]) -> list[str]:
    """Return the addresses from which the kernel would send to ``others``, without loopback."""
    found = [local_address_to(address) for address in others]
    return [
        address
        for address in found
        if address is not None and not ipaddress.ip_address(address).is_loopback
    ]
