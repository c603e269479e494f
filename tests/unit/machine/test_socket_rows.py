"""Rows of memory through sockets: exactly those bytes, in order, however the kernel cuts them."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import socket
import struct
import termios
import threading
from array import array
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import until
from tests.unit.copying.native import needs_native

from torchstore_transports.tcp.wire import rows as socket_rows
from torchstore_transports.tcp.wire.rows import MemoryRows, receive_rows, send_rows

pytestmark = needs_native
#: Rows: their length, how many there are, and the gap between them, in bytes.
Shape = tuple[int, int, int]
Shapes = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(0, 40), st.integers(0, 100)), max_size=8
)


class Memory:
    """Rows of these shapes, with gaps, in memory of their own."""

    def __init__(self, shapes: list[Shape], seed: int | None = None) -> None:
        size = sum((nbytes + gap) * rows for nbytes, rows, gap in shapes) or 1
        self.bytes = bytearray(b"\xee" * size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        self.rows: list[MemoryRows] = []
        self.places: list[slice] = []
        at = 0
        for nbytes, rows, gap in shapes:
            self.rows.append((address + at, nbytes, rows, nbytes + gap))
            for _ in range(rows):
                self.places.append(slice(at, at + nbytes))
                at += nbytes + gap
        if seed is not None:
            pattern = bytes(range(239)) * (max((row[0] for row in shapes), default=0) // 239 + 2)
            for number, place in enumerate(self.places):
                first = (seed + number) % 239
                self.bytes[place] = pattern[first : first + place.stop - place.start]

    @property
    def content(self) -> bytes:
        return b"".join([self.bytes[place] for place in self.places])

    @property
    def gaps(self) -> set[int]:
        copy = bytearray(self.bytes)
        for place in self.places:
            copy[place] = b"\xee" * (place.stop - place.start)
        return set(copy)


@pytest.fixture
def both() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends, with little room on the way."""
    one, other = socket.socketpair()
    with one, other:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield one, other


@given(Shapes, Shapes)
def test_every_byte_arrives_in_its_place(here: list[Shape], there: list[Shape]) -> None:
    """What is sent as rows of some shapes is received as rows of others."""
    source, target = Memory(here, seed=1), Memory(there)
    total, room = len(source.content), len(target.content)
    one, other = socket.socketpair()
    with one, other:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sent: list[int] = []

        def send() -> None:
            sent.append(send_rows(one.fileno(), source.rows))
            one.sendall(bytes(max(0, room - total)))

        thread = threading.Thread(target=send)
        thread.start()
        assert receive_rows(other.fileno(), target.rows) == room
        rest = total - room
        while rest > 0:
            rest -= len(other.recv(rest))
        thread.join(60)
    assert sent == [total]
    assert target.content == (source.content + bytes(room))[:room]
    assert target.gaps <= {0xEE}


def test_more_rows_than_the_kernel_takes_at_once(both: tuple[socket.socket, socket.socket]) -> None:
    shapes = [(7, 5000, 3), (1, 3000, 1)]
    source, target = Memory(shapes, seed=3), Memory(shapes)
    thread = threading.Thread(target=send_rows, args=(both[0].fileno(), source.rows))
    thread.start()
    assert receive_rows(both[1].fileno(), target.rows) == 38000
    thread.join(60)
    assert target.content == source.content


@pytest.fixture
def far() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection, whose receiver is not woken for every packet."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other = listener.accept()[0]
    with one, other:
        yield one, other


#: Some 5 MB: rows that go through the buffer, longer ones, runs, and what is between them.
MANY: list[Shape] = [
    (768, 2500, 768),
    (40, 700, 1),
    (1 << 20, 1, 0),
    (2999, 9, 77),
    (0, 5, 3),
    (4097, 300, 13),
    (3071, 200, 3),
]


@pytest.mark.parametrize("there", [MANY, MANY[::-1], [(5 << 20, 1, 0)], [(1000, 5000, 24)]])
def test_large_transfers_over_tcp(
    far: tuple[socket.socket, socket.socket], there: list[Shape]
) -> None:
    source, target = Memory(MANY, seed=5), Memory(there)
    content = source.content
    room = len(target.content)
    rest = bytes(max(0, room - len(content)))

    def send() -> None:
        send_rows(far[0].fileno(), source.rows, more=bool(rest))
        far[0].sendall(rest)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    assert receive_rows(far[1].fileno(), target.rows) == room
    assert target.content == (content + rest)[:room]
    assert target.gaps <= {0xEE}
    assert far[1].getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
    far[1].shutdown(socket.SHUT_RDWR)
    thread.join(60)


@pytest.mark.parametrize("shapes", [[(3 << 20, 1, 0)], [(1000, 3000, 24)]])
def test_the_last_bytes_come_late(
    far: tuple[socket.socket, socket.socket], shapes: list[Shape]
) -> None:
    """The receiver takes what is there, and is woken for the rest, however little it is."""
    target = Memory(shapes)
    room = len(target.content)
    content = bytes(at % 251 for at in range(251)) * (room // 251 + 1)
    got: list[int] = []
    thread = threading.Thread(
        target=lambda: got.append(receive_rows(far[1].fileno(), target.rows)), daemon=True
    )
    thread.start()
    far[0].sendall(content[: room - 1000])
    asyncio.run(until(lambda: _queued(far[1]) == 0, 20))
    far[0].sendall(content[room - 1000 : room - 1])
    asyncio.run(until(lambda: _queued(far[1]) == 0, 20))
    far[0].sendall(content[room - 1 : room])
    thread.join(60)
    assert got == [room]
    assert target.content == content[:room]


def test_a_peer_that_leaves_in_the_middle(far: tuple[socket.socket, socket.socket]) -> None:
    target = Memory([(1000, 3000, 24)])
    far[0].sendall(b"x" * 700_500)
    far[0].shutdown(socket.SHUT_WR)
    assert receive_rows(far[1].fileno(), target.rows) == 700_500
    assert target.content == b"x" * 700_500 + b"\xee" * 2_299_500
    assert target.gaps == {0xEE}
    assert far[1].getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


def _queued(sock: socket.socket) -> int:
    """Bytes that have arrived and were not received."""
    return int(struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))[0])


def test_a_peer_that_leaves(both: tuple[socket.socket, socket.socket]) -> None:
    """Receiving ends with what has come; sending fails, and no signal ends the process."""
    one, other = both
    target = Memory([(100, 10, 0)])
    one.sendall(bytes(250))
    one.shutdown(socket.SHUT_WR)
    assert receive_rows(other.fileno(), target.rows) == 250
    assert target.content == bytes(250) + b"\xee" * 750
    other.close()
    one, more = socket.socketpair()
    more.close()
    with one, pytest.raises(BrokenPipeError):
        send_rows(one.fileno(), target.rows)


def test_a_peer_that_does_nothing(both: tuple[socket.socket, socket.socket]) -> None:
    one, other = both
    interval = struct.pack("ll", 0, 50_000)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
    memory = Memory([(1 << 20, 4, 0)])
    with pytest.raises(BlockingIOError):
        receive_rows(other.fileno(), memory.rows)
    with pytest.raises(BlockingIOError):
        send_rows(one.fileno(), memory.rows)


def test_a_list_that_is_cut_off() -> None:
    transfer = socket_rows._transfer
    assert transfer is not None
    with pytest.raises(ValueError, match="32 bytes"):
        transfer(0, array("q", [1, 2, 3]), True, False)
