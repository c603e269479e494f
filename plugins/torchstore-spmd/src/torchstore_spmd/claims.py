"""Who holds a place in a meeting of ranks, and whether that process still lives. Torch-free."""

from __future__ import annotations

import os
import secrets
import socket
import time

import msgspec

from torchstore_core.machine import topology

__all__ = ["Who"]

_SHORT_S = 30.0


class Who(msgspec.Struct, frozen=True):
    """A process that has come to a meeting; made by :meth:`me`.

    Args:
        host, pids: its host, and the namespace of its pid.
        hostname, pid: of the process, for people, too.
        started: when, in ticks of its host since that booted: pids are used again.
        at: when it came, seconds since the epoch, by its host's clock.
        nonce: no other coming has it.
    """

    host: str
    pids: str
    hostname: str
    pid: int
    started: int
    at: float
    nonce: str

    @classmethod
    def me(cls) -> Who:
        """This process, coming now."""
        here = topology.probe()
        return cls(
            here.host_id,
            _namespace(),
            socket.gethostname(),
            os.getpid(),
            topology.start_time(os.getpid()) or 0,
            time.time(),
            secrets.token_hex(8),
        )

    @property
    def lives(self) -> bool | None:
        """Whether it does; None: it cannot be known from here."""
        here = topology.probe()
        if self.host != here.host_id or self.pids != _namespace() or not self.started:
            return None
        return topology.start_time(self.pid) == self.started

    @property
    def is_me(self) -> bool:
        """Whether it is this process."""
        return self.pid == os.getpid() and self.lives is True

    @property
    def long_before_me(self) -> bool:
        """Whether it came clearly before this process was started."""
        started = topology.start_time(os.getpid()) or 0
        running = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
        return self.at < time.time() - running - _SHORT_S

    def __str__(self) -> str:
        return f"process {self.pid} on {self.hostname}"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
