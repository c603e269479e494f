"""What ``torchstore doctor`` has to say about limits of this host and process. Torch-free."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from torchstore_cli import reports
from torchstore_core.reports.units import human_bytes
from torchstore_core.wire import messages as m

__all__ = ["limit_notes", "memory_notes", "read_limits"]

_LOW_OPEN_FILES = 1024
_LOW_MEMLOCK = 1 << 30
_LOW_MAPPINGS = 65530  # Linux's default


def read_limits() -> reports.Limits:
    """The limits of this process and host."""
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        mappings: int | None = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        mappings = None
    try:
        dev_shm: int | None = shutil.disk_usage("/dev/shm").total  # noqa: S108 - only looked at
    except OSError:
        dev_shm = None
    return reports.Limits(_finite(memlock), _finite(soft), _finite(hard), mappings, dev_shm)


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def limit_notes(
    limits: reports.Limits, left: int | None, capacity: int, *, has_cuda: bool
) -> Iterator[str]:
    """Which limits a store may reach.

    Args:
        left: bytes of memory that this host has left; None: that is not known.
        capacity: of a store that is started here without one.
    """
    if limits.open_files is not None and limits.open_files < _LOW_OPEN_FILES:
        yield (
            f"only {limits.open_files} open files: a server needs one for each connection and "
            f"segment; raise it with `ulimit -n` (at most {limits.open_files_hard})"
        )
    if limits.max_mappings is not None and limits.max_mappings < _LOW_MAPPINGS:
        yield (
            f"only {limits.max_mappings} memory mappings for each process: one that has used them "
            "up gets copies instead of zero-copy tensors; raise it with "
            f"`sysctl vm.max_map_count={_LOW_MAPPINGS}`"
        )
    if left is not None and left < capacity:
        yield (
            f"only {left:,} bytes of memory are left on this host, or in a cgroup of this process: "
            f"a store of the default capacity ({capacity:,} bytes) refuses puts before it is full"
        )
    memlock = limits.memlock_bytes
    if has_cuda and memlock is not None and memlock < _LOW_MEMLOCK:
        yield (
            f"memlock is {memlock} bytes: page-locking segments for CUDA may fail, and transfers "
            "are slower then; raise it with `ulimit -l unlimited`"
        )


def memory_notes(status: m.StatusReport, host: str, left: int | None) -> Iterator[str]:
    """Whether a running store may use more memory than there is.

    Args:
        host: the id of this host.
        left: bytes of memory that it has left; None: that is not known.
    """
    there = [v for v in status.volumes if v.host_id == host and not v.lost]
    missing = sum(v.capacity_bytes - v.warm_bytes for v in there)
    if left is not None and left < missing:
        yield (
            f"store {status.store_name!r} may use {human_bytes(missing)} more memory of this host, "
            f"which has only {human_bytes(left)} left: it refuses puts, or spills, before it is "
            "full; end what else uses memory, or start it with a smaller capacity"
        )
