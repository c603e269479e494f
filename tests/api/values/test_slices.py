"""``tensor_slice_spec``: parts of whole tensors, made new or written in place."""

from __future__ import annotations

import pytest
import torch
from tests.support import bits

import torchstore_core as ts

SIZES = pytest.mark.parametrize("size", ["small", "large"])


def _value(size: str) -> torch.Tensor:
    shape = (6, 10) if size == "small" else (600, 1000)
    return torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)


def _spec(index: tuple[slice, ...], shape: torch.Size) -> ts.TensorSlice:
    bounds = [part.indices(extent) for part, extent in zip(index, shape, strict=True)]
    return ts.TensorSlice(
        offsets=tuple(start for start, _, _ in bounds),
        local_shape=tuple(stop - start for start, stop, _ in bounds),
        global_shape=tuple(shape),
    )


ALL = slice(None)
BOXES = {
    "all": (ALL, ALL),
    "first rows": (slice(0, 2), ALL),
    "middle rows": (slice(2, 5), ALL),
    "most rows": (slice(1, None), ALL),
    "last row": (slice(-1, None), ALL),
    "first columns": (ALL, slice(0, 3)),
    "last column": (ALL, slice(-1, None)),
    "most columns": (ALL, slice(1, None)),
    "block": (slice(1, 4), slice(2, 7)),
    "large block": (slice(1, -1), slice(1, -1)),
    "part of a row": (slice(3, 4), slice(2, 7)),
    "one element": (slice(3, 4), slice(7, 8)),
    "no rows": (slice(2, 2), ALL),
    "no columns": (ALL, slice(4, 4)),
    "nothing at the end": (slice(6, 6), slice(10, 10)),
}


@SIZES
@pytest.mark.parametrize("name", BOXES)
async def test_boxes_of_a_matrix(shared, size, name):
    value = _value(size)
    ref = await ts.put("t", value)
    index = BOXES[name]
    spec, expected = _spec(index, value.shape), value[index]
    assert spec.local_shape == expected.shape

    for got in (
        await ts.get("t", tensor_slice_spec=spec),
        await ts.get(ref, None, spec),
        await ts.get(ts.Request("t", tensor_slice=spec)),
        (await ts.get_batch({"t": spec}))["t"],
        (await ts.get_batch([ts.Request("t", ref.version, spec)]))["t"],
    ):
        assert got.dtype == torch.float32
        assert got.is_contiguous()
        assert torch.equal(got, expected)
        got.fill_(-1.0)  # it is the reader's own
    assert torch.equal(await ts.get("t"), value)

    around = torch.full((value.shape[1] + 2, value.shape[0] + 2), -1.0)
    rows, columns = expected.shape
    destination = around.t()[1 : rows + 1, 1 : columns + 1]
    assert await ts.get("t", destination, spec) is destination
    assert torch.equal(destination, expected)
    destination.fill_(-1.0)
    assert torch.equal(around, torch.full_like(around, -1.0))


@SIZES
async def test_all_parts_make_the_whole(shared, size):
    value = _value(size)
    await ts.put("t", value)
    whole = torch.full_like(value, -1.0)
    for rows in ((0, 1), (1, 4), (4, value.shape[0])):
        for columns in ((0, 7), (7, 9), (9, value.shape[1])):
            index = (slice(*rows), slice(*columns))
            await ts.get("t", whole[index], _spec(index, value.shape))
    assert torch.equal(whole, value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex128, torch.int4])
async def test_three_dimensions_and_other_dtypes(shared, dtype):
    raw = torch.randint(0, 2, (40, 50, 60 * dtype.itemsize), dtype=torch.uint8)
    value = raw.view(dtype)
    await ts.put("t", value)
    for index in (
        (slice(3, 30), ALL, ALL),
        (slice(5, 6), slice(10, 40), ALL),
        (ALL, slice(49, 50), slice(1, 2)),
        (slice(1, 39), slice(1, 49), slice(1, 59)),
        (slice(0, 0), ALL, ALL),
    ):
        got = await ts.get("t", None, _spec(index, value.shape))
        assert torch.equal(bits(got), bits(value[index])), index


async def test_no_dimensions(shared):
    await ts.put("t", torch.tensor(3.5))
    spec = ts.TensorSlice((), (), ())
    assert (await ts.get("t", None, spec)).item() == 3.5
    destination = torch.tensor(0.0)
    assert await ts.get("t", destination, spec) is destination
    assert destination.item() == 3.5


