"""Moves that torch must make, and how: the only place of a transfer where it copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch

from torchstore_core import boxes
from torchstore_core.boxes import Box
from torchstore_core.clients.moving.batches import (
    Batch,
    CopyPlan,
    LibraryMove,
    LibraryMoves,
    Staged,
)
from torchstore_core.clients.session.allocation import is_allocated
from torchstore_core.clients.transfer import cuda
from torchstore_core.clients.transfer.targets import narrow
from torchstore_core.clients.values.new_tensors import new_tensor
from torchstore_core.clients.values.tensors import (
    address_of,
    byte_like,
    split_rows,
    strided_copy,
    tensor_at,
)
from torchstore_core.contracts.transport import Copy, Memory, Window
from torchstore_core.machine import copying


async def _on_devices(
    moves: Sequence[TensorMove | DeviceColumns], window: Window, *, into: bool
) -> None:
    """Make these moves, those of contiguous bytes together."""
    runs: list[tuple[torch.Tensor, int]] = []
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for move in moves:
        if isinstance(move, DeviceColumns):
            runs += zip(move.tensors, move.offsets, strict=True)
        elif move.is_run:
            runs.append((move.tensor, move.offset))
        else:
            pairs.append(move.pair(window.address, into))
    await cuda.transfer(runs, pairs, window, into=into)


class _TensorMove(NamedTuple):
    key: str
    tensor: torch.Tensor
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box | None = None


class TensorMove(_TensorMove, LibraryMove):
    """A move of a tensor as such: its rows are short, its dtype differs, or it is on a device.

    Args:
        tensor: in this process's memory, with any strides.
        offset, shape, dtype: those of the stored value in its segment, where it is row-major.
        box: the part of the stored value that is moved; None: all of it.
    """

    __slots__ = ()

    def tasks(self, base: int, *, into: bool, stream: bool) -> Iterable[copying.Task] | None:
        if not self.tensor.is_cpu:
            return None
        pairs = split_rows(*self.pair(base, into), copying.CHUNK)
        return (strided_copy(*some, stream=stream) for some in pairs)

    on_devices = staticmethod(_on_devices)

    def cut(self, nbytes: int) -> Iterator[tuple[TensorMove, int]]:
        key, tensor, offset, shape, dtype, box = self
        size = tensor.numel() * dtype.itemsize
        if box is not None or size <= nbytes:
            yield self, size
            return
        each = size // shape[0]
        most = -(-nbytes // each)
        for first in range(0, shape[0], most):
            there = offset + first * each
            if most == 1:  # a row is a part, or several
                yield from TensorMove(key, tensor[first], there, shape[1:], dtype).cut(nbytes)
                continue
            some = tensor[first : first + most]
            piece = TensorMove(key, some, there, tuple(some.shape), dtype)
            yield piece, some.numel() * dtype.itemsize

    def plan(self, plan: CopyPlan, segment: int, devices: frozenset[str]) -> None:
        tensor = self.tensor
        device = ""
        if tensor.device.type in devices and tensor.dtype is self.dtype and tensor.is_contiguous():
            device = str(tensor.device)
            address = address_of(self.key, tensor)
            plan.direct.append((range(address, address + tensor.nbytes), self))
        else:
            staged = new_tensor(tuple(tensor.shape), self.dtype)
            plan.staged.append(StagedTensor(self.key, tensor, staged))
            address = address_of(self.key, staged)
        itemsize = self.dtype.itemsize
        box = boxes.whole(self.shape) if self.box is None else self.box
        for start, length, rows, step in boxes.contiguous_rows(box, self.shape):
            offset, nbytes = self.offset + start * itemsize, length * itemsize
            row = nbytes, rows, nbytes, step * itemsize
            plan.copies.append(Copy(address, segment, offset, *row, device))
            plan.strided |= rows > 1
            address += nbytes * rows

    def stage(self, plan: CopyPlan, copy: Copy, start: int) -> Copy:
        address_of(self.key, self.tensor)  # it may have changed since it was planned
        whole = byte_like(self.tensor).reshape(-1).view(torch.uint8)
        size = copy.nbytes * copy.rows
        staged = new_tensor((size,), torch.uint8)
        plan.staged.append(StagedTensor(self.key, whole[start : start + size], staged))
        return msgspec.structs.replace(copy, address=address_of("", staged), device="")

    @staticmethod
    async def settled(moves: Iterable[TensorMove]) -> None:
        await cuda.settled(move.tensor for move in moves)

    @property
    def is_run(self) -> bool:
        """Whether it moves contiguous bytes as they are, between contiguous places."""
        tensor = self.tensor
        return self.box is None and tensor.dtype is self.dtype and tensor.is_contiguous()

    def pair(self, base: int, into: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Its target and source, as tensors of the same shape."""
        tensor = self.tensor
        stored = tensor_at(base + self.offset, self.shape, self.dtype)
        if self.box is not None:
            stored = narrow(stored, self.box)
        if tensor.dtype is self.dtype:
            tensor = byte_like(tensor)
        else:
            stored = stored.view(self.dtype)
        return (stored, tensor) if into else (tensor, stored)


