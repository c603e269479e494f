"""CUDA tensors, both ways. Skipped, with the reason, where there is no CUDA device."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tests.processes import run_script
from tests.support import bits, running_store
from tests.trees import assert_same

import torchstore_core as ts

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
SIZES = pytest.mark.parametrize("rows", [6, 900], ids=["small", "large"])
COLUMNS = 1200
#: Cycles a kernel spins: some tenths of a second, far longer than a copy takes.
LONG = 1_000_000_000


def _value(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Any bits, those of NaNs with a payload, too."""
    most = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, most, (rows, COLUMNS * dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype)


def _sources(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "contiguous": tensor,
        "transposed": tensor.t(),
        "strided": tensor[1::2, ::3],
        "offset": tensor[1:],
        "expanded": tensor[:1].expand(tensor.shape[0], -1),
        "no dimension": tensor[0, 0],
        "empty": tensor[:0],
    }


@SIZES
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint16],
    ids=str,
)
async def test_put_from_the_device(store, rows, dtype):
    value = _value(rows, dtype)
    on_device = value.to(DEVICE)
    expected = _sources(value)
    await ts.put_batch(_sources(on_device))
    for key, tensor in expected.items():
        got = await ts.get(key)
        assert got.device.type == "cpu", key
        assert (got.dtype, got.shape) == (dtype, tensor.shape), key
        assert torch.equal(bits(got), bits(tensor)), key


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64], ids=str)
async def test_get_into_the_device(store, rows, dtype):
    value = _value(rows, dtype)
    await ts.put("t", value)

    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=DEVICE)

    destinations = {
        "contiguous": empty(rows, COLUMNS),
        "transposed": empty(COLUMNS, rows).t(),
        "every other row": empty(2 * rows, COLUMNS)[::2],
        "inner block": empty(rows + 2, COLUMNS + 2)[1:-1, 1:-1],
    }
    for name, destination in destinations.items():
        whole = destination if destination._base is None else destination._base
        got = await ts.get("t", destination)
        assert got is destination, name
        assert torch.equal(bits(destination.cpu()), bits(value)), name
        destination.zero_()
        assert not whole.any(), f"{name}: written outside of the view"


@SIZES
async def test_slices_into_the_device(store, rows):
    value = _value(rows)
    await ts.put("t", value)
    for index in ((slice(1, rows - 1), slice(None)), (slice(None), slice(3, 700))):
        expected = value[index]
        offsets = tuple(part.start or 0 for part in index)
        spec = ts.TensorSlice(offsets, tuple(expected.shape), tuple(value.shape))
        destination = torch.zeros(expected.shape, device=DEVICE)
        await ts.get("t", destination, spec)
        assert torch.equal(bits(destination.cpu()), bits(expected))


async def test_wrong_destinations_are_left_alone(store):
    await ts.put("t", _value(900))
    for wrong in (
        torch.zeros(899, COLUMNS, device=DEVICE),
        torch.zeros(900, COLUMNS, device=DEVICE, dtype=torch.float64),
        torch.zeros(1, COLUMNS, device=DEVICE).expand(900, COLUMNS),
    ):
        with pytest.raises(ts.LayoutMismatchError):
            await ts.get("t", wrong)
        assert not wrong.any()


async def test_a_model_on_the_device_with_host_values_beside_it(store):
    model = torch.nn.Linear(700, 900, device=DEVICE)
    state = {**model.state_dict(), "step": 5, "host": torch.arange(200_000)}
    await ts.put_batch(state)
    mine = torch.nn.Linear(700, 900, device=DEVICE)
    got = await ts.get_batch({"weight": mine.weight, "bias": mine.bias, "step": None, "host": None})
    assert got["weight"] is mine.weight
    assert torch.equal(mine.weight, model.weight)
    assert torch.equal(mine.bias, model.bias)
    assert got["step"] == 5
    assert torch.equal(got["host"], torch.arange(200_000))


@pytest.mark.parametrize("count", [3, 40, 3000])
@pytest.mark.parametrize(
    "dtypes",
    [
        [torch.float32],
        [torch.bfloat16],
        [torch.float32, torch.int8, torch.bool, torch.float64],
        [torch.uint16],
    ],
    ids=["float32", "bfloat16", "several dtypes", "uint16"],
)
async def test_many_small_tensors(store, count, dtypes):
    """They are gathered and scattered on the device, and cross together."""
    values = {
        f"k{number}": _value(1, dtypes[number % len(dtypes)])[0, : number % 90 + 1]
        for number in range(count)
    }
    await ts.put("first", 1)
    for put in (ts.put_batch, lambda items: ts.put_state_dict(items, "k")):
        await put({key: value.to(DEVICE) for key, value in values.items()})
    got = await ts.get_batch(list(values))
    assert all(torch.equal(bits(got[key]), bits(value)) for key, value in values.items())
    for get in (ts.get_batch, lambda mine: ts.get_state_dict("k", mine)):
        mine = {key: torch.zeros_like(value, device=DEVICE) for key, value in values.items()}
        tensors = dict(mine)
        got = await get(mine)
        for key, value in values.items():
            assert got[key] is tensors[key]
            assert torch.equal(bits(tensors[key].cpu()), bits(value)), key


