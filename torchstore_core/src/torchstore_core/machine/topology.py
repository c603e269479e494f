"""Where a process runs. Everything is detected; nothing is guessed from host names."""

from __future__ import annotations

import functools
import os
import platform
import socket
from pathlib import Path

import msgspec

from torchstore_core.machine.networks import Network, namespace_id, reachable
from torchstore_core.machine.processes import started, stat_fields

_INFINIBAND = "/sys/class/infiniband"
_NETWORKS_MAX = 16

#: Environment variable with an id of this process's host that replaces the kernel's boot id: for
#: containers on one machine that share no memory, and for tests with several hosts on one machine.
HOST_ID = "TORCHSTORE_HOST_ID"


class Topology(msgspec.Struct, frozen=True, array_like=True):
    """Where a process runs.

    Args:
        host_id: the kernel's boot id, or ``TORCHSTORE_HOST_ID``. Containers on one machine share
            it, so equal ids are necessary for memory to be shared, but not sufficient: the proof is
            that the other process's Unix socket can be reached.
        hostname: for people only; never compared.
        pid: the process id, in the process's own pid namespace.
        uid: the user id.
        cpus: the number of processors that this process may run on.
        memory_bytes: the memory limit of the cgroup or the machine, in bytes.
        cuda_devices: the number of CUDA device files.
        rdma_devices: the names of the InfiniBand/RoCE devices.
        kernel: the operating system and its kernel release.
        networks: the addresses at which other hosts may reach this one, at most 16.
        namespace: the id of the process's network namespace; empty if the system does not tell.
        rdma_mbits_per_s: the rate of the fastest port of the RDMA devices; 0 if it is not known.
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
    networks: tuple[Network, ...] = ()
    namespace: str = ""
    rdma_mbits_per_s: int = 0


def _host_id() -> str:
    given = os.environ.get(HOST_ID)
    if given:
        return given
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        # Without a boot id (not Linux) the name must do; a Unix socket still has to prove it.
        return f"host:{socket.gethostname()}"


def start_time(pid: int) -> int | None:
    """Return when a process of this host was started, in ticks since boot; None if it is not alive.

    Because pids are reused, only pid and start time together identify a process.
    """
    fields = stat_fields(pid)
    return None if not fields or fields[0] in "ZX" else started(pid)


def memory_limit_bytes() -> int:
    """Return how many bytes of memory this process may use: the lowest limit of its cgroups (its
    container's, or its systemd unit's), or the memory of the machine if that is less.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for _, limit in _limits_of_groups())])


def memory_left_bytes() -> int | None:
    """Return how many bytes of memory this process could still fill before the kernel ends
    processes for want of it: what is available on the machine with its swap, or what is left below
    the limit of a cgroup if that is less. Caches of files count as available. None if the system
    does not say.

    It costs about 0.1 ms. Other processes may take the memory at any time.
    """
    left: int | None = None
    machine = _numbers("/proc/meminfo")
    if "MemAvailable:" in machine:
        left = (machine["MemAvailable:"] + machine.get("SwapFree:", 0)) << 10
    for file, limit in _limits_of_groups():
        below = left_below(file, limit)
        if below is not None:
            left = below if left is None else min(left, below)
    return left


def left_below(file: Path, limit: int) -> int | None:
    """Return how many bytes a cgroup may still use, its caches of files included.

    Args:
        file: the one that states its limit, of version 1 or 2; the others stand beside it.
        limit: in bytes.
    """
    first = file.name == "memory.limit_in_bytes"
    usage = _numbers(file.with_name("memory.usage_in_bytes" if first else "memory.current"))
    if "" not in usage:
        return None
    total = "total_" if first else ""  # with the groups inside of this one
    of = _numbers(file.with_name("memory.stat"))
    cached = of.get(f"{total}inactive_file", 0) + of.get(f"{total}active_file", 0)
    return max(0, limit - usage[""] + cached)


def _numbers(file: Path | str) -> dict[str, int]:
    """Return the numbers of a file of ``name number`` lines; a number that is alone has no name."""
    try:
        lines = [line.split() for line in Path(file).read_text().splitlines()]
    except OSError:
        return {}
    named = [words if len(words) > 1 else ["", *words] for words in lines]
    return {words[0]: int(words[1]) for words in named if len(words) > 1 and words[1].isdigit()}


def _limits_of_groups() -> list[tuple[Path, int]]:
    """Return the memory limits of this process' cgroups, in bytes, and the files that state them.

    A limit above the machine's memory, which is how version 1 of cgroups writes that there is
    none, is left out.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:
        groups = ""
    found = ((Path(name), _numbers(name).get("")) for name in cgroup_limits(groups))
    return [(file, limit) for file, limit in found if limit is not None and limit < total]


def cgroup_limits(groups: str) -> list[str]:
    """Return the files that may contain a memory limit of a process.

    Args:
        groups: the contents of its ``/proc/<pid>/cgroup``. In a container these may be paths of the
            host, of which only the root exists in the container.

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


def capacity_warning(capacity: int, memory_bytes: int, host: str) -> str:
    """Return the warning for a capacity that exceeds the memory; empty if it does not."""
    if capacity <= memory_bytes:
        return ""
    return (
        f"a capacity of {capacity:,} bytes is more than the {memory_bytes:,} bytes of memory that "
        f"may be used on {host} (its RAM, or the limit of a cgroup): puts are refused when that "
        "memory is used up. Take a smaller capacity"
    )


def _listdir(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


@functools.lru_cache(maxsize=1)
def _host_facts() -> tuple[str, str, int, int, tuple[str, ...], str, int]:
    cuda = sum(1 for n in _listdir("/dev") if n.startswith("nvidia") and n[6:].isdigit())
    return (
        _host_id(),
        socket.gethostname(),
        memory_limit_bytes(),
        cuda,
        tuple(_listdir(_INFINIBAND)),
        f"{platform.system()} {platform.release()}",
        _rdma_mbits_per_s(_INFINIBAND),
    )


def _rdma_mbits_per_s(devices: str) -> int:
    """Return the rate of the fastest port, of those in a directory of devices; 0 if none says."""
    fastest = 0
    for file in Path(devices).glob("*/ports/*/rate"):
        try:
            words = file.read_text().split()  # such as "200 Gb/sec (4X HDR)"
            fastest = max(fastest, int(float(words[0]) * 1000))
        except (OSError, ValueError, IndexError):
            continue
    return fastest


def probe() -> Topology:
    """Return the topology of this process. Facts about the host are read only once."""
    host_id, hostname, memory, cuda, rdma, kernel, rate = _host_facts()
    return Topology(
        host_id,
        hostname,
        os.getpid(),
        os.getuid(),
        len(os.sched_getaffinity(0)),
        memory,
        cuda,
        rdma,
        kernel,
        reachable()[:_NETWORKS_MAX],
        namespace_id(),
        rate,
    )
