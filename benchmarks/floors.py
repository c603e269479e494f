"""What the machine itself can do, measured in the process and the run it is compared with.

Copies between two warm anonymous buffers with as many threads as CPUs, in several ways, and the
first touch of a fresh memfd. All return seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from torchstore_core.machine import copying

#: The ways of the plain floor: pieces as large as the tensors (cut at CHUNK), threads take turns.
PIECES = ("copy_ of tensors", "memmove of tensors")
#: The strictest floor is the fastest of these and those above.
WARM = (*PIECES, "memmove of one share a thread", "copy_ of one buffer", "streaming copy")
COLD = ("first copy into a memfd", "memset of a memfd")
CHUNK = 8 << 20

Piece = tuple[int, int, int]  # destination offset or address, source offset or address, bytes


def cpus() -> int:
    """CPUs this process may use: the number of threads of every floor."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Threads:
    """As many threads as CPUs, none of which lets torch start further ones."""

    def __init__(self) -> None:
        self.count = cpus()
        before = torch.get_num_threads()
        ready = threading.Barrier(self.count)

        def prepare() -> None:
            torch.set_num_threads(1)  # of this thread; the process's setting is put back below
            ready.wait(30)

        self._pool = ThreadPoolExecutor(self.count)
        for done in [self._pool.submit(prepare) for _ in range(self.count)]:
            done.result()
        torch.set_num_threads(before)

    def each(self, call: Callable[[int], object]) -> None:
        """``call(thread's number)`` in every thread at once."""
        for done in [self._pool.submit(call, at) for at in range(self.count)]:
            done.result()

    def share(self, items: Iterable[object], call: Callable[..., object]) -> None:
        """``call(item)`` for all items; threads take them one by one."""
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
    """``(offset, bytes)`` of pieces of these sizes one after another, cut at ``chunk`` bytes, as
    many as fill ``limit`` bytes.

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
        start = time.perf_counter()
        self.threads.share(self._views, lambda view: view[0].copy_(view[1]))
        return time.perf_counter() - start

    def _memmove_pieces(self) -> float:
        to, of = self._target.data_ptr(), self._source.data_ptr()
        return copy_pieces(self.threads, [(to + at, of + at, n) for at, n in self._pieces])

    def _memmove_shares(self) -> float:
        to, of = self._target.data_ptr(), self._source.data_ptr()
        share = -(-self.nbytes // self.threads.count)

        def copy(thread: int) -> None:
            at = thread * share
            ctypes.memmove(to + at, of + at, max(0, min(share, self.nbytes - at)))

        start = time.perf_counter()
        self.threads.each(copy)
        return time.perf_counter() - start

    def _torch_whole(self) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads.count)
        start = time.perf_counter()
        self._target.copy_(self._source)
        seconds = time.perf_counter() - start
        torch.set_num_threads(before)
        return seconds

    def _streaming(self) -> float:
        to, of = self._target.data_ptr(), self._source.data_ptr()
        chunks = copying.plan([(to, of, self.nbytes)])
        start = time.perf_counter()
        self.threads.share(chunks, lambda chunk: copying.copy_pieces(chunk, stream=True))
        return time.perf_counter() - start

    def close(self) -> None:
        """End the threads."""
        self.threads.close()


def copy_pieces(threads: Threads, pieces: Iterable[Piece]) -> float:
    """Copy ``(destination address, source address, bytes)`` by memmove over the threads."""
    todo = list(pieces)
    start = time.perf_counter()
    threads.share(todo, lambda piece: ctypes.memmove(*piece))
    return time.perf_counter() - start


def copy_tensors(
    threads: Threads, targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]
) -> float:
    """Copy contiguous tensors by memmove over the threads."""
    pieces: list[Piece] = []
    for target, source in zip(targets, sources, strict=True):
        to, of = target.data_ptr(), source.data_ptr()
        whole = source.numel() * source.element_size()
        pieces.extend((to + at, of + at, n) for at, n in cut([whole], whole))
    return copy_pieces(threads, pieces)


class ColdTouch:
    """First touch of ``nbytes`` bytes of fresh memfds, a share for each thread."""

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

                start = time.perf_counter()
                self.threads.each(touch)
                seconds = time.perf_counter() - start
                del block
            return seconds
        finally:
            os.close(fd)

    def close(self) -> None:
        """End the threads."""
        self.threads.close()


def interleave(measures: dict[str, Callable[[], float]], turn: int) -> dict[str, float]:
    """One round: each measure once. The order rotates with ``turn``, so that none has a place of
    its own in the machine's drift.
    """
    names = list(measures)
    first = turn % len(names)
    return {name: measures[name]() for name in names[first:] + names[:first]}
