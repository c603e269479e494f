"""Reads from storage whose requests are expensive: ranges close to each other are one request, many
requests are under way at a time, and nothing is requested twice if it fits into memory.
"""

from __future__ import annotations

import bisect
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torchstore_snapshot.errors import SnapshotCorruptError
from torchstore_snapshot.format.manifest import Piece
from torchstore_snapshot.restoring.files import Files, Rows
from torchstore_snapshot.storage.base import Reader
from torchstore_snapshot.threads import run_tasks

__all__ = ["REQUESTS", "WINDOW", "Fetched", "Span", "hold_max", "merged", "windows"]

#: Requests under way at a time.
REQUESTS = 8
# A request for more than this is cut, so that its parts are read in parallel.
_REQUEST_MAX = 8 << 20
#: Bytes that are held where each is needed only once.
WINDOW = 64 << 20


class Span(NamedTuple):
    """A range of bytes of a file: its index, the first byte, and the end."""

    file: int
    begin: int
    end: int


def hold_max() -> int:
    """Return how many bytes may be held to be checked before they are used: a quarter of the memory
    that is free. What is larger is read twice.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(WINDOW, free // 4)


def merged(spans: Iterable[Span], gap: int) -> list[Span]:
    """Return the ranges to be requested for all ``spans``: those with at most ``gap`` bytes between
    them become one.

    >>> merged([Span(0, 90, 95), Span(0, 0, 10), Span(0, 12, 20), Span(1, 0, 5)], gap=4)
    [Span(file=0, begin=0, end=20), Span(file=0, begin=90, end=95), Span(file=1, begin=0, end=5)]
    """
    found: list[Span] = []
    last, first, until = -1, 0, 0
    for file, begin, end in sorted(spans):
        if end <= begin:
            continue
        if file == last and begin - until <= gap:
            until = max(until, end)
            continue
        if last >= 0:
            found.append(Span(last, first, until))
        last, first, until = file, begin, end
    if last >= 0:
        found.append(Span(last, first, until))
    return found


def windows(spans: Sequence[Span], limit: int) -> Iterator[list[int]]:
    """Divide ``spans`` into groups of at most ``limit`` bytes (or of one span), each of spans that
    are close to each other. Returns their indices.

    >>> list(windows([Span(0, 10, 20), Span(0, 0, 10), Span(0, 20, 25)], limit=20))
    [[1, 0], [2]]
    """
    group: list[int] = []
    room = limit
    for index in sorted(range(len(spans)), key=lambda i: spans[i]):
        nbytes = spans[index].end - spans[index].begin
        if group and nbytes > room:
            yield group
            group, room = [], limit
        group.append(index)
        room -= nbytes
    if group:
        yield group


class _Held:
    """A file of which some ranges are in memory; the rest is read as before."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._begins: list[int] = []
        self._data: list[memoryview] = []

    @property
    def nbytes(self) -> int:
        return self._reader.nbytes

    def add(self, begin: int, data: memoryview) -> None:
        """Add a range; ranges are added in ascending order."""
        self._begins.append(begin)
        self._data.append(data)

    def window(self, offset: int, nbytes: int) -> memoryview | None:
        """Return a range; None if not all of it is in memory, or it is empty."""
        at = bisect.bisect_right(self._begins, offset) - 1
        if at < 0 or not nbytes:
            return None
        start = offset - self._begins[at]
        data = self._data[at]
        return data[start : start + nbytes] if start + nbytes <= data.nbytes else None

    def read_into(self, offset: int, buffer: Any) -> None:
        target = memoryview(buffer)
        found = self.window(offset, target.nbytes)
        if found is None:
            self._reader.read_into(offset, buffer)
        else:
            target[:] = found

    def close(self) -> None:
        """The file belongs to others."""


class Fetched:
    """Files of which some ranges were read into memory. To be used like :class:`Files`.

    Raises:
        SnapshotCorruptError: a file is missing or too short.
    """

    remote = False

    def __init__(self, files: Files, spans: Sequence[Span]) -> None:
        self._files = files
        self._held: dict[int, _Held] = {}
        tasks: list[Callable[[], None]] = []
        for span in merged(spans, files.gap):
            reader = files.reader(span.file)
            data = memoryview(bytearray(span.end - span.begin))
            self._held.setdefault(span.file, _Held(reader)).add(span.begin, data)
            for start in range(0, data.nbytes, _REQUEST_MAX):
                part = data[start : start + _REQUEST_MAX]
                tasks.append(
                    functools.partial(self._read, reader, span.file, span.begin + start, part)
                )
        run_tasks(tasks, REQUESTS)

    def _read(self, reader: Reader, index: int, start: int, part: memoryview) -> None:
        try:
            reader.read_into(start, part)
        except (EOFError, FileNotFoundError) as error:
            raise self._files.corrupt(index, "became shorter, or was removed") from error

    def reader(self, index: int) -> Reader:
        held = self._held.get(index)
        return self._files.reader(index) if held is None else held

    def request_size(self, index: int) -> int:
        return self._files.request_size(index)

    def block(self, index: int) -> int:
        return self._files.block(index)

    def map(self, index: int, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """What is needed is in memory already."""

    def window(
        self, index: int, start: int, nbytes: int, rows: Rows | None = None
    ) -> memoryview | None:
        """See :meth:`Files.window`: a range, if it was read."""
        del rows
        held = self._held.get(index)
        return None if held is None else held.window(start, nbytes)

    def check_kept(self, index: int, path: str | None = None) -> None:
        """See :meth:`Files.check_kept`: what was read into memory stays there."""

    def corrupt(self, index: int, what: str, path: str | None = None) -> SnapshotCorruptError:
        return self._files.corrupt(index, what, path)

    def damaged(self, piece: Piece, path: str) -> SnapshotCorruptError:
        return self._files.damaged(piece, path)
