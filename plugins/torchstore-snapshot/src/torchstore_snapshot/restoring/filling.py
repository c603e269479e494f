"""Moves the bytes of reads from files into tensors, and hashes them on the way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from torchstore_core import boxes
from torchstore_core.clients.values.tensors import (
    byte_like,
    check_storage,
    from_buffer,
    strided_copy,
)
from torchstore_core.machine import copying
from torchstore_snapshot.devices import Devices, flat_bytes
from torchstore_snapshot.format.hashes import blocks
from torchstore_snapshot.format.manifest import Piece
from torchstore_snapshot.progress import Advance
from torchstore_snapshot.restoring.checking import Limits, Range, checkable
from torchstore_snapshot.restoring.fetching import Fetched, Span
from torchstore_snapshot.restoring.files import Files, Rows, adjacent
from torchstore_snapshot.restoring.hashing import hashes_of
from torchstore_snapshot.restoring.mappings import address_of
from torchstore_snapshot.taking.strided import bytes_of
from torchstore_snapshot.threads import task_size

__all__ = ["Read", "apart", "fills", "strides_of", "tasks"]

# Bytes of a part; of one that is copied from a mapped file: a task has several of these.
_PART, _MAPPED = 16 << 20, 4 << 20
# Bytes that are read and hashed at a time where a file cannot be mapped: they stay in the cache.
_STEP = 256 << 10


class Read:
    """A box to be read from a piece.

    Args:
        path: of the tensor, for errors.
        piece: where it comes from.
        source: the box of the piece, in the whole tensor.
        box: what is read of it.
        target: where it goes: a tensor of the shape of ``box``, with any strides, on any device.

    Attributes:
        span: what contains the box, in the file.
        dense: whether the box is all of the span.
    """

    __slots__ = "box", "dense", "path", "piece", "source", "span", "target"

    def __init__(
        self, path: str, piece: Piece, source: boxes.Box, box: boxes.Box, target: torch.Tensor
    ) -> None:
        self.path, self.piece, self.source, self.box, self.target = path, piece, source, box, target
        nbytes = target.nbytes
        if box == source:
            self.span = Span(piece.file, piece.start, piece.start + nbytes)
            self.dense = True
            return
        itemsize = target.itemsize
        inner = boxes.relative(box, source)
        strides = strides_of(source.shape)
        first = sum(o * s for o, s in zip(inner.offset, strides, strict=True))
        last = sum((e - 1) * s for e, s in zip(inner.end, strides, strict=True))
        end = piece.start + (last + 1) * itemsize
        self.span = Span(piece.file, piece.start + first * itemsize, end)
        self.dense = end - self.span.begin == nbytes

    @property
    def rows(self) -> Rows | None:
        """Which parts of the span are read: a row for each index of the box's first dimension that
        has several. None if it is all of the span.
        """
        first = None if self.dense else self.first
        if first is None:
            return None
        strides = strides_of(self.source.shape)
        inner = [*zip(self.box.shape, strides, strict=True)][first + 1 :]
        last = sum((extent - 1) * stride for extent, stride in inner)
        itemsize = self.target.itemsize
        return Rows((last + 1) * itemsize, strides[first] * itemsize)

    @property
    def first(self) -> int | None:
        """The box's first dimension that has several indices; None if there is none."""
        return next((dim for dim, extent in enumerate(self.box.shape) if extent > 1), None)

    def narrow(self, dim: int, start: int, count: int) -> Read:
        """Return the read of ``count`` indices of a dimension, from ``start`` on in the box."""
        box, offset, shape = self.box, [*self.box.offset], [*self.box.shape]
        offset[dim], shape[dim] = box.offset[dim] + start, count
        box = boxes.Box(tuple(offset), tuple(shape))
        return self.into(self.target.narrow(dim, start, count), box)

    def into(self, target: torch.Tensor, box: boxes.Box | None = None) -> Read:
        """Return the read of the same box, or of another one, into another tensor."""
        return Read(self.path, self.piece, self.source, box or self.box, target)

    @property
    def around(self) -> Range:
        """What of the piece contains the box."""
        start = self.piece.start
        return Range(self.path, self.piece, self.span.begin - start, self.span.end - start)

    @property
    def range(self) -> Range | None:
        """What is read of the piece; None if its bytes are not contiguous."""
        return self.around if self.dense else None


