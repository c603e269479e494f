"""The copy engine: copies many pieces on its own threads, bypassing the cache. Torch-free.

It has its own threads because OMP_NUM_THREADS is 1 under torchrun, and bypasses the cache because
weights are larger than it (see ``native/module.c``; without the compiled module, it uses memmove).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import os
import queue
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

from torchstore_core.errors import ConfigurationError, TransportNotReadyError
from torchstore_core.machine.tasks import call_from_thread
from torchstore_core.machine.threads import start_thread

#: Contiguous bytes: two addresses (or an address and an offset), and their number.
Run = tuple[int, int, int]
#: Rows of bytes; see :func:`copy_grids`.
Grid = tuple[int, int, int, int, int, int]
Task = Callable[[], None]


def compiled(name: str) -> Any:
    """A function of the compiled module; None if that was built without a compiler, so that there
    is none, or from older source than this.
    """
    try:
        return getattr(importlib.import_module("torchstore_core._native"), name, None)
    except ImportError:
        return None


_copy_runs: Callable[[list[Run], int, bool, bool], None] | None = compiled("copy_runs")
_copy_columns: Callable[[list[int], list[int], list[int], int, bool, bool], None] | None = compiled(
    "copy_columns"
)
_copy_rows: Callable[[array[int], bool], None] | None = compiled("copy_rows")
_copy_strided: Callable[[array[int]], None] | None = compiled("copy_strided")
_hash_runs: Callable[[list[Run]], bytes | None] | None = compiled("hash_runs")

#: Bytes of strided copies that one thread takes at a time.
CHUNK = 4 << 20
#: Up to this many bytes are copied by the calling thread: to wake another one, and to be woken by
#: it, takes longer.
DIRECT_MAX = 1 << 20
#: Up to this many bytes, the calling thread copies beside the copy threads: by the time that they
#: have woken it again, it has copied much of them. Meanwhile its event loop stands still.
SHARED_MAX = 4 << 20
#: From this many bytes, copying begins while the rest is still being planned. Below it, the copy
#: threads and the planner would only take the interpreter lock from each other.
OVERLAP_MIN = 32 << 20
#: From this many bytes, a batch is copied with streaming stores that bypass the cache.
STREAM_MIN = 4 << 20
#: Fewer bytes are not hashed by :func:`hash_runs`: XXH3 has other formulas for them.
HASH_MIN = 241

# Rows of fewer bytes, and copies that need more grids than this, are copied by elements.
_ROW_MIN = 256
_MAX_GRIDS = 4096


def has_native() -> bool:
    """Return whether the compiled copy functions are available."""
    return _copy_runs is not None


def copy_threads() -> int:
    """Return the number of copy threads: TORCHSTORE_COPY_THREADS if set, else the CPUs of this
    process, at most 8.

    Raises:
        ConfigurationError: the variable is not a positive number.
    """
    text = os.environ.get("TORCHSTORE_COPY_THREADS", "")
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ConfigurationError(f"TORCHSTORE_COPY_THREADS={text!r} is not a positive number")
        return int(text)
    return min(len(os.sched_getaffinity(0)), 8)


def copy_pieces(pieces: Iterable[Run], *, stream: bool) -> None:
    """Copy ``(destination address, source address, nbytes)`` pieces in the calling thread."""
    copy_runs(pieces, 0, into=False, stream=stream)


def copy_runs(runs: Iterable[Run], base: int, *, into: bool, stream: bool) -> None:
    """Copy ``(address, offset, nbytes)`` runs in the calling thread: from ``base`` plus the offset
    to the address, or, with ``into``, the other way.
    """
    if _copy_runs is not None:
        _copy_runs(list(runs), base, into, stream)
        return
    for address, offset, nbytes in runs:
        if into:
            ctypes.memmove(base + offset, address, nbytes)
        else:
            ctypes.memmove(address, base + offset, nbytes)


def hash_runs(runs: list[Run]) -> list[bytes] | None:
    """Return the hash of each ``(destination address or 0, source address, nbytes)``: XXH3 with 128
    bits, without a seed. Runs with a destination are copied on the way, past the cache. None, and
    nothing is copied, if there is no compiled module, or the processor has no AVX2.

    Raises:
        ValueError: a run has fewer than ``HASH_MIN`` bytes; nothing was copied.
    """
    found = None if _hash_runs is None else _hash_runs(runs)
    return None if found is None else [found[at : at + 16] for at in range(0, len(found), 16)]


def copy_columns(
    addresses: list[int],
    offsets: list[int],
    sizes: list[int],
    base: int,
    *,
    into: bool,
    stream: bool,
) -> None:
    """:func:`copy_runs` with a list for each of the three numbers of a run."""
    if _copy_columns is not None:
        _copy_columns(addresses, offsets, sizes, base, into, stream)
    else:
        copy_runs(zip(addresses, offsets, sizes, strict=True), base, into=into, stream=stream)


def copy_grids(grids: Iterable[Grid], *, stream: bool) -> None:
    """Copy ``(destination address, source address, nbytes, rows, step, step)`` grids in the calling
    thread: rows of ``nbytes`` bytes. The steps are the bytes from one row to the next, in the
    destination and in the source.
    """
    if _copy_rows is not None:
        _copy_rows(array("q", [x for grid in grids for x in grid]), stream)
        return
    for destination, source, nbytes, rows, to_step, of_step in grids:
        for row in range(rows):
            ctypes.memmove(destination + row * to_step, source + row * of_step, nbytes)


def strided(
    shape: Sequence[int],
    itemsize: int,
    to: int,
    to_steps: Sequence[int],
    of: int,
    of_steps: Sequence[int],
) -> Task | None:
    """A task that copies a strided array into another, element by element; the arguments are those
    of :func:`grids`. None where the compiled copy is not available.
    """
    if (copy := _copy_strided) is None:
        return None
    numbers = [to, of, itemsize]
    for extent, to_step, of_step in zip(shape, to_steps, of_steps, strict=True):
        if extent != 1:  # of which there may be more dimensions than memory has addresses for
            numbers += (extent, to_step * itemsize, of_step * itemsize)
    array_of = array("q", numbers)
    return lambda: copy(array_of)


def grids(
    shape: Sequence[int],
    itemsize: int,
    to: int,
    to_steps: Sequence[int],
    of: int,
    of_steps: Sequence[int],
) -> list[Grid] | None:
    """Plan the copy of a strided array into another: grids of rows that are contiguous in both.

    Args:
        to, of: addresses of the first elements of destination and source.
        to_steps, of_steps: elements from one index to the next, by dimension.

    Returns:
        The grids; None where copying by rows does not pay: the rows are too short, there are too
        many grids, or the compiled copy is not available.

    >>> grids((2, 3, 4), 100, 0, (12, 4, 1), 5000, (80, 8, 1)) if has_native() else "none"
    [(0, 5000, 400, 3, 400, 800), (1200, 13000, 400, 3, 400, 800)]
    """
    last = len(shape)
    run = 1
    while last and (shape[last - 1] == 1 or to_steps[last - 1] == of_steps[last - 1] == run):
        last -= 1
        run *= shape[last]
    if not last:
        return [(to, of, run * itemsize, 1, 0, 0)]
    outer = shape[: last - 1]
    if run * itemsize < _ROW_MIN or prod(outer) > _MAX_GRIDS or _copy_rows is None:
        return None
    row = (
        run * itemsize,
        shape[last - 1],
        to_steps[last - 1] * itemsize,
        of_steps[last - 1] * itemsize,
    )
    places = [(to, of)]
    for extent, to_step, of_step in zip(outer, to_steps, of_steps, strict=False):
        a, b = to_step * itemsize, of_step * itemsize
        places = [(x + i * a, y + i * b) for x, y in places for i in range(extent)]
    return [(x, y, *row) for x, y in places]


def cut_grids(found: Iterable[Grid], chunk: int) -> Iterator[list[Grid]]:
    """Split and group grids into chunks of about ``chunk`` bytes, lazily and in order."""
    current: list[Grid] = []
    room = chunk
    for to, of, nbytes, rows, to_step, of_step in found:
        while rows:
            some = min(rows, max(room // nbytes, 1))
            current.append((to, of, nbytes, some, to_step, of_step))
            to, of, rows = to + some * to_step, of + some * of_step, rows - some
            room -= some * nbytes
            if room < nbytes:
                yield current
                current, room = [], chunk
    if current:
        yield current


def on_copy_thread() -> bool:
    """Whether a copy thread runs this, and not the caller of :func:`run`."""
    return _here.is_copy_thread


def chunk_size(total: int) -> int:
    """Return how many bytes one thread takes at a time in a batch of ``total`` bytes.

    Chunks are large, because for each one the interpreter lock must be acquired (1 MB chunks reach
    0.84 of the floor, 16 MB chunks 0.95), but there are several per thread, so that all threads
    finish at about the same time.
    """
    if total <= 4 << 20:  # with any number of threads
        return 1 << 20
    return min(max(total // (4 * copy_threads()), 1 << 20), 16 << 20)


def plan(pieces: Iterable[Run], chunk: int = CHUNK) -> list[list[Run]]:
    """Return all chunks of :func:`cut` as a list.

    >>> plan([(0, 100, 10), (10, 200, 3)], chunk=4)
    [[(0, 100, 4)], [(4, 104, 4)], [(8, 108, 2), (10, 200, 2)], [(12, 202, 1)]]
    """
    return list(cut(pieces, chunk))


def cut(pieces: Iterable[Run], chunk: int) -> Iterator[list[Run]]:
    """Split and group pieces into chunks of ``chunk`` bytes, lazily and in order."""
    current: list[Run] = []
    room = chunk
    for destination, source, nbytes in pieces:
        while nbytes > room:
            current.append((destination, source, room))
            destination += room
            source += room
            nbytes -= room
            yield current
            current = []
            room = chunk
        if nbytes:
            current.append((destination, source, nbytes))
            room -= nbytes
            if not room:
                yield current
                current = []
                room = chunk
    if current:
        yield current


class CopyJob:
    """Tasks that threads take one by one; the job is done when all of them have ended.

    Args:
        open_end: further tasks may follow with :meth:`add`, until :meth:`close`.
    """

    def __init__(
        self, tasks: Sequence[Task], loop: asyncio.AbstractEventLoop, *, open_end: bool = False
    ) -> None:
        self._tasks = list(tasks)
        self._next = 0
        self._running = 0
        self._open = open_end
        self._changed = threading.Condition()
        self._idle = threading.Event()
        self._loop = loop
        self._error: BaseException | None = None
        self._is_awaited = True
        self.future: asyncio.Future[None] = loop.create_future()

    def add(self, task: Task) -> bool:
        """Add a task; return False if the job has failed and accepts no more."""
        with self._changed:
            if not self._open:
                return False
            self._tasks.append(task)
            self._changed.notify()
        return True

    def help(self) -> None:
        """Run tasks in the calling thread until none is left; raises what a task raises."""
        while True:
            with self._changed:
                if self._next >= len(self._tasks):
                    return
                task = self._tasks[self._next]
                self._next += 1
            task()

    def has_ended(self) -> bool:
        """Whether all tasks have ended, after :meth:`help`. Then ``future`` is not needed.

        Raises:
            Exception: what a task in a copy thread has raised.
        """
        with self._changed:
            if self._running:
                return False
        self._is_awaited = False
        if self._error is not None:
            raise self._error
        return True

    def close(self) -> None:
        """Declare that no more tasks will be added."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
            ended = self._running == 0 and self._next >= len(self._tasks)
        if ended:
            self._end()

    def work(self) -> None:
        """Run tasks until none is left. Called by the copy threads."""
        while True:
            with self._changed:
                while self._open and self._next >= len(self._tasks):
                    self._changed.wait()
                if self._next >= len(self._tasks):
                    return
                task = self._tasks[self._next]
                self._next += 1
                self._running += 1
            error: BaseException | None = None
            try:
                task()
            except Exception as caught:  # noqa: BLE001 - handed to the awaiting caller
                error = caught
            del task
            with self._changed:
                self._running -= 1
                if error is not None:
                    self._error = self._error or error
                    self._shut()
                last = self._running == 0 and self._next >= len(self._tasks) and not self._open
            if last:
                self._end()

    def _shut(self) -> None:
        self._next = len(self._tasks)
        self._open = False
        self._changed.notify_all()

    def _end(self) -> None:
        self._idle.set()
        call_from_thread(self._loop, self._finish)

    def _finish(self) -> None:
        if self._is_awaited and not self.future.done():
            if self._error is not None:
                self.future.set_exception(self._error)
            else:
                self.future.set_result(None)

    def stop(self) -> None:
        """Start no further task, and block until the running ones (a few MB each) have ended.
        Nobody waits for ``future`` any more; its event loop may be closed.
        """
        self._is_awaited = False
        with self._changed:
            self._shut()
            if self._running == 0:
                self._idle.set()
        self._idle.wait()


