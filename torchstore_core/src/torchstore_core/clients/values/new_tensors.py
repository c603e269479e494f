"""New tensors in host memory, for what is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from torchstore_core.clients.values.tensors import address_of
from torchstore_core.errors import OutOfMemoryError
from torchstore_core.machine.virtual_memory import LARGE, prefer_huge_pages


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor in host memory. Raises OutOfMemoryError if there is none for it."""
    try:
        made = torch.empty(shape, dtype=dtype, device="cpu")
    except RuntimeError as error:
        raise out_of_memory(math.prod(shape) * dtype.itemsize, error) from error
    if made.nbytes >= LARGE:
        prefer_huge_pages(address_of("", made), made.nbytes)
    return made


def new_like(first: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What makes further tensors of the shape and dtype of one of :func:`new_tensor`: in half the
    time, if they are small. It raises RuntimeError, too, if there is no memory for one.
    """
    if first.nbytes >= LARGE:
        return partial(new_tensor, tuple(first.shape), first.dtype)
    return partial(torch.empty_like, first)


def out_of_memory(nbytes: int, error: RuntimeError) -> OutOfMemoryError:
    """The error for a tensor that torch could not create."""
    return OutOfMemoryError(
        f"a tensor of {nbytes:,} bytes cannot be made in this process ({error}). Drop tensors, get "
        "into existing ones, or raise its limits: memory, address space (ulimit -v), mappings "
        "(vm.max_map_count)",
        details={"requested_bytes": nbytes},
    )
