"""Writes data files from the memory of tensors, on several threads, hashing as it goes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from torchstore_core.clients.values.tensors import address_of, byte_like
from torchstore_snapshot.format.hashes import BLOCK, Digest, block_hash, summed
from torchstore_snapshot.format.safetensors_files import Layout
from torchstore_snapshot.progress import Advance
from torchstore_snapshot.stopping import check
from torchstore_snapshot.storage.base import Storage, Writer
from torchstore_snapshot.taking.collecting import Item, LocalPiece
from torchstore_snapshot.taking.planning import PlannedFile, Unit
from torchstore_snapshot.threads import run_tasks

__all__ = ["Fetch", "OpenFiles", "Source", "bytes_of", "hash_strided", "source_of", "write_files"]

# Bytes that are hashed and then written at a time: what was hashed is still in the cache when it is
# written. Steps end at multiples of this in the file, so that the page cache gets huge pages, which
# are cheaper to write and, above all, to map later.
_STEP = 2 << 20
# Bytes of pieces that are fetched at a time.
_FETCHED = 64 << 20

#: Returns the tensors of pieces that are not in the memory of this process.
Fetch = Callable[[Sequence[tuple[Item, LocalPiece]]], Sequence[torch.Tensor]]


class Source(NamedTuple):
    """Bytes that go into a file.

    Args:
        file: the index of the file.
        unit: the index of the tensor in that file.
        begin: where in the tensor the bytes begin: a multiple of ``BLOCK``.
        data: bytes, in one piece or in several, or a tensor that has to be made contiguous (all of
            it: ``begin`` is 0).
        owner: kept alive until the bytes have been written.
    """

    file: int
    unit: int
    begin: int
    data: memoryview | list[memoryview] | torch.Tensor
    owner: Any = None


class OpenFiles:
    """The files of a take while they are written.

    Args:
        files: the names and layouts of the files.
        threads: how many threads write; None: the number of copy threads.
        advance: told how many bytes were written.

    Raises:
        OSError: a file cannot be created; then none is left.
    """

    def __init__(
        self,
        storage: Storage,
        files: Sequence[tuple[str, Layout]],
        threads: int | None = None,
        advance: Advance | None = None,
    ) -> None:
        self._advance = advance
        self._storage = storage
        self._files = files
        self._threads = threads
        self._writers: list[Writer] = []
        self._hashes: list[list[list[bytes]]] = [[[] for _ in file.starts] for _, file in files]
        self._begun: set[int] = set()
        try:
            self._writers.extend(storage.create(name, file.nbytes) for name, file in files)
        except BaseException:
            self.abort()
            raise

    def write(self, sources: Iterable[Source]) -> None:
        """Write some of the files' contents. Where a file must be written in order, the sources of
        all calls must be in that order.

        Raises:
            OSError: the storage failed.
            UnsupportedValueError: the memory of a tensor was freed in the meantime.
        """
        run_tasks(self._tasks(sources), self._threads)

    def _write_tensor(
        self, writer: Writer, start: int, tensor: torch.Tensor, digests: list[bytes]
    ) -> None:
        _write_strided(writer, start, tensor, digests)
        if self._advance is not None:
            self._advance(tensor.nbytes)

    def _write(
        self,
        writer: Writer,
        start: int,
        block: list[memoryview],
        digests: list[bytes],
        number: int,
        owner: Any,
    ) -> None:
        del owner  # it was passed only to be kept alive
        hasher = xxhash.xxh3_128()
        begin = start
        for part in block:
            at = 0
            while at < part.nbytes:
                step = part[at : at + _STEP - start % _STEP]
                hasher.update(step)
                writer.write(start, step)
                start += step.nbytes
                at += step.nbytes
        digests[number] = hasher.digest()
        if self._advance is not None:
            self._advance(start - begin)

    def close(self, *, durable: bool) -> list[list[Digest]]:
        """Finish all files. Returns, for each file, the hashes of its tensors, in order.

        Args:
            durable: flush the files, so that they would survive a power failure.

        Raises:
            OSError: the storage failed.
        """
        self.write([])
        tasks = [functools.partial(writer.close, durable=durable) for writer in self._writers]
        run_tasks(tasks, self._threads)
        return [[summed(unit) for unit in file] for file in self._hashes]

    def abort(self) -> None:
        """Remove all files, whatever has been written. Never raises."""
        for writer in self._writers:
            writer.abort()
        for name, _ in self._files[: len(self._writers)]:  # those that were closed already
            try:
                self._storage.delete(name)
            except OSError:
                return  # a failed take's leavings are invisible, and gc collects them

    def _tasks(self, sources: Iterable[Source]) -> Iterator[Callable[[], None]]:
        in_order: dict[int, list[Source]] = {}
        for index, writer in enumerate(self._writers):
            if not writer.random_access:
                in_order[index] = []
            elif index not in self._begun:
                self._begun.add(index)
                yield functools.partial(writer.write, 0, self._files[index][1].header)
        for source in sources:
            if source.file in in_order:
                in_order[source.file].append(source)
                continue
            writer = self._writers[source.file]
            start = self._files[source.file][1].starts[source.unit]
            found = self._hashes[source.file][source.unit]
            data = source.data
            if isinstance(data, torch.Tensor):
                yield functools.partial(self._write_tensor, writer, start, data, found)
                continue
            number, at = source.begin // BLOCK, start + source.begin
            for block in _blocks_of([data] if isinstance(data, memoryview) else data):
                found.extend(b"" for _ in range(number + 1 - len(found)))
                yield functools.partial(self._write, writer, at, block, found, number, source.owner)
                number, at = number + 1, at + BLOCK
        for index, mine in in_order.items():
            yield functools.partial(self._write_in_order, index, mine)

    def _write_in_order(self, index: int, sources: list[Source]) -> None:
        writer, layout = self._writers[index], self._files[index][1]
        if index not in self._begun:
            self._begun.add(index)
            writer.write(0, layout.header)
        for source in sorted(sources, key=lambda s: (layout.starts[s.unit], s.begin)):
            start, data = layout.starts[source.unit], source.data
            found = self._hashes[index][source.unit]
            if isinstance(data, torch.Tensor):
                self._write_tensor(writer, start, data, found)
                continue
            at = start + source.begin
            for block in _blocks_of([data] if isinstance(data, memoryview) else data):
                found.append(b"")
                self._write(writer, at, block, found, len(found) - 1, source.owner)
                at += BLOCK


def _blocks_of(parts: list[memoryview]) -> Iterator[list[memoryview]]:
    """Cut bytes that are in several pieces into blocks. No bytes are one empty block."""
    block: list[memoryview] = []
    room = BLOCK
    for part in parts:
        at = 0
        while at < part.nbytes:
            step = part[at : at + room]
            block.append(step)
            at, room = at + step.nbytes, room - step.nbytes
            if not room:
                yield block
                block, room = [], BLOCK
    if block or not any(part.nbytes for part in parts):
        yield block


def write_files(
    storage: Storage,
    items: Sequence[Item],
    files: Sequence[PlannedFile],
    *,
    durable: bool,
    threads: int | None = None,
    advance: Advance | None = None,
    fetch: Fetch | None = None,
) -> list[list[Digest]]:
    """Write all files straight from the memory of ``items``. If that fails, none of them is left.

    Args:
        fetch: called for the pieces that are on the meta device, about ``_FETCHED`` bytes at a
            time, which are freed when they are written. May raise anything.

    Returns and raises what :meth:`OpenFiles.close` and :meth:`OpenFiles.write` do.
    """
    opened = OpenFiles(storage, [(file.name, file.layout) for file in files], threads, advance)
    try:
        for batch in _batches(items, files):
            check()
            opened.write(_sources(items, batch, fetch))
        return opened.close(durable=durable)
    except BaseException:
        opened.abort()
        raise


class _Place(NamedTuple):
    file: int
    position: int
    unit: Unit
    piece: LocalPiece | None  # that has to be fetched


def _batches(items: Sequence[Item], files: Sequence[PlannedFile]) -> Iterator[list[_Place]]:
    batch: list[_Place] = []
    nbytes = 0
    for index, file in enumerate(files):
        for position, unit in enumerate(file.units):
            item = items[unit.item]
            piece = item.pieces[unit.piece] if item.is_tensor else None
            if piece is not None and not piece.tensor.is_meta:
                piece = None
            batch.append(_Place(index, position, unit, piece))
            if piece is None:
                continue
            nbytes += piece.tensor.nbytes
            if nbytes >= _FETCHED:
                yield batch
                batch, nbytes = [], 0
    yield batch


def _sources(
    items: Sequence[Item], batch: Sequence[_Place], fetch: Fetch | None
) -> Iterator[Source]:
    absent = [(items[at.unit.item], at.piece) for at in batch if at.piece is not None]
    fetched = iter(fetch(absent) if fetch is not None and absent else ())
    for at in batch:
        item = items[at.unit.item]
        if at.piece is not None:
            item = item._replace(pieces=(LocalPiece(next(fetched), at.piece.slice),))
            unit = Unit(at.unit.item, 0)
            data, owner = source_of(item, unit), item.pieces[0].tensor
            yield Source(at.file, at.position, 0, data, owner)
        else:
            yield Source(at.file, at.position, 0, source_of(item, at.unit))


def source_of(item: Item, unit: Unit) -> memoryview | torch.Tensor:
    """Return the bytes of a unit, or its tensor if they are not contiguous on the host."""
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


def _write_strided(
    writer: Writer | None, start: int, tensor: torch.Tensor, digests: list[bytes]
) -> None:
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


def hash_strided(tensor: torch.Tensor, digests: list[bytes]) -> None:
    """Append the hashes of a tensor's blocks, which are the same as when it is written."""
    _write_strided(None, 0, tensor, digests)


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
