"""Two hosts with a network each: network namespaces, joined by a pair of virtual cables.

Nothing goes over the loopback between them, so what would only work there fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.monarch import acts
from tests.monarch.api_apart import DTENSORS, DTYPES, STATE_DICTS, TENSORS, run_tests
from tests.monarch.jobs import Job, python_path, running
from tests.support import until
from tests.transports.tcp.proxy import Proxy, lead_through

import torchstore_core as ts
from torchstore_core.testing.networks import Namespace

MB = 1 << 20


@pytest.mark.parametrize("own", [pytest.param("its address", marks=pytest.mark.soak), "127.0.1.1"])
async def test_ranks_over_networks(
    spaces: tuple[Namespace, Namespace], tmp_path: Path, own: str
) -> None:
    """``initialize_spmd``; some hosts take their own name for an address of the loopback."""
    master = spaces[0].address
    mark = f"TORCHSTORE_TEST_JOB={os.urandom(8).hex()}"
    base = Path(tempfile.mkdtemp(prefix="ts-net-", dir="/tmp"))  # short, for sockets
    ranks = []
    try:
        for rank, space in enumerate(spaces):
            names = tmp_path / f"hosts{rank}"
            first = own if rank == 0 and own.startswith("127.") else master
            names.write_text(f"127.0.0.1 localhost\n{first} rank-0-host\n")
            variables = {
                "RANK": rank,
                "LOCAL_RANK": 0,
                "WORLD_SIZE": 2,
                "LOCAL_WORLD_SIZE": 1,
                "MASTER_ADDR": "rank-0-host",
                "MASTER_PORT": 26500,
                "TORCHSTORE_HOST_ID": f"host{rank}",
                "XDG_RUNTIME_DIR": base,
                "PYTHONPATH": python_path(),
            }
            ranks.append(
                subprocess.Popen(
                    [
                        *(*space.wrapper, "unshare", "-m", "sh", "-c"),
                        'mount --bind "$0" /etc/hosts && exec "$@"',
                        *(str(names), "env", mark, *(f"{k}={v}" for k, v in variables.items())),
                        *(sys.executable, str(Path(__file__).with_name("spmd_rank.py"))),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )

        async def tell(*calls: list[object]) -> list[dict[str, Any]]:
            for rank, call in zip(ranks, calls, strict=True):
                print(json.dumps(call), file=rank.stdin, flush=True)
            lines = (asyncio.to_thread(rank.stdout.readline) for rank in ranks)
            return [json.loads(line) for line in await asyncio.gather(*lines)]

        arguments = {"strategy": "local-rank", "timeout": 40.0}
        assert [a["error"] for a in await tell(*[["start", [arguments]]] * 2)] == [["", ""]] * 2
        put = await tell(["put", ["k0"]], ["put", ["k1"]])
        assert [answer["value"].split()[1] for answer in put] == ["host0", "host1"]
        got = await tell(["get", ["k1"]], ["get", ["k0"]])
        assert [answer["value"] for answer in got] == [1.0, 0.0]
        await tell(*[["leave", []]] * 2)
        await until(lambda: not _marked(mark, {rank.pid for rank in ranks}), 20)
    finally:
        for rank in ranks:
            rank.kill()
            print(rank.communicate()[1], file=sys.stderr)
        for pid in _marked(mark, set()):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(base)


def _marked(mark: str, without: set[int]) -> set[int]:
    """Running processes that have it in their environment."""
    found = set()
    for pid in running() - without:
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.add(pid)
    return found


@pytest.mark.soak  # the tests of cables have one, too
async def test_a_store_over_networks(apart: Job) -> None:
    await apart.root(acts.initialize_on_hosts, {"strategy": "host"})
    try:
        for writer in (0, 1):
            await apart.at(writer, acts.put, f"small{writer}", writer)
            await apart.at(writer, acts.put_ones, f"large{writer}", 20 * MB, writer + 1)
        for reader in (0, 1):
            for writer in (0, 1):
                assert await apart.at(reader, acts.get, f"small{writer}") == writer
                got = await apart.at(reader, acts.get_shape, f"large{writer}")
                assert got == ((20 * MB,), [writer + 1])
        assert await apart.root(acts.get_shape, "large1") == ((20 * MB,), [2])
        status = await apart.root(acts.status)
        assert [v.host_id for v in status.volumes] == ["host0", "host1"]
        assert [v.used_bytes // MB for v in status.volumes] == [20, 20]
    finally:
        await apart.root(acts.shutdown)


async def _socket() -> str:
    """Of the server or the relay on this host."""
    session = await (await ts.client())._joined.session(20)
    return session.address


async def test_both_sides_of_a_link_between_networks(
    apart: Job, spaces: tuple[Namespace, Namespace]
) -> None:
    """``torchstore doctor --peer`` on each host: what is here and there, and what is chosen."""
    await apart.root(acts.initialize_on_hosts, {"strategy": "host"})
    script = str(Path(sys.executable).with_name("torchstore"))

    async def doctor(at: int, *words: str) -> str:
        address = await apart.at(at, _socket)
        done = await asyncio.to_thread(
            subprocess.run,
            [
                *(*spaces[at].wrapper, "env", f"TORCHSTORE_HOST_ID=host{at}"),
                *(script, "doctor", *words, "--peer", f"host{1 - at}", "--address", address),
            ],
            env={**os.environ, "XDG_RUNTIME_DIR": str(apart.directory.parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    try:
        found = [json.loads(await doctor(at, "--json")) for at in (0, 1)]
        for at, report in enumerate(found):
            (volume,) = report["volumes"]
            assert (report["host"]["host_id"], volume["host"]["host_id"]) == (
                f"host{at}",
                f"host{1 - at}",
            )
            # What one side sees of the other is what that one sees of itself.
            other = found[1 - at]
            assert volume["host"] == other["host"]
            assert set(volume["offers"]) <= set(other["installed"])
            link = volume["link"]
            assert (link["chosen"], link["same_host"]) == ("tcp", False)
            bids = {bid["transport"]: bid["reason"] for bid in link["bids"]}
            assert f"in the network of eth0 ({spaces[at].address}/" in bids["tcp"]
            assert "monarch-rpc" in bids
            assert "shm" in link["refusals"]
        assert "THERE (OFFERED)" in await doctor(0)
    finally:
        await apart.root(acts.shutdown)


@pytest.mark.parametrize(
    ("files", "every", "least"),
    [
        pytest.param(TENSORS, False, 70, marks=pytest.mark.soak, id="first-tensors"),
        pytest.param(TENSORS, True, 150, marks=pytest.mark.soak, id="tensors"),
        pytest.param(DTYPES, True, 40, marks=pytest.mark.soak, id="dtypes"),
        pytest.param(DTENSORS, True, 60, marks=pytest.mark.soak, id="dtensors"),
        pytest.param(STATE_DICTS, True, 150, marks=pytest.mark.soak, id="state-dicts"),
    ],
)
async def test_the_api_over_two_networks(
    apart: Job, files: list[str], every: bool, least: int
) -> None:
    """Tests of the API, in a process whose store is on the other host. Only ``tcp`` leads there:
    not even what is small travels in messages.
    """
    block = ["monarch-rpc", "monarch-rdma", "inline"]
    await apart.root(acts.initialize_on_hosts, {"num_storage_volumes": 1, "block": block})
    try:
        passed, failures = await apart.at(1, run_tests, files, every, timeout=100.0)
        assert not failures, "\n".join(failures)[:20_000]
        assert passed >= least
        assert set((await apart.at(1, acts.transports)).values()) == {"tcp"}
    finally:
        await apart.root(acts.shutdown)


_DELAY_S = 0.05


async def _run_far_away(files: list[str]) -> tuple[int, list[str], int]:
    """As ``run_tests``, with a proxy on the way to the volume; also the bytes that went through."""
    with Proxy() as proxy:
        proxy.delay_s = _DELAY_S
        await lead_through(await ts.client(), proxy)
        passed, failures = await run_tests(files)
        return passed, failures, sum(proxy.forwarded.values())


@pytest.mark.soak
@pytest.mark.parametrize("files", [TENSORS, STATE_DICTS], ids=["tensors", "state-dicts"])
async def test_the_api_50_ms_away(apart: Job, files: list[str]) -> None:
    """The same, and every byte takes 50 ms, each way."""
    block = ["monarch-rpc", "monarch-rdma", "inline"]
    await apart.root(acts.initialize_on_hosts, {"num_storage_volumes": 1, "block": block})
    try:
        passed, failures, carried = await apart.at(1, _run_far_away, files, timeout=110.0)
        assert not failures, "\n".join(failures)[:20_000]
        assert passed >= 150
        assert carried > MB
    finally:
        await apart.root(acts.shutdown)