class _Pool:
    """Daemon threads that run jobs. There is one pool per process, recreated after a fork.

    Args:
        wanted: how many threads to start; there are fewer where the system has no more.
    """

    def __init__(self, wanted: int) -> None:
        self.threads = 0
        self._jobs: queue.SimpleQueue[CopyJob] = queue.SimpleQueue()
        with contextlib.suppress(TransportNotReadyError):
            while self.threads < wanted:
                start_thread(self._serve, f"torchstore-copy-{self.threads}")
                self.threads += 1

    def submit(self, job: CopyJob, width: int) -> None:
        for _ in range(min(width, self.threads)):
            self._jobs.put(job)

    def _serve(self) -> None:
        _here.is_copy_thread = True
        while True:
            job = self._jobs.get()
            job.work()
            del job  # do not keep the last job's tensors alive while idle


class _Here(threading.local):
    is_copy_thread = False


_here = _Here()
_pool: _Pool | None = None
_pool_lock = threading.Lock()


def _get_pool() -> _Pool:
    global _pool
    with _pool_lock:
        if _pool is None or not _pool.threads:
            _pool = _Pool(copy_threads())
        return _pool


def _after_fork() -> None:
    global _pool, _pool_lock
    _pool = None
    _pool_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


async def run(tasks: Iterable[Task], nbytes: int) -> None:
    """Run copy tasks: small batches in the calling thread, larger ones there and on the copy
    threads (if there are any), and large ones on these alone, which start while ``tasks`` is still
    being planned.

    When it raises, ``CancelledError`` included, no task is running any more.
    """
    if nbytes <= DIRECT_MAX or not (pool := _get_pool()).threads:
        for task in tasks:
            task()
        return
    overlap = nbytes >= OVERLAP_MIN
    first = () if overlap else list(tasks)
    job = CopyJob(first, asyncio.get_running_loop(), open_end=overlap)
    helps = nbytes <= SHARED_MAX
    try:
        pool.submit(job, pool.threads if overlap else len(first) - helps)
        if helps:
            job.help()
            if job.has_ended():
                return
        elif overlap:
            for task in tasks:
                if not job.add(task):
                    break
            job.close()
        elif not first:
            return
        await job.future
    except BaseException:
        job.stop()
        raise
