"""Random layouts on both sides: what any ranks put, any other ranks get, bit for bit.

The ranks live in this process, one after the other: their meshes and DTensors are real, and torch
itself cuts the tensors; only the process groups have nobody else in them. (For real ones see
``test_dtensors``.) The bytes that go over a link are counted by the link.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.integration.dtensors.layouts import SS, Layout, R, S, every_rank, roomy, same, value_of
from tests.integration.servers import ServerThread
from tests.profiles import each, few
from tests.unit.plugins.test_plugins import OBSERVERS, TRANSPORTS, Site
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import torchstore_core as ts
from torchstore_core.clients.values.sharding import ShardList, local_parts
from torchstore_core.contracts.observer import Operation

COUNTING = """
from torchstore_inprocess.transport import InProcessLink, InProcessServer

read, written = [0], [0]

class Server(InProcessServer):
    pass

class Link(InProcessLink):
    async def write(self, copies):
        written[0] += sum(copy.nbytes for copy in copies)
        await super().write(copies)

    async def read(self, copies):
        read[0] += sum(copy.nbytes for copy in copies)
        await super().read(copies)

@hookimpl
def torchstore_transport():
    return TransportSpec(
        {name!r}, bid=lambda context: Bid(1.0, 1.0, "counts"),
        client=__name__ + ":Link", server=__name__ + ":Server",
    )
"""
WATCHING = """
operations = []

@hookimpl
def torchstore_operation(operation):
    operations.append(operation)
