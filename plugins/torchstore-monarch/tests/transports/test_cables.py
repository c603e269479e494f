"""Two hosts whose cables are slow, are pulled, and are plugged in again, with a store over both.

They are joined by two cables: the engine's, and one that the data of ``tcp`` travels over.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.monarch import acts, dtensors
from tests.monarch.api_apart import STATE_DICTS, TENSORS, run_tests
from tests.monarch.jobs import Job
from tests.support import bits, noise, until
from tests.transports.tcp.proxy import Proxy, lead_through

import torchstore_core as ts
from torchstore_core.testing.networks import Namespace

MB = 1 << 20
# Not everybody has the folders of system programs on the path.
_TC = shutil.which("tc", path="/usr/sbin:/sbin:/usr/bin:/bin") or "tc"
_SLOW = ("root", "tbf", "rate", "200mbit", "burst", "256kb", "latency", "50ms")
_BYTES_PER_S = 25e6
# Who waits for half a minute for a transport to come back need not read all the time.
_BETWEEN_READS_S = 0.4
_VOLUME = "torchstore-0"  # of the first host; the second one's worker is the client


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"


class Cables(NamedTuple):
    """Of both hosts.

    Args:
        job: one over both.
        spaces: their namespaces.
    """

    job: Job
    spaces: tuple[Namespace, Namespace]

    def pull(self, *names: str) -> None:
        """Pull these cables out of the first host."""
        self._set("down", names)

    def plug(self, *names: str) -> None:
        """Plug them in again."""
        self._set("up", names)

    def _set(self, state: str, names: tuple[str, ...]) -> None:
        for name in names:
            _do("ip", "-n", self.spaces[0].name, "link", "set", name, state)

    def slow(self) -> None:
        """The data's cable lets 200 Mbit/s through, each way."""
        for space in self.spaces:
            _do(*space.wrapper, _TC, "qdisc", "replace", "dev", "eth1", *_SLOW)

    def fast(self) -> None:
        for space in self.spaces:
            _do(*space.wrapper, _TC, "qdisc", "delete", "dev", "eth1", "root")

    def carried(self) -> int:
        """Bytes that the data's cable has carried, both ways."""
        pid = self.job.host_pids()[0]
        for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.strip().partition(":")
            if name == "eth1":
                fields = numbers.split()
                return int(fields[0]) + int(fields[8])
        raise AssertionError("there is no such cable")


@pytest.fixture(scope="module")
def cables(spaces: tuple[Namespace, Namespace]) -> Iterator[Cables]:
    ends = [("name", "eth1", "netns", space.name) for space in spaces]
    _do("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    for space in spaces:
        inside = ("ip", "-n", space.name)
        _do(
            *inside, "addr", "add", space.address.replace("10.213", "10.212") + "/24", "dev", "eth1"
        )
        _do(*inside, "link", "set", "eth1", "up")
    variables = ("env", "GLOO_SOCKET_IFNAME=eth0", "TORCHSTORE_BIND=eth1")
    with Job(
        workers=1,
        wrappers=[[*space.wrapper, *variables] for space in spaces],
        addresses=[f"tcp://{space.address}:26600" for space in spaces],
        transport=f"tcp://{spaces[0].address.rpartition('.')[0]}.1:26600",
    ) as job:
        yield Cables(job, spaces)


@pytest.fixture
def stored(cables: Cables, request: pytest.FixtureRequest) -> Iterator[Cables]:
    """A store; all values are on the first host, and only these transports lead there."""
    block = {"monarch-rpc", "monarch-rdma", "tcp"} - set(request.param)
    arguments = {"strategy": "singleton", "block": sorted(block), "capacity": 512 * MB}
    asyncio.run(cables.job.root(acts.initialize_on_hosts, arguments))
    yield cables
    asyncio.run(cables.job.root(acts.shutdown))


_TCP = pytest.mark.parametrize("stored", [["tcp"]], indirect=True, ids=["tcp"])
_BOTH = pytest.mark.parametrize("stored", [["tcp", "monarch-rpc"]], indirect=True, ids=["both"])


# ---- what the client does -----------------------------------------------------------------


def _value(seed: int, nbytes: int) -> torch.Tensor:
    return noise(nbytes, seed)


def _tree(seed: int, nbytes: int) -> dict[str, torch.Tensor]:
    rows = _value(seed, nbytes).view(-1, 1024)
    return {"rows": rows, "columns": rows[:, ::2], "step": torch.tensor(seed)}


async def _write(seed: int, nbytes: int, timeout: float) -> str:
    return await _outcome(ts.put("v", _value(seed, nbytes), timeout=timeout), timeout)


async def _read(seed: int, nbytes: int, timeout: float) -> str:
    """Into memory that says what of it was not written."""
    into = torch.zeros(nbytes, dtype=torch.uint8)
    said = await _outcome(ts.get("v", into, timeout=timeout), timeout)
    wanted = _value(seed, nbytes)
    if said == "done":
        return said if torch.equal(into, wanted) else "torn"
    return said if bool(((into == wanted) | (into == 0)).all()) else "torn"


async def _write_tree(seed: int, nbytes: int, timeout: float) -> str:
    work = ts.put_state_dict(_tree(seed, nbytes), "tree", timeout=timeout)
    return await _outcome(work, timeout)


async def _tree_is(seed: int, nbytes: int) -> bool:
    got, wanted = await ts.get_state_dict("tree"), _tree(seed, nbytes)
    return all(torch.equal(got[name], wanted[name]) for name in wanted)


async def _is(seed: int, nbytes: int) -> bool:
    return torch.equal(await ts.get("v"), _value(seed, nbytes))


_DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64)
_SIDE = 256


