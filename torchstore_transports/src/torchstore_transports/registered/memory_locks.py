"""Locks on memory that tell whether it is still the same memory. Torch-free.

A lock (``mlock``) belongs to a mapping and disappears with it. While it is there, the kernel does
not swap the pages out, and nobody can discard them. So if pages were locked and still are, and
nobody else has locked them in the meantime, they are the same pages.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
from bisect import bisect_left, insort

__all__ = ["MemoryLock", "acquire", "is_locked", "lock", "release", "unlock"]

_libc = ctypes.CDLL(None, use_errno=True)
_mlock, _munlock = _libc.mlock, _libc.munlock
_mlock.argtypes = _munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_msync = _libc.msync
_msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MS_INVALIDATE = 2
_PAGE = mmap.PAGESIZE
# Of locked memory, one page in so many bytes is looked at: malloc gives back whole blocks.
_PROBE = 2 << 20


class MemoryLock:
    """A lock on whole pages, shared by all who want it for the same range."""

    __slots__ = ("first", "nbytes", "users", "valid")

    def __init__(self, first: int, nbytes: int) -> None:
        self.first = first
        self.nbytes = nbytes
        self.users = 1
        self.valid = True

    def holds(self, *, thoroughly: bool = True) -> bool:
        """Whether the pages are those that were locked. Once False, it stays so.

        Args:
            thoroughly: look at a page every 2 MiB, not only at the last one.
        """
        if self.valid:
            end = self.first + self.nbytes
            places = range(self.first, end, _PROBE) if thoroughly else ()
            if not is_locked(end - _PAGE) or not all(is_locked(at) for at in places):
                self.valid = False
        return self.valid


_guard = threading.Lock()
_locks: dict[int, MemoryLock] = {}  # by their first address
_firsts: list[int] = []


def acquire(address: int, nbytes: int) -> MemoryLock | None:
    """Lock the pages that lie in a range as a whole. They are mapped, and there is at least one.

    Returns:
        None if the kernel refuses (the limit of locked memory), or if somebody else has locked
        them: that lock would say nothing.
    """
    first = -(-address // _PAGE) * _PAGE
    nbytes = (address + nbytes) // _PAGE * _PAGE - first
    with _guard:
        known = _locks.get(first)
        if known is not None and known.nbytes == nbytes and known.holds():
            known.users += 1
            return known
        # Whoever has locked a part of this range has locked other memory, which is gone.
        at = bisect_left(_firsts, first)
        if at and _firsts[at - 1] + _locks[_firsts[at - 1]].nbytes > first:
            at -= 1
        while at < len(_firsts) and _firsts[at] < first + nbytes:
            _forget(_locks[_firsts[at]])
        if is_locked(first) or not lock(first, nbytes):
            return None
        made = _locks[first] = MemoryLock(first, nbytes)
        insort(_firsts, first)
        return made


def release(held: MemoryLock) -> None:
    """Give a lock back. The last one to do so unlocks the pages."""
    with _guard:
        held.users -= 1
        if not held.users and _locks.get(held.first) is held:
            _forget(held)


def _forget(held: MemoryLock) -> None:
    held.valid = False
    del _locks[held.first]
    del _firsts[bisect_left(_firsts, held.first)]
    unlock(held.first, held.nbytes)


def lock(address: int, nbytes: int) -> bool:
    """Lock a page-aligned range, so that its pages stay while it is mapped. Returns False if the
    kernel refuses (the limit of locked memory).
    """
    return int(_mlock(address, nbytes)) == 0


def unlock(address: int, nbytes: int) -> None:
    """Undo :func:`lock`. What is not mapped any more is left alone."""
    _munlock(address, nbytes)


def is_locked(address: int) -> bool:
    """Whether the page at a page-aligned address is locked. A lock ends with the mapping, so a page
    that was locked and is not any more may be another one.
    """
    failed = _msync(address, mmap.PAGESIZE, _MS_INVALIDATE)
    return bool(failed) and ctypes.get_errno() == errno.EBUSY
