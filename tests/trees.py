"""Nested values with tensors in them: comparing two exactly, and inventing some."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import strategies as st
from tests.support import bits

__all__ = ["assert_same", "state_dicts"]


def assert_same(got: Any, expected: Any, at: str = "it") -> None:
    """Same containers, order, types, dtypes, shapes and bits. Mappings come back as dicts."""
    if isinstance(expected, Mapping):
        assert type(got) is dict, at
        names = [(type(name), name) for name in expected]
        assert [(type(name), name) for name in got] == names, at
        for name in expected:
            assert_same(got[name], expected[name], f"{at}[{name!r}]")
    elif isinstance(expected, list | tuple):
        assert type(got) is (list if isinstance(expected, list) else tuple), at
        assert len(got) == len(expected), at
        for i, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_same(one, other, f"{at}[{i}]")
    elif isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor), at
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), at
        assert torch.equal(bits(got).cpu(), bits(expected).cpu()), at
    else:
        assert type(got) is type(expected), at
        assert got == expected, at


_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(_DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    raw = torch.randint(0, 2, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
    return tensor.t() if len(shape) == 2 and draw(st.booleans()) else tensor


_PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=3)
)
_NAMES = st.text(min_size=1, max_size=3) | st.sampled_from(["a", "a.b", "0", "a/b"])


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.dictionaries(_NAMES | st.integers(-3, 3), inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    )


def state_dicts() -> st.SearchStrategy[dict[Any, Any]]:
    """Nested dicts, lists and tuples of tensors and other values. Entries may clash."""
    values = st.recursive(_tensors() | _PLAIN, _containers, max_leaves=12)
    return st.dictionaries(_NAMES | st.integers(-3, 3), values, max_size=4)
