"""Slices as messages carry them: tuples of int, whatever the user's numbers are."""

from __future__ import annotations

from typing import Any

import pytest

from torchstore_core import TensorSlice
from torchstore_core.clients.values.tensors import plain_slice
from torchstore_core.errors import LayoutMismatchError


def _slice(offset: Any) -> TensorSlice:
    return TensorSlice(offset, (1,), (4,))


@pytest.mark.parametrize("offset", [(1,), [1], (True,), [True]])
def test_whole_numbers_become_ints_in_tuples(offset: Any) -> None:
    offsets = plain_slice("k", _slice(offset)).offsets
    assert (type(offsets), type(offsets[0]), offsets) == (tuple, int, (1,))


@pytest.mark.parametrize("offset", [(1.0,), ("1",), (None,), 1, (1 << 63,), (-(1 << 63) - 1,)])
def test_anything_else_is_refused(offset: Any) -> None:
    with pytest.raises(LayoutMismatchError, match="'k'"):
        plain_slice("k", _slice(offset))
