"""``initialize_spmd`` over two emulated hosts, with two ranks on each."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.monarch.jobs import kill_all, python_path, running
from tests.processes import Program
from tests.support import free_port, until

from torchstore_monarch.spmd.starting import _reserved_port

_PROGRAM = str(Path(__file__).with_name("spmd_rank.py"))
_MARK = "TORCHSTORE_TEST_JOB"
_RANKS = range(4)
_PATIENCE_S = 150.0
# The engine ends its processes some time after it has seen that the root is gone.
_SOON_S = 20.0


class Ranks:
    """Four ranks, started; they do what they are told."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        # Short: a Unix socket's path has at most 107 bytes.
        self._base = Path(tempfile.mkdtemp(prefix="ts-spmd-", dir="/tmp"))
        port = free_port()
        self.processes = [
            Program(
                _PROGRAM,
                environment={
                    **os.environ,
                    _MARK: self._mark,
                    "PYTHONPATH": python_path(),
                    "XDG_RUNTIME_DIR": str(self._base),
                    "OMP_NUM_THREADS": "1",
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank % 2),
                    "WORLD_SIZE": "4",
                    "LOCAL_WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "TORCHSTORE_HOST_ID": f"host{rank // 2}",
                },
            )
            for rank in _RANKS
        ]

    async def ask(self, rank: int, function: str, *arguments: Any) -> dict[str, Any]:
        """What a function of the program gives there, or the error it raises."""
        process = self.processes[rank]
        process.stdin.write(json.dumps([function, arguments]).encode() + b"\n")
        process.stdin.flush()
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), _PATIENCE_S)
        assert line, f"rank {rank} has ended"
        return dict(json.loads(line))

    async def do(self, rank: int, function: str, *arguments: Any) -> Any:
        """The same, without an error."""
        answer = await self.ask(rank, function, *arguments)
        assert answer["error"] == ["", ""]
        return answer["value"]

    async def start(self, **arguments: Any) -> None:
        """Start a store of all."""
        await asyncio.gather(*(self.do(rank, "start", arguments) for rank in _RANKS))

    async def refused(self, each: dict[int, dict[str, Any]]) -> tuple[set[str], list[str], float]:
        """Start a store, which fails: error codes, messages by rank, seconds until all know."""
        answers = await asyncio.gather(*(self.ask(rank, "start", each[rank]) for rank in each))
        codes, messages = zip(*(answer["error"] for answer in answers), strict=True)
        return set(codes), list(messages), max(answer["seconds"] for answer in answers)

    def of_store(self) -> dict[int, str]:
        """Processes that were started by the ranks and run: command lines by pid."""
        found = {}
        ours = {process.pid for process in self.processes}
        for pid in running() - ours:
            with contextlib.suppress(OSError):
                if f"{_MARK}={self._mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return found

    def roots(self) -> set[int]:
        """The root processes of stores."""
        return {pid for pid, line in self.of_store().items() if "spmd.root" in line}

    def sockets(self) -> list[Path]:
        """The directories of sockets."""
        return list((self._base / "torchstore").glob("*"))

    async def asked_by_root(self, often: int) -> None:
        """Wait until the root has asked the server for its status so often, in this life."""
        with_ours = itertools.count(await self.do(0, "asked") + often + 1)

        async def has_asked() -> bool:
            return bool(await self.do(0, "asked") >= next(with_ours))

        await until(has_asked, _PATIENCE_S)

    async def nothing_left(self) -> None:
        """Wait until neither a process nor a socket directory of a store is left."""
        await until(lambda: not self.of_store(), _SOON_S)
        await until(lambda: not self.sockets())

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        kill_all(self.of_store, 60.0)
        shutil.rmtree(self._base, ignore_errors=True)


