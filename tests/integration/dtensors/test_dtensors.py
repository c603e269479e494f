"""Real DTensors in real process groups: put by the ranks of one, got by those of another."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.integration.dtensors.layouts import SS, Layout, R, S, mesh_of, same, value_of
from tests.integration.dtensors.ranks import Jobs, Nursery
from tests.support import nothing_leased, until, used
from torch import nn
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

import torchstore_core as ts

_numbers = itertools.count()
pytestmark = pytest.mark.usefixtures("shared")


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with Nursery(__name__) as nursery:
        yield nursery.jobs


@pytest.fixture
def key() -> str:
    """Never used before: its versions begin with 1."""
    return f"key-{next(_numbers)}"


# ---- what the ranks do --------------------------------------------------------------------


class Case(NamedTuple):
    """A tensor, of which the value is drawn by ``seed``, and its layout."""

    shape: tuple[int, ...]
    layout: Layout
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def full(self) -> torch.Tensor:
        return value_of(self.shape, self.dtype, self.seed)

    def mine(self) -> DTensor:
        """What this rank has of it."""
        return self.layout.cut(self.full(), mesh_of(self.layout.mesh))


async def put(key: str, case: Case) -> int:
    ref = await ts.put(key, case.mine())
    return ref.version


async def get(key: str, case: Case) -> int:
    """Into strided memory of this rank's; torch puts it together again. Bytes of this rank's."""
    mine = case.layout.empty(case.full(), mesh_of(case.layout.mesh))
    assert await ts.get(key, mine) is mine
    assert same(mine.to_local(), case.mine().to_local())
    if mine.device_mesh.get_coordinate() is None:
        return 0
    assert same(mine.full_tensor(), case.full())
    return mine.to_local().nbytes


# ---- from any layout to any other ---------------------------------------------------------

_2x2 = (2, 2)
#: Shape; who puts, in which layout; who gets, in which layout.
CASES: dict[str, tuple[tuple[int, ...], str, Layout, str, Layout]] = {
    "2 to 4 ranks": ((12, 8), "two", Layout((2,), (S(0),)), "four", Layout((4,), (S(0),))),
    "4 to 2 ranks": ((12, 8), "four", Layout((4,), (S(0),)), "two", Layout((2,), (S(0),))),
    "4 to 1 rank": ((12, 8), "four", Layout((4,), (S(1),)), "one", Layout((1,), (S(0),))),
    "1 to 4 ranks": ((12, 8), "one", Layout((1,), (S(0),)), "four", Layout((4,), (S(1),))),
    "rows to columns": ((6, 8), "two", Layout((2,), (S(0),)), "other", Layout((2,), (S(1),))),
    "columns to rows": ((6, 8), "other", Layout((2,), (S(1),)), "two", Layout((2,), (S(0),))),
    "uneven": ((7, 5), "two", Layout((2,), (S(0),)), "four", Layout((4,), (S(0),))),
    "uneven columns": ((7, 5), "four", Layout((4,), (S(-1),)), "two", Layout((2,), (S(0),))),
    "empty shards": ((3, 4), "four", Layout((4,), (S(0),)), "two", Layout((2,), (S(1),))),
    "into empty shards": ((2, 1), "two", Layout((2,), (S(0),)), "four", Layout((4,), (S(1),))),
    "HSDP to FSDP": ((9, 4), "four", Layout(_2x2, (R, S(0))), "two", Layout((2,), (S(0),))),
    "FSDP to HSDP": ((9, 4), "two", Layout((2,), (S(0),)), "four", Layout(_2x2, (R, S(0)))),
    "replicas inside": ((9, 4), "four", Layout(_2x2, (S(1), R)), "four", Layout(_2x2, (R, S(0)))),
    "blocks": ((5, 9), "four", Layout(_2x2, (S(0), S(1))), "four", Layout(_2x2, (S(1), S(0)))),
    "one dimension twice": (
        (13, 3),
        "four",
        Layout(_2x2, (S(0), S(0))),
        "four",
        Layout(_2x2, (SS(0, 2), S(0))),
    ),
    "strided to rows": (
        (13, 3),
        "four",
        Layout(_2x2, (SS(0, 2), S(0))),
        "two",
        Layout((2,), (S(0),)),
    ),
    "strided columns to blocks": (
        (4, 11),
        "four",
        Layout(_2x2, (SS(1, 2), S(1))),
        "four",
        Layout(_2x2, (S(0), S(1))),
    ),
    "replicas to shards": ((6, 4), "four", Layout((4,), (R,)), "two", Layout((2,), (S(1),))),
    "shards to replicas": ((6, 4), "two", Layout((2,), (S(1),)), "four", Layout((4,), (R,))),
    "replicas to replicas": ((6, 4), "two", Layout((2,), (R,)), "four", Layout(_2x2, (R, R))),
    "3-D meshes": (
        (6, 5, 4),
        "four",
        Layout((1, 2, 2), (R, S(2), S(0))),
        "four",
        Layout((2, 1, 2), (S(1), S(0), S(1))),
    ),
    "mesh of one rank of four": (
        (6, 4),
        "four",
        Layout((1,), (S(0),)),
        "two",
        Layout((2,), (S(0),)),
    ),
    "no dimensions": ((), "four", Layout(_2x2, (R, R)), "two", Layout((2,), (R,))),
    "no elements": ((0, 4), "two", Layout((2,), (S(0),)), "four", Layout((4,), (S(1),))),
}


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("name", CASES)
async def test_what_ranks_put_others_get_in_their_layout(
    jobs: Jobs, key: str, size: str, name: str
):
    shape, writers, before, readers, after = CASES[name]
    if size == "large" and shape:
        shape = (*shape[:-1], shape[-1] * 3001)
    theirs = Case(shape, before, torch.bfloat16 if name.startswith("3") else torch.float32)
    full = theirs.full()
    used = await _used()
    versions = await jobs[writers].run(put, key, theirs)
    outside = [0] * (len(versions) - before.size)
    assert versions == [1] * before.size + outside
    assert (await ts.stat(key)).nbytes == full.nbytes
    if size == "large":  # each element once, however many ranks have it
        assert 0 <= await _used() - used - full.nbytes < 64 * before.size

    nbytes = await jobs[readers].run(get, key, theirs._replace(layout=after))
    assert sum(nbytes) == full.nbytes * after.copies
    assert same(await ts.get(key), full)  # this process has no mesh at all
    if full.dim() > 1:
        part = full[: len(full) // 2, 1:]
        place = ts.TensorSlice((0, 1, *[0] * (full.dim() - 2)), tuple(part.shape), shape)
        assert same(await ts.get(key, tensor_slice_spec=place), part)


async def _used() -> int:
    """Bytes that are stored; those of earlier reads are given back some time after them."""
    await until(nothing_leased)
    return await used()


# ---- while ranks are missing --------------------------------------------------------------

ROWS = Layout((2,), (S(0),))
COLUMNS = Layout((2,), (S(1),))
COPIES = Layout((2,), (R,))
SHAPES = pytest.mark.parametrize("shape", [(5, 3), (5, 30_000)], ids=["small", "large"])


def prepare(layout: Layout) -> None:
    """All ranks make the mesh; afterwards each can put alone."""
    mesh_of(layout.mesh)


async def put_dict(key: str, case: Case) -> int:
    ref = await ts.put_state_dict({"w": case.mine(), "seed": case.seed}, key)
    return ref.version


async def get_dict(key: str, case: Case) -> int:
    """Its seed; the tensor is the one that belongs to it."""
    wanted = {"w": case.layout.empty(case.full(), mesh_of(case.layout.mesh)), "seed": -1}
    await ts.get_state_dict(key, wanted)
    expected = case._replace(seed=wanted["seed"]).mine().to_local()
    assert same(wanted["w"].to_local(), expected)
    return wanted["seed"]


async def wait_for(key: str, version: int) -> asyncio.Task[Any]:
    """A wait that the server knows of."""

    async def waits() -> int:
        return (await ts.status()).operations.get("Wait", 0)

    before = await waits()
    task = asyncio.create_task(ts.wait(key, min_version=version))

    async def one_more() -> bool:
        return await waits() > before

    await until(one_more)
    return task


@SHAPES
async def test_a_tensor_is_there_when_the_last_rank_has_put(jobs: Jobs, key: str, shape: Any):
    await jobs["two"].run(prepare, ROWS)
    first, second = Case(shape, ROWS, seed=1), Case(shape, ROWS, seed=2)
    waiting = await wait_for(key, 1)
    assert await jobs["two"].run(put, key, first, only=[1]) == [1]
    with pytest.raises(ts.PartialPutError, match="not whole yet") as caught:
        await ts.get(key)
    assert isinstance(caught.value, KeyError)
    assert caught.value.details["missing"] == [[key, [0, 0], [3, shape[1]]]]
    assert not await ts.exists(key)
    assert not waiting.done()
    assert await jobs["two"].run(put, key, first, only=[0]) == [1]
    assert await waiting == {key: ts.ObjectRef(key, 1)}
    assert same(await ts.get(key), first.full())

    waiting = await wait_for(key, 2)
    assert await jobs["two"].run(put, key, second, only=[0]) == [2]
    assert same(await ts.get(key), first.full())  # the version before stays
    await jobs["other"].run(get, key, first._replace(layout=COLUMNS))
    assert not waiting.done()
    assert await jobs["two"].run(put, key, second, only=[1]) == [2]
    assert await waiting == {key: ts.ObjectRef(key, 2)}
    assert same(await ts.get(key), second.full())


@pytest.mark.quick
@SHAPES
@pytest.mark.parametrize("layout", [ROWS, COPIES], ids=["shards", "replicas"])
async def test_a_state_dict_is_there_when_the_last_rank_has_put(
    jobs: Jobs, key: str, shape: Any, layout: Layout
):
    """Also if one rank alone has put all there is."""
    await jobs["two"].run(prepare, layout)
    first, second = Case(shape, layout, seed=1), Case(shape, layout, seed=2)
    reader = first._replace(layout=COLUMNS)
    waiting = await wait_for(key, 1)
    assert await jobs["two"].run(put_dict, key, first, only=[0]) == [1]
    with pytest.raises(ts.PartialPutError, match="1 of 2 participants") as caught:
        await ts.get_state_dict(key)
    assert caught.value.details["committed"] == ["0"]
    missing = [["w", [3, 0], [2, shape[1]]]] if layout is ROWS else []
    assert caught.value.details["missing"] == missing
    assert not await ts.exists(f"{key}/seed")
    assert not waiting.done()
    assert await jobs["two"].run(put_dict, key, first, only=[1]) == [1]
    assert await waiting == {key: ts.ObjectRef(key, 1)}
    assert await jobs["other"].run(get_dict, key, reader) == [1, 1]

    waiting = await wait_for(key, 2)
    assert await jobs["two"].run(put_dict, key, second, only=[1]) == [2]
    assert await jobs["other"].run(get_dict, key, reader) == [1, 1]  # of both entries the first
    assert not waiting.done()
    assert await jobs["two"].run(put_dict, key, second, only=[0]) == [2]
    assert await waiting == {key: ts.ObjectRef(key, 2)}
    assert await jobs["other"].run(get_dict, key, reader) == [2, 2]


async def test_layout_shape_and_dtype_may_change_from_version_to_version(jobs: Jobs, key: str):
    """The version before stays until the last of the ranks has put."""
    cases = [
        (jobs["two"], Case((5, 3), ROWS)),
        (jobs["two"], Case((5, 3), COLUMNS, seed=1)),
        (jobs["four"], Case((7, 3), Layout((4,), (S(0),)), seed=2)),
        (jobs["four"], Case((7, 3), Layout((4,), (S(0),)), torch.int64)),
        (jobs["four"], Case((2, 40_000, 2), Layout((2, 2), (S(2), S(1))), torch.bfloat16)),
        (jobs["other"], Case((7,), ROWS, torch.bool)),
        (jobs["two"], Case((5, 3), ROWS, seed=3)),
    ]
    previous = torch.ones(())
    await ts.put(key, previous)
    for version, (job, case) in enumerate(cases, start=2):
        await job.run(prepare, case.layout)
        last = case.layout.size - 1
        assert await job.run(put, key, case, only=range(last)) == [version] * last
        assert same(await ts.get(key), previous)
        assert await job.run(put, key, case, only=[last]) == [version]
        previous = case.full()
        assert same(await ts.get(key), previous)
        await jobs["other"].run(get, key, case._replace(layout=ROWS))
    await ts.put(key, 5)
    assert await ts.get(key) == 5


# ---- meshes and tensors that are special --------------------------------------------------


async def outside(key: str) -> tuple[int, int, int]:
    """A mesh of ranks 1 and 2: the version of a tensor, and of a state dict, and how many bytes
    this rank gets.
    """
    mesh = mesh_of((2,), first=1)
    full = value_of((5, 3), torch.float32)
    tensor = ROWS.cut(full, mesh)
    ref = await ts.put(key, tensor)
    dict_ref = await ts.put_state_dict({"w": tensor}, f"{key} dict")
    await ts.wait([key, f"{key} dict"])
    mine = ROWS.empty(full, mesh)
    before = mine.to_local().clone()
    assert await ts.get(key, mine) is mine
    wanted = {"w": mine}
    assert await ts.get_state_dict(f"{key} dict", wanted) is wanted
    there = mesh.get_coordinate() is not None
    assert same(mine.to_local(), tensor.to_local() if there else before)
    return ref.version, dict_ref.version, mine.to_local().nbytes


async def test_ranks_outside_of_the_mesh_have_nothing_to_put_or_get(jobs: Jobs, key: str):
    found = await jobs["four"].run(outside, key)
    assert [(version, of_dict) for version, of_dict, _ in found] == [(0, 0), (1, 1), (1, 1), (0, 0)]
    full = value_of((5, 3), torch.float32)
    assert [nbytes for *_, nbytes in found][1:3] == [3 * 3 * 4, 2 * 3 * 4]
    assert same(await ts.get(key), full)
    assert same(await ts.get(f"{key} dict/w"), full)


async def refused(key: str) -> None:
    mesh = mesh_of((2,))
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    for attempt in (
        ts.put(key, partial),
        ts.put_batch({key: partial}),
        ts.put_state_dict({"w": partial}, key),
        ts.get("there", partial),
        ts.get_state_dict("there dict", {"w": partial}),
    ):
        with pytest.raises(ts.UnsupportedValueError, match=r"Partial\(sum\).*redistribute"):
            await attempt
    other_rows = torch.ones(2 if dist.get_rank() == 0 else 3, 3)
    uneven = DTensor.from_local(
        other_rows, mesh, [S(0)], run_check=False, shape=torch.Size((5, 3)), stride=(3, 1)
    )
    for attempt in (ts.put(key, uneven), ts.get("there", uneven)):
        with pytest.raises(ts.LayoutMismatchError, match="from_local"):
            await attempt


async def test_partial_and_contradicting_dtensors_are_refused_by_name(jobs: Jobs, key: str):
    await ts.put("there", torch.ones(4))
    await ts.put_state_dict({"w": torch.ones(4)}, "there dict")
    await jobs["two"].run(refused, key)
    assert not await ts.exists(key)
    assert [p.version for p in (await ts.stat("there")).pending] == []


async def mismatched(key: str) -> None:
    mesh = mesh_of((2,))
    for full in (torch.ones(5, 4), torch.ones(5, 3, dtype=torch.int32), torch.ones(15)):
        mine = distribute_tensor(full, mesh, [S(0)], src_data_rank=None)
        for attempt in (ts.get(key, mine), ts.get_batch({"there": None, key: mine})):
            with pytest.raises(ts.LayoutMismatchError):
                await attempt
        assert (mine.to_local() == 1).all()
    mine = distribute_tensor(torch.ones(5, 3), mesh, [S(0)], src_data_rank=None)
    with pytest.raises(ts.LayoutMismatchError, match="says itself"):
        await ts.get(key, mine, ts.TensorSlice((0, 0), (3, 3), (5, 3)))


async def test_a_dtensor_of_another_shape_or_dtype_is_no_destination(jobs: Jobs, key: str):
    await ts.put_batch({key: value_of((5, 3), torch.float32), "there": 1})
    await jobs["two"].run(mismatched, key)


async def unusual(key: str) -> None:
    """Trained, still gathered by a collective, of an inference mode."""
    mesh = mesh_of((2,))
    full = value_of((6, 4), torch.float64)
    parameter = nn.Parameter(ROWS.cut(full, mesh))
    with torch.inference_mode():
        inferred = COLUMNS.cut(full, mesh)
    gathered = COLUMNS.cut(full, mesh).redistribute(mesh, [R], async_op=True)
    for value in (parameter, inferred, gathered):
        await ts.put(key, value)
    await ts.put_batch({key: parameter, f"{key} too": inferred})
    parameter.grad = None
    with torch.no_grad():
        parameter.zero_()
    assert await ts.get(key, parameter) is parameter
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert same(parameter.full_tensor().detach(), full)


async def test_parameters_and_results_of_collectives_are_tensors_like_others(jobs: Jobs, key: str):
    await jobs["two"].run(unusual, key)
    full = value_of((6, 4), torch.float64)
    assert same(await ts.get(key), full)
    assert same(await ts.get(f"{key} too"), full)


async def put_tied(key: str, case: Case) -> None:
    tensor = case.mine()
    parameter = nn.Parameter(tensor)
    await ts.put_state_dict({"first": tensor, "other": case.mine(), "second": parameter}, key)


@pytest.mark.parametrize("rows", [8, 3], ids=["every rank has some", "a rank has nothing"])
async def test_tied_dtensors_are_stored_once(jobs: Jobs, key: str, rows: int):
    case = Case((rows, 30_000), Layout((4,), (S(0),)))
    full = case.full()
    used = await _used()
    await jobs["four"].run(put_tied, key, case)
    assert await ts.versions(key) == [1]
    assert 0 <= await _used() - used - 2 * full.nbytes < 1024
    got = await ts.get_state_dict(key)
    assert list(got) == ["first", "other", "second"]
    assert all(same(tensor, full) for tensor in got.values())


async def put_cast(key: str, case: Case) -> None:
    tensors = {"w": case.mine(), "trained": nn.Parameter(case.mine())}
    numbers = case._replace(dtype=torch.int32).mine()
    await ts.put_state_dict({**tensors, "numbers": numbers}, key, transfer_dtype=torch.bfloat16)


async def get_cast(key: str, case: Case) -> None:
    """Into this rank's parts of other dtypes."""
    mesh = mesh_of(case.layout.mesh)
    wanted = {
        "w": case.layout.empty(case.full(), mesh),
        "trained": case.layout.empty(case.full().double(), mesh),
        "numbers": case.layout.empty(case._replace(dtype=torch.int32).full(), mesh),
    }
    await ts.get_state_dict(key, wanted, cast=True)
    stored = case.layout.cut(case.full().bfloat16(), mesh).to_local()
    assert same(wanted["w"].to_local(), stored.float())
    assert same(wanted["trained"].to_local(), stored.double())
    numbers = case._replace(dtype=torch.int32).mine()
    assert same(wanted["numbers"].to_local(), numbers.to_local())


