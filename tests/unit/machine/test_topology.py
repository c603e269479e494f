"""What a process knows of its place."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from torchstore_core.machine.topology import Topology, cgroup_limits, memory_limit_bytes, probe


def test_it_is_this_process_on_this_host() -> None:
    here = probe()
    assert (here.pid, here.uid) == (os.getpid(), os.getuid())
    assert here.hostname == socket.gethostname()
    assert here.cpus == len(os.sched_getaffinity(0))
    assert here.kernel == f"{os.uname().sysname} {os.uname().release}"
    assert here.cuda_devices == len(list(Path("/dev").glob("nvidia[0-9]*")))
    devices = Path("/sys/class/infiniband")
    found = sorted(p.name for p in devices.iterdir()) if devices.is_dir() else []
    assert list(here.rdma_devices) == found


@pytest.mark.skipif(sys.platform != "linux", reason="boot ids are Linux's")
def test_a_host_is_known_by_its_boot_id_not_by_its_name() -> None:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert probe().host_id == boot_id
    assert probe().hostname not in probe().host_id


def test_another_process_of_this_host_has_the_same_host_id() -> None:
    code = (
        "import msgspec, sys; from torchstore_core.machine.topology import probe; "
        "sys.stdout.buffer.write(msgspec.json.encode(probe()))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, timeout=200
    )
    other = msgspec.json.decode(said.stdout, type=Topology)
    here = probe()
    assert other.pid != here.pid
    # Addresses come and go, for instance those of network namespaces.
    assert msgspec.structs.replace(other, pid=here.pid, networks=here.networks) == here


def test_the_pid_is_asked_for_each_time() -> None:
    """A forked child must not go by its parent's."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, str(probe().pid).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        assert int(said.read()) == pid
    os.waitpid(pid, 0)


def test_the_memory_limit_is_that_of_the_machine_or_less() -> None:
    limit = memory_limit_bytes()
    assert 64 << 20 < limit <= psutil.virtual_memory().total
    cgroup = Path("/sys/fs/cgroup/memory.max")
    if cgroup.exists() and cgroup.read_text().strip().isdigit():
        assert limit <= int(cgroup.read_text())
    assert probe().memory_bytes == limit


def test_it_crosses_the_wire() -> None:
    here = probe()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(here), type=Topology) == here


def test_every_cgroup_that_a_process_is_in_may_limit_it() -> None:
    """The one of its systemd unit, and those around it."""
    root = "/sys/fs/cgroup"
    both = [f"{root}/memory.max", f"{root}/memory/memory.limit_in_bytes"]
    assert cgroup_limits("") == both
    assert cgroup_limits("0::/\n") == both
    assert cgroup_limits("0::/system.slice/ts.service\n") == [
        *both,
        f"{root}/system.slice/memory.max",
        f"{root}/system.slice/ts.service/memory.max",
    ]
    assert cgroup_limits("4:cpu,memory:/a/b\n3:cpuset:/c\n0::/\nnonsense") == [
        *both,
        f"{root}/memory/a/memory.limit_in_bytes",
        f"{root}/memory/a/b/memory.limit_in_bytes",
    ]
    assert cgroup_limits("0::/../../host") == both  # not seen from here
