"""What can be known about a process's place: detected, never guessed from host names."""

from __future__ import annotations

import functools
import os
import platform
import socket
from pathlib import Path

import msgspec

__all__ = ["HOST_ID", "Topology", "beyond_memory", "cgroup_limits", "memory_limit_bytes", "probe"]
__all__ += ["started"]


_STARTED = 19  # in /proc/<pid>/stat, counted from what follows the command's name

#: Environment variable that names this process's host, in place of the kernel's boot id: for
#: containers of one machine that share no memory, and for tests of several hosts on one.
HOST_ID = "TORCHSTORE_HOST_ID"


class Topology(msgspec.Struct, frozen=True, array_like=True):
    """Where a process runs.

    Args:
        host_id: the kernel's boot id, or ``TORCHSTORE_HOST_ID``. Two containers of one machine
            share it, so that equality is needed, not enough: reaching the other's Unix socket is
            the proof.
        hostname: for people; never compared.
        pid: process id in its own pid namespace.
        uid: user id.
        cpus: processors this process may run on.
        memory_bytes: memory limit (cgroup or machine), bytes.
        cuda_devices: CUDA device files present.
        rdma_devices: InfiniBand/RoCE devices present.
        kernel: operating system and kernel release.
    """

    host_id: str
    hostname: str
    pid: int
    uid: int
    cpus: int
    memory_bytes: int
    cuda_devices: int
    rdma_devices: tuple[str, ...]
    kernel: str


def _host_id() -> str:
    given = os.environ.get(HOST_ID)
    if given:
        return given
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        # No boot id (not Linux): the name is the best there is, and a Unix socket must prove it.
        return f"host:{socket.gethostname()}"


def started(pid: int) -> int | None:
    """When a process of this host was started, in ticks since boot; None if it does not live. Pids
    are used again, this tells them apart.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[_STARTED])


def memory_limit_bytes() -> int:
    """Bytes of memory this process may use: the least limit of the cgroups that it is in (of its
    container, of its systemd unit), or all that there is.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:
        groups = ""
    for name in cgroup_limits(groups):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def cgroup_limits(groups: str) -> list[str]:
    """The files that may say how much memory a process may use.

    Args:
        groups: its ``/proc/<pid>/cgroup``. In a container the paths may be those of the host, of
            which only the root is here.

    >>> cgroup_limits("0::/a.slice/b.service")[-1]
    '/sys/fs/cgroup/a.slice/b.service/memory.max'
    """
    files = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
    for line in groups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            root, name = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            root, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        for part in path.strip("/").split("/"):
            if part in ("", ".."):
                break
            root = f"{root}/{part}"
            files.append(f"{root}/{name}")
    return files


def beyond_memory(capacity: int, memory_bytes: int, host: str) -> str:
    """The warning for a store that promises more memory than there is; empty if it does not."""
    if capacity <= memory_bytes:
        return ""
    return (
        f"a capacity of {capacity:,} bytes is more than the {memory_bytes:,} bytes of memory that "
        f"may be used on {host} (its RAM, or the limit of a cgroup): a store that fills up is "
        "killed, or its clients are, before a put is refused. Take a smaller capacity"
    )


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _listdir(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


@functools.lru_cache(maxsize=1)
def _host_facts() -> tuple[str, str, int, int, tuple[str, ...], str]:
    cuda = sum(1 for n in _listdir("/dev") if n.startswith("nvidia") and n[6:].isdigit())
    return (
        _host_id(),
        socket.gethostname(),
        memory_limit_bytes(),
        cuda,
        tuple(_listdir("/sys/class/infiniband")),
        f"{platform.system()} {platform.release()}",
    )


def probe() -> Topology:
    """The topology of this process, now (host facts are read once, pid and affinity each time)."""
    host_id, hostname, memory, cuda, rdma, kernel = _host_facts()
    return Topology(
        host_id, hostname, os.getpid(), os.getuid(), _cpus(), memory, cuda, rdma, kernel
    )