async def _every_kind(seed: int) -> list[str]:
    """Put and get tensors of several dtypes and strides, a state dict, and a DTensor together with
    the other host; what was not right.
    """
    rows = _value(seed, _SIDE * 8 * _SIDE).view(_SIDE, 8 * _SIDE)
    values = {str(dtype): rows.view(dtype) for dtype in _DTYPES}
    values |= {"bool": rows > 99, "columns": rows[:, ::3], "turned": rows.t()}
    values |= {"complex": torch.complex(rows.float(), -rows.float()), "scalar": torch.tensor(seed)}
    into = {name: torch.zeros_like(value) for name, value in values.items()}
    state = {"layers": [{"w": value} for value in values.values()], "step": seed}
    await ts.put_batch(values)
    await ts.put_state_dict(state, "model")
    await ts.get_batch(into)
    got = await ts.get_state_dict("model")
    loaded = dict(zip(values, (layer["w"] for layer in got["layers"]), strict=True))
    wrong = [
        f"{name} of {what}"
        for what, found in (("a batch", into), ("a state dict", loaded))
        for name, value in values.items()
        if not torch.equal(bits(found[name]), bits(value))
    ]
    return wrong if await _both_have_a_part(seed) else [*wrong, "the DTensor"]


async def _both_have_a_part(seed: int) -> bool:
    """Put and get a DTensor, as a worker of each host does; whether this one's part is right."""
    await dtensors.put_dtensor(f"d{seed}", 0)
    await ts.wait(f"d{seed}")
    return await dtensors.get_dtensor(f"d{seed}", 1)


async def _every_kind_far_away(seed: int) -> tuple[list[str], int]:
    """Every byte between this client and the volume takes 50 ms, each way; also how many bytes."""
    with Proxy() as proxy:
        proxy.delay_s = 0.05
        await lead_through(await ts.client(), proxy)
        return await _every_kind(seed), sum(proxy.forwarded.values())


async def _outcome(work: object, timeout: float) -> str:
    """``done``, ``failed`` with an error of the store, or what is wrong."""
    began = time.monotonic()
    try:
        await work  # type: ignore[misc]
    except ts.TorchStoreError as error:
        said = f"failed: {error!r}"
    else:
        said = "done"
    took = time.monotonic() - began
    return said if took < timeout + 3 else f"took {took:.0f} s"


