"""The few memory-mapping calls that Python's ``mmap`` module lacks. Torch-free.

``mmap.mmap`` is not used because it keeps a duplicated descriptor per mapping (a process with
thousands of zero-copy tensors would run out of them), and because it holds the GIL while the kernel
fills page tables.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import mmap
import os
import weakref
from collections.abc import Callable

#: What is new and has at least so many bytes is given huge pages, where the system leaves that to
#: programs. It is the size from which numpy does so.
LARGE = 4 << 20
_MADV_DONTNEED = 4
_MADV_POPULATE_READ = 22  # Linux 5.14
#: For ``mmap.mmap.madvise``: fill the page tables of a range for writing. As old as the one above.
MADV_POPULATE_WRITE = 23
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MOVES_TABLES = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
_TABLE = 2 << 20  # the memory that one page table is for

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_mremap = _libc.mremap
_mremap.restype = ctypes.c_void_p
_mremap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_fallocate = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_malloc = _libc.malloc
_malloc.restype = ctypes.c_void_p
_malloc.argtypes = [ctypes.c_size_t]
_free = _libc.free
_free.argtypes = [ctypes.c_void_p]
_free.restype = None
_PUNCH_HOLE_KEEP_SIZE = 3
_FAILED = ctypes.c_void_p(-1).value
_before_unmap: list[Callable[[int, int], None]] = []
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


def _map(fd: int, offset: int, nbytes: int, flags: int, at: int | None = None) -> int:
    return _mapped_at(_mmap(at, nbytes, _READ_WRITE, flags, fd, offset), nbytes)


def _mapped_at(address: int | None, nbytes: int) -> int:
    """What a call that maps memory has returned; raises OSError if that is no address."""
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        out = code == errno.ENOMEM
        hint = " (address space or mappings: see ulimit -v, vm.max_map_count)" if out else ""
        raise OSError(code, f"mmap of {nbytes} bytes: {os.strerror(code)}{hint}")
    return int(address)


def map_shared(fd: int, nbytes: int, offset: int = 0) -> int:
    """Map ``nbytes`` bytes of ``fd`` shared and writable; return the address. Raises OSError."""
    return _map(fd, offset, nbytes, mmap.MAP_SHARED | _MAP_NORESERVE)


def before_unmap(call: Callable[[int, int], None]) -> None:
    """Register ``call(address, nbytes)`` to be called before :func:`unmap` removes a mapping."""
    _before_unmap.append(call)


def unmap(address: int, nbytes: int) -> None:
    """Remove a mapping."""
    for call in _before_unmap:
        call(address, nbytes)
    _munmap(address, nbytes)


def _advise(address: int, nbytes: int, advice: int) -> int:
    return ctypes.get_errno() if _madvise(address, nbytes, advice) else 0


def populate_read(address: int, nbytes: int) -> int:
    """Fill the page tables of a page-aligned range for reading.

    Returns 0, or an errno (EINVAL: the kernel is too old).
    """
    return _advise(address, nbytes, _MADV_POPULATE_READ)


def populate_write(address: int, nbytes: int) -> int:
    """Fill the page tables of a page-aligned range for writing; missing pages are allocated.

    Returns 0, or an errno (EINVAL: the kernel is too old).
    """
    return _advise(address, nbytes, MADV_POPULATE_WRITE)


def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Ask for huge pages where a range is filled for the first time, which then takes a half to a
    quarter of the time. The pages at its ends are asked for, too: ranges side by side stay one
    mapping.
    """
    start = address & -mmap.PAGESIZE
    _advise(start, address + nbytes - start, mmap.MADV_HUGEPAGE)


def forget_pages(address: int, nbytes: int) -> None:
    """Empty the page tables of a page-aligned range of a shared mapping. The memory keeps what is
    in it, and the page tables are filled again where it is used.
    """
    _advise(address, nbytes, _MADV_DONTNEED)


def punch_hole(fd: int, offset: int, nbytes: int) -> bool:
    """Free the pages of a range of a memfd. Returns False if the file system cannot do this."""
    return int(_fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, offset, nbytes)) == 0


class _Owner(weakref.ref[object]):
    """A weak reference that may be passed to a C function, behind its arguments."""

    __slots__ = ()
    _as_parameter_ = 0


# What ends with its owner. At interpreter exit it is left to the kernel.
_owned: dict[int, tuple[object, _Owner]] = {}
_numbers = itertools.count()


