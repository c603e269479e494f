"""Gets into the reader's own memory: any strides, checked before anything is written."""

from __future__ import annotations

import pytest
import torch
from tests.processes import run_script
from tests.support import bits

import torchstore_core as ts

SIZES = pytest.mark.parametrize("rows", [4, 800], ids=["small", "large"])
COLUMNS = 600


def _views(rows: int) -> dict[str, torch.Tensor]:
    """Destinations of one shape, each a different view of memory that is full of -1."""

    def full(*shape: int) -> torch.Tensor:
        return torch.full(shape, -1.0)

    return {
        "contiguous": full(rows, COLUMNS),
        "transposed": full(COLUMNS, rows).t(),
        "every other row": full(2 * rows, COLUMNS)[::2],
        "every third column": full(rows, 3 * COLUMNS)[:, 1::3],
        "inner block": full(rows + 4, COLUMNS + 6)[2:-2, 3:-3],
        "one layer": full(rows, COLUMNS, 3)[..., 1],
        "odd offset": full(rows * COLUMNS + 1)[1:].view(rows, COLUMNS),
        "parameter": torch.nn.Parameter(full(rows, COLUMNS)),
    }


@SIZES
async def test_any_view_of_inference_mode_is_filled_in_it(shared, rows):
    value = torch.randn(rows, COLUMNS)
    with torch.inference_mode():
        await ts.put("t", value.t())
        for name, destination in _views(rows).items():
            await ts.get("t", destination.t())
            assert torch.equal(destination, value), name


@SIZES
async def test_any_view_is_filled_and_nothing_beside_it(shared, rows):
    value = torch.randn(rows, COLUMNS)
    await ts.put("t", value)
    for name, destination in _views(rows).items():
        # The memory around the view is the same tensor with the view left out.
        whole = destination if destination._base is None else destination._base
        before = whole.detach().clone()
        got = await ts.get("t", destination)
        assert got is destination, name
        assert torch.equal(bits(destination), bits(value)), name
        destination.detach().fill_(-1.0)
        assert torch.equal(whole, before), f"{name}: written outside of the view"


@SIZES
async def test_it_works_through_every_door(shared, rows):
    value = torch.randn(rows, COLUMNS)
    ref = await ts.put("t", value)
    for what in ("t", ref, ts.Request("t"), ts.Request("t", ref.version)):
        destination = torch.zeros(rows, COLUMNS)
        assert await ts.get(what, inplace_tensor=destination) is destination
        assert torch.equal(destination, value)
    destination = torch.zeros(COLUMNS, rows).t()
    got = await ts.get_batch({"t": destination})
    assert got["t"] is destination
    assert torch.equal(destination, value)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float8_e5m2, torch.uint16], ids=str
)
@SIZES
async def test_other_dtypes(shared, rows, dtype):
    raw = torch.randint(0, 2, (rows, COLUMNS * dtype.itemsize), dtype=torch.uint8)
    value = raw.view(dtype)
    await ts.put("t", value)
    for destination in (torch.empty_like(value), torch.empty_like(value.t()).t()):
        await ts.get("t", destination)
        assert torch.equal(bits(destination), bits(value))


async def test_no_dims_and_no_elements(shared):
    await ts.put_batch({"scalar": torch.tensor(7), "empty": torch.empty(0, 3)})
    scalar, empty = torch.tensor(0), torch.empty(0, 3)
    assert await ts.get("scalar", scalar) is scalar
    assert scalar.item() == 7
    row = torch.zeros(5, dtype=torch.int64)
    await ts.get("scalar", row[3])
    assert row.tolist() == [0, 0, 0, 7, 0]
    assert await ts.get("empty", empty) is empty


@SIZES
async def test_a_parameter_is_filled_without_touching_autograd(shared, rows):
    value = torch.randn(rows, COLUMNS)
    await ts.put("t", value)
    parameter = torch.nn.Parameter(torch.zeros(rows, COLUMNS))
    output = (parameter * parameter).sum()
    await ts.get("t", parameter)
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert torch.equal(parameter.detach(), value)
    # A graph that saved the old values must notice that they are gone.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()
    (parameter * parameter).sum().backward()
    assert torch.equal(parameter.grad, 2 * value)


def _wrong(rows: int) -> dict[str, torch.Tensor]:
    return {
        "fewer rows": torch.full((rows - 1, COLUMNS), -1.0),
        "transposed shape": torch.full((COLUMNS, rows), -1.0),
        "flat": torch.full((rows * COLUMNS,), -1.0),
        "extra dimension": torch.full((1, rows, COLUMNS), -1.0),
        "broadcastable": torch.full((1, COLUMNS), -1.0),
        "no dimension": torch.tensor(-1.0),
        "same bytes, other dtype": torch.full((rows, COLUMNS), -1, dtype=torch.int32),
        "wider dtype": torch.full((rows, COLUMNS), -1.0, dtype=torch.float64),
        "narrower dtype": torch.full((rows, COLUMNS), -1.0, dtype=torch.bfloat16),
    }


