"""Strided copies by rows, against what torch does with the same views."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.copying.native import needs_native

from torchstore_core.clients.values import tensors
from torchstore_core.machine import copying

GUARD = 77


@st.composite
def views(draw: st.DrawFn, shape: list[int], last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A view of ``shape`` on a larger tensor, permuted, at any alignment; and the whole of it."""
    order = draw(st.permutations(range(len(shape) - 1))) if draw(st.booleans()) else None
    dims = list(range(len(shape))) if order is None else [*order, len(shape) - 1]
    pads = [draw(st.integers(0, 2)) for _ in shape[:-1]] + [draw(st.integers(0, last))]
    before = [draw(st.integers(0, pad)) for pad in pads]
    big = [shape[d] + pads[d] for d in dims]
    skew = draw(st.integers(0, 70))
    numel = 1
    for extent in big:
        numel *= extent
    flat = torch.full((numel + skew + 70,), GUARD, dtype=torch.uint8)
    whole = flat[skew : skew + numel].view(big)
    view = whole.permute([dims.index(d) for d in range(len(shape))])
    for d, extent in enumerate(shape):
        view = view.narrow(d, before[d], extent)
    return view, flat


@needs_native
@given(st.data(), st.booleans())
def test_rows_are_copied_and_nothing_beside_them(data: st.DataObject, stream: bool) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=2))
    shape += [data.draw(st.integers(1, 20)), data.draw(st.sampled_from([1, 255, 256, 700, 1500]))]
    target, beside = data.draw(views(shape, 300))
    source, _ = data.draw(views(shape, 300))
    source.copy_(torch.randint(100, 200, shape, dtype=torch.uint8))
    expected = beside.clone()
    torch.as_strided(
        expected, target.shape, target.stride(), target.storage_offset()
    ).copy_(source)  # fmt: skip
    rows = tensors.rows_of(target, source)
    if rows is None:
        rows_short = min(shape[-1:]) < 256
        assert rows_short
        return
    for chunk in copying.cut_grids(rows, data.draw(st.sampled_from([1, 1000, 1 << 20]))):
        copying.copy_grids(chunk, stream=stream)
    assert torch.equal(beside, expected)


def test_without_a_compiler_rows_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_copy_rows", None)
    target, source = torch.zeros(7, 300, dtype=torch.uint8), torch.ones(7, 600, dtype=torch.uint8)
    grid = (target.data_ptr(), source.data_ptr(), 300, 7, 300, 600)
    copying.copy_grids([grid], stream=True)
    assert torch.equal(target, source[:, :300])
    # ... which torch does faster, so nobody is asked to do it.
    assert tensors.rows_of(target, source[:, :300]) is None


