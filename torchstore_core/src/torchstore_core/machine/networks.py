"""The addresses at which other hosts may reach this one, and how fast its networks are. Torch-free.

Host names are not looked up: a name server's answer for this host may be wrong on this host, and
asking may take seconds.
"""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from torchstore_core.errors import ConfigurationError

#: Environment variable with addresses of this host, or names of its interfaces, comma-separated:
#: transports over networks listen on these only.
BIND = "TORCHSTORE_BIND"
#: The only address at which processes of the same network namespace reach each other.
LOOPBACK = "127.0.0.1"

_UP, _LOOPBACK = 0x1, 0x8  # flags of an interface: IFF_UP, IFF_LOOPBACK
_DISCARD_PORT = 9
_FRESH_S = 5.0

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Network(msgspec.Struct, frozen=True, array_like=True):
    """An address of this host, and the network that it belongs to.

    Args:
        interface: the interface's name, such as ``eth0``.
        address: an IPv4 address, or a global or site-wide IPv6 address.
        prefix: the length of the network's prefix, in bits.
        mbits_per_s: the rate of the interface; 0 if the system does not know it.
    """

    interface: str
    address: str
    prefix: int
    mbits_per_s: int = 0

    def contains(self, address: str) -> bool:
        """Return whether ``address`` is in the same network as this one.

        >>> Network("eth0", "10.1.2.3", 16).contains("10.1.9.9")
        True
        >>> Network("eth0", "10.1.2.3", 16).contains("fd00::1")
        False
        """
        other = ipaddress.ip_address(address)
        mine = ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False)
        return other.version == mine.version and other in mine


class _SocketAddress(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _InterfaceAddress(ctypes.Structure):
    """The beginning of ``struct ifaddrs``."""


_InterfaceAddress._fields_ = (
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
    ("netmask", ctypes.POINTER(_SocketAddress)),
)


def networks() -> tuple[Network, ...]:
    """Return the addresses of the interfaces that are up, without loopback and link-local
    addresses.

    Raises:
        OSError: the system cannot list the interfaces.
    """
    found: list[Network] = []
    for interface, flags, address, netmask in _interface_addresses():
        if not flags & _UP or flags & _LOOPBACK:
            continue
        if address.is_loopback or address.is_link_local or address.is_unspecified:
            continue
        prefix = int(netmask).bit_count()
        found.append(Network(interface, str(address), prefix, _mbits_per_s(interface)))
    return tuple(found)


def bound() -> tuple[Network, ...]:
    """Return the addresses that ``TORCHSTORE_BIND`` names, in its order; empty if it is not set.

    Raises:
        ConfigurationError: a name is neither an address nor an interface that is up, or an
            address of no host, such as 0.0.0.0.
        OSError: the system cannot list the interfaces.
    """
    names = [name.strip() for name in os.environ.get(BIND, "").split(",") if name.strip()]
    every = networks() if names else ()
    found: list[Network] = []
    for name in names:
        matching = [one for one in every if name in (one.interface, one.address)]
        found += matching or _loopback(name) or [_literal(name)]
    return tuple(found)


def _loopback(interface: str) -> list[Network]:
    """Return the addresses of a loopback interface. Each is a network of its own, because every
    host has the same ones.
    """
    return [
        Network(name, str(address), address.max_prefixlen)
        for name, flags, address, _ in _interface_addresses()
        if name == interface and flags & _UP and address.is_loopback
    ]


def own(addresses: Sequence[str]) -> tuple[Network, ...]:
    """Return those of the addresses that interfaces of this host have, loopback aside, in order.

    Raises:
        OSError: the system cannot list the interfaces.
    """
    every = {one.address: one for one in networks()} if addresses else {}
    return tuple(every[address] for address in addresses if address in every)


def reachable(told: tuple[Network, ...] = ()) -> tuple[Network, ...]:
    """Return the addresses at which other hosts may reach this one: those of ``TORCHSTORE_BIND`` in
    its order if it is set, or else those that an engine has ``told``, or else all, the fastest
    first. Empty if the system or the variable does not say. They are looked up every few seconds at
    most.
    """
    return _reachable(told, os.environ.get(BIND, ""), int(time.monotonic() / _FRESH_S))


@functools.lru_cache(maxsize=4)
def _reachable(told: tuple[Network, ...], _bind: str, _period: int) -> tuple[Network, ...]:
    try:
        return bound() or told or tuple(sorted(networks(), key=lambda one: -one.mbits_per_s))
    except (ConfigurationError, OSError):  # a server says so when it starts
        return ()


def _literal(name: str) -> Network:
    try:
        address = ipaddress.ip_address(name)
    except ValueError as error:
        raise ConfigurationError(
            f"{BIND} names {name!r}, which is neither an address nor an interface that is up"
        ) from error
    if address.is_unspecified or address.is_multicast:
        raise ConfigurationError(
            f"{BIND} names {name!r}, at which no host is reached: name the addresses or interfaces "
            "of this host, or unset it to listen where each client reaches this host"
        )
    return Network("", str(address), address.max_prefixlen)


def foreign() -> tuple[str, ...]:
    """Return the addresses of ``TORCHSTORE_BIND`` that this host does not have.

    Raises:
        ConfigurationError, OSError: see :func:`bound`.
    """
    return tuple(one.address for one in bound() if not _is_here(one.address))


def _is_here(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((address, 0))
    except OSError:
        return False
    return True


def common(
    here: Iterable[Network], there: Iterable[Network]
) -> tuple[tuple[Network, Network], ...]:
    """Return the pairs of addresses, one of each host, that are in the same network, the fastest
    first. Addresses that both hosts have (such as those of container bridges) are left out, because
    neither host reaches the other at them.

    >>> mine = [Network("a", "10.0.0.1", 24, 1000), Network("b", "10.9.0.1", 16, 100)]
    >>> [pair[1].address for pair in common(mine, [Network("x", "10.9.7.7", 16, 100)])]
    ['10.9.7.7']
    """
    mine, others = tuple(here), tuple(there)
    shared = {one.address for one in mine} & {one.address for one in others}
    pairs = [
        (one, other)
        for one in mine
        for other in others
        if one.address not in shared
        and other.address not in shared
        and one.contains(other.address)
        and other.contains(one.address)
    ]
    return tuple(sorted(pairs, key=_rate, reverse=True))


def _rate(pair: Sequence[Network]) -> int:
    return min(one.mbits_per_s for one in pair)


def local_address_to(address: str) -> str | None:
    """Return the address of this host from which the kernel would send to ``address``; None if it
    has no route. Nothing is sent.
    """
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, _DISCARD_PORT))
            return str(sock.getsockname()[0])
    except OSError:
        return None


