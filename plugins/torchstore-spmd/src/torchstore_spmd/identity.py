"""Identifies processes across hosts, and tells whether they still run. Torch-free."""

from __future__ import annotations

import os
import socket
import time

import msgspec

from torchstore_core.machine import topology
from torchstore_core.machine.processes import pid_namespace

__all__ = ["ProcessIdentity"]

_CLOCK_SKEW_S = 30.0


class ProcessIdentity(msgspec.Struct, frozen=True):
    """One process of one host; made by :meth:`of` and :meth:`current`.

    Args:
        host_id, pid_namespace: the host and the namespace in which ``pid`` is valid.
        hostname: for people only.
        pid: the process's pid, in that namespace.
        started: the process's start time, in ticks since its host booted, because pids are reused;
            0: unknown.
        seen_at: when this was made, in seconds since the epoch by its host's clock.
    """

    host_id: str
    pid_namespace: int
    hostname: str
    pid: int
    started: int
    seen_at: float

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Return the identity of the process of this host that has that pid now."""
        return cls(
            topology.probe().host_id,
            pid_namespace(),
            socket.gethostname(),
            pid,
            topology.start_time(pid) or 0,
            time.time(),
        )

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Return the identity of this process."""
        return cls.of(os.getpid())

    @property
    def is_alive(self) -> bool | None:
        """Whether the process runs; None if this process cannot know."""
        here = (topology.probe().host_id, pid_namespace())
        if here != (self.host_id, self.pid_namespace) or not self.started:
            return None
        return topology.start_time(self.pid) == self.started

    @property
    def is_current(self) -> bool:
        """Whether this is the identity of the current process."""
        return self.pid == os.getpid() and self.is_alive is True

    @property
    def precedes_current(self) -> bool:
        """Whether this was made clearly before the current process was started, on any host."""
        started = topology.start_time(os.getpid()) or 0
        running = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
        return self.seen_at < time.time() - running - _CLOCK_SKEW_S

    def __str__(self) -> str:
        return f"process {self.pid} on {self.hostname}"
