"""The examples, run as a user runs them: in a process of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.support import until

EXAMPLES = Path(__file__).parents[1] / "examples"
TRAINER = "trainer_generators.py"
PATIENCE_S = 90.0


@contextmanager
def example(name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A running example, in a process group of its own; it and its children are ended."""
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / name), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        children = descendants(process.pid)
        process.kill()
        for child in children:
            if child.is_running():
                child.kill()
        process.communicate()


def descendants(pid: int) -> list[psutil.Process]:
    """Children, their children and so on."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def workers(pid: int) -> list[psutil.Process]:
    """Its children that multiprocessing has spawned: trainer and generators."""
    found = []
    for child in descendants(pid):
        try:
            if "--multiprocessing-fork" in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue
    return found


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended (one that nobody has waited for yet has)."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def ignores_sigint(pid: int) -> bool:
    """Whether the process was started with SIGINT blocked, so that it prints nothing on Ctrl-C."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:"))
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)


async def output(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, standard output and standard error, once it has ended."""
    out, err = await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
    return process.returncode, out, err


async def test_generators_hold_whole_versions_and_see_them_change() -> None:
    with example(TRAINER, "--steps", "4", "--json") as process:
        status, out, err = await output(process)
    assert status == 0, err
    numbers = json.loads(out)
    assert numbers["mismatches"] == 0
    assert numbers["versions_published"] == 4
    assert numbers["bytes_per_version"] > 90e6
    assert numbers["losses"][-1] < numbers["losses"][0]
    assert len(numbers["generators"]) == 2
    for generator in numbers["generators"]:
        seen = generator["versions_seen"]
        assert len(seen) >= 2
        assert seen == sorted(set(seen))
        assert seen[-1] == 4
    timed = [
        numbers["copy_floor"],
        numbers["publish"],
        *(g["fetch"] for g in numbers["generators"]),
    ]
    assert all(0 < times["median_s"] <= times["max_s"] for times in timed)


async def test_a_wrong_checksum_is_noticed_by_every_generator() -> None:
    with example(TRAINER, "--steps", "2", "--json", "--corrupt") as process:
        status, out, err = await output(process)
    assert status == 1, err
    numbers = json.loads(out)
    assert [len(g["mismatches"]) for g in numbers["generators"]] == [1, 1]


async def test_a_killed_worker_ends_the_job_with_an_error() -> None:
    with example(TRAINER, "--steps", "1000", "--json") as process:
        started = await until(lambda: workers(process.pid)[2:] and descendants(process.pid), 60)
        workers(process.pid)[-1].kill()
        status, out, err = await output(process)
        assert status == 1
        assert not out
        assert "died, exit code -9" in err
        await until(lambda: not alive(started))


async def test_ctrl_c_ends_everything_without_a_traceback() -> None:
    with example(TRAINER, "--steps", "1000", "--json") as process:
        started = await until(lambda: workers(process.pid)[2:] and descendants(process.pid), 60)
        assert all(ignores_sigint(worker.pid) for worker in workers(process.pid))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
        status, out, err = await output(process)
        assert status == 130
        assert not out
        assert "Traceback" not in err
        await until(lambda: not alive(started))


async def test_two_lines_carry_a_module_to_another_process() -> None:
    with example("two_lines.py") as process:
        status, out, err = await output(process)
    assert status == 0, err
    writer, reader = sorted(out.splitlines(), reverse=True)
    assert writer.startswith("writer: ")
    assert reader == writer.replace("writer", "reader")


@pytest.mark.parametrize("arguments", [("--steps", "0"), ("--generators", "0")])
async def test_senseless_arguments_are_refused(arguments: tuple[str, str]) -> None:
    with example(TRAINER, *arguments) as process:
        status, _, err = await output(process)
    assert status == 2
    assert "at least 1" in err