@functools.lru_cache(maxsize=1)
def namespace_id() -> str:
    """Return an id of this process's network namespace: two processes have the same id exactly if
    they reach each other at the loopback address. Empty if the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net")
    except OSError:
        return ""
    return f"{boot}/{namespace.st_dev}:{namespace.st_ino}"


def _mbits_per_s(interface: str) -> int:
    try:
        # The speed of a virtual interface cannot be read, or is -1.
        return max(0, int(Path("/sys/class/net", interface, "speed").read_text()))
    except (OSError, ValueError):
        return 0


def _interface_addresses() -> Iterator[tuple[str, int, _Address, _Address]]:
    """Yield the name, flags, address and netmask of every entry of ``getifaddrs``."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.freeifaddrs.argtypes = [ctypes.POINTER(_InterfaceAddress)]
    first = ctypes.POINTER(_InterfaceAddress)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"getifaddrs: {os.strerror(code)}")
    try:
        at = first
        while bool(at):
            entry = at.contents
            address = _decoded(entry.address)
            netmask = _decoded(entry.netmask)
            if address is not None and netmask is not None:
                yield entry.name.decode(errors="replace"), entry.flags, address, netmask
            at = entry.next
    finally:
        libc.freeifaddrs(first)


def _decoded(pointer: ctypes._Pointer[_SocketAddress]) -> _Address | None:
    if not bool(pointer):
        return None
    given = pointer.contents
    # After the family come the port, and for IPv6 also the flow information.
    if given.family == socket.AF_INET:
        return ipaddress.IPv4Address(bytes(given.data[2:6]))
    if given.family == socket.AF_INET6:
        return ipaddress.IPv6Address(bytes(given.data[6:22]))
    return None
