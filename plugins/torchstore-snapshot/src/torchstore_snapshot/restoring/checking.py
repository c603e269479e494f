"""Compares the bytes of files with the hashes in the manifest. Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import xxhash

from torchstore_snapshot.format.hashes import block_hash, blocks, combined
from torchstore_snapshot.format.manifest import Piece
from torchstore_snapshot.progress import Advance
from torchstore_snapshot.restoring.fetching import REQUESTS, WINDOW, Fetched, Span, windows
from torchstore_snapshot.restoring.files import Files
from torchstore_snapshot.threads import run_tasks

__all__ = ["check_pieces"]

# Bytes that are hashed at a time where a file cannot be mapped: they stay in the cache.
_SCRATCH = 256 << 10
# Pieces are checked in groups of about this size, so that small ones cost no task each.
_GROUP = 1 << 20

_Block = tuple[str, Piece, int, int, list[bytes], int]


def check_pieces(
    files: Files | Fetched,
    pieces: Sequence[tuple[str, Piece]],
    advance: Advance | None = None,
) -> None:
    """Compare the hashes of pieces, given with the paths of their tensors.

    Args:
        advance: called with numbers of bytes that were checked, by several threads.

    Raises:
        SnapshotCorruptError: the bytes of a piece have changed.
    """
    distinct = list({(piece.file, piece.start): (path, piece) for path, piece in pieces}.values())
    if not (isinstance(files, Files) and files.remote):
        _check(files, distinct, advance, None)
        return
    spans = [Span(p.file, p.start, p.start + p.nbytes) for _, p in distinct]
    for group in windows(spans, WINDOW):
        mine = [distinct[i] for i in group]
        if sum(piece.nbytes for _, piece in mine) <= WINDOW:
            _check(Fetched(files, [spans[i] for i in group]), mine, advance, None)
        else:  # a large piece, block by block
            _check(files, mine, advance, REQUESTS)


def _check(
    files: Files | Fetched,
    distinct: Sequence[tuple[str, Piece]],
    advance: Advance | None,
    threads: int | None,
) -> None:
    hashes = [[b""] * len(list(blocks(piece.nbytes))) for _, piece in distinct]

    def tasks() -> Iterator[Callable[[], None]]:
        group: list[_Block] = []
        room = _GROUP
        for (path, piece), found in zip(distinct, hashes, strict=True):
            for number, (begin, end) in enumerate(blocks(piece.nbytes)):
                group.append((path, piece, begin, end, found, number))
                room -= end - begin
                if room <= 0:
                    yield functools.partial(_hash_blocks, files, group, advance)
                    group, room = [], _GROUP
        if group:
            yield functools.partial(_hash_blocks, files, group, advance)

    run_tasks(tasks(), threads)
    for (path, piece), found in zip(distinct, hashes, strict=True):
        if combined(found) != piece.digest:
            raise files.damaged(piece, path)


def _hash_blocks(files: Files | Fetched, group: Sequence[_Block], advance: Advance | None) -> None:
    for path, piece, begin, end, found, number in group:
        start, nbytes = piece.start + begin, end - begin
        window = files.window(piece.file, start, nbytes)
        if window is not None:
            found[number] = block_hash(window)
        else:
            found[number] = _hash_read(files, path, piece, start, nbytes)
        if advance is not None:
            advance(nbytes)


def _hash_read(files: Files | Fetched, path: str, piece: Piece, start: int, nbytes: int) -> bytes:
    """Hash a range through a buffer that stays in the cache: the bytes are not needed."""
    reader = files.reader(piece.file)
    hasher = xxhash.xxh3_128()
    size = max(_SCRATCH, files.request_size(piece.file))
    scratch = memoryview(bytearray(min(size, nbytes)))
    for at in range(0, nbytes, max(len(scratch), 1)):
        part = scratch[: min(len(scratch), nbytes - at)]
        try:
            reader.read_into(start + at, part)
        except EOFError as error:
            raise files.corrupt(piece.file, "became shorter", path) from error
        hasher.update(part)
    return hasher.digest()