async def test_lists_and_torch_sizes_are_as_good_as_tuples(shared):
    value = _value("small")
    await ts.put("t", value)
    spec = ts.TensorSlice([1, 2], torch.Size([3, 4]), list(value.shape))
    assert torch.equal(await ts.get("t", None, spec), value[1:4, 2:6])


OUTSIDE = {
    "too many rows": ts.TensorSlice((0, 0), (7, 10), (6, 10)),
    "starts behind the end": ts.TensorSlice((7, 0), (0, 10), (6, 10)),
    "ends behind the end": ts.TensorSlice((4, 0), (3, 10), (6, 10)),
    "negative offset": ts.TensorSlice((-1, 0), (1, 10), (6, 10)),
    "negative extent": ts.TensorSlice((3, 0), (-1, 10), (6, 10)),
    "other global shape": ts.TensorSlice((0, 0), (1, 10), (5, 10)),
    "transposed global shape": ts.TensorSlice((0, 0), (1, 6), (10, 6)),
    "too few dimensions": ts.TensorSlice((0,), (6,), (6,)),
    "too many dimensions": ts.TensorSlice((0, 0, 0), (1, 6, 10), (1, 6, 10)),
    "mixed numbers of dimensions": ts.TensorSlice((0,), (1, 10), (6, 10)),
    "same numel": ts.TensorSlice((0,), (60,), (60,)),
    "huge": ts.TensorSlice((1 << 62, 0), (1 << 62, 10), (6, 10)),
}


@pytest.mark.parametrize("name", OUTSIDE)
async def test_out_of_bounds(shared, name):
    await ts.put("t", _value("small"))
    spec = OUTSIDE[name]
    with pytest.raises(ts.LayoutMismatchError, match=r"'t' has shape \[6, 10\]"):
        await ts.get("t", None, spec)
    with pytest.raises(ts.LayoutMismatchError):
        await ts.get_batch({"t": spec})
    destination = torch.full((6, 10), -1.0)
    with pytest.raises(ts.LayoutMismatchError):
        await ts.get("t", destination, spec)
    assert torch.equal(destination, torch.full((6, 10), -1.0))


@SIZES
async def test_the_destination_has_the_shape_of_the_slice(shared, size):
    value = _value(size)
    await ts.put("t", value)
    spec = _spec((slice(1, 3), ALL), value.shape)
    for destination in (
        torch.full_like(value, -1.0),
        torch.full((3, value.shape[1]), -1.0),
        torch.full((2, value.shape[1]), -1, dtype=torch.int32),
    ):
        before = destination.clone()
        with pytest.raises(ts.LayoutMismatchError, match="nothing was written"):
            await ts.get("t", destination, spec)
        assert torch.equal(destination, before)


async def test_a_slice_is_a_tensor_slice(shared):
    await ts.put("t", _value("small"))
    for wrong in ((0, 1), slice(0, 2), [0, 1]):
        with pytest.raises(ts.UnsupportedValueError, match="TensorSlice"):
            await ts.get("t", None, wrong)


async def test_the_slice_of_a_request_is_checked_and_is_the_only_one(shared):
    await ts.put("t", torch.arange(4.0))
    for part in ((0,), "0:2", torch.zeros(2)):
        with pytest.raises(ts.UnsupportedValueError, match="is a TensorSlice"):
            await ts.get(ts.Request("t", tensor_slice=part))
    front, back = (ts.TensorSlice((at,), (2,), (4,)) for at in (0, 2))
    with pytest.raises(ts.LayoutMismatchError, match="either that or a tensor slice"):
        await ts.get(ts.Request("t", tensor_slice=front), tensor_slice_spec=back)
    with pytest.raises(ts.LayoutMismatchError, match="either that or a tensor slice"):
        await ts.get_batch({ts.Request("t", tensor_slice=front): back})


async def test_slices_of_an_old_shape_are_noticed_after_an_overwrite(shared):
    value = _value("small")
    await ts.put("t", value)
    spec = _spec((slice(0, 2), ALL), value.shape)
    await ts.put("t", torch.zeros(12, 10))
    with pytest.raises(ts.LayoutMismatchError, match=r"shape \[12, 10\]"):
        await ts.get("t", None, spec)


async def test_a_zero_copy_slice_lives_on_its_own(shared):
    value = _value("large")
    await ts.put("t", value)
    rows = await ts.get("t", None, _spec((slice(100, 500), ALL), value.shape))
    await ts.delete("t")
    await ts.put("other", torch.full_like(value, -1.0))
    assert torch.equal(rows, value[100:500])