@SHAPES
async def test_dtensors_are_cast_both_ways(jobs: Jobs, key: str, shape: Any):
    """On the way from the ranks, and on that to others, in another layout."""
    case = Case(shape, Layout(_2x2, (S(0), R)))
    await jobs["four"].run(put_cast, key, case)
    stored = await ts.get_state_dict(key)
    assert same(stored["w"], case.full().bfloat16())
    assert same(stored["trained"], case.full().bfloat16())
    assert same(stored["numbers"], case._replace(dtype=torch.int32).full())
    assert (await ts.stat(key)).nbytes == case.full().numel() * (2 + 2 + 4)
    await jobs["two"].run(get_cast, key, case._replace(layout=COLUMNS))


def experts_of(rank: int, seed: int) -> dict[str, torch.Tensor]:
    return {
        str(number): value_of((4, 30_000), torch.bfloat16, 100 * seed + number)
        for number in range(2 * rank, 2 * rank + 2)
    }


async def put_experts(key: str, case: Case, owners: dict[int, int]) -> int:
    """Of this rank: its shard of what is dense, and the experts that it owns, which are whole."""
    own = owners.get(dist.get_rank())
    state: dict[str, Any] = {"dense": case.mine(), "step": case.seed}
    if own is not None:
        state["experts"] = experts_of(own, case.seed)
    return (await ts.put_state_dict(state, key)).version


