"""What is read of a connection that outlives its server, and what stays in the kernel's buffer."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator

import pytest
from tests.support import until

from torchstore_core.server.serving.kept_reader import KeptReader
from torchstore_core.wire.framing import HEADER
from torchstore_core.wire.messages import MAX_LIVENESS_FRAME


class Killed(SystemExit):
    """The server dies here."""


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def send(sock: socket.socket, *bodies: bytes) -> None:
    sock.sendall(b"".join(len(body).to_bytes(HEADER, "little") + body for body in bodies))


def left(sock: socket.socket) -> bytes:
    """What is still in the kernel's buffer."""
    try:
        return sock.recv(1 << 20, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""


async def test_a_message_stays_until_it_was_handled(pair) -> None:
    """If the server dies while it handles one, those before it are gone, and it is not."""
    ours, theirs = pair
    heard: list[bytes] = []

    def handle(body: bytes) -> bool:
        assert body in left(ours)
        if body == b"third":
            raise Killed
        heard.append(body)
        return True

    reader = KeptReader(ours, handle, lambda: None, lambda error: None)
    send(theirs, b"first", b"second", b"third", b"fourth")
    reader.read()
    with pytest.raises(Killed):
        reader._readable()
    assert heard == [b"first", b"second"]
    assert left(ours)[HEADER:].startswith(b"third")
    reader.close()


async def test_one_that_cannot_be_handled_now_is_not_read(pair) -> None:
    ours, theirs = pair
    heard: list[bytes] = []

    def handle(body: bytes) -> bool:
        heard.append(body)
        return len(heard) < 2  # as if the client did not read its replies

    reader = KeptReader(ours, handle, lambda: None, lambda error: None)
    send(theirs, b"first", b"second", b"third")
    reader.read()
    reader._readable()
    assert heard == [b"first", b"second"]
    await until(lambda: heard == [b"first", b"second", b"third"], 10)
    assert not left(ours)
    reader.close()


async def test_what_is_left_when_writing_has_failed_is_read_one_by_one(pair) -> None:
    ours, theirs = pair
    reader = KeptReader(ours, lambda body: True, lambda: None, lambda error: None)
    send(theirs, b"first", b"second", b"third")
    theirs.sendall(b"\xff\x00\x00\x00half")
    theirs.close()
    heard: list[bytes] = []

    def hear(body: bytes) -> None:
        heard.append(body)
        if body == b"second" and heard.count(body) == 1:
            raise Killed

    with pytest.raises(Killed):
        reader.read_rest(hear)
    reader.read_rest(hear)  # the next life
    assert heard == [b"first", b"second", b"second", b"third"]
    reader.close()


async def test_what_would_never_fit_into_the_buffer_is_refused_at_once(pair) -> None:
    ours, theirs = pair
    refused: list[str] = []
    reader = KeptReader(
        ours, lambda body: True, lambda: None, lambda error: refused.append(error.message)
    )
    send(theirs, b"x" * MAX_LIVENESS_FRAME)
    theirs.sendall((MAX_LIVENESS_FRAME + 1).to_bytes(HEADER, "little"))
    reader.read()
    await until(lambda: refused)
    assert refused == ["frame of 65537 bytes is over the limit of 65536 of a liveness connection"]
    assert len(left(ours)) == HEADER


class Late:
    """What waits for room in the log."""

    def __init__(self) -> None:
        self.is_full = True
        self._calls: deque[Callable[[], None]] = deque()

    def when_recorded(self, call: Callable[[], None]) -> bool:
        if self.is_full:
            self._calls.append(call)
        return self.is_full

    def catch_up(self) -> None:
        self.is_full = False
        while self._calls:
            self._calls.popleft()()


async def test_one_that_is_not_recorded_yet_stays_and_no_other_is_read(pair) -> None:
    ours, theirs = pair
    heard: list[bytes] = []
    late = Late()

    def handle(body: bytes) -> bool:
        heard.append(body)
        return True

    what = handle, lambda: None, lambda error: None, late.when_recorded
    reader = KeptReader(ours, *what)
    send(theirs, b"first", b"second")
    reader.read()
    reader._readable()
    assert heard == [b"first"]
    reader.read()  # whatever else may read again now
    assert not reader._is_reading
    assert left(ours)[HEADER:].startswith(b"first")
    late.catch_up()
    assert left(ours)[HEADER:] == b"second"
    await until(lambda: heard == [b"first", b"second"], 10)
    assert not left(ours)
    reader.close()


async def test_last_words_that_are_not_recorded_yet_stay(pair) -> None:
    ours, theirs = pair
    heard: list[bytes] = []
    late = Late()
    what = heard.append, lambda: None, lambda error: None, late.when_recorded
    reader = KeptReader(ours, *what)
    send(theirs, b"first", b"second", b"third")
    reader.read()
    reader._readable()
    theirs.close()
    all_of_it = left(ours)
    reader.read_rest(heard.append)
    reader.close()
    assert heard == [b"first", b"second", b"third"]
    assert left(ours) == all_of_it
    late.catch_up()
    assert not left(ours)
    assert reader._sock.fileno() < 0