@SIZES
async def test_wrong_shape_or_dtype_leaves_the_destination_alone(shared, rows):
    await ts.put("t", torch.randn(rows, COLUMNS))
    for name, destination in _wrong(rows).items():
        before = destination.clone()
        with pytest.raises(ts.LayoutMismatchError, match=r"'t' is stored as torch.float32") as e:
            await ts.get("t", destination)
        assert isinstance(e.value, ValueError), name
        assert e.value.key == "t"
        assert e.value.details["stored"] == ["torch.float32", rows, COLUMNS]
        assert e.value.details["wanted"] == [str(destination.dtype), *destination.shape]
        assert torch.equal(destination, before), name


@SIZES
async def test_one_wrong_destination_of_a_batch_leaves_all_alone(shared, rows):
    await ts.put_batch({"a": torch.ones(rows, COLUMNS), "b": torch.ones(rows, COLUMNS)})
    right, wrong = torch.zeros(rows, COLUMNS), torch.zeros(rows, COLUMNS + 1)
    for wanted in ({"a": right, "b": wrong}, {"b": wrong, "a": right}):
        with pytest.raises(ts.LayoutMismatchError) as caught:
            await ts.get_batch(wanted)
        assert caught.value.key == "b"
        assert not right.any()
        assert not wrong.any()
    with pytest.raises(ts.KeyNotFoundError):
        await ts.get_batch({"a": right, "missing": torch.zeros(1)})
    assert not right.any()
    await ts.get_batch({"a": right, "b": None})
    assert right.all()


@SIZES
async def test_destinations_that_share_memory_with_themselves_are_refused(shared, rows):
    await ts.put("t", torch.randn(rows, COLUMNS))
    memory = torch.full((rows + COLUMNS,), -1.0)
    overlapping = {
        "rows expanded": memory[:COLUMNS].expand(rows, COLUMNS),
        "columns expanded": memory[:rows, None].expand(rows, COLUMNS),
        "unfolded": memory[: rows + COLUMNS - 1].unfold(0, COLUMNS, 1),
    }
    for name, destination in overlapping.items():
        assert destination.shape == (rows, COLUMNS), name
        with pytest.raises(ts.LayoutMismatchError, match="share memory"):
            await ts.get("t", destination)
        assert torch.equal(memory, torch.full_like(memory, -1.0)), name
    # One row "expanded" to one row shares nothing.
    await ts.put("row", torch.ones(1, COLUMNS))
    row = torch.zeros(COLUMNS).expand(1, COLUMNS)
    assert torch.equal(await ts.get("row", row), torch.ones(1, COLUMNS))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
async def test_destinations_that_are_no_memory_are_refused(shared):
    await ts.put("t", torch.ones(4))
    with pytest.raises(ts.UnsupportedValueError, match=r"meta tensor .* cannot be filled; give a"):
        await ts.get("t", torch.empty(4, device="meta"))
    with pytest.raises(ts.UnsupportedValueError, match=r"sparse tensor .* cannot be filled"):
        await ts.get("t", torch.zeros(4).to_sparse())
    lazy = torch.nn.LazyLinear(4)  # these two have no shape to compare
    with pytest.raises(ts.UnsupportedValueError, match=r"\(lazy\) parameter cannot be filled"):
        await ts.get("t", lazy.weight)
    with pytest.raises(ts.UnsupportedValueError, match=r"nested tensor cannot be filled"):
        await ts.get("t", torch.nested.nested_tensor([torch.ones(2), torch.ones(2)]))
    await ts.put_state_dict({"weight": torch.ones(4)}, "sd")
    with pytest.raises(ts.LayoutMismatchError, match=r"'weight': an uninitialised \(lazy\)"):
        await ts.get_state_dict("sd", {"weight": lazy.weight})
    await ts.put("c", torch.ones(4, dtype=torch.complex64))
    with pytest.raises(ts.UnsupportedValueError, match=r"conjugate .* cannot be filled"):
        await ts.get("c", torch.zeros(4, dtype=torch.complex64).conj())
    for wrong, instead in [
        ([0.0] * 4, ""),
        (4, ""),
        ("t", "; get_batch gets several keys"),
        (torch.zeros(4).numpy(), r"; torch\.from_numpy\(\) of it is one in its memory"),
        (ts.TensorSlice((0,), (1,), (4,)), "; give tensor_slice_spec="),
    ]:
        with pytest.raises(ts.LayoutMismatchError, match=f"not a tensor{instead}$"):
            await ts.get("t", wrong)


@pytest.mark.parametrize("value", [{"a": 1}, b"x" * (2 << 20)], ids=["small", "large"])
async def test_an_object_does_not_fit_into_a_tensor(shared, value):
    await ts.put("o", value)
    destination = torch.full((4,), -1.0)
    with pytest.raises(ts.LayoutMismatchError, match="'o' is not a tensor"):
        await ts.get("o", destination)
    with pytest.raises(ts.LayoutMismatchError, match="'o' is not a tensor"):
        await ts.get("o", tensor_slice_spec=ts.TensorSlice((0,), (1,), (4,)))
    assert destination.tolist() == [-1.0] * 4


