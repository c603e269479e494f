"""Ranks that publish together, and readers of another layout, for the tests of this folder.

Everything that is published is derived from one number, everywhere differently, so that a reader
can tell which publish each element comes from. There are these kinds of publishes: a state dict, a
single sharded tensor under a key, and a state dict of which each rank holds other entries.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import torch
from tests.reliability.children import told, uniform
from tests.support import turn

import torchstore_core as ts
from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.state_dicts.putting import plan_put
from torchstore_core.clients.transfer.granting import PutOptions
from torchstore_core.clients.transfer.puts import Putting
from torchstore_core.clients.transfer.sources import Source, prepare
from torchstore_core.wire import messages as m

KEY = "model"
KINDS = ["state dict", "one tensor"]  # and "stages"
RANKS = 2

#: Of the sharded tensors; the rows do not divide by the ranks.
SHAPE = (1001, 1024)
#: Of what one rank alone holds, and of what all hold.
WHOLE = (256, 300)
NAMES = ["first", "second"]
#: How long anybody waits before it looks whether the test is over.
LOOK_S = 0.1


@lru_cache
def pattern(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Publish 0, not to be written to: every element differs from its neighbours."""
    count = shape[0] * shape[1]
    return torch.arange(seed, seed + count, dtype=torch.int32).view(shape)


def number_of(tensor: torch.Tensor, zero: torch.Tensor) -> int:
    """Which publish a tensor, or a part of one, comes from: all of it."""
    return uniform(tensor - zero)


