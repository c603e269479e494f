"""The examples, run as a user runs them: in a process of their own. Those that end by themselves
are forked with torch imported, but for the shortest and the one of torchrun.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from tests.processes import run_program
from tests.support import until

EXAMPLES = Path(__file__).parents[1] / "examples"
TRAINER = "trainer_generators.py"
FSDP = "fsdp_to_tp.py"
PATIENCE_S = 300.0
_HEARS_CTRL_C = ("env", "--default-signal=INT")
_MARK = "EXAMPLE_OF_A_TEST"  # in the environment of an example, and so of all its processes


@asynccontextmanager
async def example(
    name: str, *arguments: str, launch: tuple[str, ...] = ()
) -> AsyncIterator[subprocess.Popen[str]]:
    """A running example, in a process group of its own; it and its children are ended.

    One that ends by itself must leave no process behind.
    """
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        # Ctrl-C is ignored in what a shell runs in the background, and these tests may be.
        [*_HEARS_CTRL_C, sys.executable, *launch, str(EXAMPLES / name), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, _MARK: mark, "GLOO_SOCKET_IFNAME": "lo"},
    )
    try:
        yield process
        if process.returncode is not None:
            await until(lambda: not left_over(mark))  # a fork server ends by itself
    finally:
        children = descendants(process.pid)
        process.kill()
        for child in children:
            if child.is_running():
                child.kill()
        process.communicate()


async def finished(name: str, *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of an example that ends by itself, in a
    process that has imported torch. It must leave no process behind.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, _MARK: mark, "GLOO_SOCKET_IFNAME": "lo"}
    try:
        ended = await run_program(
            EXAMPLES / name,
            *arguments,
            environment=environment,
            timeout=PATIENCE_S,
            twin=True,
        )
        await until(lambda: not left_over(mark))  # a fork server ends by itself
    finally:
        for one in left_over(mark):
            one.kill()
    return ended


def descendants(pid: int) -> list[psutil.Process]:
    """Children, their children and so on."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def left_over(mark: str) -> list[psutil.Process]:
    """The processes that an example has started, and that have not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return alive(found)


def workers(pid: int) -> list[psutil.Process]:
    """What its fork server has forked: trainers and generators."""
    found = []
    for child in descendants(pid):
        try:
            parent = child.parent()
            if parent and parent.pid != pid and "forkserver" in str(parent.cmdline()):
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
    status, out, err = await finished(TRAINER, "--steps", "4", "--json")
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


@pytest.mark.soak
async def test_a_wrong_checksum_is_noticed_by_every_generator() -> None:
    status, out, err = await finished(TRAINER, "--steps", "2", "--json", "--corrupt")
    assert status == 1, err
    numbers = json.loads(out)
    assert [len(g["mismatches"]) for g in numbers["generators"]] == [1, 1]


async def test_tensor_parallel_ranks_hold_what_fsdp_ranks_have_published() -> None:
    status, out, err = await finished(FSDP, "--steps", "3", "--json")
    assert status == 0, err
    assert not err
    numbers = json.loads(out)
    assert numbers["not_equal"] == 0
    assert numbers["versions_published"] == 3
    first, second = numbers["versions_seen"]
    assert first == second == sorted(set(first))
    assert first[0] >= 1
    assert first[-1] == 3
    assert all(behind in range(3) for behind in numbers["behind"])
    assert numbers["losses"][-1] < numbers["losses"][0]
    cut, other = numbers["publish"]["layout"], numbers["fetch"]["layout"]
    assert set(cut) == {"cut along dim 0"}
    assert set(other) == {"cut along dim 0", "cut along dim 1", "whole"}
    assert sum(cut.values()) == sum(other.values())
    # Together the trainer ranks have each byte once; what is whole, each generator rank has.
    assert numbers["publish"]["nbytes"] == numbers["copy_floor"]["nbytes"] > 90e6
    assert numbers["publish"]["nbytes"] < numbers["fetch"]["nbytes"] < 100e6
    timed = [numbers["copy_floor"], numbers["publish"], numbers["fetch"]]
    assert all(0 < times["median_s"] <= times["max_s"] for times in timed)


@pytest.mark.soak
async def test_wrong_weights_are_noticed_by_every_tensor_parallel_rank_and_said() -> None:
    status, out, err = await finished(FSDP, "--steps", "2", "--corrupt")
    assert status == 1, err
    assert re.search(r"2 FSDP2 ranks put +2 +90\.9 ", out)
    assert re.search(r"2 TP ranks get +[12] +92\.3 ", out)
    assert "cut along dim 0, " in out
    assert re.search(r"^staleness +at most [01] newer versions", out, re.M)
    assert re.search(r"^verified +2 times the weights were wrong$", out, re.M)


both = pytest.mark.parametrize("name", [TRAINER, FSDP])


@pytest.mark.soak  # of what examples show, what they do when all goes well is in `make test-all`
@both
async def test_a_killed_worker_ends_the_job_with_an_error(name: str) -> None:
    async with example(name, "--steps", "1000", "--json") as process:
        started = await until(lambda: workers(process.pid)[2:] and descendants(process.pid), 60)
        workers(process.pid)[-1].kill()
        status, out, err = await output(process)
        assert status == 1
        assert not out
        assert "died, exit code -9" in err
        await until(lambda: not alive(started))


@pytest.mark.soak
@both
async def test_ctrl_c_ends_everything_without_a_traceback(name: str) -> None:
    async with example(name, "--steps", "1000", "--json") as process:
        started = await until(lambda: workers(process.pid)[2:] and descendants(process.pid), 60)
        assert all(ignores_sigint(worker.pid) for worker in workers(process.pid))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
        status, out, err = await output(process)
        assert status == 130
        assert not out
        assert "Traceback" not in err
        await until(lambda: not alive(started))


@pytest.mark.quick
async def test_two_lines_carry_a_module_to_another_process() -> None:
    status, out, err = await finished("two_lines.py")
    assert status == 0, err
    writer, reader = sorted(out.splitlines(), reverse=True)
    assert writer.startswith("writer: ")
    assert reader == writer.replace("writer", "reader")


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.soak), 2])
async def test_rollouts_never_come_from_weights_that_are_too_old(lag: int) -> None:
    status, out, err = await finished("bounded_staleness.py", "--lag", str(lag), "--steps", "60")
    assert status == 0, err
    assert not err
    before, after = map(float, re.findall(r"^reward: (\S+) -> (\S+)$", out, re.M)[0])
    assert before < 0.3
    assert after > 0.7
    ages = {int(age): int(count) for age, count in re.findall(r"(\d+) \((\d+) rollouts\)", out)}
    assert sum(ages.values()) == 2 * 60
    assert max(ages) <= lag
    assert max(ages) > 0 or lag == 0  # they do run ahead


async def test_lora_adapters_are_published_alone_and_the_rest_is_shared() -> None:
    status, out, err = await finished("lora.py", "--steps", "3")
    assert status == 0, err
    assert not err
    rows = {
        name: (int(tensors), float(size), float(took))
        for name, tensors, size, took in re.findall(
            r"^(\w+ \w+) +(\d+) tensors, +(\S+) MB, +(\S+) ms", out, re.M
        )
    }
    whole, partial, got = (rows[n] for n in ("whole publish", "partial publish", "partial get"))
    assert partial[:2] == got[:2]
    assert 0 < partial[1] < whole[1] / 50
    assert 0 < partial[0] < whole[0]
    assert min(took for _, _, took in rows.values()) > 0
    losses = [float(loss) for loss in re.findall(r"^version \d+: loss (\S+),", out, re.M)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    held = re.search(r"the store held (\S+) MB", out)
    assert held is not None
    assert whole[1] <= float(held[1]) < whole[1] + 4 * partial[1]
    assert re.search(r"^a partial publish took \d+% of the time", out, re.M)
    assert out.endswith("all 4 versions arrived bit by bit\n")


async def test_generators_follow_a_killed_trainer_back_to_its_checkpoint() -> None:
    status, out, err = await finished("restarted_trainer.py", "--steps", "7", "--killed-at", "6")
    assert status == 0, err
    assert not err
    lines = out.splitlines()
    assert "trainer, run 1: ended with -9" in lines
    assert "trainer, run 2: starts after step 5" in lines
    refused = r"^trainer, run 2: version 5 .* cannot be put: it is at 6, .*rewind=True"
    assert re.search(refused, out, re.M)
    for rank in (0, 1):
        back = "8 versions of 7 steps; after step 6 of run 1 came step 6 of run 2"
        assert f"generator {rank}: {back}" in lines
    assert lines[-1] == "all 7 steps arrived bit by bit, also those that were trained twice"


async def test_ranks_of_torchrun_read_back_in_another_layout() -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    async with example("torchrun_reshard.py", launch=launch) as process:
        status, out, err = await output(process)
    assert status == 0, err
    assert sorted(out.splitlines()) == [
        f"rank {rank}: 3 versions, each 7168 bytes, by columns" for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        (TRAINER, ("--steps", "0")),
        (TRAINER, ("--generators", "0")),
        (FSDP, ("--steps", "0")),
        ("bounded_staleness.py", ("--steps", "0")),
        ("bounded_staleness.py", ("--lag", "-1")),
        ("lora.py", ("--steps", "0")),
        ("restarted_trainer.py", ("--killed-at", "0")),
    ],
)
async def test_senseless_arguments_are_refused(name: str, arguments: tuple[str, str]) -> None:
    status, _, err = await run_program(EXAMPLES / name, *arguments)
    assert status == 2
    assert "at least 1" in err