def when_gone(owner: object, call: Callable[..., object]) -> None:
    """Call a function in C when an object dies: what a signal handler raises (Ctrl-C) would be lost
    in a finalizer in Python, and the rest of that with it. What was asked for last is called first.

    Args:
        call: gets one more argument than it needs.
    """
    number = next(_numbers)
    forgets = weakref.ref(owner, functools.partial(_owned.pop, number))
    _owned[number] = forgets, _Owner(owner, call)


def map_private(fd: int, offset: int, nbytes: int) -> tuple[int, int, object]:
    """Map a range copy-on-write.

    Returns:
        ``(address of offset, bytes before it in the block, block)``. The block is a writable buffer
        that starts at a page boundary. The mapping lives exactly as long as the block and the
        objects that share its memory.

    Raises:
        OSError: the kernel refuses the mapping.
    """
    before = offset % mmap.PAGESIZE
    size = before + nbytes
    address = _map(fd, offset - before, size, mmap.MAP_PRIVATE | _MAP_NORESERVE)
    return address + before, before, _block(address, size)


def map_through(window: int, fd: int, offset: int, nbytes: int) -> tuple[int, int, object]:
    """:func:`map_private`, but what is written to the mapping is in the file, until
    :func:`make_private`. The page tables of a shared mapping of the file, in which ``offset`` is at
    the address ``window``, move to it: they need not be filled again.
    """
    before = offset % mmap.PAGESIZE
    size = before + nbytes
    address = _moved(window - before, size) or _map(
        fd, offset - before, size, mmap.MAP_SHARED | _MAP_NORESERVE
    )
    return address + before, before, _block(address, size)


def make_private(window: int, fd: int, offset: int, nbytes: int, address: int) -> bool:
    """Make a mapping of :func:`map_through` copy-on-write, in one step: what was written before is
    in the file, and what is written from now on is not. Its page tables move back to ``window``: to
    empty them takes as long as to copy what they are for. Returns whether they have.

    Raises:
        OSError: the kernel refuses it; what is written still is in the file.
    """
    before = offset % mmap.PAGESIZE
    start, size = address - before, before + nbytes
    moved = bool(_mremap(start, size, size, _MOVES_TABLES, window - before) != _FAILED)
    if not moved:  # its mapping is in pieces, for example; that there was one here is over by then
        flags = mmap.MAP_SHARED | _MAP_NORESERVE | _MAP_FIXED
        _map(fd, offset - before, size, flags, window - before)
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE | _MAP_FIXED
    _map(fd, offset - before, size, flags, start)
    return moved


def _moved(start: int, size: int) -> int:
    """Move the page tables of a shared mapping to another one of the same range of its file; both
    stay mapped. Returns its address; 0: the kernel cannot do this (before Linux 5.13).
    """
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    there = _map(-1, 0, size + _TABLE, anonymous)
    address = there + (start - there) % _TABLE  # whole tables move then, not each of their entries
    end = -(-(address + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    if address > there:
        _munmap(there, address - there)
    _munmap(end, there + size + _TABLE - end)
    if _mremap(start, size, size, _MOVES_TABLES, address) == _FAILED:
        return 0  # the address may be another thread's by now
    return address


def _block(address: int, size: int) -> object:
    """A writable buffer that unmaps its memory when it dies."""
    block = (ctypes.c_char * size).from_address(address)
    when_gone(block, functools.partial(_munmap, address, size))
    return block


def make_own(nbytes: int, address: int) -> None:
    """Replace a mapping by memory of this process alone, with the same bytes. What other threads
    write meanwhile may be lost.

    Raises:
        OSError: the kernel refuses it.
    """
    before = address % mmap.PAGESIZE
    start, size = address - before, before + nbytes
    copy = _map(-1, 0, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    ctypes.memmove(copy, start, size)
    moved = _mremap(copy, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, start)
    try:
        _mapped_at(moved, size)
    except OSError:
        _munmap(copy, size)
        raise


def allocate(nbytes: int) -> tuple[int, object]:
    """Return memory that nobody has filled: ``(address, block)``. The block is a writable buffer,
    as that of :func:`map_private`.

    Raises:
        MemoryError: there is not so much.
    """
    address: int | None = _malloc(nbytes)
    if address is None:
        raise MemoryError(f"{nbytes:,} bytes")
    if nbytes >= LARGE:
        prefer_huge_pages(address, nbytes)
    block = (ctypes.c_char * nbytes).from_address(address)
    when_gone(block, functools.partial(_free, address))
    return address, block