async def test_a_refused_get_leases_nothing(shared):
    await ts.put("t", torch.ones(1 << 20))
    with pytest.raises(ts.LayoutMismatchError):
        await ts.get("t", torch.zeros(3))
    # The release travels on the connection that the question travels on.
    assert (await ts.status()).volumes[0].leased_bytes == 0
    assert (await ts.stat("t")).leases == 0


# ---- several destinations of one get ------------------------------------------------------

# Fewer than 4 values, fewer than 32 and more than these are handled in different ways.
MANY = pytest.mark.parametrize("count", [2, 6, 40])


@SIZES
@MANY
async def test_destinations_that_overlap_are_refused_before_anything_is_written(
    shared, count, rows
):
    values = {f"{at}": torch.full((rows, COLUMNS), float(at)) for at in range(count)}
    await ts.put_batch(values)
    memory = torch.full((3 * rows, COLUMNS), -1.0)
    apart = {name: torch.full((rows, COLUMNS), -1.0) for name in values}
    wide = torch.full((rows, 2 * COLUMNS), -1.0)
    for pair in [
        (memory[:rows], memory[rows - 1 : 2 * rows - 1]),
        (memory[: 2 * rows : 2], memory[2 : 2 * rows + 2 : 2]),
        (wide[:, :COLUMNS], wide[:, COLUMNS - 1 : -1]),
        (wide[:, ::2], wide[:, :COLUMNS]),
    ]:
        destinations = apart | {"0": pair[0], "1": pair[1]}
        with pytest.raises(ts.LayoutMismatchError, match="'0' and '1' overlap in memory") as caught:
            await ts.get_batch(destinations)
        assert caught.value.details == {"overlapping": ["0", "1"]}
        assert all((t == -1).all() for t in [memory, wide, *apart.values()])


@SIZES
@MANY
async def test_destinations_side_by_side_or_interleaved_are_filled(shared, count, rows):
    values = {f"{at}": torch.full((rows, COLUMNS), float(at)) for at in range(count)}
    await ts.put_batch(values)
    whole = torch.empty(count * rows, COLUMNS)
    for parts in [
        whole.chunk(count),
        [whole[at::count] for at in range(count)],
        torch.empty(rows, count * COLUMNS).chunk(count, 1),
        torch.empty(rows, COLUMNS, count).unbind(2),
    ]:
        await ts.get_batch(dict(zip(values, parts, strict=True)))
        for part, value in zip(parts, values.values(), strict=True):
            assert torch.equal(part, value)


@MANY
async def test_the_same_tensor_may_be_the_destination_of_several_equal_values(shared, count):
    value = torch.randn(300, COLUMNS)
    await ts.put_batch({f"{at}": value for at in range(count)})
    mine = torch.empty(300, COLUMNS)
    parameter = torch.nn.Parameter(mine)
    got = await ts.get_batch({f"{at}": [mine, parameter][at % 2] for at in range(count)})
    assert torch.equal(mine, value)
    assert got["0"] is mine
    assert got["1"] is parameter


@SIZES
@MANY
async def test_different_values_are_not_written_to_the_same_tensor(shared, count, rows):
    values = {f"{at}": torch.full((rows, COLUMNS), float(at > 0)) for at in range(count)}
    await ts.put_batch(values)
    mine = torch.full((rows, COLUMNS), -1.0)
    last = count - 1
    for first, second in ((0, last), (last, 0)):
        apart = {name: torch.empty_like(value) for name, value in values.items()}
        pair = {f"{first}": mine, f"{second}": mine.view(rows, COLUMNS)}
        ordered = {**pair, **{name: one for name, one in apart.items() if name not in pair}}
        with pytest.raises(
            ts.LayoutMismatchError, match="to the same tensor, and differ"
        ) as caught:
            await ts.get_batch(ordered)
        assert caught.value.details == {"overlapping": ["0", f"{last}"]}
        assert torch.equal(mine, values[f"{first}"])  # whole, and no mixture


async def test_a_small_value_of_bytes_is_filled_by_this_thread_alone():
    """torch copies more than 32,768 elements with a pool of threads. Where processors are busy,
    that took a hundred times as long as all the rest of such a get.
    """
    out = await run_script("""
        import os
        torch.set_num_threads(4)
        await ts.initialize(capacity=64 << 20, prefault=0)
        await ts.put("k", torch.frombuffer(bytearray(b"1" * 60_000), dtype=torch.uint8))
        first, rest = (torch.frombuffer(bytearray(60_000), dtype=torch.uint8) for _ in range(2))
        await ts.get("k", first[:1], ts.TensorSlice((0,), (1,), (60_000,)))
        threads = len(os.listdir("/proc/self/task"))
        await ts.get("k", rest)
        print(len(os.listdir("/proc/self/task")) - threads, bytes(rest.tolist()) == b"1" * 60_000)
        await ts.shutdown()
    """)
    assert out.split() == ["0", "True"]
