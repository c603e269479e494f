"""Shards that are plain tensors: several puts make one tensor, which is read in any layout."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support import bits, turn, until

import torchstore_core as ts

SIZES = pytest.mark.parametrize("rows", [4, 400], ids=["small", "large"])
COLUMNS = 500
_numbers = itertools.count()


@pytest.fixture
def key() -> str:
    """Never used before: what is unfinished outlives a test of a shared store."""
    return f"w{next(_numbers)}"


def _part(tensor: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> ts.TensorShard:
    """A piece of a tensor, as the one who holds it would put it."""
    index = tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))
    return ts.TensorShard(tensor[index], ts.TensorSlice(offsets, shape, tuple(tensor.shape)))


def _cut(tensor: torch.Tensor, parts: tuple[int, ...]) -> Iterator[ts.TensorShard]:
    """A grid of shards: so many along each dimension, the last ones smaller or empty."""
    spans = []
    for size, count in zip(tensor.shape, parts, strict=True):
        step = -(-size // count)
        starts = [min(size, step * i) for i in range(count)]
        spans.append([(start, min(step, size - start)) for start in starts])
    for choice in itertools.product(*spans):
        yield _part(tensor, tuple(start for start, _ in choice), tuple(n for _, n in choice))


def _empty(tensor: torch.Tensor, shard: ts.TensorShard) -> ts.TensorShard:
    """A destination for that piece, with strides of its own."""
    shape = shard.tensor.shape
    memory = torch.full((*shape[:-1], 2 * shape[-1] + 1), -1, dtype=tensor.dtype)
    return ts.TensorShard(memory[..., 1::2], shard.tensor_slice)


async def _used() -> int:
    return (await ts.status()).volumes[0].used_bytes


# ---- there and back -----------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("theirs", [(2, 1), (1, 3), (2, 2), (3, 7), (1, 1)], ids=str)
async def test_any_layout_is_read_in_any_other(shared, key, rows, theirs):
    value = torch.randn(rows, COLUMNS)
    refs = [await ts.put(key, shard) for shard in _cut(value, theirs)]
    assert refs == [ts.ObjectRef(key, 1)] * len(refs)
    assert torch.equal(await ts.get(key), value)
    assert torch.equal(await ts.get(refs[0]), value)
    mine = torch.zeros(COLUMNS, rows).t()
    assert await ts.get(key, mine) is mine
    assert torch.equal(mine, value)
    for layout in ((2, 1), (1, 3), (3, 2), (rows, 1)):
        for shard in itertools.islice(_cut(value, layout), 8):
            box = shard.tensor_slice
            assert torch.equal(await ts.get(key, tensor_slice_spec=box), shard.tensor)
            assert torch.equal(await ts.get(ts.Request(key, 1, box)), shard.tensor)
            destination = _empty(value, shard)
            assert await ts.get(key, destination) is destination
            assert torch.equal(destination.tensor, shard.tensor)
            assert (destination.tensor._base[..., ::2] == -1).all()
            plain = torch.zeros(shard.tensor.shape)
            assert await ts.get(key, plain, box) is plain
            assert torch.equal(plain, shard.tensor)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.uint16], ids=str
)
@SIZES
async def test_any_dtype_and_any_strides(shared, key, rows, dtype):
    raw = torch.randint(0, 2, (COLUMNS, rows * dtype.itemsize), dtype=torch.uint8)
    value = raw.view(dtype).t()
    for shard in _cut(value, (2, 2)):
        await ts.put(key, shard)
    assert torch.equal(bits(await ts.get(key)), bits(value))
    mine = torch.empty_like(value)
    await ts.get(key, mine)
    assert torch.equal(bits(mine), bits(value))


async def test_other_numbers_of_dimensions(shared, key):
    for value, parts in (
        (torch.tensor(2.5), ()),
        (torch.arange(7), (3,)),
        (torch.randn(3, 4, 5, 2), (2, 1, 2, 2)),
        (torch.empty(0, 3), (1, 2)),
    ):
        name = f"{key}-{value.dim()}-{value.numel()}"
        for shard in _cut(value, parts):
            ref = await ts.put(name, shard)
        assert ref.version == 1
        got = await ts.get(name)
        assert (got.shape, got.dtype) == (value.shape, value.dtype)
        assert torch.equal(got, value)


async def test_a_slice_beside_the_tensor_says_the_same(shared, key):
    value = torch.arange(12.0).reshape(3, 4)
    for shard in _cut(value, (1, 2)):
        await ts.put(key, shard.tensor, tensor_slice_spec=shard.tensor_slice)
    assert torch.equal(await ts.get(key), value)
    with pytest.raises(ts.UnsupportedValueError, match="TensorSlice"):
        await ts.put(key, value, tensor_slice_spec=(0, 0))
    with pytest.raises(ts.UnsupportedValueError, match="a shard is a tensor"):
        await ts.put(key, "text", _part(value, (0, 0), (1, 4)).tensor_slice)


async def test_requires_grad_and_parameters_are_stored_detached(shared, key):
    value = torch.randn(4, COLUMNS, requires_grad=True)
    first, second = _cut(value, (2, 1))
    await ts.put(key, ts.TensorShard(torch.nn.Parameter(first.tensor), first.tensor_slice))
    await ts.put(key, second)
    got = await ts.get(key)
    assert not got.requires_grad
    assert torch.equal(got, value.detach())


async def test_a_shard_object_is_compared_by_identity_and_says_what_it_is(shared, key):
    value = torch.arange(4)
    one, other = _part(value, (0,), (2,)), _part(value, (0,), (2,))
    assert one == one
    assert one != other
    assert "TensorSlice(offsets=(0,)" in repr(one)


# ---- visible when whole -------------------------------------------------------------------


@SIZES
async def test_nothing_is_there_until_the_shards_cover_the_tensor(shared, key, rows):
    value = torch.randn(rows, COLUMNS)
    waiting = asyncio.create_task(ts.wait(key, timeout=30))
    shards = [*_cut(value, (2, 2))]
    for shard in shards[:3]:
        assert (await ts.put(key, shard)).version == 1
        assert not await ts.exists(key)
        assert await ts.keys(key) == []
        assert await ts.latest_version(key) == 0
        for call in (
            ts.get(key),
            ts.get(key, torch.zeros_like(value)),
            ts.get(key, tensor_slice_spec=shards[0].tensor_slice),  # though this very one is there
            ts.get_batch([key]),
            ts.stat(key),
        ):
            with pytest.raises(ts.PartialPutError):
                await call
    assert not waiting.done()
    await ts.put(key, shards[3])
    assert await waiting == {key: ts.ObjectRef(key, 1)}
    assert torch.equal(await ts.get(key), value)


async def test_the_error_says_which_boxes_are_missing(shared, key):
    value = torch.randn(6, 4)
    await ts.put(key, _part(value, (0, 0), (2, 4)))
    await ts.put(key, _part(value, (2, 0), (4, 2)))
    with pytest.raises(ts.PartialPutError) as caught:
        await ts.get(key)
    error = caught.value
    assert isinstance(error, KeyError)
    assert (error.code, error.key) == ("partial-put", key)
    assert error.details["missing"] == [[key, [2, 2], [4, 2]]]
    assert error.details["version"] == 1
    assert f"{key!r} is not whole yet: of version 1" in str(error)
    assert f"still missing: {key}[2, 2]+[4, 2]" in str(error)
    assert f"ts.wait({key!r})" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.details) == (ts.PartialPutError, error.details)


@SIZES
async def test_readers_keep_the_generation_before_until_the_next_is_whole(shared, key, rows):
    for number in range(1, 5):
        value = torch.full((rows, COLUMNS), float(number))
        shards = [*_cut(value, (2, 2))]
        for i, shard in enumerate(shards):
            assert (await ts.put(key, shard)).version == number
            there = number if i == 3 else number - 1
            if there:
                assert (await ts.get(key) == there).all()
                mine = _empty(value, shards[0])
                await ts.get(key, mine)
                assert (mine.tensor == there).all()
                assert (await ts.stat(key)).version == there
                assert [p.version for p in (await ts.stat(key)).pending] == [number][: i < 3]


async def test_two_event_loop_tasks_never_show_a_mixture(shared, key):
    """Two ranks publish as fast as they can, in their own order; a reader sees whole versions."""
    count, whole = 60, torch.zeros(40, COLUMNS)
    boxes = [shard.tensor_slice for shard in _cut(whole, (2, 1))]
    seam = ts.TensorSlice((19, 0), (2, COLUMNS), (40, COLUMNS))

    async def rank(box: ts.TensorSlice) -> None:
        for number in range(1, count + 1):
            await ts.put(key, torch.full(box.local_shape, float(number)), box)
            await turn()

    publishing = asyncio.gather(*(rank(box) for box in boxes))
    await ts.wait(key)
    seen = [0.0]
    while not publishing.done():
        got = await ts.get(key, tensor_slice_spec=seam)
        assert got.min() == got.max() >= seen[-1]
        seen.append(got[0, 0].item())
    await publishing
    assert (await ts.get(key) == count).all()
    assert await ts.latest_version(key) == count


# ---- what is stored -----------------------------------------------------------------------


async def test_replicas_are_stored_once(shared, key):
    value = torch.randn(400, COLUMNS)
    before = await _used()
    first, second = _cut(value, (2, 1))
    for place, shard in enumerate((first, first, second)):
        box = shard.tensor_slice
        where = ts.TensorSlice(box.offsets, box.local_shape, box.global_shape, (4,), (place,))
        assert (await ts.put(key, ts.TensorShard(shard.tensor, where))).version == 1
        assert await ts.exists(key) == (place == 2)
    assert value.nbytes <= await _used() - before <= value.nbytes + 4096
    assert torch.equal(await ts.get(key), value)
    late = ts.TensorSlice(second.tensor_slice.offsets, (200, COLUMNS), (400, COLUMNS), (4,), (3,))
    ref = await ts.put(key, ts.TensorShard(torch.zeros(200, COLUMNS), late))
    assert ref.version == 1  # the other replica was faster
    assert torch.equal(await ts.get(key), value)


async def test_shards_may_overlap(shared, key):
    value = torch.arange(1000.0)
    await ts.put(key, _part(value, (0,), (700,)))
    assert not await ts.exists(key)
    await ts.put(key, _part(value, (300,), (700,)))
    assert torch.equal(await ts.get(key), value)
    assert torch.equal(await ts.get(key, torch.zeros(1000)), value)


async def test_empty_shards_are_nothing_to_wait_for(shared, key):
    value = torch.randn(2, COLUMNS)
    shards = [*_cut(value, (4, 1))]
    assert [shard.tensor.numel() for shard in shards] == [COLUMNS, COLUMNS, 0, 0]
    for place, shard in reversed([*enumerate(shards)]):
        assert not await ts.exists(key)
        box = shard.tensor_slice
        where = ts.TensorSlice(box.offsets, box.local_shape, box.global_shape, (4,), (place,))
        assert (await ts.put(key, ts.TensorShard(shard.tensor, where))).version == 1
    assert torch.equal(await ts.get(key), value)
    for shard in shards[2:]:
        destination = ts.TensorShard(torch.empty(0, COLUMNS), shard.tensor_slice)
        assert await ts.get(key, destination) is destination
        assert (await ts.get(key, tensor_slice_spec=shard.tensor_slice)).shape == (0, COLUMNS)


async def test_old_generations_give_their_memory_back(shared, key):
    before = await _used()
    size = 400 * COLUMNS * 4
    for number in range(1, 6):
        for shard in _cut(torch.full((400, COLUMNS), float(number)), (2, 2)):
            await ts.put(key, shard)
        assert await _used() - before <= size + 4 * 4096
    held = await ts.get(key)
    await ts.delete(key)
    assert (held == 5).all()
    del held

    async def all_given_back() -> bool:
        return await _used() <= before

    await until(all_given_back)


async def test_a_newer_generation_drops_unfinished_ones_of_another_layout(shared, key):
    before = await _used()
    rows = [*_cut(torch.full((400, COLUMNS), 1.0), (2, 1))]
    assert (await ts.put(key, rows[0])).version == 1
    columns = [*_cut(torch.full((400, COLUMNS), 2.0, dtype=torch.float64), (1, 2))]
    for shard in columns:
        ref = await ts.put(key, shard)
    assert ref.version == 2
    got = await ts.get(key)
    assert got.dtype is torch.float64
    assert (got == 2).all()
    assert await _used() - before <= 400 * COLUMNS * 8 + 4 * 4096
    assert (await ts.stat(key)).pending == []


# ---- from generation to generation --------------------------------------------------------


async def test_layout_dtype_shape_and_kind_may_change(shared, key):
    values: list[tuple[Any, tuple[int, ...]]] = [
        (torch.randn(8, 6), (2, 1)),
        (torch.randn(8, 6), (1, 3)),
        (torch.randn(8, 6).bfloat16(), (2, 1)),
        (torch.arange(30), (4,)),
        (torch.randn(2, 3, 4), (2, 1, 2)),
    ]
    last = 0
    for value, parts in [*values, *values]:
        for shard in _cut(value, parts):
            ref = await ts.put(key, shard)
        assert ref.version == last + 1
        got = await ts.get(key)
        assert got.dtype is value.dtype
        assert torch.equal(got, value)
        plain = await ts.put(key, ("now", "an object"))
        assert plain.version == last + 2
        assert await ts.get(key) == ("now", "an object")
        last = (await ts.put(key, torch.ones(3))).version
        assert last == plain.version + 1


async def test_another_cut_is_never_taken_for_late_shards_of_the_old_one(shared, key):
    """Without a mesh the store knows shards by their boxes alone: new boxes are new data."""
    cuts = ((2, 1), (2, 1), (3, 1), (3, 1), (1, 2), (2, 1), (1, 1))
    for number, parts in enumerate(cuts, start=1):
        value = torch.full((12, COLUMNS), float(number))
        for shard in _cut(value, parts):
            assert (await ts.put(key, shard)).version == number
        assert torch.equal(await ts.get(key), value), parts


async def test_a_version_may_be_said(shared, key):
    value = torch.randn(4, COLUMNS)
    first, second = _cut(value, (2, 1))
    assert (await ts.put(key, first, version=7)).version == 7
    assert (await ts.put(key, first, version=8)).version == 8
    assert (await ts.put(key, second, version=8)).version == 8
    assert await ts.versions(key) == [8]
    with pytest.raises(ts.VersionGoneError, match="version 7"):
        await ts.put(key, second, version=7)
    await ts.put(key, first, version=9)
    with pytest.raises(ts.VersionGoneError, match="another layout"):
        await ts.put(key, _part(value.bfloat16(), (0, 0), (2, COLUMNS)), version=9)
    assert torch.equal(await ts.get(key), value)


async def test_a_put_batch_of_shards_is_one_cut(shared, key):
    values = {f"{key}-{i}": torch.randn(8, COLUMNS) + i for i in range(3)}
    for i in range(2):
        batch = {name: [*_cut(value, (2, 1))][i] for name, value in values.items()}
        refs = await ts.put_batch(batch)
        assert set(refs.values()) == {ts.ObjectRef(name, 1) for name in values}
        for name in values:
            assert await ts.exists(name) == (i == 1)
    got = await ts.get_batch(list(values))
    assert all(torch.equal(got[name], value) for name, value in values.items())
    mine = {name: _empty(value, _part(value, (3, 0), (2, 9))) for name, value in values.items()}
    assert await ts.get_batch(mine) == mine
    for name, value in values.items():
        assert torch.equal(mine[name].tensor, value[3:5, :9])


# ---- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "box",
    [
        ((0, 0), (3, 4), (6, 4)),
        ((5, 0), (2, 4), (6, 4)),
        ((-1, 0), (2, 4), (6, 4)),
        ((0,), (2, 4), (6, 4)),
        ((0, 0), (2, 4), (6,)),
        ((0, 0), (2, 4), (6, 3)),
        ((0, 0), (2, 4), (6, 4), (2,), ()),
    ],
    ids=["shape", "outside", "negative", "offsets", "global", "small", "mesh"],
)
async def test_a_shard_that_is_not_its_slice_is_refused(shared, key, box):
    shard = ts.TensorShard(torch.ones(2, 4), ts.TensorSlice(*box))
    with pytest.raises(ts.LayoutMismatchError, match=key) as caught:
        await ts.put(key, shard)
    assert caught.value.key == key
    with pytest.raises(ts.KeyNotFoundError) as missing:
        await ts.get(key)
    assert type(missing.value) is ts.KeyNotFoundError  # nothing of it is there
    await ts.put(key, torch.ones(6, 4))
    with pytest.raises(ts.LayoutMismatchError):
        await ts.get(key, ts.TensorShard(torch.zeros(2, 4), ts.TensorSlice(*box)))


async def test_what_cannot_be_a_shard(shared, key):
    box = ts.TensorSlice((0,), (2,), (4,))
    for tensor in (torch.empty(2, device="meta"), torch.ones(2).to_sparse()):
        with pytest.raises(ts.UnsupportedValueError, match=key):
            await ts.put(key, ts.TensorShard(tensor, box))
    for shard in (ts.TensorShard([1, 2], box), ts.TensorShard(torch.ones(2), ((0,), (2,), (4,)))):
        with pytest.raises(ts.UnsupportedValueError, match="a shard is a tensor and a TensorSlice"):
            await ts.put(key, shard)
    with pytest.raises(ts.KeyNotFoundError, match="no such key"):
        await ts.get(key)


async def test_a_shard_as_destination_must_fit_what_is_stored(shared, key):
    value = torch.randn(6, 4)
    await ts.put(key, value)
    await ts.put(f"{key}-object", (1, 2))
    for shape, dtype in (((7, 4), value.dtype), ((6, 4), torch.float16), ((6, 4, 1), value.dtype)):
        box = ts.TensorSlice((0,) * len(shape), (2, 4, 1)[: len(shape)], shape)
        destination = ts.TensorShard(torch.zeros(box.local_shape, dtype=dtype), box)
        with pytest.raises(ts.LayoutMismatchError, match=key):
            await ts.get(key, destination)
        assert not destination.tensor.any()
    destination = _part(torch.zeros(6, 4), (0, 0), (2, 4))
    with pytest.raises(ts.LayoutMismatchError, match="either it or a tensor slice"):
        await ts.get(key, destination, destination.tensor_slice)
    with pytest.raises(ts.LayoutMismatchError, match="not a tensor"):
        await ts.get(f"{key}-object", destination)
    assert not destination.tensor.any()


async def test_stat_says_where_the_shards_are(shared, key):
    whole = torch.randn(5, 700)
    for shard in [*_cut(whole, (2, 3))][::-1]:
        await ts.put(key, shard)
    cut = [shard.tensor_slice for shard in _cut(whole, (2, 3))]
    found = await ts.stat(key)
    assert (found.shards, found.parts) == (cut, 6)
    for part in found.shards:
        rows, columns = (
            slice(o, o + n) for o, n in zip(part.offsets, part.local_shape, strict=True)
        )
        assert torch.equal(await ts.get(key, tensor_slice_spec=part), whole[rows, columns])
    await ts.put_state_dict({"w": next(_cut(whole, (1, 1))), "n": 1}, f"{key}/state")
    assert (await ts.stat(f"{key}/state")).shards == []
    await ts.put(key, 1)
    assert (await ts.stat(key)).shards == []


async def test_stat_of_a_version(shared, key):
    halves = [*_cut(torch.randn(4, 4), (2, 1))]
    for step in range(3):
        for at, half in enumerate(halves):
            state = {"w": half, "step": step}
            await ts.put_state_dict(state, key, participants=2, participant=at, keep=2)
    assert (await ts.stat(key, version=2)).version == 2
    entry = await ts.stat(f"{key}/w", version=2)
    assert entry.shards == [half.tensor_slice for half in halves]
    assert (await ts.stat(key)).versions == [2, 3]
    for name in (key, f"{key}/w"):
        with pytest.raises(ts.VersionGoneError):
            await ts.stat(name, version=1)
    with pytest.raises(ts.ConfigurationError):
        await ts.stat(key, version=0)