@st.composite
def strided(draw: st.DrawFn, shape: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """A view of ``shape`` in any order, with gaps; and the whole of it."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    pads = [draw(st.integers(0, 2)) for _ in shape]
    big = [shape[d] * steps[d] + pads[d] for d in order]
    whole = torch.full(big, GUARD, dtype=dtype)
    view = whole.permute([order.index(d) for d in range(len(shape))])
    for d, extent in enumerate(shape):
        view = view.narrow(d, draw(st.integers(0, pads[d])), extent * steps[d])
    return view[tuple([slice(None, None, step) for step in steps])], whole


@needs_native
@given(st.data(), st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]))
def test_elements_are_copied_and_nothing_beside_them(
    data: st.DataObject, dtype: torch.dtype
) -> None:
    extents = st.one_of(st.integers(1, 4), st.sampled_from([31, 32, 33, 64, 70]))
    shape = data.draw(st.lists(extents, max_size=4).filter(lambda s: torch.Size(s).numel() < 9000))
    target, beside = data.draw(strided(shape, dtype))
    source, _ = data.draw(strided(shape, dtype))
    source.copy_(torch.randint(100, 120, shape, dtype=dtype))
    if shape and data.draw(st.booleans()):
        source = source[:1].expand(shape)
    expected = beside.clone()
    torch.as_strided(
        expected, target.shape, target.stride(), target.storage_offset()
    ).copy_(source)  # fmt: skip
    copy = tensors.elements_of(target, source)
    assert copy is not None
    copy()
    assert torch.equal(beside, expected)


@needs_native
@pytest.mark.parametrize("shape", [(300, 500), (1, 1), (1000, 3), (0, 4), ()])
def test_elements_of_sixteen_bytes(shape: tuple[int, ...]) -> None:
    source = torch.randn(shape, dtype=torch.complex128)
    into = torch.zeros(shape[::-1], dtype=torch.complex128).permute(list(range(len(shape)))[::-1])
    tensors.strided_copy(into, source, stream=False)()
    assert torch.equal(into, source)


@needs_native
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", [(3, 3), (4, 4), (5, 5)])  # 9, 16 and 25 rows of a block
def test_kernels_of_convolutions(kernel: tuple[int, int], dtype: torch.dtype) -> None:
    """Between ``channels_last`` and row-major, and nothing beside them."""
    source = torch.randint(1, 120, (6, 70, *kernel)).to(dtype)
    beside = torch.zeros(8, 70, *kernel, dtype=dtype)
    last = torch.channels_last
    for of, whole in (
        (source.to(memory_format=last), beside),
        (source, beside.to(memory_format=last)),
    ):
        copy = tensors.elements_of(whole[1:7], of)
        assert copy is not None
        copy()
        assert torch.equal(whole[1:7], source)
        assert not whole[::7].any()


def test_what_the_compiled_copy_does_not_take_raises() -> None:
    native = pytest.importorskip("torchstore_core._native")
    for numbers in ([], [0, 0], [0, 0, 3], [0, 0, 4, 1], [0, 0, 4, *[1, 1, 1] * 65]):
        with pytest.raises(ValueError, match="copy_strided"):
            native.copy_strided(array("q", numbers))


def test_without_a_compiler_torch_copies_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_copy_strided", None)
    target, source = torch.zeros(40, 50), torch.rand(50, 40).t()
    assert tensors.elements_of(target, source) is None
    tensors.strided_copy(target, source, stream=False)()
    assert torch.equal(target, source)


@needs_native
def test_what_torch_must_copy_is_left_to_it() -> None:
    wide = torch.zeros(8, 1024)
    assert tensors.elements_of(wide, torch.zeros(8, 1024, dtype=torch.int32)) is None  # a cast
    assert tensors.elements_of(wide, torch.zeros(8, 1024, device="meta")) is None
    assert tensors.elements_of(wide, torch.zeros(1024, 8).t()) is not None
    assert tensors.rows_of(wide, torch.zeros(8, 2048)[:, ::2]) is None  # no rows
    assert tensors.rows_of(wide[:, :63], wide[:, 64:127]) is None  # short rows
    assert tensors.rows_of(wide, torch.zeros(8, 1024, dtype=torch.int32)) is None  # a cast
    assert tensors.rows_of(wide, torch.zeros(1024).expand(8, 1024)) is not None


@needs_native
@given(st.integers(1, 50), st.integers(1, 400), st.integers(1, 5000))
def test_chunks_have_about_the_size_asked_for(rows: int, nbytes: int, chunk: int) -> None:
    grid = (0, 10_000_000, nbytes, rows, nbytes + 3, nbytes + 5)
    chunks = list(copying.cut_grids([grid, grid], chunk))
    copied = [
        (to + row * to_step, of + row * of_step, n)
        for found in chunks
        for to, of, n, count, to_step, of_step in found
        for row in range(count)
    ]
    once = [(r * (nbytes + 3), 10_000_000 + r * (nbytes + 5), nbytes) for r in range(rows)]
    assert copied == once + once
    sizes = [sum(grid[2] * grid[3] for grid in found) for found in chunks]
    assert all(size <= max(chunk, nbytes) for size in sizes)
    assert all(size > chunk - nbytes for size in sizes[:-1])
