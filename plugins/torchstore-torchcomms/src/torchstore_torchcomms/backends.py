"""Which backend of torchcomms a pair uses. Both ends compute the same."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence

import torch

__all__ = ["BACKEND", "agreed", "device_of", "usable"]

#: Environment variable with the name of the only backend that may be used.
BACKEND = "TORCHSTORE_TORCHCOMMS_BACKEND"

_OF_GPUS = ("ncclx", "nccl", "rcclx", "rccl")
_OF_HOSTS = ("gloo",)


def usable() -> list[str]:
    """Return the backends that this process can use, best first."""
    installed = importlib.metadata.entry_points(group="torchcomms.backends").names
    chosen = os.environ.get(BACKEND, "")
    if chosen:
        return [name for name in (chosen,) if name in installed]
    known = (*_OF_GPUS, *_OF_HOSTS) if torch.cuda.is_available() else _OF_HOSTS
    return [name for name in known if name in installed]


def agreed(first: Sequence[str], second: Sequence[str]) -> str | None:
    """Return the best backend of the first end that the second has, too.

    >>> agreed(["ncclx", "nccl", "gloo"], ["nccl", "gloo"])
    'nccl'
    """
    return next((name for name in first if name in second), None)


def device_of(backend: str) -> torch.device:
    """Return where a backend expects tensors."""
    if backend in _OF_GPUS:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
