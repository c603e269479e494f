"""Stores of ranks: under torchrun, and started by hand with the variables that it sets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.processes import Program, run_script
from tests.support import SMALL, free_port, running_store, server_children, turn, until
from torch.distributed import TCPStore

import torchstore_core as ts
from torchstore_core.contracts.runtime import StoreOptions
from torchstore_core.runtimes.local import LocalRuntime
from torchstore_core.testing.timers import within
from torchstore_spmd.identity import ProcessIdentity
from torchstore_spmd.member import Member
from torchstore_spmd.rendezvous import TCPRendezvous

PROGRAM = str(Path(__file__).with_name("spmd_ranks.py"))
PATIENCE_S = 300.0


class Job:
    """Running ranks."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes] | Program]) -> None:
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
def job(
    act: str,
    *,
    torchrun: bool = False,
    ranks: int = 2,
    port: int | None = None,
    leave_out: Sequence[int] = (),
    **more: str,
) -> Iterator[Job]:
    """Ranks that do ``act``: processes of their own, or one torchrun; they do not outlive it."""
    port = free_port() if port is None else port
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **more}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    processes: list[subprocess.Popen[bytes] | Program]
    if torchrun:
        processes = [
            subprocess.Popen(
                [*launch, PROGRAM, act],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env=environment,
            )
        ]
    else:
        processes = [
            Program(PROGRAM, act, environment=environment | variables(rank, ranks, port))
            for rank in range(ranks)
            if rank not in leave_out
        ]
    try:
        yield Job(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # it ends just now
                    os.killpg(process.pid, signal.SIGTERM if torchrun else signal.SIGKILL)
            process.communicate(timeout=200)


def nothing_left(server: dict[str, Any]) -> bool:
    """Whether a server that a rank spoke of has gone, with its directory."""
    directory = Path(server["address"].removeprefix("unix:")).parent
    return not Path(f"/proc/{server['pid']}").exists() and not directory.exists()


@pytest.mark.parametrize(
    "torchrun",
    [pytest.param(True, id="torchrun", marks=pytest.mark.soak), pytest.param(False, id="by hand")],
)
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


async def test_ranks_go_on_when_the_server_is_killed() -> None:
    """Under torchrun; and the store ends with the last rank."""
    with job("keep", torchrun=True) as ranks:
        said = await ranks.end()
    told = [line for line in said if line["say"] == "server"]
    assert len(told) == 2
    assert all(map(nothing_left, told))
    assert [line["say"] for line in said].count("done") == 2


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.thorough)])
async def test_a_rank_dies_while_there_is_no_server(killed: int) -> None:
    """The next life of the server counts the members that are left; also without its starter."""
    other = 1 - killed
    with job("stay") as ranks:
        server = await ranks.line(other)
        await ranks.line(killed)
        os.kill(server["pid"], signal.SIGSTOP)
        ranks.processes[killed].kill()
        ranks.processes[killed].wait()
        os.kill(server["pid"], signal.SIGKILL)
        ranks.tell(other)
        assert await ranks.line(other) == {"rank": other, "say": "still here", "value": other}
        ranks.processes[other].kill()
        await until(lambda: nothing_left(server), 20)


@pytest.mark.quick
async def test_a_store_ends_when_all_ranks_end_without_shutdown() -> None:
    with job("end_without_shutdown") as ranks:
        said = await ranks.end()
    assert len(said) == 2
    await until(lambda: nothing_left(said[0]))


async def all_go_on(ranks: Job) -> None:
    """At the same time: a rank that comes when rank 0 tries again would see no failure."""
    for index in range(len(ranks.processes)):
        assert (await ranks.line(index))["say"] == "here"
    for index in range(len(ranks.processes)):
        ranks.tell(index)


async def cannot_start(ranks: Job) -> list[dict[str, Any]]:
    """Two ranks fail together, and come again together; what they said."""
    await all_go_on(ranks)
    said = [await ranks.line(index) for index in (0, 1)]
    for index in (0, 1):
        ranks.tell(index)
    return said + await ranks.end()


async def use(ranks: Job) -> None:
    """They have joined; now they use the store, and leave it."""
    for index in range(len(ranks.processes)):
        ranks.tell(index)
    assert await ranks.end() == []


