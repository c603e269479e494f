"""Both halves must refuse ranges outside of a segment, and requests that are garbage."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from torchstore_core.contracts.transport import Copy
from torchstore_core.errors import TransportError
from torchstore_core.testing.transports.base import (
    Ends,
    TransportKit,
    check,
    check_raised,
    fail,
    must_refuse,
    outcome,
    over_a_link,
)
from torchstore_core.testing.transports.ends.endpoints import Endpoints
from torchstore_core.testing.transports.ends.memory import Memory, pattern
from torchstore_core.testing.transports.ends.session import Session

__all__ = ["RefusingTests"]

_SOON_S = 5.0
# Less than a volume waits for its halves when it closes.
_CLOSING_S = 2.5
_CONNECT_S = 15.0
_EDGE = 1 << 16
_NBYTES = 5000
_BEYOND = 1 << 62
_UINT64 = 1 << 64
_GARBAGE = (
    b"",
    b"\x00",
    b"garbage",
    b"\xff" * 64,
    b"\x93\xc0\xc0\xc0",
    b'{"a": 1}',
    b"\x80" * 3000,
    b"\x00" * 100_000,
)


def _outside(end: int) -> Iterator[tuple[str, Copy]]:
    """Yield copies that leave segment 0, which has ``end`` bytes; the caller sets the address."""
    yield "the byte after the segment", Copy(0, 0, end, 1)
    yield "a copy across the segment's end", Copy(0, 0, end - 100, 101)
    yield "a copy far behind the segment's end", Copy(0, 0, end + (1 << 40), _NBYTES)
    yield "a negative offset", Copy(0, 0, -1, 2)
    yield "a negative offset of many bytes", Copy(0, 0, -_NBYTES, _NBYTES)
    yield "an offset near 2**62", Copy(0, 0, _BEYOND - 2, _NBYTES)
    yield "an offset near 2**63", Copy(0, 0, 2 * _BEYOND - 2, _NBYTES)
    yield "an offset that overflows 64 bits", Copy(0, 0, _UINT64 - 8, _NBYTES)
    yield "an unknown segment", Copy(0, 2, 0, _NBYTES)
    yield "a segment with a negative number", Copy(0, -1, 0, _NBYTES)


def _rows_outside(end: int) -> Iterator[tuple[str, Copy]]:
    yield "rows that leave the segment", Copy(0, 0, end - 300, 100, 4, 100, 100)
    yield "a last row across the segment's end", Copy(0, 0, end - 2099, 100, 3, 100, 1000)
    yield "rows with a negative step", Copy(0, 0, 100, 100, 3, 100, -100)
    yield "rows whose step overflows 64 bits", Copy(0, 0, 0, 100, 3, 100, _UINT64 // 2)


class RefusingTests(TransportKit):
    """Tests that the halves refuse what is out of range, malformed or closed."""

    @over_a_link()
    async def test_what_is_out_of_range_is_refused(self, ends: Ends) -> None:
        """It raises a TransportError, and neither the segment nor local memory changes."""
        endpoints, session, _ = ends
        cases = list(_outside(endpoints.nbytes))
        if self.link_class().rows:
            cases += _rows_outside(endpoints.nbytes)
        for what, copy in cases:
            for direction in ("write", "read"):
                await _refused(endpoints, session, f"{direction} of {what}", copy, direction)

    @over_a_link()
    async def test_a_negative_size_moves_nothing(self, ends: Ends) -> None:
        """It may be refused, or treated as an empty copy."""
        endpoints, session, _ = ends
        for nbytes in (-1, -_NBYTES, -_BEYOND):
            for direction in ("write", "read"):
                copy = Copy(0, 0, _EDGE // 2, nbytes)
                what = f"{direction} of {nbytes} bytes"
                await _refused(endpoints, session, what, copy, direction, must=False)

    @over_a_link()
    async def test_what_has_arrived_is_told_honestly(self, ends: Ends) -> None:
        """If a batch fails, ``details["done"]`` counts only copies that have arrived."""
        endpoints, _, link = ends
        source = Memory(pattern(1, 1 << 20))
        offset = endpoints.take(1 << 20)
        endpoints.put(offset, bytes(1 << 20))
        size = (1 << 20) // 8
        copies = [Copy(source.address + at * size, 0, offset + at * size, size) for at in range(8)]
        copies[5] = msgspec.structs.replace(copies[5], offset=endpoints.nbytes - 1)
        raised = await outcome(link.write(copies), _SOON_S, "a batch with a copy out of range")
        if not isinstance(raised, TransportError):
            fail(f"a batch with a copy out of range ended with {raised!r}")
        done = raised.details.get("done", 0)
        good = type(done) is int and 0 <= done <= 5
        check(good, f'details["done"] is {done!r}, and the copy at 5 cannot be done')
        arrived = endpoints.look(offset, done * size) == source.data()[: done * size]
        check(arrived, f'details["done"] is {done}, but not all of these bytes are there')

    @over_a_link()
    async def test_a_garbage_offer_is_refused(self, ends: Ends) -> None:
        """``connect`` soon raises a TransportError. A transport that needs no offer may ignore it,
        but then its link must write the right bytes, or raise a TransportError.
        """
        endpoints, session, _ = ends
        taken: list[bytes] = []
        real = session.context.offer
        for offer in (*_GARBAGE, real[:-1], real + b"\x00"):
            if offer == real:
                continue
            what = f"an offer of {len(offer)} bytes of garbage"
            raised = await outcome(session.connect(offer), _SOON_S, what)
            if raised is None:
                taken.append(offer)
                continue
            check_raised(raised, what)
        for offer in taken:
            other = await session.connect(offer)
            source, offset = Memory(pattern(2, _NBYTES)), endpoints.take(_NBYTES)
            raised = await outcome(
                other.write([source.copy(offset)]), _SOON_S, "a write after a garbage offer"
            )
            known = raised is None or isinstance(raised, TransportError)
            check(known, f"a write after a garbage offer raised {raised!r}")
            right = raised is not None or endpoints.look(offset, _NBYTES) == source.data()
            check(right, "a link made from a garbage offer loses bytes")

    @over_a_link()
    async def test_garbage_handshakes_are_refused(self, ends: Ends) -> None:
        """The server half soon raises a TransportError, and continues to serve other clients."""
        endpoints, session, _ = ends
        sent = session.requests[:3]
        changed = [one[:-1] for one in sent if one] + [one + b"\x00" * 9 for one in sent]
        async with endpoints.session() as stranger:
            for request in (*_GARBAGE, *changed):
                what = f"a handshake of {len(request)} bytes of garbage"
                raised = await outcome(stranger.handshake(request), _SOON_S, what)
                check_raised(raised, what)
                if isinstance(raised, TransportError) and "raised" in raised.details:
                    fail(
                        f"{what} ({request[:40]!r}) made the server half's 'handshake' raise "
                        f"{raised.details['raised']}, which is no TransportError: it has to "
                        f"refuse what it does not understand ({raised})"
                    )
            for request in _GARBAGE[2:4]:
                await must_refuse(stranger.handshake(request), "a garbage handshake", _SOON_S)
        memory, offset = Memory(pattern(9, _NBYTES)), endpoints.take(_NBYTES)
        again = await session.connect()
        what = "a write after garbage handshakes of another client"
        raised = await outcome(again.write([memory.copy(offset)]), _SOON_S, what)
        check(raised is None, f"{what} raised {raised!r}")
        check(endpoints.look(offset, _NBYTES) == memory.data(), f"{what} wrote other bytes")

    @over_a_link()
    async def test_handshakes_carry_no_pickles(self, ends: Ends) -> None:
        """The offer is no pickle, either: to unpickle a peer's bytes is to run the peer's code."""
        endpoints, session, link = ends
        memory = Memory(_NBYTES)
        await link.write([memory.copy(endpoints.take(_NBYTES))])
        for what, data in [
            ("the offer", session.context.offer),
            *(("a handshake", request) for request in session.requests),
        ]:
            check(not _is_pickle(data), f"{what} is a pickle: {data[:40]!r}...")

    @over_a_link()
    async def test_a_closed_link_refuses(self, ends: Ends) -> None:
        """After ``close``, transfers raise a TransportError."""
        endpoints, _, link = ends
        source, offset = Memory(pattern(8, _NBYTES)), endpoints.take(_NBYTES)
        endpoints.put(offset, bytes(_NBYTES))
        link.close()
        await must_refuse(link.write([source.copy(offset)]), "a write after close()")
        check(endpoints.look(offset, _NBYTES) == bytes(_NBYTES), "a closed link has written")
        await must_refuse(link.read([source.copy(offset)]), "a read after close()")
        check(source.data() == pattern(8, _NBYTES), "a closed link has read")

    @over_a_link("fresh")
    async def test_a_closed_server_half_refuses(self, ends: Ends) -> None:
        """After it has been closed (once or twice), no link can be made, and a link that exists
        fails with a TransportError, unless it needs no server half.
        """
        endpoints, session, link = ends
        source = Memory(pattern(8, _NBYTES))
        copies = [source.copy(endpoints.take(_NBYTES))]
        await link.write(copies)
        for _ in range(2):
            closing = session.close_volume()
            raised = await outcome(closing, _CLOSING_S, "close() of the server half")
            check(raised is None, f"close() of the server half raised {raised!r}")
        what = "a write after close() of the server half"
        raised = await outcome(link.write(copies), _SOON_S, what)
        check_raised(raised, what)
        what = "connect after close() of the server half"
        await must_refuse(session.connect(), what, _CONNECT_S)

    @over_a_link()
    async def test_more_than_max_bytes_is_not_asked_for(self, ends: Ends) -> None:
        """``max_bytes``, if it is set, is at least 1, and a batch of that many bytes is moved."""
        endpoints, _, link = ends
        limit = self.spec().max_bytes
        if limit is None:
            pytest.skip("it has no limit (max_bytes is None)")
        check(type(limit) is int and limit > 0, f"max_bytes is {limit!r}")
        size = min(limit, self.large_bytes)
        source, offset = Memory(pattern(6, size)), endpoints.take(size)
        await link.write([source.copy(offset)])
        check(endpoints.look(offset, size) == source.data(), "a batch of max_bytes changed")


async def _refused(
    endpoints: Endpoints,
    session: Session,
    what: str,
    copy: Copy,
    direction: str,
    *,
    must: bool = True,
) -> None:
    """Try one copy on a link of its own, and check that memory has not changed at either end."""
    data = pattern(17, _NBYTES)
    memory = Memory(data)
    last = endpoints.nbytes - _EDGE
    before = endpoints.look(0, _EDGE), endpoints.look(last, _EDGE)
    link = await session.connect()
    move = link.write if direction == "write" else link.read
    work = move([msgspec.structs.replace(copy, address=memory.address)])
    if must:
        await must_refuse(work, what, _SOON_S)
    else:
        raised = await outcome(work, _SOON_S, what)
        check_raised(raised, what)
    after = endpoints.look(0, _EDGE), endpoints.look(last, _EDGE)
    check(before == after, f"{what} changed the segment")
    check(memory.data() == data and memory.is_intact(), f"{what} changed local memory")
    link.close()


def _is_pickle(data: bytes) -> bool:
    """Return whether the bytes begin and end like a pickle of protocol 2 to 5."""
    return len(data) > 3 and data[0] == 0x80 and 2 <= data[1] <= 5 and data[-1:] == b"."
