"""The floors: what the machine itself can do, measured in the same process and run as the store.

They are copies between two warm anonymous buffers with as many threads as CPUs, in several ways;
first touches of a fresh memfd; clones of tensors, one by one; bare mappings. All return seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from torchstore_cli.bench.measuring import timed_call
from torchstore_core.machine import copying

__all__ = [
    "COLD",
    "FLOOR_MAX",
    "PIECES",
    "WARM",
    "ColdTouch",
    "Mappings",
    "WarmCopy",
    "clone_each",
    "copy_tensors",
    "cpus",
    "interleave",
    "warm_copy",
]

#: The ways of the plain floor: threads take turns at pieces as large as the tensors, cut at CHUNK.
PIECES = ("copy_ of tensors", "memmove of tensors")
#: The strictest floor is the fastest of these and those above.
WARM = (*PIECES, "memmove of one share a thread", "copy_ of one buffer", "streaming copy")
COLD = ("first copy into a memfd", "memset of a memfd")
CHUNK = 8 << 20
#: Floors are copies of at most this many bytes, however large the set is.
FLOOR_MAX = 1 << 30

Piece = tuple[int, int, int]  # destination address, source address, bytes


def cpus() -> int:
    """Return the number of CPUs of this process, which is the number of threads of every floor."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Threads:
    """As many threads as CPUs; torch starts no further threads in them."""

    def __init__(self) -> None:
        self.count = cpus()
        before = torch.get_num_threads()
        ready = threading.Barrier(self.count)

        def prepare() -> None:
            torch.set_num_threads(1)  # for this thread; the process's setting is restored below
            ready.wait(30)

        self._pool = ThreadPoolExecutor(self.count)
        for done in [self._pool.submit(prepare) for _ in range(self.count)]:
            done.result()
        torch.set_num_threads(before)

    def each(self, call: Callable[[int], object]) -> None:
        """Call ``call(index of the thread)`` in every thread at once."""
        for done in [self._pool.submit(call, at) for at in range(self.count)]:
            done.result()

    def share(self, items: Iterable[object], call: Callable[..., object]) -> None:
        """Call ``call(item)`` for all items, which the threads take one by one."""
        todo = iter(items)
        lock = threading.Lock()
        nothing = object()

        def work(_: int) -> None:
            while True:
                with lock:
                    item = next(todo, nothing)
                if item is nothing:
                    return
                call(item)

        self.each(work)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def cut(sizes: Iterable[int], limit: int, chunk: int = CHUNK) -> list[tuple[int, int]]:
    """Return ``(offset, bytes)`` of adjacent pieces of these sizes, cut at ``chunk`` bytes, up to
    ``limit`` bytes in all.

    >>> cut([3, 10], 12, chunk=4)
    [(0, 3), (3, 4), (7, 4), (11, 1)]
    """
    pieces: list[tuple[int, int]] = []
    at = 0
    for size in sizes:
        end = min(at + size, limit)
        while at < end:
            step = min(chunk, end - at)
            pieces.append((at, step))
            at += step
    return pieces


class WarmCopy:
    """Copies of ``nbytes`` bytes between two warm buffers, in every way of :data:`WARM`."""

    def __init__(self, nbytes: int, sizes: Sequence[int]) -> None:
        self.nbytes = nbytes
        self.threads = Threads()
        self._source = torch.full((nbytes,), 0x5A, dtype=torch.uint8)
        self._target = torch.zeros(nbytes, dtype=torch.uint8)
        repeats = nbytes // max(1, sum(sizes)) + 1
        self._pieces = cut([*sizes] * repeats, nbytes)
        self._views = [
            (self._target[at : at + size], self._source[at : at + size])
            for at, size in self._pieces
        ]
        self.kinds: dict[str, Callable[[], float]] = {
            PIECES[0]: self._torch_pieces,
            PIECES[1]: self._memmove_pieces,
            WARM[2]: self._memmove_shares,
            WARM[3]: self._torch_whole,
        }
        if copying.has_native():
            self.kinds[WARM[4]] = self._streaming

    def _torch_pieces(self) -> float:
        return timed_call(
            lambda: self.threads.share(self._views, lambda view: view[0].copy_(view[1]))
        )

    def _memmove_pieces(self) -> float:
        to, of = self._target.data_ptr(), self._source.data_ptr()
        return _copy_pieces(self.threads, [(to + at, of + at, n) for at, n in self._pieces])

    def _memmove_shares(self) -> float:
        to, of = self._target.data_ptr(), self._source.data_ptr()
        share = -(-self.nbytes // self.threads.count)

        def copy(thread: int) -> None:
            at = thread * share
            ctypes.memmove(to + at, of + at, max(0, min(share, self.nbytes - at)))

        return timed_call(lambda: self.threads.each(copy))

    def _torch_whole(self) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads.count)
        seconds = timed_call(lambda: self._target.copy_(self._source))
        torch.set_num_threads(before)
        return seconds

    def _streaming(self) -> float:
        to, of = self._target.data_ptr(), self._source.data_ptr()
        chunks = copying.plan([(to, of, self.nbytes)])
        return timed_call(
            lambda: self.threads.share(
                chunks, lambda chunk: copying.copy_pieces(chunk, stream=True)
            )
        )

    def close(self) -> None:
        """End the threads."""
        self.threads.close()