async def test_jobs_of_one_port_do_not_mix() -> None:
    """As two `mp.spawn` with the port of an example would be."""
    port = free_port()
    with job("meet", port=port) as first:
        servers = [await first.line(index) for index in (0, 1)]
        assert servers[0]["pid"] == servers[1]["pid"]
        with job("meet", port=port) as second:
            errors = await second.end()
        assert [error.get("code") for error in errors] == ["configuration"] * 2
        for error in errors:
            assert "Another job uses this MASTER_PORT" in error["message"]
        await use(first)


async def test_a_rank_that_is_given_twice_is_refused_by_all() -> None:
    port = free_port()
    with (
        job("meet", port=port, ranks=3, leave_out=[2]) as first,  # they wait for rank 2
        job("meet", port=port, ranks=3, leave_out=[0, 2]) as twin,
    ):
        errors = [*await twin.end(), *await first.end()]
    assert [error["code"] for error in errors] == ["configuration"] * 3
    assert all("rank 1 is there already" in error["message"] for error in errors)


async def test_a_twin_does_not_leave_in_the_name_of_the_rank_that_is_there() -> None:
    """Rank 0, which hosts the rendezvous store, waits until that one has heard why it fails."""
    env = alone(1, 3)
    kept = TCPStore("127.0.0.1", env.master_port, is_master=True, wait_for_workers=False)
    other = ProcessIdentity.of(os.getppid())
    session = "torchstore/twins/0/session"
    announced = {"session": "session", "rank_0": other}
    kept.set("torchstore/twins/0/current", msgspec.json.encode(announced).decode())
    kept.set(f"{session}/present/1", msgspec.json.encode(other).decode())
    with pytest.raises(ts.ConfigurationError, match="rank 1 is there already"):
        await TCPRendezvous.open(env, "twins", 20)
    assert b"rank 1 is there already" in kept.get(f"{session}/failed")
    assert not kept.check([f"{session}/closed/1"])


@pytest.mark.soak
async def test_ranks_come_again_to_a_rendezvous_that_stays() -> None:
    """torchrun's agents keep theirs when hosts come and go, and count that as no restart."""
    port = free_port()
    kept = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with job("meet", port=port, **agent) as ranks:
        before = await ranks.line()
        await ranks.line(1)
        for process in ranks.processes:
            process.kill()
    with job("meet", port=port, ranks=3, **agent) as ranks:  # more of them
        said = [await ranks.line(index) for index in range(3)]
        assert {line["pid"] for line in said} == {said[0]["pid"]} != {before["pid"]}
        await use(ranks)
    with job("cannot_start", port=port, **agent) as ranks:  # what failed then does not fail now
        assert [line["say"] for line in await cannot_start(ranks)].count("done") == 2
    with job("meet", port=port, **agent) as ranks:
        assert await ranks.line() != await ranks.line(1)
        await use(ranks)
    del kept


async def test_a_rank_that_has_the_name_already_tells_the_others() -> None:
    port = free_port()
    async with running_store():
        with job("meet", port=port, leave_out=[0]) as other:
            env = ts.SPMDEnv(0, 0, 2, 2, "127.0.0.1", port)
            async with within(25):
                with pytest.raises(ts.ConfigurationError, match="initialized in this process"):
                    await ts.initialize_spmd(env=env, **SMALL)
                (error,) = await other.end()
    assert error["code"] == "configuration"
    assert "rank 0: store 'torchstore' is initialized in this process already" in error["message"]


async def test_a_rank_whose_warning_of_a_second_store_is_an_error_tells_the_others() -> None:
    port = free_port()
    async with running_store(store_name="elsewhere") as there:
        os.environ["TORCHSTORE_ADDRESS"] = there.address
        try:
            with job("meet", port=port, leave_out=[0]) as other:  # rank 1 does not warn again
                env = ts.SPMDEnv(0, 0, 2, 2, "127.0.0.1", port)
                with pytest.raises(RuntimeWarning, match="connect_or_initialize"):
                    await ts.initialize_spmd(env=env, **SMALL)
                (error,) = await other.end()
        finally:
            del os.environ["TORCHSTORE_ADDRESS"]
    assert "rank 0: it gave up: RuntimeWarning" in error["message"]


