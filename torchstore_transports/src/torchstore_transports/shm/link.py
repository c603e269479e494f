"""Client half of ``shm``: windows for copies, private mappings for zero-copy gets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import resource
import socket
import sys
import threading
from collections.abc import Iterator, Sequence

import msgspec

from torchstore_core.contracts.transport import Copy, Link, LinkContext, Mapping, Window
from torchstore_core.errors import (
    TransportError,
    TransportNotReadyError,
    TransportUnavailableError,
)
from torchstore_core.machine import copying
from torchstore_core.machine.sockets.unix import above_standard, connect, unix_socket
from torchstore_core.machine.virtual_memory import (
    make_private,
    map_private,
    map_shared,
    map_through,
    populate_read,
    populate_write,
    unmap,
)
from torchstore_transports.shm.server import HEADER_MAX, Offer

__all__ = ["ShmLink"]

_HAND_OVER_S = 10.0
# What connecting to the socket of a server that has died gives.
_NOBODY_LISTENS = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOENT)
_POLL_S = 0.01
# Page tables are filled, and recorded as filled, in granules of this many bytes. Pages of a granule
# that a range has a part of are left to page faults.
_GRANULE = 1 << 16
# Of shorter ranges, all pages are.
_PREPARE_MIN = 1 << 20


class _Segment:
    """One attached segment: its descriptor, and its window once it has been requested.

    It is closed with its link, or by the garbage collector if no link was made (because the connect
    was cancelled).
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.address = 0
        self.filled = bytearray()

    def close(self) -> None:
        address, self.address = self.address, 0
        if address:
            unmap(address, self.nbytes)
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # modules are half gone then, and the kernel cleans up
            self.close()


