"""Compares the bytes of files with the hashes in the manifest. Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import xxhash

from torchstore_core.machine.copying import Run
from torchstore_snapshot.format.hashes import HASH, blocks, combined
from torchstore_snapshot.format.manifest import Piece
from torchstore_snapshot.progress import Advance
from torchstore_snapshot.restoring.fetching import REQUESTS, WINDOW, Fetched, Span, windows
from torchstore_snapshot.restoring.files import Files, adjacent
from torchstore_snapshot.restoring.hashing import hashes_of
from torchstore_snapshot.restoring.mappings import address_of
from torchstore_snapshot.threads import run_tasks, task_size

__all__ = ["UNLIMITED", "Limits", "Range", "check_ranges", "checkable", "covering", "holds"]
__all__ += ["united", "whole_piece"]

# Bytes that are hashed at a time where a file cannot be mapped: they stay in the cache.
_SCRATCH = 256 << 10


class Limits(NamedTuple):
    """What reading may use.

    Args:
        threads: how many threads; None: as many as suit the storage.
        nbytes: of the memory that each of them may use for itself; None: no matter.
    """

    threads: int | None = None
    nbytes: int | None = None


UNLIMITED = Limits()


class Range(NamedTuple):
    """A range of bytes of a piece.

    Args:
        path: of the tensor, for errors.
        begin, end: the first byte, and the end, from the beginning of the piece.
    """

    path: str
    piece: Piece
    begin: int
    end: int

    @property
    def span(self) -> Span:
        """Where it is in its file."""
        start = self.piece.start
        return Span(self.piece.file, start + self.begin, start + self.end)


class _Block(NamedTuple):
    """A block to be hashed: its file, its first byte and its end there, and where its hash goes."""

    of: Range
    file: int
    start: int
    end: int
    found: dict[int, bytes]
    number: int


def whole_piece(path: str, piece: Piece) -> Range:
    """Return all of a piece."""
    return Range(path, piece, 0, piece.nbytes)


def checkable(of: Range, size: int) -> Iterator[tuple[int, int, int]]:
    """Return the blocks that can be checked when a range is read, those that lie inside of it: the
    number of each, its first byte and its end, from the beginning of the piece. Version 1 of the
    format has no hashes of blocks, so that there a piece is checked as a whole, or not at all.

    Args:
        size: bytes of a block.

    >>> piece = Piece(0, 0, 25, "", blocks=bytes(3 * HASH))
    >>> list(checkable(Range("m/w", piece, 5, 25), size=10))
    [(1, 10, 20), (2, 20, 25)]
    """
    piece = of.piece
    whole = of.begin == 0 and of.end == piece.nbytes
    if not whole and not piece.blocks:
        return
    first = -(-of.begin // size)
    for number, (begin, end) in enumerate(blocks(piece.nbytes, size)):
        if end > of.end:
            return
        if number >= first:
            yield number, begin, end


def covering(of: Range, size: int) -> Range:
    """Return the smallest range around one that consists of whole blocks: what has to be read to
    check all of it.

    Args:
        size: bytes of a block.

    >>> piece = Piece(0, 0, 25, "", blocks=bytes(3 * HASH))
    >>> found = covering(Range("m/w", piece, 11, 12), size=10)
    >>> found.begin, found.end
    (10, 20)
    """
    piece = of.piece
    if not piece.blocks:
        return whole_piece(of.path, piece)
    begin, end = of.begin // size * size, -(-of.end // size) * size
    return Range(of.path, piece, begin, min(end, piece.nbytes))


def united(ranges: Iterable[Range]) -> list[Range]:
    """Return the same ranges without overlaps, so that no block is checked twice.

    >>> piece = Piece(0, 0, 25, "", blocks=bytes(3 * HASH))
    >>> both = [Range("m/w", piece, 10, 25), Range("m/w", piece, 0, 20)]
    >>> [(of.begin, of.end) for of in united(both)]
    [(0, 25)]
    """
    found: list[Range] = []
    for of in sorted(ranges, key=lambda of: (of.piece.file, of.piece.start, of.begin)):
        last = found[-1] if found else None
        if last is None or last.piece != of.piece or of.begin > last.end:
            found.append(of)
        elif of.end > last.end:
            found[-1] = last._replace(end=of.end)
    return found


def holds(of: Range, found: Mapping[int, bytes]) -> bool:
    """Whether the hashes of blocks, by number, are those that are stored."""
    stored = of.piece.blocks
    if stored:
        return all(stored[HASH * n : HASH * (n + 1)] == found[n] for n in found)
    return not found or combined(found[n] for n in sorted(found)) == of.piece.digest


def check_ranges(
    files: Files | Fetched,
    ranges: Sequence[Range],
    advance: Advance | None = None,
    limits: Limits = UNLIMITED,
) -> None:
    """Compare the hashes of all blocks that lie in the ranges.

    Args:
        advance: called with numbers of bytes that were checked, by several threads.

    Raises:
        SnapshotCorruptError: the bytes of a piece have changed.
    """
    known = {(of.piece.file, of.piece.start, of.begin, of.end): of for of in ranges}
    distinct = [known[at] for at in sorted(known)]
    if limits.nbytes is not None or not (isinstance(files, Files) and files.remote):
        _check(files, distinct, advance, limits)
        return
    spans = [of.span for of in distinct]
    for group in windows(spans, WINDOW):
        mine = [distinct[i] for i in group]
        if sum(of.end - of.begin for of in mine) <= WINDOW:
            _check(Fetched(files, [spans[i] for i in group]), mine, advance, limits)
        else:  # a large piece, block by block
            _check(files, mine, advance, Limits(REQUESTS))


def _check(
    files: Files | Fetched, distinct: Sequence[Range], advance: Advance | None, limits: Limits
) -> None:
    hashes: list[dict[int, bytes]] = [{} for _ in distinct]

    def tasks() -> Iterator[Callable[[], None]]:
        # Several blocks to a task: they are read in turn, and small pieces cost no task each.
        group: list[_Block] = []
        left = sum(of.end - of.begin for of in distinct)
        room = task_size(left)
        for of, found in zip(distinct, hashes, strict=True):
            file, first = of.piece.file, of.piece.start
            for number, begin, end in checkable(of, files.block(file)):
                group.append(_Block(of, file, first + begin, first + end, found, number))
                room -= end - begin
                left -= end - begin
                if room <= 0:
                    yield functools.partial(_hash_blocks, files, group, advance, limits)
                    group, room = [], task_size(left)
        if group:
            yield functools.partial(_hash_blocks, files, group, advance, limits)

    run_tasks(tasks(), limits.threads)
    for of, found in zip(distinct, hashes, strict=True):
        if not holds(of, found):
            raise files.damaged(of.piece, of.path)


def _hash_blocks(
    files: Files | Fetched, group: Sequence[_Block], advance: Advance | None, limits: Limits
) -> None:
    mapped: list[_Block] = []
    runs: list[Run] = []
    for together in adjacent(group):
        file, start = together[0].file, together[0].start
        window = files.window(file, start, together[-1].end - start)
        if window is not None:
            moved = address_of(window) - start
            mapped += together
            runs += [(0, moved + block.start, block.end - block.start) for block in together]
            continue
        for block in together:
            nbytes = block.end - block.start
            block.found[block.number] = _hash_read(files, block.of, block.start, nbytes, limits)
    for block, digest in zip(mapped, hashes_of(runs), strict=True):
        block.found[block.number] = digest
    for index in {block.file for block in mapped}:
        files.check_kept(index)
    if advance is not None:
        advance(sum(block.end - block.start for block in group))


def _hash_read(files: Files | Fetched, of: Range, start: int, nbytes: int, limits: Limits) -> bytes:
    """Hash a range through a buffer that stays in the cache: the bytes are not needed."""
    reader = files.reader(of.piece.file)
    hasher = xxhash.xxh3_128()
    size = max(_SCRATCH, files.request_size(of.piece.file))
    if limits.nbytes is not None:
        size = min(size, limits.nbytes)
    scratch = memoryview(bytearray(min(size, nbytes)))
    for at in range(0, nbytes, max(len(scratch), 1)):
        part = scratch[: min(len(scratch), nbytes - at)]
        try:
            reader.read_into(start + at, part)
        except (EOFError, FileNotFoundError) as error:
            raise files.corrupt(of.piece.file, "became shorter, or was removed", of.path) from error
        hasher.update(part)
    return hasher.digest()
