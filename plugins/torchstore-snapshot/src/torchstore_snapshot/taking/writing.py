"""Writes data files straight from the memory of tensors, on several threads, hashing as it goes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torchstore_core.clients.values.tensors import address_of, byte_like
from torchstore_snapshot.format.hashes import BLOCK, block_hash, blocks, combined
from torchstore_snapshot.storage.base import Storage, Writer
from torchstore_snapshot.taking.collecting import Item
from torchstore_snapshot.taking.planning import PlannedFile, Unit
from torchstore_snapshot.threads import run_tasks

__all__ = ["bytes_of", "write_files"]


def write_files(
    storage: Storage,
    items: Sequence[Item],
    files: Sequence[PlannedFile],
    *,
    durable: bool,
    threads: int | None = None,
) -> list[list[str]]:
    """Write all files. If that fails, none of them is left.

    Args:
        durable: flush the files, so that they would survive a power failure.
        threads: how many threads write; None: the number of copy threads.

    Returns:
        For each file, the hashes of what it contains, in the order of its units.

    Raises:
        OSError: the storage failed.
        UnsupportedValueError: the memory of a tensor was freed in the meantime.
    """
    writers: list[Writer] = []
    hashes: list[list[list[bytes]]] = [[[] for _ in file.units] for file in files]
    try:
        writers.extend(storage.create(file.name, file.layout.nbytes) for file in files)
        run_tasks(_tasks(items, files, writers, hashes), threads)
        run_tasks([functools.partial(writer.close, durable=durable) for writer in writers], threads)
    except BaseException:
        for writer in writers:
            writer.abort()
        for file in files[: len(writers)]:  # those that were closed already
            _delete(storage, file.name)
        raise
    return [[combined(unit) for unit in file] for file in hashes]


def _delete(storage: Storage, name: str) -> None:
    try:
        storage.delete(name)
    except OSError:
        return  # a failed take's leavings are invisible, and gc collects them


def _tasks(
    items: Sequence[Item],
    files: Sequence[PlannedFile],
    writers: Sequence[Writer],
    hashes: Sequence[list[list[bytes]]],
) -> Iterator[Callable[[], None]]:
    for file, writer, found in zip(files, writers, hashes, strict=True):
        if not writer.random_access:
            yield functools.partial(_write_in_order, items, file, writer, found)
            continue
        yield functools.partial(writer.write, 0, file.layout.header)
        for unit, start, digests in zip(file.units, file.layout.starts, found, strict=True):
            source = _source(items[unit.item], unit)
            if isinstance(source, torch.Tensor):
                yield functools.partial(_write_strided, writer, start, source, digests)
                continue
            spans = list(blocks(len(source)))
            digests.extend(b"" for _ in spans)
            for number, (begin, end) in enumerate(spans):
                part = source[begin:end]
                yield functools.partial(_write, writer, start + begin, part, digests, number)


def _source(item: Item, unit: Unit) -> memoryview | torch.Tensor:
    """The bytes of a unit, or its tensor if they are not contiguous in the memory of the host."""
    if not item.is_tensor:
        return memoryview(item.data)
    tensor = item.pieces[unit.piece].tensor
    if tensor.is_cpu and tensor.is_contiguous():
        return bytes_of(f"{item.key}/{item.name}", tensor)
    return tensor


def bytes_of(path: str, tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host. The caller keeps the tensor alive."""
    address = address_of(path, tensor)
    if not tensor.nbytes:
        return memoryview(b"")
    raw: Any = (ctypes.c_char * tensor.nbytes).from_address(address)
    return memoryview(raw).cast("B")


def _write(writer: Writer, start: int, part: memoryview, digests: list[bytes], number: int) -> None:
    writer.write(start, part)
    digests[number] = block_hash(part)  # after the write, which has brought part of it to the cache


def _write_in_order(
    items: Sequence[Item], file: PlannedFile, writer: Writer, found: list[list[bytes]]
) -> None:
    writer.write(0, file.layout.header)
    order = sorted(range(len(file.units)), key=lambda i: file.layout.starts[i])
    for i in order:
        start, unit = file.layout.starts[i], file.units[i]
        source = _source(items[unit.item], unit)
        if isinstance(source, torch.Tensor):
            _write_strided(writer, start, source, found[i])
            continue
        for begin, end in blocks(len(source)):
            writer.write(start + begin, source[begin:end])
            found[i].append(block_hash(source[begin:end]))


def _write_strided(writer: Writer, start: int, tensor: torch.Tensor, digests: list[bytes]) -> None:
    """Write a tensor through a buffer of about one block."""
    pending = bytearray()
    for rows in _groups_of_rows(tensor):
        packed = byte_like(rows).cpu().contiguous()
        pending += bytes_of("", packed)
        while len(pending) >= BLOCK:
            start = _write_block(writer, start, pending, BLOCK, digests)
        del packed
    if pending or not digests:
        _write_block(writer, start, pending, len(pending), digests)


def _write_block(
    writer: Writer, start: int, pending: bytearray, nbytes: int, digests: list[bytes]
) -> int:
    block = bytes(memoryview(pending)[:nbytes])
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
