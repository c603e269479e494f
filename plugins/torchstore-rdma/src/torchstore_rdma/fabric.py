"""Where a half runs, which devices a pair uses, and what registering memory means there."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from torchstore_core.errors import TransportUnavailableError

__all__ = ["BIND", "Place", "here", "options", "pins"]

#: Environment variable: the addresses of this host that may be used, separated by commas.
BIND = "TORCHSTORE_BIND"
_UCX_DEVICES = "UCX_NET_DEVICES"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_ANY_PORT = 9


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a half runs.

    Args:
        network: the network namespace; equal if and only if both halves share it.
        addresses: IPv4 addresses at which other hosts may reach it.
        rdma_devices: names of its InfiniBand and RoCE devices.
        chosen: the user has chosen the addresses.
    """

    network: str
    addresses: tuple[str, ...]
    rdma_devices: tuple[str, ...]
    chosen: bool = False


def here(rdma_devices: Sequence[str], environment: Mapping[str, str] = os.environ) -> Place:
    """Where this process runs.

    Raises:
        TransportUnavailableError: this host has no address that ``TORCHSTORE_BIND`` names.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = f"{boot}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        network = ""  # not known: equal to no other
    interfaces = _interfaces()
    bind = [one.strip() for one in environment.get(BIND, "").split(",") if one.strip()]
    for address in bind:
        if address not in interfaces:
            raise TransportUnavailableError(f"{BIND}: this host has no address {address}")
    others = [address for address, name in interfaces.items() if name != "lo"]
    return Place(network, tuple(bind or others), tuple(rdma_devices), chosen=bool(bind))


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


def _interface(own: Place, peer: Place) -> str:
    interfaces = _interfaces()
    if own.chosen and own.addresses:
        return interfaces.get(own.addresses[0], "")
    if own.network and own.network == peer.network:
        # The peer's user may have chosen an address; both must be on that interface then.
        return interfaces.get(peer.addresses[0], "lo") if peer.chosen else "lo"
    for address in peer.addresses:
        source = _source(address)
        if source in interfaces:
            return interfaces[source]
    return ""


def _source(address: str) -> str:
    """The own address from which the system would send to that address; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((address, _ANY_PORT))  # sends nothing
        except OSError:
            return ""
        return str(sock.getsockname()[0])


def _interfaces() -> dict[str, str]:
    """The network interfaces that have an IPv4 address, by it."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(sock.fileno(), _GET_ADDRESS, request)
            except OSError:
                continue  # it has no address
            found[socket.inet_ntoa(answer[20:24])] = name
    return found
