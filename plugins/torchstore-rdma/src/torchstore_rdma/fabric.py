"""Where a half runs, which devices a pair uses, and what registering memory means there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from torchstore_core.errors import ConfigurationError, TransportUnavailableError
from torchstore_core.machine.networks import (
    BIND,
    LOOPBACK,
    Network,
    bound,
    local_address_to,
    namespace_id,
    networks,
)

__all__ = ["KEPT_BYTES", "Place", "here", "kept", "options", "pins"]

#: Environment variable: how many bytes of user memory may stay registered in a process, for each
#: volume; 0: none.
KEPT_BYTES = "TORCHSTORE_RDMA_KEPT_BYTES"
_UCX_DEVICES = "UCX_NET_DEVICES"
# Locks divide mappings, of which a process may have some 65,000.
_KEPT_COUNT = 8192


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a half runs.

    Args:
        network: the network namespace; equal if and only if both halves share it.
        addresses: IPv4 addresses at which other hosts may reach it.
        rdma_devices: names of its InfiniBand and RoCE devices.
        chosen: the user has chosen the addresses.
        told: the engine has told them; see ``ServerContext.told``.
    """

    network: str
    addresses: tuple[str, ...]
    rdma_devices: tuple[str, ...]
    chosen: bool = False
    told: bool = False


def here(rdma_devices: Sequence[str], told: Sequence[Network] = ()) -> Place:
    """Where this process runs.

    Args:
        told: see ``ServerContext``.

    Raises:
        TransportUnavailableError: this host has no address that ``TORCHSTORE_BIND`` names.
        ConfigurationError: that names neither an address nor an interface.
    """
    interfaces = _interfaces()
    chosen = [one.address for one in bound()]
    for address in chosen:
        if address not in interfaces:
            raise TransportUnavailableError(f"{BIND}: this host has no IPv4 address {address}")
    known = [] if chosen else [one.address for one in told if one.address in interfaces]
    others = [address for address, name in interfaces.items() if name != "lo"]
    addresses = tuple(chosen or known or others)
    return Place(namespace_id(), addresses, tuple(rdma_devices), bool(chosen), bool(known))


def options(own: Place, peer: Place, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Options of the library's UCX backend, which limit it to the devices that this pair needs.

    Empty if the user has chosen devices by UCX's own variable, or if no interface is known that
    leads to the peer: then UCX chooses, and listens at an address of every interface.
    """
    if environment.get(_UCX_DEVICES):
        return {}
    if own.rdma_devices and peer.rdma_devices:
        return {"device_list": ", ".join(own.rdma_devices)}
    interface = _interface(own, peer)
    return {"engine_config": f"NET_DEVICES={interface}"} if interface else {}


def pins(rdma_devices: Sequence[str], cuda_devices: int) -> bool:
    """Whether registered memory keeps its pages: RDMA devices and CUDA drivers pin it. UCX over TCP
    and shared memory looks addresses up when bytes move, so registering is free there.
    """
    return bool(rdma_devices) or cuda_devices > 0


def kept(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """How many bytes of user memory may stay registered, and in how many pieces; half of this
    host's memory unless the user says otherwise.

    Raises:
        ConfigurationError: the variable is not a number of bytes.
    """
    text = environment.get(KEPT_BYTES, "")
    if text and not text.isdecimal():
        raise ConfigurationError(f"{KEPT_BYTES}={text!r} is not a number of bytes")
    if text:
        return int(text), _KEPT_COUNT
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2, _KEPT_COUNT


def _interface(own: Place, peer: Place) -> str:
    interfaces = _interfaces()
    if own.chosen and own.addresses:
        return interfaces.get(own.addresses[0], "")
    if own.network and own.network == peer.network:
        # The peer's user may have chosen an address; both must be on that interface then.
        return interfaces.get(peer.addresses[0], "lo") if peer.chosen else "lo"
    if own.told:
        return interfaces.get(own.addresses[0], "")
    for address in peer.addresses:
        source = local_address_to(address)
        if source is not None and source in interfaces:
            return interfaces[source]
    return ""


def _interfaces() -> dict[str, str]:
    """The network interfaces that have an IPv4 address, by it."""
    every = {one.address: one.interface for one in networks() if ":" not in one.address}
    return {LOOPBACK: "lo", **every}