async def test_what_fails_at_the_very_end_of_a_start_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHSTORE_ADDRESSES", "no JSON")
    before = server_children()
    for start in (
        lambda: ts.initialize(store_name="other", **SMALL),
        lambda: ts.initialize_spmd(env=alone(0, 1), store_name="other", **SMALL),
    ):
        with pytest.raises(ts.ConfigurationError, match="TORCHSTORE_ADDRESSES"):
            await start()
    assert server_children() <= before
    monkeypatch.setenv("TORCHSTORE_ADDRESSES", '{"other": "unix:/inherited"}')
    await ts.initialize(store_name="other", **SMALL)
    assert "/inherited" not in os.environ["TORCHSTORE_ADDRESSES"]
    await ts.shutdown("other")
    assert json.loads(os.environ["TORCHSTORE_ADDRESSES"]) == {"other": "unix:/inherited"}


async def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(ts.ConfigurationError, match="env is an SPMDEnv"):
        await ts.initialize_spmd(env={"rank": 0})  # type: ignore[arg-type]


async def test_all_ranks_are_told_why_the_server_does_not_start() -> None:
    async with within(25):
        with job("cannot_start") as ranks:
            said = await cannot_start(ranks)
    errors = {line["rank"]: line for line in said if line["say"] == "error"}
    assert [errors[rank]["code"] for rank in (0, 1)] == ["configuration"] * 2
    assert "rank 0" in errors[1]["message"]
    assert [line["say"] for line in said].count("done") == 2


def alone(rank: int, world: int = 2) -> ts.SPMDEnv:
    return ts.SPMDEnv(rank, rank, world, world, "127.0.0.1", free_port())


async def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(ts.StoreTimeoutError, match=r"ranks 1, 2 of 3 did not come.* 8 s") as caught:
        await ts.initialize_spmd(env=alone(0, 3), **{**SMALL, "timeout": 8})
    assert caught.value.details["missing_ranks"] == [1, 2]
    with pytest.raises(ts.StoreClosedError):
        await ts.keys()
    assert not server_children()


async def test_a_rank_0_that_does_not_come_is_named() -> None:
    with pytest.raises(ts.StoreTimeoutError, match=r"MASTER_ADDR:MASTER_PORT.*rank 0") as caught:
        await ts.initialize_spmd(env=alone(1), timeout=0.3)
    assert caught.value.details["missing_ranks"] == [0]


async def test_what_hangs_at_the_port_is_waited_for_in_time_and_blocks_nobody() -> None:
    """torch itself would wait for ever."""
    env = alone(1)
    with socket.create_server(("127.0.0.1", env.master_port)) as server:
        server.setblocking(False)
        async with within(9):
            joining = asyncio.ensure_future(ts.initialize_spmd(env=env, timeout=5))
            connection, _ = await asyncio.get_running_loop().sock_accept(server)
            with connection:  # of torch, which waits for an answer now; and this loop goes on
                assert not joining.done()
                with pytest.raises((ts.StoreTimeoutError, ts.StoreClosedError), match="rendezvous"):
                    await joining


