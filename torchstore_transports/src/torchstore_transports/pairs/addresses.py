"""Chooses the addresses at which the two ends of a pair listen. Torch-free."""

from __future__ import annotations

from torchstore_core.errors import TransportUnavailableError
from torchstore_core.machine.networks import (
    BIND,
    LOOPBACK,
    Network,
    bound,
    common,
    local_address_to,
    namespace_id,
    networks,
)
from torchstore_transports.pairs.protocol import Hello

__all__ = ["addresses_here", "meeting_addresses"]


def addresses_here(told: tuple[Network, ...] = ()) -> tuple[tuple[Network, ...], bool]:
    """Return the addresses at which other hosts may reach this one, and whether the user has chosen
    them. ``told``: those that the engine says, see ``ServerContext``.

    Raises:
        ConfigurationError: ``TORCHSTORE_BIND`` names neither an address nor an interface.
        OSError: the system cannot list its addresses.
    """
    chosen = bound()
    return chosen or told or networks(), bool(chosen)


def meeting_addresses(hello: Hello, told: tuple[Network, ...] = ()) -> tuple[str, str]:
    """Choose where this host's end and the end of the link's host listen; return both addresses.
    ``told``: the addresses of this host that the engine says, see ``ServerContext``.

    Raises:
        TransportUnavailableError: no address of either host is known to reach the other.
    """
    here, bound = addresses_here(told)
    if hello.namespace and hello.namespace == namespace_id():
        mine = here[0].address if bound and here else LOOPBACK
        other = hello.networks[0].address if hello.bound and hello.networks else LOOPBACK
        return mine, other
    for one, peer in common(here, hello.networks):
        return one.address, peer.address
    for peer in hello.networks:
        local = local_address_to(peer.address)
        if local is not None and any(one.address == local for one in here):
            return local, peer.address
    raise TransportUnavailableError(
        "the hosts of the client and of the volume have no addresses at which they reach each "
        f"other: {_text(hello.networks)} and {_text(here)}; {BIND} says which ones to use"
    )


def _text(given: tuple[Network, ...]) -> str:
    return ", ".join(one.address for one in given) or "none"