def rows(rank: int) -> slice:
    """Which rows of a sharded tensor a rank holds."""
    size = -(-SHAPE[0] // RANKS)
    return slice(rank * size, min((rank + 1) * size, SHAPE[0]))


class Publisher:
    """What one rank publishes.

    Args:
        named: it says which participant it is.
    """

    def __init__(self, kind: str, rank: int, *, named: bool = True) -> None:
        self._kind = kind
        self._rank = rank
        self._who = rank if named else None
        here = rows(rank)
        self._zeros = [pattern(SHAPE, seed)[here] for seed in range(len(NAMES))]
        self._shards = [torch.empty_like(zero) for zero in self._zeros]
        offsets, extents = (here.start, 0), (here.stop - here.start, SHAPE[1])
        self._part = ts.TensorSlice(offsets, extents, SHAPE, (RANKS,), (rank,))
        self._whole = torch.empty(WHOLE, dtype=torch.int32)

    def state_dict(self, number: int) -> dict[str, Any]:
        """Nested, with entries of both ranks, of all ranks and of this one alone."""
        for shard, zero in zip(self._shards, self._zeros, strict=True):
            torch.add(zero, number, out=shard)
        torch.add(pattern(WHOLE, 0), number, out=self._whole)
        if self._kind == "stages":
            return {f"stage{self._rank}": {"w": self._whole, "number": number}}
        return {
            "layers": [{name: self._shard(at)} for at, name in enumerate(NAMES)],
            "all": self._whole,
            f"stage{self._rank}": {"w": self._whole.clone(), "number": number},
            "number": number,
        }

    def _shard(self, at: int) -> ts.TensorShard:
        return ts.TensorShard(self._shards[at], self._part)

    def plan(self, number: int, anonymous: str) -> tuple[list[Source], m.Publication | None]:
        """What :meth:`put` stores."""
        state_dict = self.state_dict(number)
        if self._kind == "one tensor":
            return prepare(KEY, self._shard(0), allow_pickle=False), None
        return plan_put(
            state_dict,
            KEY,
            participants=RANKS,
            participant=self._who,
            transfer_dtype=None,
            partial=False,
            keep=1,
            anonymous=anonymous,
            allow_pickle=False,
        )

    async def put(self, number: int, version: int | None = None, **how: Any) -> int:
        """Publish; the version."""
        if self._kind == "one tensor":
            torch.add(self._zeros[0], number, out=self._shards[0])
            return await self.put_this({}, version, **how)
        return await self.put_this(self.state_dict(number), version, **how)

    async def put_this(
        self, state_dict: dict[str, Any], version: int | None = None, **how: Any
    ) -> int:
        """Publish what was made before; the version."""
        if self._kind == "one tensor":
            shard, part = self._shards[0], self._part
            return (await ts.put(KEY, shard, part, version=version, **how)).version
        who = {"participants": RANKS, "participant": self._who}
        ref = await ts.put_state_dict(state_dict, KEY, version=version, **who, **how)
        if isinstance(ref, ts.PendingPut):
            for tensor in (*self._shards, self._whole):
                tensor.fill_(-1)  # as if the next step of training had begun
            ref = await ref
        return ref.version


def check(kind: str, got: Any) -> int:
    """Which publish a whole value is; fails if it is more than one."""
    if kind == "one tensor":
        return number_of(got, pattern(SHAPE, 0))
    numbers: set[int] = set()
    if kind == "state dict":
        numbers = {number_of(got["all"], pattern(WHOLE, 0)), got["number"]}
        for seed, (layer, name) in enumerate(zip(got["layers"], NAMES, strict=True)):
            numbers.add(number_of(layer[name], pattern(SHAPE, seed)))
    for rank in range(RANKS):
        stage = got[f"stage{rank}"]
        numbers |= {stage["number"], number_of(stage["w"], pattern(WHOLE, 0))}
    assert len(numbers) == 1, f"a mixture of {numbers}"
    return numbers.pop()


class Columns:
    """A reader's half of the columns, in place, inside of larger tensors of its own."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        half = slice(SHAPE[1] // RANKS, SHAPE[1])
        self._homes = [torch.full(SHAPE, -1, dtype=torch.int32) for _ in NAMES]
        self._halves = [home[:, half] for home in self._homes]
        self._zeros = [pattern(SHAPE, seed)[:, half] for seed in range(len(NAMES))]
        self._part = ts.TensorSlice((0, half.start), tuple(self._halves[0].shape), SHAPE)
        self._beside = [home[:, : half.start] for home in self._homes]
        self._all = torch.empty(WHOLE, dtype=torch.int32)
        self._stages = [torch.empty(WHOLE, dtype=torch.int32) for _ in range(RANKS)]

    async def read(self) -> int:
        """Get it; which publish it is."""
        return self.number_of(await self.get())

    async def get(self, **how: Any) -> Any:
        """Get it."""
        if self._kind == "one tensor":
            return await ts.get(KEY, self._halves[0], self._part, **how)
        mine: dict[str, Any] = {
            "layers": [
                {name: ts.TensorShard(half, self._part)}
                for name, half in zip(NAMES, self._halves, strict=True)
            ],
            "all": self._all,
            "number": None,
        }
        for rank, stage in enumerate(self._stages):
            mine[f"stage{rank}"] = {"w": stage, "number": None}
        return await ts.get_state_dict(KEY, mine, **how)

    def number_of(self, got: Any) -> int:
        """Which publish it is that :meth:`get` got; fails if it is more than one."""
        if self._kind == "one tensor":
            assert got is self._halves[0]
            return number_of(got, self._zeros[0])
        pairs = [(self._all, pattern(WHOLE, 0)), *zip(self._halves, self._zeros, strict=True)]
        pairs += [(stage, pattern(WHOLE, 0)) for stage in self._stages]
        numbers = {number_of(tensor, zero) for tensor, zero in pairs}
        numbers |= {got["number"], *(got[f"stage{rank}"]["number"] for rank in range(RANKS))}
        assert len(numbers) == 1, f"a mixture of {numbers}"
        return numbers.pop()

    def copies(self) -> list[torch.Tensor]:
        """What is there now."""
        return [tensor.clone() for tensor in (*self._halves, self._all)]

    def nothing_else_written(self) -> bool:
        """Whether what lies beside the columns is as it was."""
        return all(uniform(beside) == -1 for beside in self._beside)


async def get_whole(kind: str, version: int | None = None) -> Any:
    """All of it, in the reader's own or in the store's memory."""
    if kind == "one tensor":
        return await ts.get(KEY if version is None else ts.ObjectRef(KEY, version))
    return await ts.get_state_dict(KEY, version=version)


# ---- from the test itself -----------------------------------------------------------------


async def publish_all(kind: str, number: int, version: int | None = None) -> int:
    """Publish one version, all ranks of it from this process; the version."""
    versions = {await Publisher(kind, rank).put(number, version) for rank in range(RANKS)}
    assert len(versions) == 1
    return versions.pop()


async def published(kind: str) -> int:
    """Which publish can be read now; 0 if there is none."""
    try:
        return check(kind, await get_whole(kind))
    except ts.KeyNotFoundError:
        return 0


async def pending() -> list[m.Pending]:
    """The versions that are on their way, beside one that can be read."""
    return (await ts.stat(KEY)).pending


# ---- what readers do ----------------------------------------------------------------------


async def read_columns(pipe: Connection, address: str, kind: str) -> None:
    """Get half of the columns in place, again and again; see :func:`_go_on`."""
    await ts.connect(address)
    mine = Columns(kind)
    await ts.wait(KEY)
    await _go_on(pipe, mine.read)
    assert mine.nothing_else_written()
    pipe.send("ended")


async def read_whole(pipe: Connection, address: str, kind: str) -> None:
    """Get all of it, and hold what was got before; see :func:`_go_on`."""
    await ts.connect(address)
    held: Any = None
    last = 0

    async def read() -> int:
        nonlocal held, last
        got = await get_whole(kind)
        number = check(kind, got)
        if held is not None:
            assert check(kind, held) == last, "a value changed while it was held"
        held, last = got, number
        return number

    await ts.wait(KEY)
    await _go_on(pipe, read)
    pipe.send("ended")


async def _go_on(pipe: Connection, read: Callable[[], Awaitable[int]]) -> None:
    """Read until the test says "end"; at any other word say how many reads there were, how many
    different publishes they saw, and which was the last.
    """
    reads = changes = last = 0
    while True:
        while pipe.poll():
            if pipe.recv() == "end":
                return
            pipe.send((reads, changes, last))
        number = await read()
        assert number >= last, f"went back from {last} to {number}"
        reads += 1
        changes += number > last
        last = number


# ---- what ranks do ------------------------------------------------------------------------


async def publish(
    pipe: Connection, address: str, kind: str, rank: int, run: int, lead: int, explicit: bool
) -> None:
    """Publish as fast as possible until the test says something; then say the last version.

    A rank waits for the others only when it is more than ``lead`` versions ahead of them.

    Args:
        run: the n-th publish of this process has the number ``run + n``; one of an explicit
            version has ``run +`` that version.
        explicit: say the version: the one after the newest. Goes on where others are if that is
            not wanted any more.
    """
    await ts.connect(address)
    mine = Publisher(kind, rank)
    done = version = 0
    if explicit:
        version = await ts.latest_version(KEY)
    while not pipe.poll():
        done += 1
        if explicit:
            try:
                version = await mine.put(run + version + 1, version + 1)
            except ts.VersionGoneError:
                version = await ts.latest_version(KEY)
        else:
            version = await mine.put(run + done)
        while version > lead and not pipe.poll():
            with suppress(ts.StoreTimeoutError):
                await ts.wait(KEY, min_version=version - lead, timeout=LOOK_S)
                break
    pipe.send(version)
    await told(pipe)


async def obey(pipe: Connection, address: str, kind: str, rank: int, named: bool = True) -> None:
    """Do what the test says, one word after the other:

    * ``("put", number, version)``: publish; answer the version, or the name of the error.
    * ``("begin", number, version)``: all of a publish but the commit.
    * ``"fork"``: hold zero-copy values, fork a child that sleeps with them; answer its pid.
    """
    client = await ts.connect(address)
    mine = Publisher(kind, rank, named=named)
    held: list[Any] = []
    pipe.send("ready")
    while True:
        match await told(pipe):
            case ("put", number, version):
                try:
                    pipe.send(await mine.put(number, version))
                except ts.TorchStoreError as error:
                    pipe.send(type(error).__name__)
            case ("begin", number, version):
                held.append(await begin(client, mine, number, version))
                pipe.send("begun")
            case "fork":
                held.append(await get_whole(kind))
                pid = os.fork()
                if not pid:
                    time.sleep(600)
                    os._exit(0)
                pipe.send(pid)


async def begin(client: ts.Client, mine: Publisher, number: int, version: int | None) -> Putting:
    """A publish up to the moment before its commit."""
    clock = Clock(20)
    session, channel = await client._join(clock)
    sources, group = mine.plan(number, session.anonymous)
    putting = Putting(session, channel, sources, clock, PutOptions(version or 0, group))
    await putting.begin()
    await putting.write()
    return putting


async def replicate(pipe: Connection, address: str, replica: int) -> None:
    """For each number from the test, put a tensor full of it: all of it, as one of two replicas."""
    await ts.connect(address)
    part = ts.TensorSlice((0, 0), WHOLE, WHOLE, (RANKS,), (replica,))
    while True:
        value = torch.full(WHOLE, await told(pipe), dtype=torch.int32)
        pipe.send((await ts.put(KEY, value, part)).version)


# ---- processes that end early -------------------------------------------------------------


async def publish_and_end(pipe: Connection, address: str, number: int, moment: str) -> None:
    """Publish in the background, and end: in good order, killed at once, or a step later."""
    await ts.connect(address)
    value = torch.full(WHOLE, number, dtype=torch.int32)
    await ts.put_state_dict({"w": value, "number": number}, KEY, blocking=False)
    if moment == "killed a step later":
        await turn()
    if moment != "ends":
        os.kill(os.getpid(), signal.SIGKILL)


async def publish_here(pipe: Connection, rank: int, number: int) -> None:
    """In a forked child: publish, without a connect of its own."""
    pipe.send(await Publisher("state dict", rank).put(number))
    await told(pipe)


async def hold_version(pipe: Connection, address: str, version: int) -> None:
    """Hold all of one version; for every message, say which publish it is."""
    await ts.connect(address)
    held = await ts.get_state_dict(KEY, version=version)
    await ts.exists(KEY)  # the server has been told by then what was copied, and is not held
    while True:
        pipe.send(check("state dict", held))
        await told(pipe)


# ---- many cycles --------------------------------------------------------------------------


async def publish_cycle(pipe: Connection, address: str, cycles: int) -> None:
    """Publish and get in every way, and fail; at 20 % and at 100 % tell the test, and wait."""
    await ts.connect(address)
    half = (64, 256)
    parts = [ts.TensorSlice((64 * rank, 0), half, (128, 256), (2,), (rank,)) for rank in (0, 1)]
    shards = [torch.zeros(half) for _ in parts]  # 64 KB each
    columns = torch.empty(128, 300)[:, 17:145]
    part = ts.TensorSlice((0, 64), (128, 128), (128, 256))
    large = torch.zeros(1 << 18)

    async def publish(rank: int, **how: Any) -> Any:
        mine = ts.TensorShard(shards[rank], parts[rank])
        value = {"w": [mine, {"of": (rank, "object")}], f"stage{rank}": large}
        return await ts.put_state_dict(value, KEY, participants=2, participant=rank, **how)

    for cycle in range(cycles):
        for shard in shards:
            shard.fill_(cycle)
        version = 2 * cycle + 1
        commit = await publish(0, version=version, keep=2, blocking=False)
        assert (await publish(1, version=version, keep=2)).version == version
        assert (await commit).version == version
        held = await ts.get_state_dict(KEY, version=version)
        mine = {"w": [ts.TensorShard(columns, part), {"of": None}], "stage0": None, "stage1": None}
        await ts.get_state_dict(KEY, mine, min_version=version)
        assert columns[0, 0] == columns[-1, -1] == held["w"][0][0, 0] == cycle
        await ts.put(f"tensor{cycle % 3}", shards[0], parts[0])
        await ts.put(f"tensor{cycle % 3}", shards[1], parts[1])
        assert (await ts.get(f"tensor{cycle % 3}", None, part))[-1, -1] == cycle
        # One that is never finished; keys that come and go, one of them not whole.
        await publish(cycle % 2, version=version + 1)
        await ts.put_state_dict({"a": large, "b": cycle}, f"dict{cycle}")
        await ts.put_state_dict({"b": -cycle}, f"dict{cycle}", partial=True, keep=3)
        assert await ts.get(f"dict{cycle}/b") == -cycle
        await ts.put(f"half{cycle}", shards[0], parts[0])
        for missing in (f"half{cycle}", f"{KEY}/never"):
            with suppress(ts.KeyNotFoundError):
                await ts.get(missing)
        await ts.delete_batch([f"dict{cycle}", f"half{cycle}"])
        if cycle % 10 == 0:
            await fail(columns)
            held = await ts.get_state_dict(KEY)
            await ts.delete_batch([KEY, "tensor1"])
        del held, mine  # what was None in it became zero-copy tensors
        if cycle + 1 in (cycles // 5, cycles):
            gc.collect()
            pipe.send(cycle + 1)
            await told(pipe)


async def fail(columns: torch.Tensor) -> None:
    """Gets that find something else, or nothing in time; a publish that has no time."""
    with suppress(ts.LayoutMismatchError):
        await ts.get_state_dict(KEY, {"w": columns, "x": None})
    with suppress(ts.StoreTimeoutError):
        await ts.get_state_dict(KEY, min_version=1 << 40, timeout=0)
    with suppress(ts.StoreTimeoutError):
        await ts.put_state_dict({"w": columns}, "never", timeout=1e-4, blocking=False)
    waiting = asyncio.ensure_future(ts.wait(["never", KEY], min_version=1 << 40))
    await turn()
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    await ts.delete_batch(["never"])
