"""Stores of ranks: under torchrun, and started by hand with the variables that it sets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support import SMALL, free_port, until

import torchstore_core as ts

PROGRAM = str(Path(__file__).with_name("spmd_ranks.py"))
PATIENCE_S = 90.0


class Job:
    """Running ranks."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self.processes = processes

    async def line(self, index: int = 0) -> dict[str, Any]:
        """The next thing that a process says."""
        stream = self.processes[index].stdout
        assert stream is not None
        line = await asyncio.wait_for(asyncio.to_thread(stream.readline), PATIENCE_S)
        assert line, "it ended"
        return dict(json.loads(line))

    def tell(self, index: int) -> None:
        stream = self.processes[index].stdin
        assert stream is not None
        stream.write(b"\n")
        stream.flush()

    async def end(self, status: int = 0) -> list[dict[str, Any]]:
        """What was said until all have ended."""
        said = []
        for process in self.processes:
            out, _ = await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
            assert process.returncode == status
            said += [json.loads(line) for line in out.splitlines()]
        return said


def variables(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@contextmanager
def job(act: str, *, torchrun: bool = False, ranks: int = 2) -> Iterator[Job]:
    """Ranks that do ``act``: processes of their own, or one torchrun; they do not outlive it."""
    port = free_port()
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    commands = [launch] if torchrun else [[sys.executable]] * ranks
    processes = [
        subprocess.Popen(
            [*command, PROGRAM, act],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=environment if torchrun else environment | variables(rank, ranks, port),
        )
        for rank, command in enumerate(commands)
    ]
    try:
        yield Job(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM if torchrun else signal.SIGKILL)
            process.communicate(timeout=30)


def nothing_left(server: dict[str, Any]) -> bool:
    """Whether a server that a rank spoke of has gone, with its directory."""
    directory = Path(server["address"].removeprefix("unix:")).parent
    return not Path(f"/proc/{server['pid']}").exists() and not directory.exists()


@pytest.mark.parametrize("torchrun", [True, False], ids=["torchrun", "by hand"])
async def test_stores_of_ranks_come_and_go_in_every_order(torchrun: bool) -> None:
    with job("rounds", torchrun=torchrun) as ranks:
        said = await ranks.end()
    servers = [line for line in said if line["say"] == "server"]
    assert len({line["pid"] for line in servers}) == 3
    assert len(servers) == 6
    for server in servers:  # gone with the last rank, before the ranks have ended
        assert nothing_left(server)
    assert sorted(line["rank"] for line in said if line["say"] == "done") == [0, 1]


@pytest.mark.parametrize("killed", [0, 1])
async def test_a_killed_rank_does_not_take_the_store_along(killed: int) -> None:
    other = 1 - killed
    with job("stay") as ranks:
        server = await ranks.line(other)
        assert (await ranks.line(killed))["pid"] == server["pid"]
        ranks.processes[killed].kill()
        ranks.processes[killed].wait()
        ranks.tell(other)
        assert await ranks.line(other) == {"rank": other, "say": "still here", "value": other}
        assert not nothing_left(server)
        ranks.processes[other].kill()
        await until(lambda: nothing_left(server))


async def test_a_store_ends_when_all_ranks_end_without_shutdown() -> None:
    with job("end_without_shutdown") as ranks:
        said = await ranks.end()
    assert len(said) == 2
    await until(lambda: nothing_left(said[0]))


async def test_all_ranks_are_told_why_the_server_does_not_start() -> None:
    started = time.monotonic()
    with job("cannot_start") as ranks:
        said = await ranks.end()
    assert time.monotonic() - started < 25
    errors = {line["rank"]: line for line in said if line["say"] == "error"}
    assert [errors[rank]["code"] for rank in (0, 1)] == ["configuration"] * 2
    assert "rank 0" in errors[1]["message"]
    assert [line["say"] for line in said].count("done") == 2


def alone(rank: int, world: int = 2) -> ts.SPMDEnv:
    return ts.SPMDEnv(rank, rank, world, world, "127.0.0.1", free_port())


async def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(ts.StoreTimeoutError, match=r"ranks 1, 2 of 3 did not come.* 1 s") as caught:
        await ts.initialize_spmd(env=alone(0, 3), **{**SMALL, "timeout": 1})
    assert caught.value.details == {"missing_ranks": [1, 2]}
    with pytest.raises(ts.StoreClosedError):
        await ts.keys()
    mine = Path("/proc/self/task").glob("*/children")
    assert "torchstore_core.server" not in commands(
        pid for path in mine for pid in path.read_text().split()
    )


def commands(pids: Iterator[str]) -> str:
    return " ".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)


async def test_a_rank_0_that_does_not_come_is_named() -> None:
    with pytest.raises(ts.StoreTimeoutError, match=r"MASTER_ADDR:MASTER_PORT.*rank 0") as caught:
        await ts.initialize_spmd(env=alone(1), timeout=0.3)
    assert caught.value.details == {"missing_ranks": [0]}


async def test_what_hangs_at_the_port_is_waited_for_in_time_and_blocks_nobody() -> None:
    """torch itself would wait for ever."""
    env = alone(1)
    started = time.monotonic()
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    beating = asyncio.create_task(beat())
    with socket.create_server(("127.0.0.1", env.master_port)):
        with pytest.raises((ts.StoreTimeoutError, ts.StoreClosedError), match="rendezvous store"):
            await ts.initialize_spmd(env=env, timeout=1)
        assert time.monotonic() - started < 5
        assert beats > 20
        beating.cancel()


async def test_a_cancelled_start_leaves_nothing_and_the_next_one_works() -> None:
    env = alone(0)
    task = asyncio.create_task(ts.initialize_spmd(env=env, **SMALL))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    one = ts.SPMDEnv(0, 0, 1, 1, "127.0.0.1", free_port())
    fds = 0
    for round_ in range(4):
        await ts.initialize_spmd(env=one, **SMALL)
        await ts.put("k", round_)
        assert (await ts.versions("k"), await ts.get("k")) == ([1], round_)
        with pytest.raises(ts.ConfigurationError, match="initialized in this process already"):
            await ts.initialize_spmd(env=one, **SMALL)
        await ts.shutdown()
        if round_ == 1:
            fds = len(os.listdir("/proc/self/fd"))
    await until(lambda: len(os.listdir("/proc/self/fd")) <= fds)


async def test_several_hosts_need_a_package_and_its_name_is_said() -> None:
    env = ts.SPMDEnv(0, 0, 4, 2, "127.0.0.1", free_port())
    with pytest.raises(ts.PluginError, match="pip install torchstore-monarch"):
        await ts.initialize_spmd(env=env, block=["monarch"])
