"""The bytes of tensors in row-major order, whatever their strides are and wherever they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from torchstore_core.clients.values.tensors import address_of, byte_like
from torchstore_snapshot.committing.files import Scattered
from torchstore_snapshot.format.hashes import BLOCK, block_hash
from torchstore_snapshot.storage.base import Writer

if TYPE_CHECKING:
    from torchstore_snapshot.devices import DeviceBytes, Devices

__all__ = ["Strided", "bytes_of", "data_of", "ranges_of"]


def bytes_of(path: str, tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host. The caller keeps the tensor alive."""
    address = address_of(path, tensor)
    if not tensor.nbytes:
        return memoryview(b"")
    raw: Any = (ctypes.c_char * tensor.nbytes).from_address(address)
    return memoryview(raw).cast("B")


def data_of(
    path: str, tensor: torch.Tensor, devices: Devices
) -> memoryview | DeviceBytes | Strided:
    """Return the bytes of a tensor: its memory, if they lie there. The caller keeps it alive."""
    if not tensor.is_cpu:
        return devices.bytes_of(path, tensor)
    return bytes_of(path, tensor) if tensor.is_contiguous() else Strided(tensor)


class Strided(Scattered):
    """A tensor of any strides on the host. It is written through a buffer of about one block."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    def write(self, writer: Writer | None, start: int, digests: list[bytes]) -> None:
        pending = bytearray()
        for rows in _groups_of_rows(self._tensor):
            packed = byte_like(rows).contiguous()
            pending += bytes_of("", packed)
            while len(pending) >= BLOCK:
                start = _write_block(writer, start, pending, BLOCK, digests)
            del packed
        if pending or not digests:
            _write_block(writer, start, pending, len(pending), digests)


def _write_block(
    writer: Writer | None, start: int, pending: bytearray, nbytes: int, digests: list[bytes]
) -> int:
    block = bytes(memoryview(pending)[:nbytes])
    if writer is not None:
        writer.write(start, block)
    digests.append(block_hash(block))
    del pending[:nbytes]
    return start + nbytes


def _groups_of_rows(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of a tensor, of about one block each, in row-major order."""
    if tensor.nbytes <= BLOCK or not tensor.dim():
        yield tensor
        return
    row = tensor.nbytes // tensor.shape[0]
    if row > BLOCK:
        for part in tensor:
            yield from _groups_of_rows(part)
        return
    yield from tensor.split(max(1, BLOCK // row))


def ranges_of(tensor: torch.Tensor, begin: int, end: int) -> list[torch.Tensor]:
    """Return views of a tensor, of whatever strides, that have the bytes from ``begin`` to ``end``
    of its values in row-major order, one view after the other. Copies nothing.

    >>> [view.tolist() for view in ranges_of(torch.arange(6).view(2, 3).t(), 8, 40)]
    [[3], [[1, 4]], [2]]
    """
    first, last = begin // tensor.itemsize, end // tensor.itemsize
    if tensor.is_contiguous():
        return [tensor.view(-1)[first:last]]
    found: list[torch.Tensor] = []
    _collect(tensor, first, last, found)
    return found


def _collect(tensor: torch.Tensor, first: int, last: int, found: list[torch.Tensor]) -> None:
    if first >= last:
        return
    if tensor.dim() <= 1:
        found.append(tensor[first:last] if tensor.dim() else tensor)
        return
    row = tensor.numel() // tensor.shape[0]
    top, bottom = -(-first // row), last // row  # the rows of which everything is wanted
    if top > bottom:  # the range is inside of one row
        _collect(tensor[bottom], first - bottom * row, last - bottom * row, found)
        return
    if first < top * row:
        _collect(tensor[top - 1], first - (top - 1) * row, row, found)
    if top < bottom:
        found.append(tensor[top:bottom])
    if bottom * row < last:
        _collect(tensor[bottom], 0, last - bottom * row, found)
