"""Which process writes a file, as claims and the names of temporary files say it: other processes
on its host know by that whether it still runs.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from pathlib import Path

from torchstore_core.machine import processes

__all__ = ["OWNER", "has_ended", "host", "owner", "started"]

#: What :func:`owner` returns.
OWNER = re.compile(r"([0-9a-f]{16})-([0-9a-f]+)-([0-9a-f]+)")


@functools.cache
def host() -> str:
    """Return the host, since it was started, and the name space of this process's pid."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def started(pid: int) -> int | None:
    """When a process was started, in ticks of this host; None if it does not run."""
    fields = processes.stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in ("Z", "X") else None


def owner() -> str:
    """Return this process as a part of a file's name."""
    pid = os.getpid()
    return f"{_short_host()}-{pid:x}-{started(pid) or 0:x}"


def has_ended(owner: str) -> bool:
    """Whether the process that :func:`owner` names was one of this host, and does not run any more.
    False if nobody here can know.
    """
    found = OWNER.fullmatch(owner)
    if found is None or found[1] != _short_host():
        return False
    return started(int(found[2], 16)) != int(found[3], 16)


@functools.cache
def _short_host() -> str:
    return hashlib.blake2b(host().encode(), digest_size=8).hexdigest()