"""


class Ways:
    """One store, reached in three ways: inside of messages, through a window on the shared memory,
    and by a link that counts the bytes.
    """

    def __init__(
        self, runner: asyncio.Runner, clients: dict[str, ts.Client], counts: Any, watching: Any
    ) -> None:
        self.runner = runner
        self.clients = clients
        self.counts = counts
        self.operations: list[Operation] = watching.operations


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    site = Site(tmp_path_factory.mktemp("site"))
    blocks = {
        "messages": ["counting", "inprocess"],
        "window": ["counting", "inprocess", "inline"],
        "counted": ["shm", "tcp", "inprocess", "inline"],
    }
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.syspath_prepend(str(site.path))
        site.install("counter", TRANSPORTS, counting=COUNTING)
        site.install("watcher", OBSERVERS, watching=WATCHING)
        server = ServerThread()
        try:
            clients = {
                way: runner.run(ts.connect(server.address, store_name=way, block=block))
                for way, block in blocks.items()
            }
            counts = sys.modules["site_counter_counting"]
            watching = sys.modules["site_watcher_watching"]
            yield Ways(runner, clients, counts, watching)
            for way in blocks:
                runner.run(ts.shutdown(way))
        finally:
            server.stop()
            for module in site.modules:
                sys.modules.pop(module, None)


# ---- what is drawn ------------------------------------------------------------------------

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.bool,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.int16,
)
MESHES = st.sampled_from(
    [(1,), (2,), (3,), (4,), (5,), (2, 2), (1, 3), (3, 2), (2, 1, 2), (2, 2, 2)]
)


@st.composite
def layouts(
    draw: st.DrawFn, ndim: int, meshes: st.SearchStrategy[tuple[int, ...]] = MESHES
) -> Layout:
    """Any placements of a tensor of so many dimensions on any mesh."""
    mesh = draw(meshes)
    dims = st.integers(-ndim, ndim - 1)
    cuts = st.builds(S, dims) | st.builds(SS, dims, st.integers(1, 4))
    placement = (cuts | st.just(R)) if ndim else st.just(R)
    placements = tuple(draw(st.lists(placement, min_size=len(mesh), max_size=len(mesh))))
    return Layout(mesh, placements)


class Put(NamedTuple):
    """A tensor, its layout, how its parts are put, and in which order."""

    full: torch.Tensor
    layout: Layout
    how: str
    order: random.Random

    def __repr__(self) -> str:
        return f"{self.how} of {self.full.dtype} {list(self.full.shape)} in {self.layout}"


@st.composite
def puts(draw: st.DrawFn) -> Put:
    shape = draw(st.lists(st.integers(0, 9) | st.integers(1, 4), max_size=4).filter(_small))
    full = value_of(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    how = draw(st.sampled_from(["DTensors", "TensorShards", "slices"]))
    return Put(full, draw(layouts(len(shape))), how, random.Random(draw(st.integers(0, 99))))


def _small(shape: Sequence[int]) -> bool:
    return torch.Size(shape).numel() < 1000


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Put, Layout]:
    """A put, and the layout of its readers."""
    put = draw(puts())
    return put, draw(layouts(put.full.dim()))


# ---- putting and getting ------------------------------------------------------------------


def pieces(put: Put) -> list[tuple[Any, ts.TensorSlice | None, list[ts.TensorSlice]]]:
    """What is put one after the other: a value, its slice if that is said beside it, its boxes."""
    found: list[tuple[Any, ts.TensorSlice | None, list[ts.TensorSlice]]] = []
    seen = set()
    for dtensor in every_rank(put.layout, put.full, Layout.cut):
        parts = local_parts("t", dtensor)
        boxes = [part for _, part in parts]
        if put.how == "DTensors":
            found.append((dtensor, None, boxes))
        elif put.how == "TensorShards":
            shards = [ts.TensorShard(tensor, part) for tensor, part in parts]
            found.append((shards[0] if len(shards) == 1 else ShardList(shards), None, boxes))
        else:  # without a mesh there are no replicas; and nothing has one part
            for tensor, part in parts:
                box = ts.TensorSlice(part.offsets, part.local_shape, part.global_shape)
                if box not in seen and (put.full.numel() or not seen):
                    seen.add(box)
                    found.append((tensor, box, [box]))
    put.order.shuffle(found)
    return found


async def put_all(client: ts.Client, put: Put, before: int) -> None:
    """Put all pieces. They are one version, and it is there as soon as they cover the tensor."""
    covered = torch.zeros(put.full.shape, dtype=torch.bool)
    for value, part, boxes in pieces(put):
        ref = await client.put("t", value, part)
        assert ref == ts.ObjectRef("t", before + 1)
        for box in boxes:
            covered[_index(box)] = True
        expected = before + 1 if covered.all() else before
        assert await client.latest_version("t") == expected
    assert covered.all()


def _index(box: ts.TensorSlice) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + extent)
        for start, extent in zip(box.offsets, box.local_shape, strict=True)
    )


async def get_all(ways: Ways, way: str, put: Put, layout: Layout) -> None:
    """Every rank of another layout gets its part, and a rank without mesh gets all."""
    client, full = ways.clients[way], put.full
    locals_ = [d.to_local() for d in every_rank(layout, full, Layout.cut)]
    mine = every_rank(layout, full, Layout.empty)
    for dtensor, expected in zip(mine, locals_, strict=True):
        with moving(ways, way, expected.nbytes):
            assert await client.get("t", dtensor) is dtensor
        assert same(dtensor.to_local(), expected)
        for tensor, part in local_parts("t", dtensor):
            expected = full[_index(part)]
            with moving(ways, way, expected.nbytes):
                assert same(await client.get("t", None, part), expected)
            around, room = roomy(tensor)
            shard = ts.TensorShard(room, part)
            with moving(ways, way, expected.nbytes):
                assert await client.get("t", shard) is shard
            assert same(room, expected)
            assert nothing_else_written(around, room)
    with moving(ways, way, full.nbytes):
        assert same(await client.get("t"), full)
    around, room = roomy(full)
    with moving(ways, way, full.nbytes):
        assert await client.get("t", room) is room
    assert same(room, full)
    assert nothing_else_written(around, room)


def nothing_else_written(around: torch.Tensor, room: torch.Tensor) -> bool:
    fresh, into = roomy(room)
    into.copy_(room)
    return same(around, fresh)


class moving:
    """The one operation inside moves exactly so many bytes."""

    def __init__(self, ways: Ways, way: str, nbytes: int) -> None:
        self._ways = ways
        self._counted = way == "counted"
        self._nbytes = nbytes

    def __enter__(self) -> None:
        self._ways.operations.clear()
        self._before = self._ways.counts.read[0]

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is None:
            assert [o.nbytes for o in self._ways.operations] == [self._nbytes]
            moved = self._ways.counts.read[0] - self._before
            assert moved == (self._nbytes if self._counted else 0)


# ---- what holds ---------------------------------------------------------------------------

WAYS = st.sampled_from(["messages", "window", "counted"])


@each()
@given(way=WAYS, transfer=transfers())
def test_any_layout_is_read_in_any_other(ways: Ways, way: str, transfer: tuple[Put, Layout]):
    """Bit for bit, in place and new, whole and in parts; and only what is wanted is moved."""
    put, layout = transfer
    ways.runner.run(_there_and_back(ways, way, put, layout))


async def _there_and_back(ways: Ways, way: str, put: Put, layout: Layout) -> None:
    client = ways.clients[way]
    await client.delete_batch(["t"])
    before = await client.put("t", "something else")  # shards may follow any other value
    written = ways.counts.written[0]
    await put_all(client, put, before.version)
    if way == "counted":  # each element once, however many ranks have it
        assert ways.counts.written[0] - written == put.full.nbytes
    await get_all(ways, way, put, layout)


@few()
@given(data=st.data())
def test_any_layout_of_a_large_tensor_is_read_in_any_other(ways: Ways, data: st.DataObject):
    """Large enough to be copied in chunks, by several threads."""
    shape = data.draw(st.sampled_from([(1500, 1031), (2, 700_000), (1_500_001,)]))
    full = value_of(shape, torch.float32)
    put = Put(full, data.draw(layouts(len(shape))), "DTensors", random.Random(0))
    ways.runner.run(_there_and_back(ways, "window", put, data.draw(layouts(len(shape)))))


@each()
@given(way=WAYS, several=st.lists(puts(), min_size=2, max_size=4))
def test_layout_shape_and_dtype_may_change_from_version_to_version(
    ways: Ways, way: str, several: list[Put]
):
    """The version before is readable until the next one is whole."""

    async def one_after_the_other() -> None:
        client = ways.clients[way]
        await client.delete_batch(["t"])
        previous = value_of((3,), torch.int64)
        version = (await client.put("t", previous)).version
        for put in several:
            rest = pieces(put)
            if put.how == "slices":  # without a mesh, an empty part may be of the version before
                rest = [piece for piece in rest if piece[0].numel()]
                if not rest:
                    continue
            while rest:
                assert same(await client.get("t"), previous)
                value, part, _ = rest.pop()
                assert (await client.put("t", value, part)).version == version + 1
                if await client.latest_version("t") > version:
                    break
            for value, part, _ in rest:  # replicas, which come too late to matter
                assert (await client.put("t", value, part)).version == version + 1
            version, previous = version + 1, put.full
            assert await client.versions("t") == [version]
            assert same(await client.get("t"), previous)

    ways.runner.run(one_after_the_other())


@st.composite
def dicts(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], list[Layout], list[Layout]]:
    """Some tensors, and layouts for each of them: of the ranks that put, and of those that get."""
    tensors = {}
    sides: tuple[list[Layout], list[Layout]] = [], []
    meshes = [draw(st.sampled_from([[(4,), (2, 2), (1, 4)], [(2,), (1, 2)], [(3,)]])) for _ in "ab"]
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 6), max_size=3))
        tensors[f"w{number}"] = value_of(shape, draw(st.sampled_from(DTYPES)), number)
        for side, same_size in zip(sides, meshes, strict=True):
            side.append(draw(layouts(len(shape), st.sampled_from(same_size))))
    return tensors, *sides


@each()
@given(way=WAYS, drawn=dicts())
def test_a_state_dict_of_any_layouts_is_read_in_any_others(
    ways: Ways,
    way: str,
    drawn: tuple[dict[str, torch.Tensor], list[Layout], list[Layout]],
):
    tensors, theirs, mine = drawn
    client = ways.clients[way]

    async def there_and_back() -> None:
        await client.delete_batch(["d"])
        written = ways.counts.written[0]
        ranks = _ranks(tensors, theirs, Layout.cut)
        for number, entries in enumerate(ranks):
            assert await client.versions("d") == []
            await client.put_state_dict({"n": entries, "step": 7}, "d", participant=number)
        if way == "counted":
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            assert 0 <= ways.counts.written[0] - written - nbytes < 16  # the step's
        expected = _ranks(tensors, mine, Layout.cut)
        for number, entries in enumerate(_ranks(tensors, mine, Layout.empty)):
            nbytes = sum(dtensor.to_local().nbytes for dtensor in expected[number].values())
            with moving(ways, way, nbytes):
                got = await client.get_state_dict("d", {"n": entries}, strict=False)
            assert got["n"] is entries
            for name, dtensor in entries.items():
                assert same(dtensor.to_local(), expected[number][name].to_local()), name
        got = await client.get_state_dict("d")
        assert got["step"] == 7
        assert all(same(got["n"][name], tensor) for name, tensor in tensors.items())

    ways.runner.run(there_and_back())


def _ranks(
    tensors: dict[str, torch.Tensor],
    layouts: Sequence[Layout],
    make: Callable[[Layout, torch.Tensor, DeviceMesh], DTensor],
) -> list[dict[str, DTensor]]:
    """What each rank has of the tensors."""
    columns = [
        every_rank(layout, full, make)
        for layout, full in zip(layouts, tensors.values(), strict=True)
    ]
    return [dict(zip(tensors, row, strict=True)) for row in zip(*columns, strict=True)]
