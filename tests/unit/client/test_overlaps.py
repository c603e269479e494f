"""Tensors that share memory: found whenever they have a byte in common, and only then."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchstore_core as ts
from torchstore_core.clients.transfer.targets import Plain, check_apart
from torchstore_core.clients.values.overlaps import are_disjoint, find_overlap
from torchstore_core.clients.values.tensors import tensor_at
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m

_NUMEL = 48


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of the same 48 elements as every other one: any block of any shape, any steps."""
    view = _BASE.view(draw(st.sampled_from([torch.int16, torch.int32])))
    sizes = [n for n in range(1, view.numel() + 1) if view.numel() % n == 0]
    view = view.view(draw(st.sampled_from(sizes)), -1)
    if draw(st.booleans()):
        view = view.unflatten(1, (1, -1) if draw(st.booleans()) else (-1, 1))
    if draw(st.booleans()):
        wide = [n for n in range(1, view.shape[-1] + 1) if view.shape[-1] % n == 0]
        view = view.unflatten(-1, (draw(st.sampled_from(wide)), -1))
    for dim, extent in enumerate(view.shape):
        first = draw(st.integers(0, extent - 1))
        end = draw(st.integers(first, extent))
        step = draw(st.sampled_from([1, 1, 2, 3]))
        view = view[(slice(None),) * dim + (slice(first, end, step),)]
    return view.transpose(0, 1) if draw(st.booleans()) else view


_BASE = torch.zeros(_NUMEL, dtype=torch.int16)


def _bytes(view: torch.Tensor) -> frozenset[int]:
    """The addresses of all bytes of a view."""
    found = {view.data_ptr()} if view.numel() else set()
    for extent, stride in zip(view.shape, view.stride(), strict=True):
        step = stride * view.element_size()
        found = {at + step * i for at in found for i in range(extent)}
    return frozenset(at + i for at in found for i in range(view.element_size()))


def _view(tensor: torch.Tensor) -> object:
    """Equal for two tensors that are the same view."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.dtype, tensor.numel()
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


@given(st.lists(views(), min_size=2, max_size=6))
def test_tensors_overlap_if_they_have_a_byte_in_common(tensors):
    there = [_bytes(tensor) for tensor in tensors]
    overlapping = [
        (a, b)
        for a, b in combinations(range(len(tensors)), 2)
        if there[a] & there[b] and _view(tensors[a]) != _view(tensors[b])
    ]
    found = find_overlap(tensors)
    assert found in overlapping if overlapping else found is None


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=8))
def test_ranges_are_disjoint_if_no_byte_is_in_two_of_them(ranges):
    taken = [at for start, size in ranges for at in range(start, start + size)]
    apart = are_disjoint([start for start, _ in ranges], [size for _, size in ranges])
    assert apart == (len(set(taken)) == len(taken))


def test_thousands_of_parts_of_one_tensor_are_not_compared_in_pairs():
    """50 million comparisons of two would take minutes, and a test has two."""
    whole = torch.empty(100, 10_000)
    columns = list(whole.unbind(1))
    tiles = [tile for rows in whole.chunk(10) for tile in rows.chunk(1_000, 1)]
    for parts in (columns, tiles):
        assert find_overlap(parts) is None
        parts.append(whole[7:9, 5_000:5_002])
        assert find_overlap(parts) is not None


def test_of_a_tensor_that_gave_its_memory_back_that_is_said():
    """Somebody else may have the memory by now: then it is not what overlaps."""
    shrunk = torch.ones(40, 40)
    shrunk.untyped_storage().resize_(4)
    other = tensor_at(shrunk.data_ptr() + 64, (40, 40), torch.float32)  # nobody touches it
    meta = TensorMeta("float32", (40, 40))
    entry = m.Entry(1, meta, other.nbytes, None, m.Grant(0, 0, 0))
    plain = [Plain(at, at, f"k{at}", entry, meta, one) for at, one in enumerate((other, shrunk))]
    with pytest.raises(ts.UnsupportedValueError, match=r"'k1'.*storage.*was freed or shrunk"):
        check_apart([], plain)