async def test_many_small_parameters_with_some_that_are_large_or_strided(store):
    def shape(number: int) -> tuple[int, ...]:
        return (300, 400) if number % 25 == 3 else (number % 7 + 1, 11)

    ours = [torch.nn.Parameter(torch.randn(shape(i), device=DEVICE)) for i in range(200)]
    mine = [torch.nn.Parameter(torch.zeros_like(one)) for one in ours]
    mine[7] = torch.nn.Parameter(torch.zeros(11, len(ours[7]), device=DEVICE).t())
    await ts.put_state_dict({f"w{i}": one for i, one in enumerate(ours)}, "k")
    before = [one._version for one in mine]
    await ts.get_state_dict("k", {f"w{i}": one for i, one in enumerate(mine)})
    assert all(map(torch.equal, ours, mine))
    assert all(one.requires_grad and one.is_leaf for one in mine)
    assert all(one._version > version for one, version in zip(mine, before, strict=True))


async def test_wrong_destinations_among_many_are_refused(store):
    values = {f"k{number}": torch.arange(5.0) + number for number in range(40)}
    await ts.put_batch(values)
    memory = torch.zeros(6, device=DEVICE)
    for wrong in (
        {"k20": torch.zeros(4, device=DEVICE)},
        {"k20": torch.zeros(5, device=DEVICE, dtype=torch.int32)},
        {"k20": memory[:5], "k21": memory[1:]},
    ):
        mine = {
            key: torch.zeros_like(value, device=DEVICE) for key, value in values.items()
        } | wrong
        with pytest.raises(ts.LayoutMismatchError, match="k20"):
            await ts.get_batch(mine)
        assert not any(tensor.any() for tensor in mine.values())
    mine["k20"] = torch.zeros(5)  # on the host, among those of a device
    mine["k21"] = mine["k22"] = torch.zeros(5, device=DEVICE)
    with pytest.raises(ts.LayoutMismatchError, match="k22"):
        await ts.get_batch(mine)
    del mine["k22"]
    await ts.get_batch(mine)
    assert all(torch.equal(tensor.cpu(), values[key]) for key, tensor in mine.items())


# ---- state dicts --------------------------------------------------------------------------


def _state_dict(rows: int) -> dict[str, object]:
    table = torch.randn(rows, COLUMNS, device=DEVICE)
    return {
        "embedding": table,
        "head": table,
        "layers": [{"w": torch.randn(COLUMNS, rows, device=DEVICE).t()}, torch.arange(rows)],
        "every third": torch.randn(rows, 3 * COLUMNS, device=DEVICE)[:, ::3],
        "scalar": torch.tensor(2.5, device=DEVICE),
        "counts": torch.arange(rows, device=DEVICE),
        "on the host": torch.randn(rows, COLUMNS),
        "step": 5,
    }


@SIZES
async def test_a_state_dict_of_the_device_comes_back_on_the_host(store, rows):
    state_dict = _state_dict(rows)
    await ts.put_state_dict(state_dict, "k")
    got = await ts.get_state_dict("k")
    assert all(t.device.type == "cpu" for t in (got["embedding"], got["layers"][0]["w"]))
    assert_same(got, state_dict)
    assert got["head"].data_ptr() == got["embedding"].data_ptr()


@SIZES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e4m3fn], ids=str)
async def test_a_state_dict_is_cast_on_its_way_from_the_device(store, rows, dtype):
    state_dict = _state_dict(rows)
    await ts.put_state_dict(state_dict, "k", transfer_dtype={"*": dtype, "scalar": None})
    got = await ts.get_state_dict("k")
    for name in ("embedding", "head", "every third", "on the host"):
        assert_same(got[name], state_dict[name].to(dtype), name)
    assert_same(got["layers"][0]["w"], state_dict["layers"][0]["w"].to(dtype))
    for name in ("scalar", "counts", "step"):
        assert_same(got[name], state_dict[name], name)
    assert got["head"].data_ptr() == got["embedding"].data_ptr()


