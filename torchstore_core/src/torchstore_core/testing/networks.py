"""Network namespaces: several hosts with addresses of their own on one machine. Linux only."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import pytest

__all__ = ["Network", "two_networks"]

_SECONDS = 20.0


class Network(NamedTuple):
    """A namespace, with an interface of this address."""

    name: str
    address: str

    @property
    def wrapper(self) -> list[str]:
        """The command that runs another one in it."""
        return ["ip", "netns", "exec", self.name]


def _ip(*words: str) -> str:
    """Run ``ip``; returns what it complains about."""
    done = subprocess.run(
        ["ip", *words],  # noqa: S607 - wherever the system has it
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    return done.stderr.strip() or f"exit {done.returncode}" if done.returncode else ""


def _make(*words: str) -> None:
    if failed := _ip(*words):
        pytest.skip(f"network namespaces cannot be made here: {failed}")


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[Network, Network]]:
    """Two namespaces, joined by a cable; nothing else leads from one to the other.

    Skips the test, and says why, where they cannot be made.
    """
    if shutil.which("ip") is None:
        pytest.skip("network namespaces cannot be made here: there is no `ip` (iproute2)")
    tag = f"{os.getpid() % 100_000}{os.urandom(2).hex()}"
    both = Network(f"tk{tag}a", "10.213.78.1"), Network(f"tk{tag}b", "10.213.78.2")
    try:
        for one in both:
            _make("netns", "add", one.name)
        ends = ("name", "eth0", "netns", both[0].name), ("name", "eth0", "netns", both[1].name)
        _make("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for one in both:
            inside = ("-n", one.name)
            _make(*inside, "addr", "add", f"{one.address}/24", "dev", "eth0")
            _make(*inside, "link", "set", "eth0", "up")
            _make(*inside, "link", "set", "lo", "up")
        yield both
    finally:
        for one in both:
            _ip("netns", "delete", one.name)
