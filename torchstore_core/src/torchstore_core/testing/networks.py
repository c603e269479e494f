"""Network namespaces that act as hosts with their own addresses on one machine. Linux only."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import pytest

__all__ = ["Namespace", "free_number", "two_networks"]

_SECONDS = 60.0
_NUMBERS = 250
_BEFORE = 100


class Namespace(NamedTuple):
    """A network namespace, and an address of its interface."""

    name: str
    address: str

    @property
    def wrapper(self) -> list[str]:
        """The beginning of a command line that runs a command in the namespace."""
        return ["ip", "netns", "exec", self.name]


def _ip(*words: str) -> str:
    """Run ``ip``; return its error, or an empty text if it succeeds."""
    done = subprocess.run(
        ["ip", *words],  # noqa: S607 - wherever the system has it
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    return done.stderr.strip() or f"exit {done.returncode}" if done.returncode else ""


def _make(*words: str) -> None:
    failed = _ip(*words)
    if "not permitted" in failed:
        pytest.skip(f"network namespaces may not be made here: {failed}")
    if failed:
        pytest.fail(f"ip {' '.join(words)}: {failed}")


@contextlib.contextmanager
def free_number() -> Iterator[int]:
    """Yield a number below 250 for a subnet that this host gets an address in. Meanwhile, no other
    caller on this host gets the same: not this process, and none that runs beside it.
    """
    first = os.getpid()
    for number in (at % _NUMBERS for at in range(first, first + _NUMBERS)):
        # A name that the kernel gives to one of those that share their addresses, and takes back
        # when that one ends.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
            try:
                held.bind(f"\0torchstore-subnet-{number}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            yield number
            return
    pytest.fail(f"{_NUMBERS} subnets are in use")


@contextlib.contextmanager
def two_networks(
    *, here: bool = False, second: bool = False
) -> Iterator[tuple[Namespace, Namespace]]:
    """Yield two network namespaces that are connected to each other, and to nothing else.

    ``here``: whether this process's own namespace is connected to them, too, as ``.1`` of their
    network. ``second``: whether the address of each is the second one of its interface: the kernel
    takes the first one where nobody says which.

    Skips the test, with the reason, where namespaces cannot be created.
    """
    if shutil.which("ip") is None:
        pytest.skip("network namespaces cannot be made here: there is no `ip` (iproute2)")
    with free_number() as number:
        yield from _joined(f"10.213.{number}", here, second)


def _joined(network: str, here: bool, second: bool) -> Iterator[tuple[Namespace, Namespace]]:
    # Every call uses new names, because the kernel takes some time to remove the interfaces of a
    # deleted namespace. Names of interfaces have at most 15 characters.
    tag = f"{os.getpid() % 100_000}{os.urandom(2).hex()}"
    first = 2 if here else 1
    both = (
        Namespace(f"ts{tag}a", f"{network}.{first}"),
        Namespace(f"ts{tag}b", f"{network}.{first + 1}"),
    )
    ends = [("name", "eth0", "netns", one.name) for one in both]
    bridge = f"ts{tag}br"
    try:
        for one in both:
            _make("netns", "add", one.name)
        if here:
            _make("link", "add", bridge, "type", "bridge")
            _make("addr", "add", f"{network}.1/24", "dev", bridge)
            _make("link", "set", bridge, "up")
            for one, end in zip(both, ends, strict=True):
                _make("link", "add", one.name, "type", "veth", "peer", *end)
                _make("link", "set", one.name, "master", bridge, "up")
        else:
            _make("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for one in both:
            inside = ("-n", one.name)
            if second:
                before = f"{network}.{_BEFORE + int(one.address.rpartition('.')[2])}"
                _make(*inside, "addr", "add", f"{before}/24", "dev", "eth0")
            _make(*inside, "addr", "add", f"{one.address}/24", "dev", "eth0")
            _make(*inside, "link", "set", "eth0", "up")
            _make(*inside, "link", "set", "lo", "up")
        yield both
    finally:
        for one in both:
            _ip("link", "delete", one.name)  # this namespace's end of the cable, if there is one
            _ip("netns", "delete", one.name)
        _ip("link", "delete", bridge)