@SIZES
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
async def test_a_state_dict_is_filled_on_the_device_and_cast_if_asked(store, rows, stored):
    value = torch.randn(rows, COLUMNS).to(stored)
    await ts.put_state_dict({"w": value, "columns": value.t(), "n": torch.arange(3)}, "k")
    for dtype in (torch.float32, torch.bfloat16):
        wide = torch.zeros(rows, 2 * COLUMNS, dtype=dtype, device=DEVICE)
        mine = {
            "w": wide[:, ::2],
            "columns": torch.zeros(COLUMNS, rows, dtype=dtype, device=DEVICE),
            "n": torch.zeros(3, dtype=torch.int64, device=DEVICE),
        }
        if dtype is not stored:
            with pytest.raises(ts.LayoutMismatchError, match="2 mismatched"):
                await ts.get_state_dict("k", mine)
            assert not any(tensor.any() for tensor in mine.values())
        tensors = dict(mine)
        await ts.get_state_dict("k", mine, cast=True)
        assert all(mine[name] is tensor for name, tensor in tensors.items())
        assert_same(mine["w"], value.to(dtype))
        assert_same(mine["columns"], value.to(dtype).t())
        assert mine["n"].tolist() == [0, 1, 2]
        assert not wide[:, 1::2].any(), "written outside of the view"


@SIZES
async def test_inference_tensors_of_the_device_are_filled_and_cast(store, rows):
    source = torch.randn(rows, COLUMNS)
    await ts.put_state_dict({"w": source}, "k")
    for dtype in (torch.float32, torch.bfloat16):
        with torch.inference_mode():
            mine = torch.zeros(rows, COLUMNS, dtype=dtype, device=DEVICE)
        await ts.get_state_dict("k", {"w": mine}, cast=True)
        assert_same(mine, source.to(dtype))


@SIZES
async def test_shards_of_the_device_are_cast_both_ways(store, rows):
    value = torch.randn(2 * rows, COLUMNS, device=DEVICE)
    for i in range(2):
        part = ts.TensorSlice((i * rows, 0), (rows, COLUMNS), (2 * rows, COLUMNS))
        shard = ts.TensorShard(value[i * rows : (i + 1) * rows], part)
        await ts.put_state_dict(
            {"w": shard}, "k", participants=2, participant=i, transfer_dtype=torch.bfloat16
        )
    assert_same(await ts.get_state_dict("k"), {"w": value.bfloat16()})
    part = ts.TensorSlice((1, 7), (2 * rows - 2, 300), (2 * rows, COLUMNS))
    mine = ts.TensorShard(torch.zeros(2 * rows - 2, 300, device=DEVICE), part)
    await ts.get_state_dict("k", {"w": mine}, cast=True)
    assert_same(mine.tensor, value.bfloat16().float()[1:-1, 7:307])


@SIZES
async def test_values_of_the_device_may_change_before_the_commit(store, rows):
    for number in (1.0, 2.0, 3.0):
        tensor = torch.full((rows, COLUMNS), number, device=DEVICE)
        pending = await ts.put_state_dict(
            {"w": tensor, "cast": tensor.t()},
            "k",
            blocking=False,
            transfer_dtype={"cast": torch.bfloat16},
        )
        tensor.fill_(-1)
        torch.cuda.synchronize()
        got = await ts.get_state_dict("k", min_version=(await pending).version)
        assert (got["w"] == number).all()
        assert (got["cast"] == number).all()


# ---- order, locks, ends -------------------------------------------------------------------


async def test_more_than_one_block_of_page_locked_memory():
    async with running_store(capacity=1 << 30):
        value = torch.randint(0, 256, (300 << 20,), dtype=torch.uint8)
        await ts.put("t", value.to(DEVICE))
        assert torch.equal(await ts.get("t"), value)
        destination = torch.zeros_like(value, device=DEVICE)
        await ts.get("t", destination)
        assert torch.equal(destination.cpu(), value)


async def test_what_is_arranged_or_cast_lies_beside_page_locked_memory():
    """CUDA refuses to copy what is page-locked in part."""
    async with running_store(capacity=1 << 30):
        value = torch.randn(6000, COLUMNS, device=DEVICE)  # more than one block
        await ts.put("locks some", value[:3500].clone())
        await ts.put("columns", value.t())
        await ts.put_state_dict({"w": value}, "cast", transfer_dtype=torch.bfloat16)
        await ts.put("on the host", value.cpu())
        assert_same(await ts.get("columns"), value.t())
        assert_same(await ts.get_state_dict("cast"), {"w": value.bfloat16()})
        for key in ("columns", "on the host"):
            mine = torch.zeros(COLUMNS, 6000, device=DEVICE)
            got = await ts.get(key, mine if key == "columns" else mine.t())
            assert_same(got, value.t() if key == "columns" else value)