@contextlib.contextmanager
def started() -> Iterator[Ranks]:
    ranks = Ranks()
    try:
        yield ranks
    finally:
        ranks.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Ranks without a store, and which have none after each test."""
    with started() as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("strategy", "order", "places"),
    [
        ("local-rank", [0, 1, 2, 3], {f"torchstore-{rank} host{rank // 2}" for rank in _RANKS}),
        pytest.param(
            *("host", [3, 2, 1, 0], {"torchstore-0 host0", "torchstore-1 host1"}),
            marks=pytest.mark.soak,
        ),
        pytest.param(None, [1, 0, 3, 2], {"torchstore-0 host0"}, marks=pytest.mark.soak),
    ],
)
async def test_what_one_host_puts_the_other_gets_whoever_leaves_first(
    four: Ranks, strategy: str | None, order: list[int], places: set[str]
) -> None:
    await four.start(strategy=strategy)
    lie = await asyncio.gather(*(four.do(rank, "put", f"of {rank}") for rank in _RANKS))
    assert set(lie) == places
    if strategy is not None:
        assert [place.split()[1] for place in lie] == [f"host{rank // 2}" for rank in _RANKS]
    got = await asyncio.gather(*(four.do(rank, "get", f"of {(rank + 2) % 4}") for rank in _RANKS))
    assert got == [2.0, 3.0, 0.0, 1.0]
    last = order[-1]
    for rank in order[:-1]:
        await four.do(rank, "leave")
        await four.do(last, "put", "still here")
    await four.do(last, "leave")
    await four.nothing_left()


@pytest.mark.soak
async def test_a_killed_server_comes_back_and_ends_with_its_last_member(four: Ranks) -> None:
    await four.start(strategy="host", keeper=True)
    await asyncio.gather(*(four.do(rank, "put", f"of {rank}") for rank in _RANKS))
    for _ in range(2):
        server = await four.do(0, "server")
        os.kill(server, signal.SIGKILL)
        got = [await four.do(rank, "get", f"of {(rank + 2) % 4}") for rank in _RANKS]
        assert got == [2.0, 3.0, 0.0, 1.0]
        assert await four.do(3, "server") != server
    await four.asked_by_root(1)  # it ends the store if there is no answer
    for rank in _RANKS:
        await four.do(rank, "put", "still here")
        await four.do(rank, "leave")
    await four.nothing_left()


@pytest.mark.soak  # what spills is the same volume as in a job
async def test_more_than_fits_is_on_the_disks_of_both_hosts(four: Ranks, tmp_path: Path) -> None:
    spills = {"spill": str(tmp_path), "spill_capacity": 256 << 20, "when_full": "spillable"}
    await four.start(strategy="host", keeper=True, **spills)

    async def put(rank: int) -> None:
        for at in range(20):
            await four.do(rank, "put", f"{at} of {rank}")

    async def is_there(rank: int) -> bool:
        other = (rank + 2) % 4
        got = [await four.do(rank, "get", f"{at} of {other}") for at in range(20)]
        return got == [other] * 20

    await asyncio.gather(*(put(rank) for rank in _RANKS))  # 96 MB, of which 64 fit
    assert await four.do(0, "spilled") >= 30_000_000
    assert all(await asyncio.gather(*(is_there(rank) for rank in _RANKS)))
    os.kill(await four.do(0, "server"), signal.SIGKILL)
    assert all(await asyncio.gather(*(is_there(rank) for rank in _RANKS)))
    for rank in _RANKS:
        await four.do(rank, "leave")
    await four.nothing_left()
    await until(lambda: not list(tmp_path.iterdir()))


@pytest.mark.soak
async def test_sockets_that_somebody_removes_cost_no_volume(four: Ranks) -> None:
    await four.start(strategy="host")
    await asyncio.gather(*(four.do(rank, "put", f"of {rank}") for rank in _RANKS))
    sockets = four.sockets()
    assert len(sockets) == 3  # of the server, of two agents
    for path in sockets:
        shutil.rmtree(path)
    await four.asked_by_root(10)  # two times a second: longer than agents wait for a server
    got = await asyncio.gather(*(four.do(rank, "get", f"of {(rank + 2) % 4}") for rank in _RANKS))
    assert got == [2.0, 3.0, 0.0, 1.0]
    for rank in _RANKS:
        await four.do(rank, "leave")
    await four.nothing_left()


async def test_why_rank_0_cannot_start_is_told_to_all_at_once(four: Ranks) -> None:
    too_much = {"capacity": 1 << 62}
    codes, messages, seconds = await four.refused(dict.fromkeys(_RANKS, too_much))
    assert codes == {"store-full"}
    assert all("rank 0: " in message for message in messages[1:])
    assert seconds < 75  # and not the 100 of the time-out
    await four.nothing_left()


async def test_arguments_that_differ_are_named(four: Ranks) -> None:
    each: dict[int, dict[str, Any]] = {rank: {} for rank in _RANKS}
    codes, messages, seconds = await four.refused({**each, 3: {"capacity": 1 << 20}})
    assert codes == {"configuration"}
    assert all("capacity is 67108864 on rank 0, 1048576 here" in one for one in messages)
    codes, messages, more = await four.refused({**each, 1: {"strategy": "no-such"}})
    assert codes == {"plugin"}
    assert all("no-such" in one for one in messages)
    assert seconds + more < 75
    await four.nothing_left()


async def test_a_rank_that_is_missing_is_missed_by_all(four: Ranks) -> None:
    # Another name: rank 2 does not count this meeting.
    arguments = {"store_name": "missed", "timeout": 3.0}
    codes, messages, seconds = await four.refused(dict.fromkeys((0, 1, 3), arguments))
    assert codes == {"timeout"}
    assert all("rank 2 of 4 did not come" in message for message in messages)
    assert seconds < 25
    await four.nothing_left()


async def _kill(ranks: Ranks, rank: int) -> None:
    ranks.processes[rank].kill()
    ranks.processes[rank].wait()


async def test_killed_ranks_do_not_take_a_store_along_and_a_killed_root_leaves_nothing() -> None:
    with started() as ranks:
        await ranks.start(store_name="a", strategy="local-rank")
        (root_a,) = ranks.roots()
        await ranks.start(strategy="host")
        (root,) = ranks.roots() - {root_a}
        await ranks.do(0, "put", "of 0")
        await _kill(ranks, 0)
        assert await ranks.do(3, "get", "of 0") == 0.0
        await ranks.do(1, "put", "of 1")
        await _kill(ranks, 2)
        assert await ranks.do(3, "get", "of 1") == 1.0
        assert ranks.roots() == {root_a, root}
        for rank in (1, 3):
            await ranks.do(rank, "leave", "a")
        await until(lambda: ranks.roots() == {root}, _SOON_S)
        os.kill(root, signal.SIGKILL)
        await ranks.nothing_left()
        for rank in (1, 3):
            assert (await ranks.ask(rank, "put", "k"))["error"][0] == "store-closed"
            await ranks.do(rank, "leave")


def test_a_port_is_kept_for_who_is_told_of_it() -> None:
    with _reserved_port("127.0.0.1") as port, socket.socket() as other:
        with pytest.raises(OSError) as caught:  # noqa: PT011 - its number says which
            other.bind(("127.0.0.1", port))
        assert caught.value.errno == errno.EADDRINUSE
        with socket.create_server(("127.0.0.1", port)) as told:  # as the engine's listeners
            told.settimeout(20)
            with socket.create_connection(told.getsockname()), told.accept()[0]:
                pass


async def test_a_worker_says_that_its_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        worker = subprocess.Popen(
            [sys.executable, "-m", "torchstore_monarch.spmd.worker", address, "20"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await asyncio.to_thread(worker.communicate, timeout=_PATIENCE_S)
    assert (worker.returncode, out) == (1, b"")
    assert f"cannot listen on {address}" in err.decode()