def strides_of(shape: tuple[int, ...]) -> list[int]:
    """Return the strides, in elements, of a contiguous tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return strides


def fills(read: Read) -> bool:
    """Whether the bytes of a read lie in its target as they do in the file."""
    return read.dense and read.target.is_contiguous()


def apart(read: Read, gap: int) -> Iterator[Read]:
    """Divide a read into those of its rows, if more than ``gap`` bytes lie between two of them. The
    rows of an inner dimension are never further from each other than those of an outer one.
    """
    rows, dim = read.rows, read.first
    if rows is None or dim is None or rows.stride - rows.nbytes <= gap:
        yield read
        return
    for index in range(read.box.shape[dim]):
        yield from apart(read.narrow(dim, index, 1), gap)


def tasks(
    files: Files | Fetched,
    reads: Mapping[int, Read],
    hashes: Mapping[int, dict[int, bytes]],
    advance: Advance | None,
    limits: Limits,
    devices: Devices,
) -> Iterator[Callable[[], None]]:
    """Return tasks that carry reads out, for several threads.

    Args:
        hashes: by the number of each read that is to be hashed on the way (:func:`fills` holds for
            it), where the hashes of its blocks go, by their numbers.
        devices: for targets that are on one.
    """
    left = sum(read.target.nbytes for read in reads.values())
    # From remote storage, each part is a request, and many are under way at a time.
    remote = isinstance(files, Files) and files.remote
    most = _PART if remote else _MAPPED
    group: list[_Part] = []
    room = 0 if remote else task_size(left)
    for index in sorted(reads, key=lambda index: reads[index].span):
        read = reads[index]
        target = read.target.detach()
        if not fills(read):
            left -= target.nbytes
            yield functools.partial(_scatter, files, read, target, advance, limits, devices)
            continue
        begin = read.span.begin
        found = hashes.get(index)
        memory, on_device = memoryview(b""), None
        if target.is_cpu:
            memory = bytes_of(read.path, target)
        else:
            on_device = flat_bytes(read.path, target)
        size = most if target.is_cpu else min(most, devices.slot)
        for start, stop, number in _parts(files, read, size, hashed=found is not None):
            if group and (
                stop - start > room
                or group[0].file != read.piece.file
                or (group[0].on_device is None) != (on_device is None)
            ):
                yield functools.partial(_fill, files, group, advance, limits, devices)
                group, room = [], 0 if remote else task_size(left)
            keep = found if number >= 0 else None
            here, there = memory, on_device
            if stop - start < target.nbytes:
                place = slice(start - begin, stop - begin)
                here, there = memory[place], None if on_device is None else on_device[place]
            group.append(_Part(read, start, stop, here, keep, number, there))
            room -= stop - start
            left -= stop - start
    if group:
        yield functools.partial(_fill, files, group, advance, limits, devices)


class _Part(NamedTuple):
    """What is copied, and hashed, at a time.

    Args:
        start, end: its first byte and its end in the file.
        memory: where it goes.
        found: where its hash goes, by ``number``; None if it is not hashed.
        on_device: where it goes if that is on a device: bytes. It has no ``memory`` then, until it
            gets some on its way.
    """

    read: Read
    start: int
    end: int
    memory: memoryview
    found: dict[int, bytes] | None
    number: int
    on_device: torch.Tensor | None = None

    @property
    def file(self) -> int:
        return self.read.piece.file

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def _parts(
    files: Files | Fetched, read: Read, most: int, *, hashed: bool
) -> Iterator[tuple[int, int, int]]:
    """The parts of a read: first byte and end in the file, and the number of the block that it is;
    -1 if it is not hashed. Those that are not have at most ``most`` bytes.
    """
    _, begin, end = read.span
    first, at = read.piece.start, begin
    of = read.range
    if hashed and of is not None:
        for number, start, stop in checkable(of, files.block(read.piece.file)):
            for a, b in blocks(first + start - at, most) if first + start > at else ():
                yield at + a, at + b, -1
            yield first + start, first + stop, number
            at = first + stop
    for a, b in blocks(end - at, most) if end > at else ():
        yield at + a, at + b, -1


def _fill(
    files: Files | Fetched,
    group: Sequence[_Part],
    advance: Advance | None,
    limits: Limits,
    devices: Devices,
) -> None:
    """Fill parts of one file, which are in order, and are all on the host, or all on devices."""
    if group[0].on_device is None:
        _fill_here(files, group, advance, limits)
        return
    with devices.lane() as lane:
        for some in _fitting(group, devices.slot):
            slot = lane.slot()
            placed: list[_Part] = []
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []
            at = 0
            for part in some:
                end = at + part.nbytes
                placed.append(part._replace(memory=slot.view[at:end]))
                if part.on_device is not None:
                    copies.append((part.on_device, slot.memory[at:end]))
                at = end
            _fill_here(files, placed, advance, limits)
            lane.send(slot, copies)


def _fitting(group: Sequence[_Part], size: int) -> Iterator[Sequence[_Part]]:
    """Divide parts into groups of at most ``size`` bytes."""
    first, room = 0, size
    for at, part in enumerate(group):
        if part.nbytes > room:
            yield group[first:at]
            first, room = at, size
        room -= part.nbytes
    yield group[first:]


def _fill_here(
    files: Files | Fetched, group: Sequence[_Part], advance: Advance | None, limits: Limits
) -> None:
    """Fill parts whose memory is on this host. Parts that touch each other in the file are mapped
    together. What needs a hash is copied in one call, and what needs none in another.
    """
    plain: list[copying.Run] = []
    hashed: list[copying.Run] = []
    found: list[tuple[dict[int, bytes], int]] = []
    for together in adjacent(group):
        start = together[0].start
        window = files.window(together[0].file, start, together[-1].end - start)
        for part in together:
            if window is None:
                _fill_by_reading(files, part, limits)
                continue
            source = address_of(window) + part.start - start
            run = address_of(part.memory), source, part.nbytes
            if part.found is None:
                plain.append(run)
            else:
                hashed.append(run)
                found.append((part.found, part.number))
    # Faster than reading: with stores that bypass the cache.
    copying.copy_pieces(plain, stream=True)
    for (hashes, number), digest in zip(found, hashes_of(hashed), strict=True):
        hashes[number] = digest
    files.check_kept(group[0].file)
    if advance is not None:
        advance(sum(part.nbytes for part in group))


def _fill_by_reading(files: Files | Fetched, part: _Part, limits: Limits) -> None:
    hasher = None if part.found is None else xxhash.xxh3_128()
    step = _STEP
    if files.request_size(part.read.piece.file) > 1:
        step = limits.nbytes or part.nbytes
    for at in range(0, part.nbytes, max(step, 1)):
        some = part.memory[at : at + step]
        _read(files, part.read, part.start + at, some)
        if hasher is not None:
            hasher.update(some)
    if part.found is not None and hasher is not None:
        part.found[part.number] = hasher.digest()


def _read(files: Files | Fetched, read: Read, start: int, buffer: memoryview | bytearray) -> None:
    try:
        files.reader(read.piece.file).read_into(start, buffer)
    except (EOFError, FileNotFoundError) as error:
        raise files.corrupt(read.piece.file, "became shorter, or was removed", read.path) from error


def _scatter(
    files: Files | Fetched,
    read: Read,
    target: torch.Tensor,
    advance: Advance | None,
    limits: Limits,
    devices: Devices,
) -> None:
    """Read a box whose bytes are not contiguous, in the file or in its target."""
    most = _PART if limits.nbytes is None else limits.nbytes
    if not target.is_cpu:
        check_storage(read.path, target)
        most = min(most, devices.slot)
    for part in _cut(read.into(target), most, spans=limits.nbytes is not None):
        view = part.target
        _, begin, end = part.span
        buffer: Any = files.window(read.piece.file, begin, end - begin, part.rows)
        if buffer is None:
            buffer = bytearray(end - begin)
            _read(files, read, begin, buffer)
        flat = from_buffer(buffer, 0, ((end - begin) // view.itemsize,), view.dtype)
        source = flat.as_strided(tuple(view.shape), strides_of(read.source.shape))
        if view.is_cpu:
            strided_copy(byte_like(view), byte_like(source), stream=False)()
            files.check_kept(read.piece.file, read.path)
        else:
            with devices.lane() as lane:
                slot = lane.slot()
                packed = byte_like(slot.memory[: view.nbytes].view(view.dtype)).view(view.shape)
                strided_copy(packed, byte_like(source), stream=True)()
                files.check_kept(read.piece.file, read.path)
                lane.send(slot, [(byte_like(view), packed)])
        if advance is not None:
            advance(view.nbytes)


def _cut(read: Read, most: int, *, spans: bool) -> Iterator[Read]:
    """Cut a read into parts of at most ``most`` bytes; with ``spans``, of which each needs at most
    as many bytes of its file, in one range, unless a single element has more.
    """
    _, begin, end = read.span
    size = end - begin if spans else read.target.nbytes
    dim = read.first
    if size <= most or dim is None:
        yield read
        return
    extent = read.box.shape[dim]
    rows = max(1, most * extent // size)
    for start in range(0, extent, rows):
        part = read.narrow(dim, start, min(rows, extent - start))
        yield from _cut(part, most, spans=spans)