@SIZES
async def test_a_put_waits_for_work_that_is_queued_on_the_source(store, rows):
    """The value is what the caller's stream makes of it, not what it was before."""
    tensor = torch.zeros(rows, COLUMNS, device=DEVICE)
    torch.cuda.synchronize()
    for number, stream in enumerate((torch.cuda.current_stream(), torch.cuda.Stream()), start=1):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            tensor.fill_(number)
            await ts.put("t", tensor)
        assert (await ts.get("t") == number).all()
        torch.cuda.synchronize()


@SIZES
async def test_a_get_waits_for_work_that_still_reads_the_destination(store, rows):
    await ts.put("t", torch.full((rows, COLUMNS), 2.0))
    destination = torch.full((rows, COLUMNS), 1.0, device=DEVICE)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        before = destination.clone()  # queued before the get, runs long after it was called
        await ts.get("t", destination)
        after = destination.clone()
    torch.cuda.synchronize()
    assert (before == 1).all()
    assert (after == 2).all()


@SIZES
async def test_the_source_may_change_right_after_the_put(store, rows):
    tensor = torch.full((rows, COLUMNS), 1.0, device=DEVICE)
    await ts.put("t", tensor)
    tensor.fill_(2.0)
    torch.cuda.synchronize()
    assert (await ts.get("t") == 1).all()


async def test_the_event_loop_runs_while_a_copy_waits_for_the_device(store):
    tensor = torch.ones(900, COLUMNS, device=DEVICE)
    torch.cuda._sleep(LONG)
    task = asyncio.create_task(ts.put("t", tensor))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    await task
    assert turns > 5
    assert (await ts.get("t") == 1).all()


@pytest.mark.parametrize("count", [1, 40])
async def test_nothing_is_copied_while_a_graph_is_captured(store, count):
    """That would fail, and so would the capture."""
    values = {f"k{i}": torch.full((5,), float(i), device=DEVICE) for i in range(count)}
    await ts.put_batch(values)
    one = torch.zeros(5, device=DEVICE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.add_(1)
        with pytest.raises(ts.UnsupportedValueError, match="captured"):
            await ts.put_batch(values)
        with pytest.raises(ts.UnsupportedValueError, match="filled"):
            await ts.get_batch(values)
    graph.replay()
    await ts.put("one", one)
    assert (await ts.get("one") == 1).all()


async def test_a_cancelled_put_has_stopped_writing(store):
    tensor = torch.ones(900, COLUMNS, device=DEVICE)
    torch.cuda._sleep(LONG)
    task = asyncio.create_task(ts.put("t", tensor))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await ts.exists("t")
    assert (await ts.status()).volumes[0].unfinished_bytes == 0
    await ts.put("t", tensor)
    assert (await ts.get("t") == 1).all()


async def test_a_new_store_does_not_inherit_old_page_locks():
    """Its window may lie where another one was: memory that is locked no more."""
    for number in range(1, 5):
        async with running_store():
            await ts.put("t", torch.full((900, COLUMNS), float(number), device=DEVICE))
            assert (await ts.get("t") == number).all()
            destination = torch.zeros(900, COLUMNS, device=DEVICE)
            await ts.get("t", destination)
            assert (destination == number).all()


async def test_a_driver_that_does_not_page_lock_is_said_once(store):
    """It costs speed, not correctness. The driver is asked for memory that does not exist."""
    out = await run_script(
        fresh=True,
        body=f"""
        import warnings

        real = torch.cuda.cudart()

        class Refusing:
            asked = 0

            def __getattr__(self, name):
                return getattr(real, name)

            def cudaHostRegister(self, address, nbytes, flags):
                Refusing.asked += 1
                return real.cudaHostRegister(0, nbytes, flags)

        torch.cuda.cudart = Refusing
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for number in range(3):
                tensor = torch.full((900, {COLUMNS}), float(number), device="cuda")
                await ts.put("t", tensor.t())  # a kernel arranges it, after the refusal
                assert (await ts.get("t") == number).all()
                assert (await ts.get("t", torch.zeros_like(tensor).t()) == number).all()
        told = [str(w.message) for w in said if "page-lock" in str(w.message)]
        assert all(issubclass(w.category, RuntimeWarning) for w in said)
        print(Refusing.asked > 0, len(told))
        """,
    )
    assert out == "True 1\n"
