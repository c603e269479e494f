"""Writes and hashes tensors whose bytes are not contiguous on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch

from torchstore_core.clients.values.tensors import address_of, byte_like
from torchstore_snapshot.committing.files import Scattered
from torchstore_snapshot.format.hashes import BLOCK, block_hash
from torchstore_snapshot.storage.base import Writer

__all__ = ["Strided", "bytes_of", "data_of"]


def bytes_of(path: str, tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host. The caller keeps the tensor alive."""
    address = address_of(path, tensor)
    if not tensor.nbytes:
        return memoryview(b"")
    raw: Any = (ctypes.c_char * tensor.nbytes).from_address(address)
    return memoryview(raw).cast("B")


def data_of(path: str, tensor: torch.Tensor) -> memoryview | Strided:
    """Return the bytes of a tensor: its memory, if they lie there. The caller keeps it alive."""
    if tensor.is_cpu and tensor.is_contiguous():
        return bytes_of(path, tensor)
    return Strided(tensor)


class Strided(Scattered):
    """A tensor of any strides, on any device. It is written through a buffer of about one block."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    def write(self, writer: Writer | None, start: int, digests: list[bytes]) -> None:
        pending = bytearray()
        for rows in _groups_of_rows(self._tensor):
            packed = byte_like(rows).cpu().contiguous()
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