def warm_copy(sizes: Sequence[int], limit: int) -> WarmCopy | None:
    """Return the warm-copy floors for tensors of these sizes: copies of as many bytes, but at most
    ``limit``, after an unmeasured round that warms them up. None if there is nothing to copy.
    """
    nbytes = min(sum(sizes), limit)
    if not nbytes:
        return None
    made = WarmCopy(nbytes, sizes)
    interleave(made.kinds, 0)
    return made


def _copy_pieces(threads: Threads, pieces: Iterable[Piece]) -> float:
    return timed_call(lambda: threads.share(pieces, lambda piece: ctypes.memmove(*piece)))


def copy_tensors(
    threads: Threads, targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]
) -> float:
    """Copy contiguous tensors by memmove on the threads; return the seconds."""
    pieces: list[Piece] = []
    for target, source in zip(targets, sources, strict=True):
        to, of = target.data_ptr(), source.data_ptr()
        whole = source.numel() * source.element_size()
        pieces.extend((to + at, of + at, n) for at, n in cut([whole], whole))
    return _copy_pieces(threads, pieces)


class ColdTouch:
    """First touches of ``nbytes`` bytes of fresh memfds, a share for each thread."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.threads = Threads()
        self._source = torch.full((nbytes,), 0x5A, dtype=torch.uint8)
        self.kinds: dict[str, Callable[[], float]] = {
            COLD[0]: lambda: self._touch(copy=True),
            COLD[1]: lambda: self._touch(copy=False),
        }

    def _touch(self, *, copy: bool) -> float:
        of = self._source.data_ptr()
        fd = os.memfd_create("torchstore-bench", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, self.nbytes)
            with mmap.mmap(fd, self.nbytes) as memory:
                block = ctypes.c_char.from_buffer(memory)
                to = ctypes.addressof(block)
                share = (self.nbytes // self.threads.count + mmap.PAGESIZE) & -mmap.PAGESIZE

                def touch(thread: int) -> None:
                    at = thread * share
                    size = max(0, min(share, self.nbytes - at))
                    if copy:  # in steps: one huge memmove goes past the cache, and faults slowly
                        for start, step in cut([size], size, 1 << 20):
                            ctypes.memmove(to + at + start, of + at + start, step)
                    else:
                        ctypes.memset(to + at, 0x5A, size)

                seconds = timed_call(lambda: self.threads.each(touch))
                del block
            return seconds
        finally:
            os.close(fd)

    def close(self) -> None:
        """End the threads."""
        self.threads.close()


def clone_each(tensors: Iterable[torch.Tensor]) -> float:
    """Clone tensors one by one in this thread, as a loop over them would; all clones are kept until
    the end.
    """
    return timed_call(lambda: [tensor.clone() for tensor in tensors])


class Mappings:
    """Private mappings of a file in memory, one for each of ``count`` tensors of ``nbytes`` bytes:
    ``mmap`` and ``torch.frombuffer``, which a zero-copy get of separate values cannot avoid.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self._count = count
        self._nbytes = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._fd = os.memfd_create("torchstore-bench", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, count * self._nbytes)

    def map_each(self) -> float:
        """Map all of them; they are unmapped when the clock has stopped."""
        tensors: list[torch.Tensor] = []

        def map_them() -> None:
            for at in range(self._count):
                memory = mmap.mmap(
                    self._fd, self._nbytes, flags=mmap.MAP_PRIVATE, offset=at * self._nbytes
                )
                tensors.append(torch.frombuffer(memory, dtype=torch.uint8))

        return timed_call(map_them)

    def close(self) -> None:
        """Free the memory."""
        os.close(self._fd)


def interleave(measures: dict[str, Callable[[], float]], turn: int) -> dict[str, float]:
    """Run a round: each measure once. The order rotates with ``turn``, so that the machine's drift
    affects all measures equally.
    """
    names = list(measures)
    first = turn % len(names)
    return {name: measures[name]() for name in names[first:] + names[:first]}
