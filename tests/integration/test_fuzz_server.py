"""A real server and clients that send what no client should: nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support import until

import torchstore_core as ts
from torchstore_core import topology
from torchstore_core.client_side.lane import client_facts
from torchstore_core.values import ObjectMeta, TensorMeta, ValueMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import HEADER, FrameReader, decode_reply, encode

MB = 1 << 20
CAPACITY = 64 * MB
MOST = 2**64 - 1  # the largest integer that msgpack has
NAME = "fuzzed"

FUZZ = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# ---- the server, a good client, hostile ones ----------------------------------------------


class Neighbour:
    """A well-behaved client beside the hostile ones, with a thread and an event loop of its own;
    it owns the server.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._count = itertools.count(1)
        try:
            self.client = self.run(
                ts.initialize(store_name=NAME, capacity=CAPACITY, prefault=0, timeout=10)
            )
            self.pid = self.status().controller_pid
            self.path = self.client.address.removeprefix("unix:")
            self._target = torch.zeros(64 << 10)
            self.work()
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def status(self) -> m.StatusReport:
        report: m.StatusReport = self.run(self.client.status())
        return report

    def work(self) -> None:
        """Put and get, small and large, and look at every byte."""
        self.run(self._work(next(self._count)))

    async def _work(self, number: int) -> None:
        ref = await self.client.put("good/small", {"number": number})
        assert ref.version == number
        assert await self.client.get(ref) == {"number": number}
        if number % 8 == 1:
            value = torch.full((64 << 10,), float(number))
            await self.client.put("good/large", value)
            assert torch.equal(await self.client.get("good/large"), value)
            await self.client.get("good/large", self._target)
            assert torch.equal(self._target, value)

    def close(self) -> None:
        self.run(ts.shutdown(NAME))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def rss(pid: int) -> int:
    """Resident bytes of a process, without the shared memory that clients wrote to."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024


class Hostile:
    """A raw connection to the server."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(10)
        self._socket.connect(path)
        self._reader = FrameReader(m.MAX_FRAME)
        self._replies: list[Any] = []

    def __enter__(self) -> Hostile:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes | bytearray) -> None:
        """Send all of it, or what the server takes before it hangs up."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def no_more(self) -> None:
        """Nothing more will be sent; the replies still come."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def reply(self) -> Any:
        """The next reply, or None if the connection was closed; every byte must make sense."""
        while not self._replies:
            try:
                data = self._socket.recv(MB)
            except ConnectionResetError:  # it hung up before it had read all that was sent
                return None
            if not data:
                return None
            self._replies += map(decode_reply, self._reader.feed(data))
        return self._replies.pop(0)

    def replies(self) -> list[Any]:
        """All replies up to the end of the connection."""
        return list(iter(self.reply, None))

    def ask(self, message: Any) -> Any:
        self.send(encode(message))
        return self.reply()

    def greet(self, **changes: Any) -> Any:
        return self.ask(hello(**changes))


def hello(**changes: Any) -> m.Hello:
    here = topology.probe()
    made = m.Hello(1, m.PROTOCOL_VERSION, b"", here, client_facts({}, here))
    return msgspec.structs.replace(made, **changes)


def framed(body: bytes, announced: int | None = None) -> bytes:
    size = len(body) if announced is None else announced
    return size.to_bytes(HEADER, "little") + body


def body_of(message: Any) -> bytes:
    return bytes(encode(message))[HEADER:]


@pytest.fixture(scope="module")
def good() -> Iterator[Neighbour]:
    neighbour = Neighbour()
    try:
        yield neighbour
    finally:
        neighbour.close()


