"""Watching processes end: any of this host's, and the parent on kernels that cannot tell."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys

import pytest
from tests.processes import Script

from torchstore_core.machine.processes import ProcessWatch

# Watches its parent, says that it does, and says when the parent has ended.
INNER = """
import asyncio, os, sys
from torchstore_core.machine.processes import ProcessWatch
if sys.argv[1] == "old":
    del os.pidfd_open

async def main():
    ended = asyncio.Event()
    parent = os.getppid()
    watch = ProcessWatch(parent, ended.set, is_parent=True)
    os.write(1, b"watching\\n")
    await asyncio.wait_for(ended.wait(), 60)
    assert os.getppid() != parent
    os.write(1, b"ended\\n")

asyncio.run(main())
"""
OUTER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]])
"""


async def test_a_process_that_is_killed_is_told_once() -> None:
    process = subprocess.Popen(["sleep", "60"])
    ended = asyncio.Queue[int]()
    watch = ProcessWatch(process.pid, lambda: ended.put_nowait(1))
    closed = ProcessWatch(process.pid, lambda: ended.put_nowait(2))
    closed.close()
    assert ended.empty()
    process.kill()
    process.wait()
    assert await asyncio.wait_for(ended.get(), 30) == 1
    gone = ProcessWatch(process.pid, lambda: ended.put_nowait(3))
    assert await asyncio.wait_for(ended.get(), 30) == 3
    for one in (watch, gone):
        one.close()
    assert ended.empty()


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_the_end_of_the_parent_is_known_on_every_kernel(kernel: str) -> None:
    outer = subprocess.Popen(
        [sys.executable, "-c", OUTER, INNER, kernel], stdout=subprocess.PIPE, bufsize=0
    )
    assert outer.stdout is not None
    try:
        assert _line(outer.stdout.fileno()) == b"watching\n"
        outer.kill()
        outer.wait()
        assert _line(outer.stdout.fileno()) == b"ended\n"
    finally:
        outer.kill()
        outer.wait()
        outer.stdout.close()


async def test_a_pid_that_is_no_parent_any_more_has_ended() -> None:
    """The parent ended before it was watched, and its pid is another process's now."""
    ended = asyncio.Event()
    watch = ProcessWatch(os.getpid(), ended.set, is_parent=True)
    await asyncio.wait_for(ended.wait(), 30)
    watch.close()


def _line(fd: int) -> bytes:
    ready, _, _ = select.select([fd], [], [], 60)
    assert ready, "nothing was said"
    return os.read(fd, 100)


@pytest.mark.thorough
def test_reading_what_a_script_prints_moves_nothing_of_it() -> None:
    """Its file is read while it writes, by tests that wait for what it says."""
    with Script("for n in range(30_000):\n    print(n, flush=True)") as script:
        while script._process.wait(0) is None:
            script._out.seek(0)
            script._out.read(1)
        script._out.seek(0)
        assert script._out.read() == "".join(f"{n}\n" for n in range(30_000))
