"""A store that may have more memory than the host: it refuses, or spills, and nobody is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import until

from torchstore_core.machine.topology import left_below, memory_left_bytes
from torchstore_core.server.memory.allocator import Allocator
from torchstore_core.server.memory.segment import SegmentMemory

MB = 1 << 20
LIMIT = 900 * MB
# It needs about 200 MB for itself, so that the store has room for about 18 values. The argument
# is a folder to spill to.
PROGRAM = """
import asyncio, sys
import torch
import torchstore_core as ts

VALUE = 32 << 20

def value(number):
    return torch.full((VALUE,), number, dtype=torch.uint8)

async def check(count):
    for number in range(count):
        got = await ts.get(f"k{number}")
        assert bool((got == number).all()), number
        del got

async def main():
    await ts.initialize(capacity=8 << 30, prefault=400 << 20)
    count = 0
    try:
        while count < 100:
            await ts.put(f"k{count}", value(count))
            count += 1
    except ts.StoreFullError as error:
        assert error.details["host_left_bytes"] < 4 * VALUE, error.details
        assert "larger capacity" not in error.message
    assert 8 <= count < 28, count
    await check(count)
    await ts.delete_batch([f"k{number}" for number in range(count)])
    await ts.put("again", value(7))
    await ts.shutdown()
    await ts.initialize(capacity=8 << 30, prefault=0, when_full="spillable", spill=sys.argv[1])
    for number in range(28):
        await ts.put(f"k{number}", value(number))
    await check(28)
    await ts.shutdown()
    print("whole", count)

asyncio.run(main())
"""
# The same of a volume that is attached to its server. The arguments are where these tests are, and
# a folder.
ATTACHED = """
import asyncio, pathlib, sys
import torch
sys.path.insert(0, sys.argv[1])
import torchstore_core as ts
from tests.unit.remote.attached import attached
from tests.unit.remote.relays import Backstage

VALUE = 32 << 20

async def main():
    with Backstage() as stage:
        async with attached(stage, pathlib.Path(sys.argv[2]), 1) as made:
            stage.do(made.attach(0, capacity=8 << 30))
            client = await ts.connect(made.address, store_name="attached", timeout=10)
            count = 0
            try:
                while count < 100:
                    await client.put(f"k{count}", torch.full((VALUE,), count, dtype=torch.uint8))
                    count += 1
            except ts.StoreFullError as error:
                assert error.details["host_left_bytes"] < 4 * VALUE, error.details
            assert 8 <= count < 28, count
            for number in range(count):
                assert bool(((await client.get(f"k{number}")) == number).all()), number
            print("whole", count)

asyncio.run(main())
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup of its own, with a limit of 900 MB."""
    second = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    root = Path("/sys/fs/cgroup") if second else Path("/sys/fs/cgroup/memory")
    group = root / f"torchstore-test-{os.getpid()}"
    limit = "memory.max" if second else "memory.limit_in_bytes"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not (group / limit).exists():
            pytest.skip("cgroups made here have no memory controller")
        (group / limit).write_text(str(LIMIT))
        yield group
    finally:
        asyncio.run(until(lambda: _removed(group), 20))


def _removed(group: Path) -> bool:
    """Remove a group, unless a process of it is still ending."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def shell_in(group: Path) -> list[str]:
    return ["/bin/sh", "-c", f'echo $$ > {group / "cgroup.procs"}; exec "$@"', "sh"]


def run_in(group: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*shell_in(group), sys.executable, "-P", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_store_larger_than_the_limit_of_a_cgroup(group: Path, tmp_path: Path) -> None:
    done = run_in(group, "-W", "ignore", "-c", PROGRAM, str(tmp_path))
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.startswith("whole")


@pytest.mark.soak
def test_an_attached_volume_larger_than_the_limit_of_a_cgroup(group: Path, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[3])
    done = run_in(group, "-W", "ignore", "-c", ATTACHED, root, str(tmp_path))
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.startswith("whole")


def test_doctor_warns_of_a_host_that_has_little_left(group: Path) -> None:
    ballast = "import sys; memory = bytearray(600 << 20); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", ballast]
    user = subprocess.Popen([*shell_in(group), *command], stdin=-1, stdout=-1)
    try:
        assert user.stdout is not None
        assert user.stdout.readline()
        done = run_in(group, "-m", "torchstore_cli", "doctor")
    finally:
        user.communicate()
    assert "bytes of memory are left on this host" in " ".join(done.stdout.split()), done


@pytest.mark.parametrize(
    ("limit", "usage", "prefix"),
    [
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ],
)
def test_what_is_left_below_a_limit(tmp_path: Path, limit: str, usage: str, prefix: str) -> None:
    file = tmp_path / limit
    assert left_below(file, 1000) is None
    (tmp_path / usage).write_text("900\n")
    assert left_below(file, 1000) == 100
    counts = f"anon 700\n{prefix}inactive_file 80\n{prefix}active_file 20\nshmem 100\n"
    (tmp_path / "memory.stat").write_text(counts)
    assert left_below(file, 1000) == 200
    assert left_below(file, 500) == 0


def test_the_segment_asks_for_missing_pages_alone() -> None:
    memory = SegmentMemory("test", 1 << 44)
    try:
        left = memory_left_bytes()
        assert left is not None
        assert memory.may_grow(4 * left) < 2 * left
        assert memory.may_grow(MB) >= MB
        fd = os.dup(memory.fd)
        with os.fdopen(fd, "wb") as file:  # pages that are there count as room
            file.write(bytes(64 * MB))
        assert os.fstat(memory.fd).st_blocks * 512 >= 64 * MB
        assert memory.may_grow(64 * MB) >= 64 * MB
    finally:
        memory.close()


def test_an_allocator_stops_where_it_is_told_to() -> None:
    asked: list[int] = []

    def grow(end: int) -> int:
        asked.append(end)
        return min(end + 128, limit)

    limit = 1024
    allocator = Allocator(4096, grow)
    assert [allocator.allocate(64) for _ in range(16)] == list(range(0, 1024, 64))
    assert asked == [64, 256, 448, 640, 832, 1024]  # once for three
    assert allocator.allocate(64) is None
    assert allocator.refused
    assert allocator.allocate_all(128, [64, 64]) is None
    assert allocator.refused
    allocator.free([(128, 64)])
    assert allocator.allocate(64) == 128  # what was used before is there
    limit = 2048
    assert allocator.allocate_all(128, [64, 64]) == [1024, 1088]
    assert allocator.allocate(4096) is None
    assert not allocator.refused
    asked.clear()
    allocator.ask_again()
    assert allocator.allocate(64) == 1152
    assert asked == [1216]