@pytest.fixture(autouse=True)
async def _nothing_is_left(good: Neighbour):
    """After every test: the same process, with the descriptors, sessions and bytes of before."""
    descriptors, memory, before = fds(good.pid), rss(good.pid), good.status()
    used = before.volumes[0].used_bytes
    yield
    await until(lambda: fds(good.pid) == descriptors)
    good.work()
    good.run(good.client.delete_batch(good.run(good.client.keys("evil/"))))
    after = good.status()
    assert after.controller_pid == good.pid
    assert [s.pid for s in after.sessions] == [os.getpid()]
    assert after.volumes[0].unfinished_bytes == 0
    assert after.volumes[0].used_bytes <= used + 1024  # the good client's keys alone
    assert rss(good.pid) <= memory + 8 * MB


def only_refused(replies: Sequence[Any], code: str = "protocol") -> None:
    """One failure, about the connection, then the end."""
    assert [type(reply) for reply in replies] == [m.Failure], replies
    assert (replies[0].id, replies[0].code) == (0, code)
    assert replies[0].message


# ---- before the hello ---------------------------------------------------------------------


@settings(FUZZ, max_examples=400)
@given(data=st.binary(max_size=300), cut=st.integers(0, 300))
def test_garbage_instead_of_a_hello(good: Neighbour, data: bytes, cut: int) -> None:
    with Hostile(good.path) as hostile:
        hostile.send(data[:cut])
        good.work()
        hostile.send(data[cut:])
        size = int.from_bytes(data[:HEADER], "little")
        whole = len(data) >= HEADER and (len(data) >= HEADER + size or size > m.MAX_HELLO_FRAME)
        if whole:  # it hangs up by itself
            only_refused(hostile.replies())
        else:
            hostile.no_more()
            assert hostile.replies() == []


@settings(FUZZ, max_examples=300)
@given(data=st.data())
def test_frames_of_garbage_instead_of_a_hello(good: Neighbour, data: st.DataObject) -> None:
    bodies = data.draw(st.lists(st.one_of(st.binary(max_size=200), junk()), min_size=1, max_size=8))
    with Hostile(good.path) as hostile:
        hostile.send(b"".join(map(framed, bodies)))
        only_refused(hostile.replies())
    good.work()


@settings(FUZZ, max_examples=150)
@given(data=st.data())
def test_a_hello_that_is_cut_or_changed(good: Neighbour, data: st.DataObject) -> None:
    body = body_of(hello())
    broken = data.draw(st.one_of(cut(body), continued(body), mistyped(body)))
    with Hostile(good.path) as hostile:
        hostile.send(framed(broken))
        only_refused(hostile.replies())
    with Hostile(good.path) as hostile:  # announced whole, ends early
        hostile.send(framed(broken[:-1], len(broken)))
        good.work()
        hostile.no_more()
        assert hostile.replies() == []


@settings(FUZZ, max_examples=150)
@given(data=st.data())
def test_requests_before_the_hello(good: Neighbour, data: st.DataObject) -> None:
    requests = data.draw(st.lists(request(), min_size=1, max_size=4))
    with Hostile(good.path) as hostile:
        for asked in requests:
            hostile.send(encode(asked))
        hostile.send(encode(hello()))
        only_refused(hostile.replies())
    good.work()


def test_a_shutdown_before_the_hello(good: Neighbour) -> None:
    with Hostile(good.path) as hostile:
        hostile.send(encode(m.Shutdown(1)))
        only_refused(hostile.replies())


@pytest.mark.parametrize("version", [0, -1, m.PROTOCOL_VERSION + 1, MOST])
def test_a_hello_of_another_version(good: Neighbour, version: int) -> None:
    with Hostile(good.path) as hostile:
        hostile.send(encode(hello(protocol=version)) + encode(m.Status(2)))
        replies = hostile.replies()
        only_refused(replies)
        assert str(version) in replies[0].message


@pytest.mark.parametrize("token", [b"\0", bytes(16), b"x" * 16, b"x" * 60_000])
def test_a_token_that_was_never_given(good: Neighbour, token: bytes) -> None:
    with Hostile(good.path) as hostile:
        hostile.send(encode(hello(id=7, session=token)) + encode(m.Status(2)))
        refused, *rest = hostile.replies()
        assert (refused.id, refused.code) == (7, "store-closed")
        # A connection without a session gets no answer to anything.
        assert [(type(r), r.id) for r in rest] in ([], [(m.Failure, 0)])