class DeviceColumns(LibraryMoves):
    """The moves of many contiguous tensors on devices, as they are.

    Args:
        keys: those of the values, for errors.
        offsets: those of the stored values in their segment, in ascending order.
    """

    __slots__ = ("keys", "offsets", "tensors")

    def __init__(self, keys: list[str], tensors: list[torch.Tensor], offsets: list[int]) -> None:
        self.keys = keys
        # They are copied later, in another thread: their ``.data`` may be replaced before.
        self.tensors = list(map(torch.Tensor.detach, tensors))
        self.offsets = offsets

    def tasks(self, base: int, *, into: bool, stream: bool) -> None:
        return None

    on_devices = staticmethod(_on_devices)

    def each(self) -> Iterable[TensorMove]:
        for key, tensor, offset in zip(self.keys, self.tensors, self.offsets, strict=True):
            yield TensorMove(key, tensor, offset, tuple(tensor.shape), tensor.dtype)


class StagedTensor(Staged):
    """A tensor, or a part of one, and staging memory of the same shape."""

    __slots__ = ("_key", "_memory", "_tensor")

    def __init__(self, key: str, tensor: torch.Tensor, memory: torch.Tensor) -> None:
        self._key = key
        self._tensor = tensor
        self._memory = memory

    @property
    def memory(self) -> torch.Tensor:
        return self._memory

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def on_device(self) -> bool:
        return not self._tensor.is_cpu

    def check(self) -> None:
        address_of(self._key, self._tensor)

    def tasks(self, *, pack: bool) -> Iterable[copying.Task]:
        destination, source = self._pair(pack=pack)
        if destination.dtype is source.dtype:  # torch cannot copy every dtype
            destination, source = byte_like(destination), byte_like(source)
        for some in split_rows(destination, source, copying.CHUNK):
            yield strided_copy(*some, stream=False)

    @staticmethod
    async def on_devices(staged: Sequence[StagedTensor], *, pack: bool) -> None:
        await cuda.copy([one._pair(pack=pack) for one in staged])

    def _pair(self, *, pack: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The destination and the source."""
        return (self._memory, self._tensor) if pack else (self._tensor, self._memory)


class TensorBatch(Batch):
    """A batch of tensors. If their memory is replaced during the copy, it must stay alive."""

    _memory: Sequence[torch.UntypedStorage | None] = ()

    def memory(self) -> list[Memory]:
        storages = {id(one): one for one in self._memory if one is not None}
        there = [one for one in storages.values() if one.device.type == "cpu"]
        return [
            Memory(one.data_ptr(), one.nbytes(), one)
            for one in there
            if not is_allocated(one.data_ptr())
        ]

    def take_memory(self) -> Sequence[torch.UntypedStorage | None]:
        """What keeps the memory of the moves alive that were generated since the last call."""
        taken, self._memory = self._memory, []
        return taken
