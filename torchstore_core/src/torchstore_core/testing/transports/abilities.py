"""The optional abilities of links, if they declare them: windows, mappings and progress."""

from __future__ import annotations

import asyncio
import ctypes
import mmap

import pytest

from torchstore_core.contracts.transport import (
    Copy,
    SupportsMap,
    SupportsMapThrough,
    SupportsProgress,
    SupportsRegistration,
    SupportsWindow,
)
from torchstore_core.contracts.transport import Memory as OwnedMemory
from torchstore_core.testing.timers import clock
from torchstore_core.testing.transports.base import Ends, TransportKit, check, fail, over_a_link
from torchstore_core.testing.transports.ends.memory import Memory, pattern

__all__ = ["AbilityTests"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FIXED = 0x10
_MOVED = 8 << 20
# What a call that does not block may take, at best, on a busy machine.
_CALL_S = 20e-3
_CALLS = 5
# How often and how soon progress is asked for, while nothing moves.
_LOOKS, _LOOK_S = 40, 0.05


def _map(nbytes: int, address: int | None = None) -> int:
    """Fresh memory; at an address, instead of what is there."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_FIXED if address else 0)
    found = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    check(isinstance(found, int), "this host has no memory for the test")
    return int(found)


class _Owner:
    """Whose memory it is."""


class AbilityTests(TransportKit):
    """Tests of ``window``, ``prepare``, ``map`` and ``progress``."""

    @over_a_link()
    async def test_a_window_shows_the_segment(self, ends: Ends) -> None:
        """Bytes written through the window of each segment are in it, and the reverse."""
        endpoints, _, link = ends
        window: object = link
        if not isinstance(window, SupportsWindow):
            pytest.skip("it has no windows")
        for number, segment in enumerate(endpoints.segments):
            shown = window.window(number)
            check(shown.nbytes == len(segment), f"a window of {shown.nbytes} bytes")
            offset, data = endpoints.take(300_000), pattern(11 + number, 300_000)
            window.prepare(number, offset, len(data), fresh=True)
            source, target = Memory(data), Memory(len(data))
            ctypes.memmove(shown.address + offset, source.address, len(data))
            found = endpoints.look(offset, len(data), number)
            check(found == data, "the segment has other bytes")
            endpoints.put(offset, data[::-1], number)
            window.prepare(number, offset, len(data), fresh=False)
            ctypes.memmove(target.address, shown.address + offset, len(data))
            check(target.data() == data[::-1], "the window shows other bytes")
            check(window.window(number) == shown, "a second window of the segment is another")

    @over_a_link()
    async def test_a_mapping_is_private_and_outlives_its_link(self, ends: Ends) -> None:
        """Writing to a mapping does not change the segment; it is usable after ``close``."""
        endpoints, _, link = ends
        mapper: object = link
        if not isinstance(mapper, SupportsMap):
            pytest.skip("it has no mappings")
        offset, data = endpoints.take(100_000), pattern(14, 100_000)
        last = len(endpoints.segments) - 1
        endpoints.put(offset, data, last)
        mapped = mapper.map(last, offset, len(data))
        check(mapped.nbytes == len(data), f"a mapping of {mapped.nbytes} bytes")
        target = Memory(len(data))
        ctypes.memmove(target.address, mapped.address, len(data))
        check(target.data() == data, "the mapping shows other bytes")
        link.close()
        view = memoryview(mapped.owner).cast("B")  # type: ignore[arg-type]
        view[mapped.offset : mapped.offset + 10] = bytes(10)
        same = endpoints.look(offset, len(data), last) == data
        check(same, "writing to a mapping changed the segment")
        ctypes.memmove(target.address, mapped.address, len(data))
        check(target.data() == bytes(10) + data[10:], "the mapping ended with its link")

    @over_a_link()
    async def test_what_is_written_to_a_mapping_is_in_the_segment_until_it_is_private(
        self, ends: Ends
    ) -> None:
        """Of every alignment; afterwards it is a private one."""
        endpoints, _, link = ends
        mapper: object = link
        if not isinstance(mapper, SupportsMapThrough):
            pytest.skip("it has no mappings that are written through")
        for first in (0, 4096 + 64):
            nbytes = 2_000_000
            taken = endpoints.take(nbytes + first) + first
            source, target = Memory(pattern(15 + first, nbytes)), Memory(nbytes)
            mapped = mapper.map_through(0, taken, nbytes)
            check(mapped.nbytes == nbytes, f"a mapping of {mapped.nbytes} bytes")
            ctypes.memmove(mapped.address, source.address, nbytes)
            same = endpoints.look(taken, nbytes) == source.data()
            check(same, "what was written to the mapping is not in the segment")
            mapper.make_private(0, taken, mapped)
            same = endpoints.look(taken, nbytes) == source.data()
            check(same, "what was written before is not in the segment")
            view = memoryview(mapped.owner).cast("B")  # type: ignore[arg-type]
            view[mapped.offset : mapped.offset + 10] = bytes(10)
            same = endpoints.look(taken, nbytes) == source.data()
            check(same, "writing to a private mapping changed the segment")
            ctypes.memmove(target.address, mapped.address, nbytes)
            check(target.data() == bytes(10) + source.data()[10:], "the mapping has other bytes")
            endpoints.put(taken, bytes(nbytes))
            await link.write([source.copy(taken)])
            check(endpoints.look(taken, nbytes) == source.data(), "the link writes elsewhere")

    @over_a_link()
    async def test_progress_tells_that_bytes_have_moved(self, ends: Ends) -> None:
        """``progress`` returns an integer, on any thread and without blocking, another one after a
        transfer, and the same one as long as nothing moves.
        """
        endpoints, _, link = ends
        reporting: object = link
        if not isinstance(reporting, SupportsProgress):
            pytest.skip("it does not report progress")
        memory, offset = Memory(pattern(13, _MOVED)), endpoints.take(_MOVED)
        last = _progress(reporting)
        for what, move in (("write", link.write), ("read", link.read)):
            moving = asyncio.ensure_future(move([memory.copy(offset)]))
            await asyncio.sleep(0)
            await asyncio.to_thread(_progress, reporting)
            await moving
            now = _progress(reporting)
            check(now != last, f"progress() is {now} before a {what} of 8 MiB, and after it")
            last = await _at_rest(reporting)

    @over_a_link()
    async def test_registered_memory_is_that_of_now(self, ends: Ends) -> None:
        """What moves is what is at an address now: its owner, or another one, may have given the
        memory back in between, and got other memory there.
        """
        endpoints, _, link = ends
        nbytes = 300 << 10
        registering: object = link
        if not isinstance(registering, SupportsRegistration):
            pytest.skip("it does not want to know whose memory it moves")
        offset = endpoints.take(nbytes)
        address = _map(nbytes)
        owner = _Owner()
        for turn, what in enumerate(("at first", "again", "given back", "another's")):
            if turn >= 2:
                _map(nbytes, address)
            if what == "another's":
                owner = _Owner()
            memory = [OwnedMemory(address, nbytes, owner)]
            sent, stored = pattern(20 + turn, nbytes), pattern(30 + turn, nbytes)
            ctypes.memmove(address, sent, nbytes)
            await registering.write_from([Copy(address, 0, offset, nbytes)], memory)
            check(endpoints.look(offset, nbytes) == sent, f"write, {what}: other bytes")
            endpoints.put(offset, stored)
            await registering.read_into([Copy(address, 0, offset, nbytes)], memory)
            found = ctypes.string_at(address, nbytes)
            check(found == stored, f"read, {what}: other bytes")
            # What is nobody's, or only a part of what somebody has.
            few = Memory(pattern(40 + turn, 5000))
            part = Copy(address + 5, 0, offset + 10_000, 5000)
            await registering.write_from([few.copy(offset), part], memory)
            there = endpoints.look(offset, 15_000)
            check(there[:5000] == few.data(), f"write, {what}: other bytes of nobody's memory")
            check(there[10_000:] == stored[5:5005], f"write, {what}: other bytes of a part")
        _libc.munmap(address, nbytes)


async def _at_rest(link: SupportsProgress) -> int:
    """Return the progress of a link that moves nothing, when it has come to rest."""
    last = _progress(link)
    for _ in range(_LOOKS):
        await asyncio.sleep(_LOOK_S)
        if (now := _progress(link)) == last:
            return now
        last = now
    fail("progress() does not stay the same although nothing moves")


def _progress(link: SupportsProgress) -> int:
    """Return the progress of a link, and check that it is quick to tell."""
    took: list[float] = []
    while len(took) < _CALLS and min(took, default=_CALL_S) >= _CALL_S:
        began = clock()
        try:
            found: object = link.progress()
        except Exception as error:  # noqa: BLE001 - any one would end the store's operation
            fail(f"progress() raised {error!r}")
        took.append(clock() - began)
    check(min(took) < _CALL_S, f"progress() took {min(took) * 1e3:.0f} ms: it must not block")
    if not isinstance(found, int):
        fail(f"progress() returned {found!r}, which is no integer")
    return found