async def test_the_token_of_a_session_that_ended(good: Neighbour) -> None:
    with Hostile(good.path) as anchor, Hostile(good.path) as lane:
        token = anchor.greet().session
        assert len(token) >= 16
        assert lane.greet(session=token).session == token
        assert isinstance(lane.ask(m.Status(2)), m.StatusReport)
        anchor.no_more()
        assert anchor.replies() == []
        only_refused([lane.ask(m.Status(3))], "store-closed")
        assert lane.replies() == []
        with Hostile(good.path) as late:
            assert late.greet(session=token).code == "store-closed"
            assert late.replies() == []


def test_a_second_hello(good: Neighbour) -> None:
    for changes in ({}, {"session": b"x"}, {"protocol": 9}):
        with Hostile(good.path) as hostile:
            assert isinstance(hostile.greet(), m.Welcome)
            hostile.send(encode(hello(**changes)))
            only_refused(hostile.replies())
    good.work()


# ---- sizes --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [m.MAX_HELLO_FRAME + 1, m.MAX_FRAME, MOST >> 32])
def test_a_first_frame_that_is_too_large(good: Neighbour, size: int) -> None:
    with Hostile(good.path) as hostile:
        hostile.send(framed(b"", size))
        only_refused(hostile.replies())


@pytest.mark.parametrize("size", [m.MAX_FRAME + 1, MOST >> 32])
def test_a_frame_that_is_too_large(good: Neighbour, size: int) -> None:
    with Hostile(good.path) as hostile:
        hostile.greet()
        hostile.send(framed(b"", size))
        only_refused(hostile.replies())


async def test_a_64_mb_frame_that_dribbles(good: Neighbour) -> None:
    memory = rss(good.pid)
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(Hostile(good.path)) for _ in range(8)]
        for hostile in many:
            hostile.greet()
            hostile.send(framed(b"", m.MAX_FRAME))
        for _ in range(128):
            for hostile in many:
                hostile.send(bytes(1000))
            good.work()
        # Announcing costs nothing: the server holds what came, not what was promised.
        assert rss(good.pid) < memory + 8 * MB
    await until(lambda: len(good.status().sessions) == 1)


def test_whole_64_mb_frames_of_garbage(good: Neighbour) -> None:
    def once() -> None:
        with Hostile(good.path) as hostile:
            hostile.greet()
            hostile.send(framed(b"", m.MAX_FRAME))
            for _ in range(64):
                hostile.send(bytes(MB))
            only_refused(hostile.replies())
        good.work()

    once()
    memory = rss(good.pid)
    for _ in range(3):
        once()
    assert rss(good.pid) <= memory + 8 * MB


