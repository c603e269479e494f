"""Rows of memory through sockets: exactly those bytes, in order, however the kernel cuts them."""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
from array import array
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.machine.native import needs_native

from torchstore_core.machine import socket_rows
from torchstore_core.machine.socket_rows import MemoryRows, receive_rows, send_rows

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
            for number, place in enumerate(self.places):
                length = place.stop - place.start
                self.bytes[place] = bytes((seed + number + at) % 239 for at in range(length))

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
        thread.join(10)
    assert sent == [total]
    assert target.content == (source.content + bytes(room))[:room]
    assert target.gaps <= {0xEE}


def test_more_rows_than_the_kernel_takes_at_once(both: tuple[socket.socket, socket.socket]) -> None:
    shapes = [(7, 5000, 3), (1, 3000, 1)]
    source, target = Memory(shapes, seed=3), Memory(shapes)
    thread = threading.Thread(target=send_rows, args=(both[0].fileno(), source.rows))
    thread.start()
    assert receive_rows(both[1].fileno(), target.rows) == 38000
    thread.join(10)
    assert target.content == source.content


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
