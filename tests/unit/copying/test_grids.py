"""Strided copies by rows, against what torch does with the same views."""

from __future__ import annotations

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


@needs_native
def test_what_torch_must_copy_is_left_to_it() -> None:
    wide = torch.zeros(8, 1024)
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
