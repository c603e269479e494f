"""Tied weights: tensors that consist of the same elements in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch

from torchstore_core.clients.values.sharding import ShardList, TensorShard, is_dtensor

#: Types of tensors that have bytes of their own.
PLAIN = (torch.Tensor, torch.nn.Parameter)
_PLAIN_TYPES = frozenset(PLAIN)


class Ties:
    """Finds tensors that consist of the same elements in memory as an earlier one."""

    def __init__(self) -> None:
        # By address: the only tensor at it, or a dict of all tensors at it by their identity.
        self._found: dict[int, tuple[Any, int] | dict[object, int]] = {}

    def find(self, value: Any, mark: int) -> int | None:
        """The mark of the first such tensor. If there is none, store ``mark`` and return None."""
        tensor = value
        if type(value) not in PLAIN:
            if isinstance(value, ShardList):
                tensor = value[0].tensor if value else None
            elif isinstance(value, TensorShard):
                tensor = value.tensor
            elif is_dtensor(value):
                tensor = value.to_local().detach()
            if type(tensor) not in PLAIN:
                return None
        if tensor.layout is not torch.strided or tensor.is_meta:
            return None
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # inside of a transform of torch.func: there is an error for that
            return None
        if not address or not tensor.numel():
            return None
        others = self._found.get(address)
        if others is None:
            self._found[address] = value, mark
            return None
        if isinstance(others, tuple):
            others = self._found[address] = {_identity(others[0]): others[1]}
        earlier = others.setdefault(_identity(value), mark)
        return None if earlier == mark else earlier


def shared(addresses: Sequence[int]) -> Collection[int]:
    """Addresses that occur more than once: only these can have tied plain tensors."""
    if len(set(addresses)) == len(addresses):
        return ()
    return {address for address, times in Counter(addresses).items() if times > 1}


def are_apart(values: Sequence[Any]) -> bool:
    """Whether all are tensors with bytes of their own, each at a different address, so that none
    of them can be tied. Returns False if a closer look is needed to decide.
    """
    if not _PLAIN_TYPES.issuperset(map(type, values)):
        return False
    try:
        addresses = set(map(torch.Tensor.data_ptr, values))
    except RuntimeError:  # not a strided tensor
        return False
    return len(addresses) == len(values) and 0 not in addresses


def _identity(value: Any) -> object:
    """A hashable value that is equal for tensors at one address with the same elements."""
    if isinstance(value, ShardList):
        return tuple(map(_identity, value))
    if isinstance(value, TensorShard):
        return _identity(value.tensor), repr(value.tensor_slice)
    if is_dtensor(value):
        local = _identity(value.to_local().detach())
        return local, value.device_mesh, tuple(value.placements), tuple(value.shape)
    flags = value.is_conj(), value.is_neg(), value.device
    return value.shape, value.stride(), value.dtype, flags
