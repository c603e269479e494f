"""Which NUMA nodes a process and the network devices of its host are on. Torch-free.

Memory comes from the node of the processor that touches it first. A device on another node reaches
it through the connection between the nodes.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class Numa(msgspec.Struct, frozen=True):
    """What is where on a host.

    Args:
        nodes: how many nodes the host has; 0 if the system does not tell.
        process: the nodes of the processors that the process may run on.
        devices: the nodes of network interfaces and RDMA devices, by name; without those of which
            the system does not know it, such as virtual ones.
    """

    nodes: int = 0
    process: tuple[int, ...] = ()
    devices: dict[str, int] = {}

    def apart(self) -> dict[str, int]:
        """Return the devices that are on none of the process's nodes.

        >>> Numa(2, (0,), {"eth0": 0, "mlx5_0": 1}).apart()
        {'mlx5_0': 1}
        """
        if not self.process:
            return {}
        return {name: node for name, node in self.devices.items() if node not in self.process}


def probe_numa(system: Path = Path("/sys")) -> Numa:
    """Return what the system knows; ``system``: where it tells."""
    usable = os.sched_getaffinity(0)
    nodes = {
        int(folder.name.removeprefix("node")): _numbers(folder / "cpulist")
        for folder in (system / "devices/system/node").glob("node[0-9]*")
    }
    devices = {
        folder.name: node
        for kind in ("net", "infiniband")
        for folder in sorted((system / "class" / kind).glob("*"))
        if (node := _number(folder / "device/numa_node")) >= 0
    }
    process = tuple(sorted(node for node, cpus in nodes.items() if cpus & usable))
    return Numa(len(nodes), process, devices)


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return -1


def _numbers(file: Path) -> set[int]:
    """Return the numbers of a list such as ``0-3,8``."""
    found: set[int] = set()
    try:
        for part in file.read_text().strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return found
