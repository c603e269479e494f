"""The deadlines of tests."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time

import pytest
from tests.support import halt, turn

from torchstore_core.testing.timers import ends_within, within


async def test_what_ends_before_the_timer_and_what_does_not() -> None:
    for ends, seconds, in_time in ((0.0, 5.0, True), (5.0, 0.1, False)):
        work = asyncio.ensure_future(asyncio.sleep(ends))
        assert await ends_within(work, seconds) == in_time
        work.cancel()
    async with within(5.0):
        await turn()
    with pytest.raises(pytest.fail.Exception, match=r"did not end within 0\.05 s"):
        async with within(0.05):
            await asyncio.sleep(2.0)


async def test_an_error_of_what_is_late_is_not_hidden() -> None:
    async def fails_late() -> None:
        async with within(0.02):
            await asyncio.sleep(0.5)
            raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        await fails_late()


async def test_how_long_the_process_stands_still_does_not_count() -> None:
    async with within(0.2):
        await turn()
        time.sleep(1.0)  # as if it had been stopped


async def test_how_long_another_process_waits_for_a_processor_does_not_count() -> None:
    """Of three that have one processor, each waits for two thirds of the time."""
    spin = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); print(flush=True)\n"
        "while True: pass"
    )
    with contextlib.ExitStack() as stack:
        spinning = []
        for _ in range(4):
            process = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            spinning.append(process)
        for process in spinning:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
        # Who stands still does not wait for a processor; this process does, beside others.
        await halt(spinning[1].pid)
        for done_by, in_time in ((spinning[1].pid, False), (spinning[0].pid, True)):
            work = asyncio.ensure_future(asyncio.sleep(2.0))
            assert await ends_within(work, 1.0, done_by=done_by) == in_time
            work.cancel()
