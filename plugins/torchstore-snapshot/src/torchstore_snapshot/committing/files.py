"""Writes data files, on several threads, hashing as it goes."""

from __future__ import annotations

import contextlib
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import xxhash

from torchstore_core.machine.copying import copy_threads
from torchstore_snapshot.format.hashes import BLOCK, Digest, summed
from torchstore_snapshot.format.safetensors_files import Layout
from torchstore_snapshot.garbage import no_collections
from torchstore_snapshot.progress import Advance
from torchstore_snapshot.storage.base import Storage, Writer
from torchstore_snapshot.storage.gathering import (
    STEP,
    Block,
    Elsewhere,
    Gathered,
    Part,
    Run,
    blocks_of,
)
from torchstore_snapshot.threads import interleaved, run_tasks

__all__ = ["OpenFiles", "Scattered", "Source"]


class Scattered(ABC):
    """A tensor on the host whose bytes do not lie in a row in memory."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """How many there are."""

    @abstractmethod
    def write(self, writer: Writer | None, start: int, digests: list[bytes]) -> None:
        """Write them in a row, if there is a writer, and append the hashes of their blocks."""


class Source(NamedTuple):
    """Bytes that go into a file.

    Args:
        file: the index of the file.
        unit: the index of the tensor in that file.
        begin: where in the tensor the bytes begin: a multiple of ``BLOCK``.
        data: bytes, in one piece or in several, or elsewhere, or scattered (all of them: ``begin``
            is 0).
        owner: kept alive until the bytes have been written.
    """

    file: int
    unit: int
    begin: int
    data: memoryview | list[memoryview] | Elsewhere | Scattered
    owner: Any = None


class _File:
    """A file while it is written, and the hashes of what is in it.

    Args:
        name, layout: what it is.

    Attributes:
        writer: there is one from its first byte on.
        begun: whether somebody writes its header.
        left: how many bytes are still to be written, with the header.
        finished: whether the writer was closed.
    """

    def __init__(self, name: str, layout: Layout) -> None:
        self.name, self.layout = name, layout
        self.writer: Writer | None = None
        self.left = layout.nbytes
        self.begun = False
        self.finished = False
        self.hashes: list[list[bytes]] = [[] for _ in layout.starts]


class OpenFiles:
    """The files of a take while they are written. Each is opened when its first bytes are, and
    finished as soon as it is whole: there may be more files than a process may have open.

    Args:
        files: the names and layouts of the files.
        durable: flush the files, so that they would survive a power failure.
        threads: how many threads write; None: the number of copy threads.
        advance: told how many bytes were written.
        step: bytes that are written at a time, see :class:`.Gathered`, and that arrive at a time
            from elsewhere.
    """

    def __init__(
        self,
        storage: Storage,
        files: Sequence[tuple[str, Layout]],
        *,
        durable: bool,
        threads: int | None = None,
        advance: Advance | None = None,
        step: int = STEP,
    ) -> None:
        self._advance = advance
        self._step = step
        self._storage = storage
        self._files = [_File(name, layout) for name, layout in files]
        self._durable = durable
        self._threads = threads
        self._lock = threading.Lock()
        self._in_order = False

    def begin(self) -> None:
        """Open the first file, so that a folder that cannot be written to is found early.

        Raises:
            OSError: it cannot be created.
        """
        if self._files:
            self._begin(self._files[0])

    def write(self, sources: Iterable[Source]) -> None:
        """Write some of the files' contents. Where a file must be written in order, the sources of
        all calls must be in that order. Only a few files are written to at a time, so that few are
        open: one after the other, or, if ``sources`` is a list, one by each thread.

        Raises:
            OSError: the storage failed.
            UnsupportedValueError: the memory of a tensor was freed in the meantime.
        """
        lanes: dict[int, list[Source]] = {}
        if isinstance(sources, list) and len(self._files) > 1:
            for source in sources:
                lanes.setdefault(source.file, []).append(source)
        threads = self._threads or copy_threads()
        if len(lanes) > 1:
            tasks = interleaved([self._tasks(mine) for mine in lanes.values()], threads)
        else:
            tasks = self._tasks(sources)
        run_tasks(tasks, threads)

    def close(self) -> list[list[Digest]]:
        """Finish all files. Returns, for each file, the hashes of its tensors, in order.

        Raises:
            OSError: the storage failed.
        """
        rest = [file for file in self._files if not file.finished]
        run_tasks([functools.partial(self._finish_empty, file) for file in rest], self._threads)
        with no_collections():
            return [[summed(unit) for unit in file.hashes] for file in self._files]

    def abort(self) -> None:
        """Remove all files, whatever has been written. Never raises."""
        begun = [(file.name, file.writer) for file in self._files if file.writer is not None]
        for _, writer in begun:
            writer.abort()
        for name, _ in begun:  # those that were closed already
            try:
                self._storage.delete(name)
            except OSError:
                return  # a failed take's leavings are invisible, and gc collects them

    def _tasks(self, sources: Iterable[Source]) -> Iterator[Callable[[], None]]:
        in_order: dict[int, list[Source]] = {}
        if not self._files:
            return
        run, running = Run(0, []), self._files[0]
        for source in sources:
            file = self._files[source.file]
            begins = not file.begun and not self._in_order
            if begins and file.writer is None:
                self._begin(file)
            if self._in_order:
                in_order.setdefault(source.file, []).append(source)
                continue
            if begins:
                file.begun = True
                yield functools.partial(self._write, running, run)
                run, running = Run(0, [memoryview(file.layout.header)]), file
            data = source.data
            if isinstance(data, Scattered):
                yield functools.partial(self._write_scattered, file, source.unit, data)
                continue
            at = file.layout.starts[source.unit] + source.begin
            for block in _blocks(data, source, file.hashes[source.unit]):
                if running is not file or run.end != at or run.full:
                    follows = running is file and run.end == at
                    following = run.following() if follows else Run(at, [])
                    yield functools.partial(self._write, running, run)
                    run, running = following, file
                run.add(block)
                at += block.nbytes
        yield functools.partial(self._write, running, run)
        for index, mine in in_order.items():
            yield functools.partial(self._write_in_order, self._files[index], mine)

    def _write_in_order(self, file: _File, sources: list[Source]) -> None:
        if file.writer is None:
            self._begin(file)
        if file.left == file.layout.nbytes:
            self._write_header(file)
        starts = file.layout.starts
        for source in sorted(sources, key=lambda s: (starts[s.unit], s.begin)):
            data = source.data
            if isinstance(data, Scattered):
                self._write_scattered(file, source.unit, data)
                continue
            at = starts[source.unit] + source.begin
            for block in _blocks(data, source, file.hashes[source.unit]):
                run = Run(at, [])
                run.add(block)
                self._write(file, run)
                at += block.nbytes

    def _begin(self, file: _File) -> Writer:
        writer = file.writer = self._storage.create(file.name, file.layout.nbytes)
        self._in_order = not writer.random_access
        return writer

    def _write_header(self, file: _File) -> None:
        writer = file.writer or self._begin(file)
        writer.write(0, file.layout.header)
        self._written(file, len(file.layout.header))

    def _write_scattered(self, file: _File, unit: int, data: Scattered) -> None:
        data.write(file.writer, file.layout.starts[unit], file.hashes[unit])
        self._written(file, data.nbytes)
        if self._advance is not None:
            self._advance(data.nbytes)

    def _write(self, file: _File, run: Run) -> None:
        if file.writer is None or not (run.before or run.blocks):
            return
        with contextlib.ExitStack() as closing:
            elsewhere = run.elsewhere
            arrivals: Generator[memoryview, None, None] | None = None
            if elsewhere is not None:
                arrivals = elsewhere.arrivals(run.windows(self._step))
                closing.callback(arrivals.close)
            gathered = Gathered(file.writer, run.start, self._step)
            for part in run.before:
                for step in gathered.steps(part, arrivals):
                    gathered.add(step)
            for block in run.blocks:
                hasher = xxhash.xxh3_128()
                for part in block.parts:
                    for step in gathered.steps(part, arrivals):
                        hasher.update(step)
                        gathered.add(step)
                block.found[block.number] = hasher.digest()
            if run.stop == run.end:
                gathered.flush()
        self._written(file, run.stop - run.start)
        if self._advance is not None and run.nbytes:
            self._advance(run.nbytes)

    def _written(self, file: _File, nbytes: int) -> None:
        """Count what was written; the last to do so finishes the file."""
        if not nbytes:
            return
        with self._lock:
            file.left -= nbytes
            whole = not file.left
        if whole:
            self._finish(file)

    def _finish(self, file: _File) -> None:
        if file.writer is not None:
            file.writer.close(durable=self._durable)
            file.finished = True

    def _finish_empty(self, file: _File) -> None:
        """Finish a file of which nothing was written: it has no data, but a header."""
        if file.left == file.layout.nbytes:
            self._write_header(file)
        if not file.finished:
            self._finish(file)


def _blocks(
    data: memoryview | list[memoryview] | Elsewhere, source: Source, found: list[bytes]
) -> Iterator[Block]:
    """The blocks of a source whose bytes are in a row, in memory or elsewhere."""
    parts: Sequence[Part] = data if isinstance(data, list) else [data]
    for number, block in enumerate(blocks_of(parts), source.begin // BLOCK):
        found.extend(b"" for _ in range(number + 1 - len(found)))
        yield Block(block, found, number, source.owner)