@pytest.mark.parametrize("depth", [1_000, 100_000, 10_000_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k", b"\xdc\x00\x01"], ids=bytes.hex)
@pytest.mark.parametrize("before", [b"", b"\x93\xa6status\x02", b"\x92\xa6status"], ids=bytes.hex)
def test_deep_nesting(good: Neighbour, depth: int, opening: bytes, before: bytes) -> None:
    with Hostile(good.path) as hostile:
        hostile.greet()
        hostile.send(framed(before + opening * depth + b"\xc0"))
        if depth == 1_000 and before.startswith(b"\x93"):
            # A field that is not known (yet), and not too deep to be skipped.
            hostile.no_more()
            assert {type(reply) for reply in hostile.replies()} <= {m.StatusReport, m.Failure}
        else:
            only_refused(hostile.replies())
    good.work()


# ---- what is in a message -----------------------------------------------------------------

META = ObjectMeta("msgpack")


def item(key: str = "evil/a", nbytes: int = 1, data: bytes | None = b"x") -> m.PutItem:
    return m.PutItem(key, META, nbytes, data)


BAD_PUTS = {
    "no items": [],
    "empty key": [item("")],
    "long key": [item("k" * (m.MAX_KEY + 1))],
    "very long key": [item("k" * (8 * MB))],
    "long key, placed": [item("k" * (m.MAX_KEY + 1), 10, None)],
    "less data": [item(nbytes=2)],
    "more data": [item(nbytes=1, data=b"xy")],
    "data of a negative size": [item(nbytes=-1)],
    "huge size, little data": [item(nbytes=MOST)],
    "negative": [item(nbytes=-1, data=None)],
    "very negative": [item(nbytes=-(2**63), data=None)],
    "nothing to place": [item(nbytes=0, data=None)],
    "2**60": [item(nbytes=2**60, data=None)],
    "2**63": [item(nbytes=2**63, data=None)],
    "2**64 - 1": [item(nbytes=MOST, data=None)],
    "a sum over 2**60": [item(nbytes=2**59, data=None)] * 3,
    "one bad among good": [item(), item("evil/b", 10, None), item(nbytes=-1, data=None)],
    "one without a key among good": [item(), item("evil/b", 10, None), item("")],
}


@pytest.mark.parametrize("items", BAD_PUTS.values(), ids=BAD_PUTS)
def test_puts_that_make_no_sense(good: Neighbour, items: list[m.PutItem]) -> None:
    """They are refused as a whole; the connection and its other requests go on."""
    with Hostile(good.path) as hostile:
        hostile.greet()
        failure = hostile.ask(m.Put(5, 5, items))
        assert (type(failure), failure.id, failure.code) == (m.Failure, 5, "protocol")
        assert len(failure.message) < 16 << 10
        assert hostile.ask(m.Commit(6, 5)).code == "protocol"
        assert hostile.ask(m.Keys(7, "evil/")).keys == []
        assert hostile.ask(m.Status(8)).volumes[0].unfinished_bytes == 0
        assert hostile.ask(m.Put(9, 5, [item()])).versions
    good.work()


@pytest.mark.parametrize("nbytes", [CAPACITY + 1, 2**40, 2**59, 2**60 - 4096])
def test_puts_that_never_fit(good: Neighbour, nbytes: int) -> None:
    with Hostile(good.path) as hostile:
        hostile.greet()
        for items in ([item(nbytes=nbytes, data=None)], [item(), item("evil/b", nbytes, None)]):
            failure = hostile.ask(m.Put(5, 5, items))
            assert (failure.id, failure.code) == (5, "store-full")
        assert hostile.ask(m.Keys(7, "evil/")).keys == []
    good.work()


async def test_ids_that_are_used_twice(good: Neighbour) -> None:
    with Hostile(good.path) as hostile:
        hostile.greet()
        placed = item("evil/a", 1000, None)
        first = hostile.ask(m.Put(2, 5, [placed]))
        assert hostile.ask(m.Put(3, 5, [item("evil/b", 1000, None)])).code == "protocol"
        assert hostile.ask(m.Commit(4, 5)).versions == [
            hostile.ask(m.Stat(5, "evil/a")).version,
        ]
        assert hostile.ask(m.Commit(6, 5)).code == "protocol"
        assert hostile.ask(m.Stat(7, "evil/a")).offset == first.grants[0].offset
        located = m.Locate(8, 5, [m.Want("evil/a")], -1)
        assert hostile.ask(located).leased
        assert hostile.ask(located).code == "protocol"
        assert hostile.ask(m.Stat(9, "evil/a")).leases == 1
        # Given back twice, in pieces, at places that are not there: it counts once.
        hostile.send(encode(m.Release([], [(5, [0, 0, -1, 7, MOST])])))
        hostile.send(encode(m.Release([5, 5, -1, MOST], [(5, [0]), (MOST, [0])])))
        assert hostile.ask(m.Stat(10, "evil/a")).leases == 0
        waiting = encode(m.Wait(11, ["evil/never"], 1))
        hostile.send(waiting + waiting)
        only_refused(hostile.replies())
    await until(lambda: len(good.status().sessions) == 1)


def test_ids_of_others(good: Neighbour) -> None:
    """Ids belong to a session: whatever one says of them does nothing to another's."""
    ids = list(range(-2, 300))
    value = torch.arange(256 << 10)
    good.run(good.client.put("good/held", value))
    held = good.run(good.client.get("good/held"))
    with Hostile(good.path) as witness, Hostile(good.path) as hostile:
        witness.greet()
        hostile.greet()
        granted = witness.ask(m.Put(2, 100, [item("evil/w", 1000, None)]))
        assert witness.ask(m.Locate(3, 100, [m.Want("good/held")], -1)).leased
        waiting = m.Wait(50, ["evil/w"], 1)
        witness.send(encode(waiting))
        assert witness.ask(m.Stat(4, "good/held")).leases == 2
        for number in ids:
            assert hostile.ask(m.Commit(2, number)).code == "protocol"
            hostile.send(encode(m.Cancel(number)))
        hostile.send(encode(m.Abort(ids)))
        hostile.send(encode(m.Release(ids, [(number, [0]) for number in ids])))
        report = hostile.ask(m.Status(3))
        assert report.volumes[0].unfinished_bytes > 0
        assert hostile.ask(m.Stat(4, "good/held")).leases == 2
        good.work()
        witness.send(encode(m.Commit(5, 100)))
        answers = {reply.id: reply.versions for reply in (witness.reply(), witness.reply())}
        assert answers[5] == answers[50]
        assert witness.ask(m.Stat(6, "evil/w")).offset == granted.grants[0].offset
    assert torch.equal(held, value)
    del held
    good.run(good.client.delete("good/held"))


# ---- anything, in any order ---------------------------------------------------------------

Sizes = st.sampled_from([-(2**63), -1, 0, 1, 100, 4096, 65536, 2**40, 2**59, 2**60, 2**63, MOST])
Ids = st.one_of(st.integers(-1, 4), st.sampled_from([-(2**63), 2**63, MOST]))
Positions = st.lists(st.one_of(Ids, st.integers(0, 3)), max_size=4)
Keys = st.sampled_from(["evil/a", "evil/b", "evil/\0", "evil/" + "k" * 4091, "evil/é\U0001f600"])
AnyKey = st.one_of(Keys, st.sampled_from(["", "k" * 4097, "good/small", "good/no"]))
ManyKeys = st.lists(AnyKey, max_size=4)
Metas: st.SearchStrategy[ValueMeta] = st.sampled_from(
    [
        META,
        ObjectMeta("no such codec"),
        TensorMeta("float32", (1,)),
        TensorMeta("no such dtype", (MOST, -1)),
        TensorMeta("", ()),
    ]
)


@st.composite
def put_item(draw: st.DrawFn) -> m.PutItem:
    data = draw(st.sampled_from([None, b"", b"x", bytes(100)]))
    likely = 100 if data is None else len(data)
    # Only keys of its own: overwriting another's is no attack, every client may.
    key = draw(st.one_of(Keys, st.sampled_from(["", "evil/" + "k" * 4092])))
    return m.PutItem(key, draw(Metas), draw(st.one_of(st.just(likely), Sizes)), data)


def request() -> st.SearchStrategy[Any]:
    """Any request, with values from plausible to absurd; ids are given out later."""
    want = st.builds(m.Want, AnyKey, st.one_of(st.just(0), Ids))
    evil = st.lists(Keys, max_size=4)
    return st.one_of(
        st.builds(m.Put, st.just(0), Ids, st.lists(put_item(), max_size=4)),
        st.builds(m.Put, st.just(0), Ids, st.lists(st.builds(item, Keys), min_size=1, max_size=4)),
        st.builds(m.Commit, st.just(0), Ids),
        st.builds(m.Abort, st.lists(Ids, max_size=4)),
        st.builds(m.Locate, st.just(0), Ids, st.lists(want, max_size=4), Sizes),
        st.builds(m.Release, Positions, st.lists(st.tuples(Ids, Positions), max_size=3)),
        st.builds(m.Delete, st.just(0), evil, st.booleans()),
        st.builds(m.Exists, st.just(0), ManyKeys),
        st.builds(m.Keys, st.just(0), AnyKey),
        st.builds(m.Wait, st.just(0), ManyKeys, Ids),
        st.builds(m.Cancel, Ids),
        st.builds(m.Stat, st.just(0), AnyKey),
        st.builds(m.List, st.just(0), AnyKey, AnyKey),
        st.builds(m.Status, st.just(0)),
    )


def cut(body: bytes) -> st.SearchStrategy[bytes]:
    return st.integers(0, len(body) - 1).map(lambda at: body[:at])


def continued(body: bytes) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=1, max_size=9).map(lambda more: body + more)


def mistyped(body: bytes) -> st.SearchStrategy[bytes]:
    """One field, or the tag, becomes something that no message has there."""
    plain = msgspec.msgpack.decode(body)

    def change(at: int, wrong: Any) -> bytes:
        return msgspec.msgpack.encode([*plain[:at], wrong, *plain[at + 1 :]])

    wrongs = st.sampled_from([None, 1.5, {"a": 1}, {1: 2}, [[[[]]]], msgspec.msgpack.Ext(5, b"x")])
    return st.builds(change, st.integers(0, len(plain) - 1), wrongs)


def junk() -> st.SearchStrategy[bytes]:
    """Well-formed msgpack, or nearly, that is no request."""
    return st.sampled_from(
        [
            b"",
            b"\xc1",
            b"\xc0",
            b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
            b"\x92\xa5abort\xdd\xff\xff\xff\xff",
            b"\x92\xa5abort\xdd\x7f\xff\xff\xff" + b"\x01" * 1000,
            b"\x93\xa4keys\x02\xa2\xff\xfe",  # not UTF-8
            b"\x93\xa4keys\x02\xa3\xed\xa0\x80",  # a surrogate
            b"\x93\xa6exists\x02\xd9",
            msgspec.msgpack.encode(["no-such-message", 1]),
            msgspec.msgpack.encode(["status"]),
            msgspec.msgpack.encode(["status", 2**63, *[0] * 5])[:-1],
            msgspec.msgpack.encode({"type": "status", "id": 1}),
            msgspec.msgpack.encode("status"),
            body_of(m.Done(1)),
            body_of(m.Failure(0, "protocol", "no, you")),
            body_of(m.Warmed([(0, 0, 1 << 40)])),
            body_of(m.Committed(1, [1])),
        ]
    )


class Frame(NamedTuple):
    """What is sent, and what must come of it.

    Args:
        body: the frame's.
        id: of the reply, None if there is none.
        fatal: it ends the connection.
        message: what it is, if it is a request.
    """

    body: bytes
    id: int | None
    fatal: bool
    message: Any = None


@st.composite
def session(draw: st.DrawFn) -> list[Frame]:
    """Frames in any order: requests, the same ones again, broken ones, garbage."""
    frames: list[Frame] = []
    for number in range(draw(st.integers(1, 14))):
        kind = draw(st.integers(0, 39))
        old = [f for f in frames if f.message is not None and not isinstance(f.message, m.Wait)]
        if kind < 6 and old:
            frames.append(draw(st.sampled_from(old)))  # replayed
            continue
        asked = draw(request())
        answered = "id" in asked.__struct_fields__
        if answered:
            asked = msgspec.structs.replace(asked, id=1000 + number)
        body = body_of(asked)
        if kind < 36:
            frames.append(Frame(body, asked.id if answered else None, False, asked))
        else:
            broken = draw(st.one_of(cut(body), continued(body), mistyped(body), junk()))
            frames.append(Frame(broken, None, True))
    return frames


#: Codes that a client may get for what it asked. Not "error": the server failed, not the request.
CODES = {"protocol", "key-not-found", "version-gone", "store-full"}


@settings(FUZZ, max_examples=500)
@given(frames=session(), pieces=st.lists(st.integers(1, 400), max_size=6), lane=st.booleans())
def test_anything_in_any_order(
    good: Neighbour, frames: list[Frame], pieces: list[int], lane: bool
) -> None:
    stream = b"".join(framed(frame.body) for frame in frames)
    with contextlib.ExitStack() as stack:
        anchor = stack.enter_context(Hostile(good.path))
        token = anchor.greet().session
        hostile = anchor
        if lane:
            hostile = stack.enter_context(Hostile(good.path))
            assert isinstance(hostile.greet(session=token), m.Welcome)
        for size in pieces:
            hostile.send(stream[:size])
            stream = stream[size:]
        hostile.send(stream)
        good.work()
        if not any(frame.fatal for frame in frames):
            hostile.no_more()
        check(frames, hostile.replies())


def check(frames: list[Frame], replies: list[Any]) -> None:
    if any(frame.fatal for frame in frames):
        only_refused(replies[-1:])
        replies = replies[:-1]
    owed: Counter[int] = Counter()
    waits: dict[int, Any] = {}
    for frame in itertools.takewhile(lambda frame: not frame.fatal, frames):
        if isinstance(frame.message, m.Wait):
            waits[frame.message.id] = frame.message
        elif frame.id is not None:
            owed[frame.id] += 1
    for reply in replies:
        if isinstance(reply, m.Failure):
            assert reply.code in CODES, reply
    got = Counter(reply.id for reply in replies)
    for number in waits:  # answered once if what it waits for is there, else not at all
        assert got.pop(number, 0) <= 1
    assert got == owed


@settings(FUZZ, max_examples=150)
@given(data=st.data())
def test_no_frame_of_garbage_after_a_hello_is_survived(
    good: Neighbour, data: st.DataObject
) -> None:
    body = body_of(data.draw(request()))
    broken = data.draw(st.one_of(cut(body), continued(body), mistyped(body), junk()))
    with Hostile(good.path) as hostile:
        hostile.greet()
        hostile.send(framed(broken) + encode(m.Status(2)))
        only_refused(hostile.replies())
    good.work()


async def test_thousands_of_connections_leave_nothing(good: Neighbour) -> None:
    """Every way to end: silent, refused, in the middle of a frame, with a put and a lease open."""
    good.run(good.client.put("evil/read", torch.zeros(100_000)))

    def once() -> None:
        for _ in range(5):
            Hostile(good.path).__exit__()
        with Hostile(good.path) as hostile:
            hostile.send(framed(b"\xc1"))
            only_refused(hostile.replies())
        with Hostile(good.path) as hostile:
            hostile.greet()
            hostile.send(framed(b"\xc1" * 10_000, 20_000))
        with Hostile(good.path) as hostile:
            hostile.greet()
            for number in range(5):
                hostile.send(encode(m.Put(2, number, [item("evil/c", 100_000, None)])))
                hostile.send(encode(m.Locate(3, number, [m.Want("evil/read")], -1)))
                hostile.send(encode(m.Wait(9 + number, [f"evil/{number}"], 1)))
            hostile.ask(m.Status(4))
        good.work()

    def clean() -> bool:
        status = good.status()
        volume = status.volumes[0]
        return len(status.sessions) == 1 and not (volume.unfinished_bytes or volume.leased_bytes)

    for _ in range(50):
        once()
    await until(clean)
    memory, descriptors = rss(good.pid), fds(good.pid)
    for _ in range(200):
        once()
    await until(clean)
    await until(lambda: fds(good.pid) == descriptors)
    assert rss(good.pid) <= memory + 2 * MB