class _Touches:
    """What runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


async def test_what_others_put_into_the_rendezvous_is_not_unpickled(tmp_path: Path) -> None:
    """Everybody on the network may write there."""
    env = alone(1)
    store = TCPStore("127.0.0.1", env.master_port, is_master=True, wait_for_workers=False)
    ran = tmp_path / "ran"
    assert pickle.loads(pickle.dumps(_Touches(ran))) is None
    assert ran.exists()
    ran.unlink()
    for said in (pickle.dumps(_Touches(ran)), b"{}", b"\xff\x00", b"[" * 100_000):
        store.set("torchstore/torchstore/0/current", said)
        with pytest.raises(ts.StoreClosedError, match="rendezvous"):
            await ts.initialize_spmd(env=env, timeout=10)
    assert not ran.exists()
    assert not server_children()


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


async def test_a_cancelled_start_leaves_nothing_and_the_next_one_works() -> None:
    env = alone(0)
    task = asyncio.create_task(ts.initialize_spmd(env=env, **SMALL))
    await until(lambda: listens(env.master_port))
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


async def test_without_its_package_the_error_names_it() -> None:
    printed = await run_script(
        """
        import importlib.metadata as metadata
        found = metadata.distributions

        def distributions(**context):
            return (d for d in found(**context) if d.metadata["Name"] != "torchstore-spmd")

        metadata.distributions = distributions
        sys.modules["torchstore_spmd"] = None  # importing it fails
        import torchstore_core.blocking as blocking

        assert "initialize_spmd" in dir(ts) and "initialize_spmd" in dir(blocking)
        assert ts.SPMDEnv(0, 0, 1, 1, "127.0.0.1", 1).one_host
        for name in ("runtime='spmd'", ""):
            try:
                await (ts.initialize(runtime="spmd") if name else ts.initialize_spmd())
            except ts.PluginError as error:
                print("pip install torchstore-spmd" in str(error))
        """,
    )
    assert printed.split() == ["True", "True"]


async def test_the_runtime_of_a_rank_takes_its_place_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As all runtimes do, it works by its name alone."""
    with pytest.raises(ts.ConfigurationError, match="torchrun"):
        await ts.initialize(runtime="spmd", **SMALL)
    for name, value in variables(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)
    await ts.initialize(runtime="spmd", **SMALL)
    await ts.shutdown()
    with pytest.raises(ts.PluginError, match="'spmd' is blocked"):
        await ts.initialize_spmd(block=["spmd"], **SMALL)


async def test_the_program_of_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (printed,) = re.findall(r"^\$ torchrun .*?\n(.*?)```", readme, re.DOTALL | re.MULTILINE)
    script = tmp_path / "script.py"
    script.write_text(program)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        str(script),
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert sorted(out.decode().splitlines()) == printed.splitlines()


# ---- members of a server ------------------------------------------------------------------


async def test_a_server_ends_with_its_last_member() -> None:
    runtime = LocalRuntime(members=True)
    address = await runtime.start(StoreOptions("m", capacity=32 << 20, prefault=0), None)
    reaper = runtime.release()
    first, second = [await Member.join(address, (rank, rank), 10) for rank in (0, 1)]
    client = await ts.connect(address, store_name="m")
    await client.put("k", 1)
    assert [session.role for session in (await client.status()).sessions] == [""]  # no members
    assert await first.leave(10) is False
    assert not second.server_ended
    assert await client.get("k") == 1
    assert await second.leave(10) is True
    await asyncio.to_thread(reaper.join, 10)
    assert not reaper.is_alive()
    assert not Path(address.removeprefix("unix:")).parent.exists()
    with pytest.raises(ts.StoreClosedError):
        await Member.join(address, (0, 0), 10)
    await ts.shutdown("m")


async def test_a_forked_child_has_no_part_in_being_a_member() -> None:
    runtime = LocalRuntime(members=True)
    address = await runtime.start(StoreOptions("m", capacity=32 << 20, prefault=0), None)
    reaper = runtime.release()
    member = await Member.join(address, (0, 0), 10)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(send)
        os.read(receive, 1)  # until the parent closes its end
        os._exit(0)
    os.close(receive)
    member.close()
    await asyncio.to_thread(reaper.join, 10)
    assert not reaper.is_alive()
    os.close(send)
    os.waitpid(child, 0)


async def test_a_server_that_ends_takes_no_more_members() -> None:
    """Stopped between the two messages of its last member, say. It may end before it has looked for
    new connections; then there is no server any more.
    """
    runtime = LocalRuntime(members=True)
    address = await runtime.start(StoreOptions("m", capacity=32 << 20, prefault=0), None)
    try:
        member = await Member.join(address, (0, 0), 10)
        os.kill(runtime.server_pid, signal.SIGSTOP)
        leaving = asyncio.ensure_future(member.leave(10))
        await turn()
        joining = asyncio.ensure_future(Member.join(address, (1, 1), 10))
        for _ in range(100):  # turns of the loop, in which both send what they have to say
            await turn()
        os.kill(runtime.server_pid, signal.SIGCONT)
        assert await leaving is True
        with pytest.raises(ts.StoreClosedError, match=r"last rank has left|^no store at"):
            await joining
    finally:
        await runtime.stop(5)