async def _read_until_told(seed: int, nbytes: int) -> tuple[int, bool, float]:
    """How often; whether all that was read was right; the longest time that one took, seconds."""
    wanted, into = _value(seed, nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    count, right, longest = 0, True, 0.0
    while not await ts.exists("enough"):
        began = time.monotonic()
        await ts.get("v", into.zero_())
        longest = max(longest, time.monotonic() - began)
        right = right and torch.equal(into, wanted)
        count += 1
        await ts.put("count", count)
        await asyncio.sleep(_BETWEEN_READS_S)
    return count, right, longest


# ---- tests --------------------------------------------------------------------------------


@_TCP
async def test_a_slow_cable(stored: Cables) -> None:
    """Bytes and rows, both ways, as fast as it allows, and nothing beside them travels."""
    nbytes = 12 * MB
    stored.slow()
    try:
        began, before = time.monotonic(), stored.carried()
        assert await stored.job.at(1, _write, 1, nbytes, 30.0) == "done"
        assert await stored.job.at(1, _read, 1, nbytes, 30.0) == "done"
        assert await stored.job.at(1, _write_tree, 2, nbytes, 30.0) == "done"
        assert await stored.job.at(1, _tree_is, 2, nbytes)
        took, carried = time.monotonic() - began, stored.carried() - before
        # Twice the bytes, and twice the tree, whose columns are another half.
        assert 5 * nbytes < carried < 5 * nbytes * 1.1
        assert took > 2 * nbytes / _BYTES_PER_S  # it did go over the slow cable, a way at a time
    finally:
        stored.fast()
    assert await stored.job.at(0, _is, 1, nbytes)


_STALL_S, _BETWEEN_S = 0.7, 4.0


async def _stalls(cables: Cables) -> None:
    """Pull the data's cable every few seconds, for less time than a connection lasts."""
    try:
        while True:
            await asyncio.sleep(_BETWEEN_S)
            cables.pull("eth1")
            await asyncio.sleep(_STALL_S)
            cables.plug("eth1")
    finally:
        cables.plug("eth1")


@pytest.mark.soak
@pytest.mark.parametrize("stalls", [False, True], ids=["slow", "stalls"])
@pytest.mark.parametrize("files", [TENSORS, STATE_DICTS], ids=["tensors", "state-dicts"])
async def test_the_api_over_a_slow_cable(cables: Cables, files: list[str], stalls: bool) -> None:
    """Tests of tests/api, whose values all go over it; with stalls, it is pulled time and again."""
    block = ["monarch-rpc", "monarch-rdma", "inline"]
    await cables.job.root(acts.initialize_on_hosts, {"num_storage_volumes": 1, "block": block})
    cables.slow()
    before = cables.carried()
    trouble = asyncio.ensure_future(_stalls(cables)) if stalls else None
    try:
        passed, failures = await cables.job.at(1, run_tests, files, timeout=110.0)
        assert not failures, "\n".join(failures)[:20_000]
        assert passed >= 150
        assert cables.carried() - before > MB
    finally:
        if trouble is not None:
            trouble.cancel()
            await asyncio.wait([trouble])
        cables.fast()
        await cables.job.root(acts.shutdown)


async def test_values_of_every_kind_on_bad_networks(cables: Cables, tmp_path: Path) -> None:
    """Those of the second host, which are all on the first one, and DTensors that both have a part
    of: 200 Mbit/s, a stall, and 50 ms. The tests of the API do so at length, in `make soak`.
    """
    block = ["monarch-rpc", "monarch-rdma", "inline"]
    job = cables.job
    await job.root(acts.initialize_on_hosts, {"num_storage_volumes": 1, "block": block})
    await asyncio.gather(
        *(job.at(i, dtensors.join_group, i, 2, str(tmp_path / "group")) for i in (0, 1))
    )

    async def on_both(act: Any, seed: int) -> Any:
        """What the second host says; also the bytes that the data's cable has carried."""
        before = cables.carried()
        ours, said = await asyncio.gather(job.at(0, _both_have_a_part, seed), job.at(1, act, seed))
        assert ours
        return said, cables.carried() - before

    cables.slow()
    try:
        right, carried = await on_both(_every_kind, 1)
        assert right == []
        assert carried > 20 * MB
        cables.pull("eth1")
        working = asyncio.ensure_future(on_both(_every_kind, 2))
        await asyncio.sleep(_STALL_S)  # so long the cable is out
        assert not working.done()
        cables.plug("eth1")
        assert (await working)[0] == []
        (right, far), _ = await on_both(_every_kind_far_away, 3)
        assert right == []
        assert far > 0.9 * carried
        # Not if something was wrong: one may be waiting for the other.
        await asyncio.gather(*(job.at(i, dtensors.leave_group) for i in (0, 1)))
    finally:
        cables.plug("eth1")
        cables.fast()
        await job.root(acts.shutdown)


@_TCP
@pytest.mark.parametrize(
    "what",
    ["put", *(pytest.param(each, marks=pytest.mark.soak) for each in ("get", "late put", "tree"))],
)
async def test_all_cables_are_pulled_for_5_s_in_the_middle(stored: Cables, what: str) -> None:
    """Nobody reaches anybody meanwhile. A late put has less time than that, and fails."""
    nbytes = 50 * MB
    assert await stored.job.at(1, _write, 1, nbytes, 30.0) == "done"
    stored.slow()
    try:
        before = stored.carried()
        act, seed = {"get": (_read, 1), "tree": (_write_tree, 2)}.get(what, (_write, 2))
        timeout = 4.0 if what == "late put" else 40.0
        moving = asyncio.ensure_future(stored.job.at(1, act, seed, nbytes, timeout))
        await until(lambda: stored.carried() - before > 5 * MB or moving.done(), 20)
        assert not moving.done()
        stored.pull("eth0", "eth1")
        await asyncio.sleep(5)  # so long the cables are out
        assert what == "late put" or not moving.done()
        stored.plug("eth0", "eth1")
        said = await moving
    finally:
        stored.fast()
    assert said.partition(":")[0] in ("done", "failed"), said
    if what == "late put":
        assert said != "done"
        assert any([await stored.job.at(0, _is, whole, nbytes) for whole in (1, 2)])

    async def works() -> bool:
        return await stored.job.at(1, _write, 3, nbytes, 10.0) == "done"

    if said == "done" and what != "get":
        there = _is if what == "put" else _tree_is
        assert await stored.job.at(0, there, 2, nbytes)
    await until(works, 20)
    assert await stored.job.at(1, _read, 3, nbytes, 10.0) == "done"
    assert await stored.job.at(0, _is, 3, nbytes)

    async def books() -> tuple[int, ...]:
        return tuple((await stored.job.root(acts.books))[1:])

    async def nothing_is_left() -> bool:
        return await books() == (0, 0)

    await until(nothing_is_left, 30)


@_BOTH
async def test_the_best_transport_is_unplugged_and_comes_back(stored: Cables) -> None:
    """Its cable alone; the engine's carries the bytes meanwhile."""
    nbytes = 8 * MB
    job = stored.job
    assert await job.at(0, _write, 1, nbytes, 30.0) == "done"
    reading = asyncio.ensure_future(job.at(1, _read_until_told, 1, nbytes, timeout=110.0))

    async def chosen() -> str:
        return str((await job.at(1, acts.transports))[_VOLUME])

    async def is_chosen(name: str) -> bool:
        assert not reading.done()
        return await chosen() == name

    async def has_read(count: int) -> bool:
        return await job.root(acts.exists, "count") and await job.root(acts.get, "count") > count

    await until(lambda: has_read(3), 20)
    assert await chosen() == "tcp"
    stored.pull("eth1")
    await until(lambda: is_chosen("monarch-rpc"), 40)
    count = await job.root(acts.get, "count")
    await until(lambda: has_read(count + 3), 20)
    stored.plug("eth1")
    await until(lambda: is_chosen("tcp"), 60)
    before = stored.carried()
    await until(lambda: stored.carried() - before > 3 * nbytes, 20)
    await job.root(acts.put, "enough", 1)
    _, right, longest = await reading
    assert right
    assert longest < 35