async def get_experts(key: str, case: Case, mine: int) -> None:
    """Another rank's experts, in place, with its own shard of what is dense."""
    wanted: dict[str, Any] = {
        "dense": case.layout.empty(case.full(), mesh_of(case.layout.mesh)),
        "experts": {name: t.clone().zero_() for name, t in experts_of(mine, case.seed).items()},
    }
    await ts.get_state_dict(key, wanted, strict=False, min_version=1)
    assert same(wanted["dense"].to_local(), case.mine().to_local())
    for name, tensor in experts_of(mine, case.seed).items():
        assert same(wanted["experts"][name], tensor)


async def test_experts_that_one_rank_has_belong_to_the_version_of_all(jobs: Jobs, key: str):
    """Ranks hold different entries beside the shards of others: nothing of it is partial. From
    version to version experts may move, also all to one rank; and there may be fewer.
    """
    layout = Layout((4,), (S(0),))
    placements = [{0: 0, 1: 1, 3: 3}, {0: 3, 1: 0, 2: 1}, {2: 1}]
    await jobs["four"].run(prepare, layout)
    for version, owners in enumerate(placements, start=1):
        case = Case((7, 9000), layout, seed=version)
        first = await jobs["four"].run(put_experts, key, case, owners, only=[0, 1, 2])
        assert first == [version] * 3
        assert await ts.versions(key) == [version - 1] * (version > 1)
        assert await jobs["four"].run(put_experts, key, case, owners, only=[3]) == [version]
        got = await ts.get_state_dict(key)
        assert got["step"] == version
        assert same(got["dense"], case.full())
        expected = {k: v for own in owners.values() for k, v in experts_of(own, version).items()}
        assert got["experts"].keys() == expected.keys()
        assert all(same(got["experts"][name], tensor) for name, tensor in expected.items())
        await jobs["two"].run(get_experts, key, case._replace(layout=COLUMNS), 1)