class ShmLink(Link):
    """A :class:`~torchstore_core.contracts.transport.Link` with windows and mappings."""

    def __init__(self, segments: dict[int, _Segment]) -> None:
        self._segments = segments
        self._lock = threading.RLock()  # a signal handler may put, too
        self._pid = os.getpid()
        self._closed = False

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> ShmLink:
        return cls(await _attach(offer, context.directory))

    async def write(self, copies: Sequence[Copy]) -> None:
        await self._copy(copies, into_segment=True)

    async def read(self, copies: Sequence[Copy]) -> None:
        await self._copy(copies, into_segment=False)

    async def _copy(self, copies: Sequence[Copy], *, into_segment: bool) -> None:
        pieces: list[tuple[int, int, int]] = []
        total = 0
        for address, segment, offset, nbytes in copies:
            window = self.window(segment)
            if not 0 <= offset <= offset + nbytes <= window.nbytes:
                raise TransportError(f"[{offset}, +{nbytes}) is outside segment {segment}")
            there = window.address + offset
            pieces.append((there, address, nbytes) if into_segment else (address, there, nbytes))
            total += nbytes
        stream = total >= copying.STREAM_MIN
        tasks = [
            lambda chunk=chunk: copying.copy_pieces(chunk, stream=stream)
            for chunk in copying.plan(pieces, copying.chunk_size(total))
        ]
        await copying.run(tasks, total)

    def window(self, segment: int) -> Window:
        """Map the segment as shared memory of this process, once."""
        with self._lock:
            state = self._state(segment)
            if not state.address:
                try:
                    state.address = map_shared(state.fd, state.nbytes)
                except OSError as error:
                    raise TransportError(f"cannot map segment {segment}: {error}") from error
                state.filled = bytearray(state.nbytes // _GRANULE + 1)
            return Window(state.address, state.nbytes)

    def prepare(self, segment: int, offset: int, nbytes: int, *, fresh: bool) -> None:
        """Fill page tables, which costs a fifth of taking the page faults while copying.

        For pages that exist, populating for reads is faster (and the resulting mapping is
        writable); pages that do not exist yet are populated for writes.
        """
        state = self._state(segment)
        filled = state.filled
        if nbytes < _PREPARE_MIN or not state.address:
            return
        populate = populate_write if fresh else populate_read
        last = (offset + nbytes) // _GRANULE
        at = filled.find(0, -(-offset // _GRANULE), last)
        while at >= 0:
            end = filled.find(1, at, last)
            if end < 0:
                end = last
            if populate(state.address + at * _GRANULE, (end - at) * _GRANULE) != 0:
                return  # an older kernel: page faults will fill them
            filled[at:end] = b"\1" * (end - at)
            at = filled.find(0, end, last)

    def map(self, segment: int, offset: int, nbytes: int) -> Mapping:
        """Map a sealed range privately."""
        state = self._state_of(segment, offset, nbytes)
        try:
            address, before, owner = map_private(state.fd, offset, nbytes)
        except OSError as error:
            raise TransportError(f"cannot map segment {segment}: {error}") from error
        return Mapping(address, before, nbytes, owner)

    def map_through(self, segment: int, offset: int, nbytes: int) -> Mapping:
        """Map a range that is still to be written; it gets the page tables of the window, which are
        filled before, so that writing cannot find that the host has no memory.
        """
        state = self._state_of(segment, offset, nbytes)
        window = self.window(segment).address + offset
        self.prepare(segment, offset, nbytes, fresh=True)
        low, high = -(-offset // _GRANULE), (offset + nbytes) // _GRANULE
        edges = [(offset, low * _GRANULE), (high * _GRANULE, offset + nbytes)]
        if state.filled.find(0, low, high) >= 0 or any(
            populate_write(*_pages(window - offset + start, window - offset + end))
            for start, end in edges
            if start < end
        ):
            raise TransportError(f"the host has no memory for {nbytes} bytes of segment {segment}")
        try:
            with self._open(state):
                address, before, owner = map_through(window, state.fd, offset, nbytes)
        except OSError as error:
            raise TransportError(f"cannot map segment {segment}: {error}") from error
        first, last = offset // _GRANULE, (offset + nbytes - 1) // _GRANULE + 1
        state.filled[first:last] = bytes(last - first)
        return Mapping(address, before, nbytes, owner)

    def make_private(self, segment: int, offset: int, mapping: Mapping) -> None:
        """What is written to a mapping of :meth:`map_through` is no longer in the segment."""
        state = self._state(segment)
        nbytes = mapping.nbytes
        try:
            with self._open(state):
                window, at = state.address + offset, mapping.address
                moved = make_private(window, state.fd, offset, nbytes, at)
        except OSError as error:
            raise TransportError(f"cannot map segment {segment} again: {error}") from error
        first, last = -(-offset // _GRANULE), (offset + nbytes) // _GRANULE
        if moved and first < last:
            state.filled[first:last] = b"\1" * (last - first)

    @contextlib.contextmanager
    def _open(self, state: _Segment) -> Iterator[None]:
        """The window of a segment stays where it is meanwhile."""
        with self._lock:
            if not state.address:
                raise TransportError("the link is closed")
            yield

    def close(self) -> None:
        self._closed = True
        # In a forked child the lock may be held by a thread that does not exist there.
        with self._lock if os.getpid() == self._pid else contextlib.nullcontext():
            while self._segments:
                self._segments.popitem()[1].close()

    def _state_of(self, segment: int, offset: int, nbytes: int) -> _Segment:
        state = self._state(segment)
        if not 0 <= offset < offset + nbytes <= state.nbytes:
            raise TransportError(f"[{offset}, +{nbytes}) is outside segment {segment}")
        return state

    def _state(self, segment: int) -> _Segment:
        state = self._segments.get(segment)
        if state is None or self._closed:
            raise TransportError(f"segment {segment} is not attached (link closed: {self._closed})")
        return state


async def _attach(offer: bytes, directory: str) -> dict[int, _Segment]:
    """Connect to the offer's socket and receive the segments."""
    try:
        described = msgspec.msgpack.decode(offer, type=Offer)
    except msgspec.DecodeError as error:
        raise TransportUnavailableError(f"not an offer of shm: {error}") from error
    wanted = described.segments
    path = _found(described.path, directory)
    try:
        async with asyncio.timeout(_HAND_OVER_S):
            fds, truncated = await _receive(path, len(wanted))
    except TimeoutError as error:
        raise TransportNotReadyError(
            f"the server did not hand over its memory within {_HAND_OVER_S:.0f} s; it is busy, or "
            "has no file descriptors left (its log says so)"
        ) from error
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise _no_descriptors() from error
        if error.errno in _NOBODY_LISTENS:
            raise TransportNotReadyError(
                f"nobody listens at {path}: the server has died, and may come back",
                details={"died": path},
            ) from error
        raise TransportUnavailableError(
            f"cannot receive segments through {path}: {error}"
        ) from error
    if len(fds) != len(wanted):
        for fd in fds:
            os.close(fd)
        if truncated:
            raise _no_descriptors()
        raise TransportNotReadyError(
            f"the server handed over {len(fds)} of {len(wanted)} segments through "
            f"{path} (it is another user's, or has too many on their way)"
        )
    try:
        fds = above_standard(fds)
    except OSError as error:
        raise _no_descriptors() from error
    return {ident: _Segment(fd, n) for (ident, n), fd in zip(wanted, fds, strict=True)}


def _pages(start: int, end: int) -> tuple[int, int]:
    """The pages of a range: where the first one begins, and how many bytes they have."""
    first = start - start % mmap.PAGESIZE
    return first, -(-(end - first) // mmap.PAGESIZE) * mmap.PAGESIZE


def _found(path: str, directory: str) -> str:
    """Where a socket is: at the path that the server knows, or else, as in a container into which
    that was mounted at another place, in the directory where its control socket was found.
    """
    elsewhere = os.path.join(directory, os.path.basename(path))
    moved = directory and not os.path.exists(path) and os.path.exists(elsewhere)
    return elsewhere if moved else path


async def _receive(path: str, count: int) -> tuple[list[int], bool]:
    """Return the descriptors that the server sends, and whether the kernel dropped some because
    this process has none left.
    """
    loop = asyncio.get_running_loop()
    with unix_socket() as sock, sock:
        await connect(sock, path)
        readable = asyncio.Event()
        loop.add_reader(sock.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(sock.fileno())
        _, fds, flags, _ = socket.recv_fds(sock, HEADER_MAX, count, socket.MSG_CMSG_CLOEXEC)
        return fds, bool(flags & socket.MSG_CTRUNC)


def _no_descriptors() -> TransportNotReadyError:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return TransportNotReadyError(
        "this process has no file descriptor left for the memory of a volume (its limit is "
        f"{limit}: close some, or raise it with `ulimit -n`)",
        details={"descriptor_limit": limit},
    )
