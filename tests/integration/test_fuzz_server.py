"""A real server under fire: garbage, lies and nonsense by the thousand over its Unix socket.

Every connection ends in a typed failure or is closed; the server lives, its memory and descriptors
stay as they were, its log shows no traceback, and the neighbour beside it notices nothing.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.test_messages import REQUESTS, body_of, messages_of

import torchstore_core as ts
from torchstore_core import topology
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.values import ObjectMeta, StateDictMeta, TensorMeta, TensorSlice
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import HEADER, FrameReader, decode_reply, encode

CAPACITY = 256 << 20
HERE = topology.probe()
FACTS = ClientFacts(os.getpid(), HERE.host_id, HERE.hostname)
HELLO = m.Hello(1, m.PROTOCOL_VERSION, b"", HERE, FACTS)
HARMLESS = [cls for cls in REQUESTS if cls not in (m.Hello, m.Shutdown)]

fuzz = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# ---- those involved -------------------------------------------------------------------------


class Neighbour:
    """A client in a thread of its own that uses the store all the time, and checks what it gets."""

    LARGE = 300_000

    def __init__(self, address: str) -> None:
        self.rounds = 0
        self.slowest = 0.0
        self.error: BaseException | None = None
        self._address = address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._work())
        except BaseException as error:
            self.error = error

    async def _work(self) -> None:
        client = await ts.connect(self._address, store_name="neighbour", timeout=5)
        large = torch.empty(self.LARGE, dtype=torch.uint8)
        try:
            while not self._stop.is_set():
                begun = time.monotonic()
                number = self.rounds % 251
                large.fill_(number)
                refs = await client.put_batch({"neighbour/large": large, "neighbour/n": number})
                got = await client.get_batch(list(refs.values()))
                assert torch.equal(got["neighbour/large"], large)
                assert got["neighbour/n"] == number
                assert await client.keys("neighbour/") == ["neighbour/large", "neighbour/n"]
                self.slowest = max(self.slowest, time.monotonic() - begun)
                self.rounds += 1
                await asyncio.sleep(0.001)  # leave the attackers some of the processor
        finally:
            await ts.shutdown("neighbour")

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)


class Target:
    """The server process that is attacked."""

    def __init__(self, log: Path) -> None:
        self._log = log
        options = msgspec.json.encode({"capacity": CAPACITY, "prefault": 0})
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "torchstore_core.server", options.decode()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        ready = msgspec.json.decode(self.process.stdout.readline())
        assert ready["pid"] == self.process.pid
        self.address: str = ready["address"]
        self.neighbour = Neighbour(self.address)

    def close(self) -> None:
        self.neighbour.stop()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert self.process.wait(10) == 0

    def rss(self) -> int:
        """Bytes of memory of its own."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return int(fields["RssAnon"].split()[0]) * 1024

    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @contextlib.contextmanager
    def unharmed(self, *, growth: int = 8 << 20) -> Iterator[None]:
        """Whatever happens inside leaves no trace."""
        self.settle(lambda: self.neighbour.rounds > 0)
        fds, rss, rounds = self.fds(), self.rss(), self.neighbour.rounds
        self.neighbour.slowest = 0.0
        yield
        self.settle(lambda: self.neighbour.rounds > rounds + 5)
        self.settle(lambda: self.fds() <= fds)
        self.settle(lambda: self.rss() <= rss + growth)
        assert self.neighbour.slowest < 3.0
        self.settle(self._has_only_its_neighbour)
        assert "Traceback" not in self._log.read_text()

    def _has_only_its_neighbour(self) -> bool:
        with Raw(self.address) as raw:
            raw.send(encode(HELLO), encode(m.Status(2)))
            _, status = raw.finish()
        assert isinstance(status, m.StatusReport)
        assert {s.pid for s in status.sessions} == {os.getpid()}
        (volume,) = status.volumes
        return (
            len(status.sessions) <= 2  # the neighbour's and this one
            and volume.unfinished_bytes < 2 * Neighbour.LARGE
            and volume.leased_bytes < 2 * Neighbour.LARGE
            and volume.used_bytes < 4 << 20
        )

    def settle(self, predicate: Callable[[], bool]) -> None:
        """Wait until it is so; meanwhile nothing may break."""
        deadline = time.monotonic() + 10
        while not predicate():
            assert self.neighbour.error is None, repr(self.neighbour.error)
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, (self.fds(), self.rss(), self.neighbour.rounds)
            time.sleep(0.005)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    made = Target(tmp_path_factory.mktemp("fuzz") / "log")
    try:
        # What is imported, compiled and cached on first use is there before anybody measures.
        for _ in range(300):
            with Raw(made.address) as raw:
                raw.send(encode(HELLO), frame(b"\xc1"))
                raw.finish()
        yield made
    finally:
        made.close()


class Raw:
    """A connection that sends what it likes."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(address.partition(":")[2])

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *chunks: bytes | bytearray) -> None:
        """Send as much as the other side takes before it hangs up."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for chunk in chunks:
                self.socket.sendall(chunk)

    def greet(self) -> None:
        """Say hello and be welcomed: only then a frame may be large."""
        self.send(encode(HELLO))
        reader = FrameReader(m.MAX_FRAME)
        bodies: list[bytes] = []
        while not bodies:
            bodies = reader.feed(self.socket.recv(1 << 16))
        assert isinstance(decode_reply(bodies[0]), m.Welcome)

    def finish(self) -> list[Any]:
        """Send no more; everything that still comes until the other side closes, too."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        return self.read_all()

    def read_all(self) -> list[Any]:
        """All replies (every one of them must be one) until the connection is closed."""
        reader = FrameReader(m.MAX_FRAME)
        replies: list[Any] = []
        while True:
            try:
                data = self.socket.recv(1 << 18)
            except ConnectionResetError:
                break
            if not data:
                break
            replies += [decode_reply(body) for body in reader.feed(data)]
        return [reply for reply in replies if not isinstance(reply, m.Warmed)]

    def refused(self) -> m.Failure:
        """The connection is closed by the other side, for a reason that it gives."""
        last = self.read_all()[-1]
        assert isinstance(last, m.Failure)
        assert last.id == 0
        assert last.code == "protocol"
        return last


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER, "little") + body


def pieces(stream: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(stream) + 1) for c in cuts), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


Cuts = st.lists(st.integers(0, 1 << 16), max_size=4)


# ---- noise ----------------------------------------------------------------------------------


def test_garbage_instead_of_a_hello(target: Target) -> None:
    @settings(fuzz, max_examples=700)
    @given(st.binary(max_size=80) | st.binary(max_size=80).map(frame), Cuts)
    def attack(stream: bytes, cuts: list[int]) -> None:
        with Raw(target.address) as raw:
            raw.send(*pieces(stream, cuts))
            for reply in raw.finish():
                assert isinstance(reply, m.Failure)
                assert (reply.id, reply.code) == (0, "protocol")

    with target.unharmed():
        attack()


Plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
TAGS = [cls.__struct_config__.tag for cls in HARMLESS]


@st.composite
def broken(draw: st.DrawFn) -> bytes:
    """The body of something that was nearly a request."""
    kind = draw(st.sampled_from(["bytes", "value", "typed", "field", "cut", "flip", "utf8"]))
    if kind == "bytes":
        return draw(st.binary(max_size=60))
    if kind == "value":
        return msgspec.msgpack.encode(draw(Plain))
    if kind == "typed":
        return msgspec.msgpack.encode(
            [draw(st.sampled_from(TAGS)), *draw(st.lists(Plain, max_size=5))]
        )
    body = bytearray(body_of(draw(st.sampled_from(HARMLESS).flatmap(messages_of))))
    at = draw(st.integers(0, len(body) - 1))
    if kind == "cut":
        return bytes(body[:at])
    if kind == "flip":
        body[at] ^= draw(st.integers(1, 255))
    elif kind == "utf8":
        body[at:at] = b"\xff\xc0\xaf"
    else:
        plain = msgspec.msgpack.decode(body)
        plain[draw(st.integers(0, len(plain) - 1))] = draw(Plain)
        return msgspec.msgpack.encode(plain)
    if body[1:10] == b"\xa8shutdown":  # that one means it
        return b""
    return bytes(body)


def test_nearly_messages(target: Target) -> None:
    """Cut, flipped, wrongly typed: whatever still is a message is answered as one."""

    @settings(fuzz, max_examples=500)
    @given(st.lists(broken(), min_size=1, max_size=6), Cuts)
    def attack(bodies: list[bytes], cuts: list[int]) -> None:
        with Raw(target.address) as raw:
            stream = b"".join(map(frame, bodies))
            raw.send(encode(HELLO), *pieces(stream, cuts))
            replies = raw.finish()
            assert isinstance(replies[0], m.Welcome)
            closing = [r for r in replies if isinstance(r, m.Failure) and r.code == "protocol"]
            closing = [r for r in closing if "closing this connection" in r.message]
            assert closing in ([], [replies[-1]])
            assert len(replies) <= 1 + len(bodies)

    with target.unharmed():
        attack()


def test_a_conversation_cut_anywhere_and_replayed(target: Target) -> None:
    put = m.Put(2, 1, [m.PutItem("fuzz/r", TensorMeta("uint8", (5000,)), 5000)])
    lines = [HELLO, put, m.Commit(3, 1), m.Locate(4, 2, [m.Want("fuzz/r")], -1), m.Release([2])]
    said = b"".join(bytes(encode(line)) for line in lines)

    @settings(fuzz, max_examples=250)
    @given(st.integers(0, len(said)), st.integers(0, 3), Cuts)
    def attack(cut: int, times: int, cuts: list[int]) -> None:
        with Raw(target.address) as raw:
            raw.send(*pieces(said * times + said[:cut], cuts))
            replies = raw.finish()
            for reply in replies:
                assert isinstance(reply, (m.Welcome, m.Granted, m.Committed, m.Located, m.Failure))
            if times >= 2:  # one Hello is enough
                assert isinstance(replies[-1], m.Failure)

    with target.unharmed():
        attack()


# ---- valid, and hostile ---------------------------------------------------------------------

Id = st.integers(0, 3) | st.sampled_from([-1, -(2**63), 2**63 - 1, 2**64 - 1])
Key = st.sampled_from(["fuzz/a", "fuzz/b", "fuzz/ü", "fuzz/" + "k" * 4091, "", "x" * 5000, "\0"])
Size = st.sampled_from(
    [-(2**63), -1, 0, 1, 63, 64, 65, 4096, 100_000, CAPACITY + 1, 2**60 - 1, 2**60, 2**64 - 1]
)
Meta = st.sampled_from(
    [TensorMeta("uint8", (1,)), TensorMeta("no-such-type", (-1, 2**40)), ObjectMeta("pickle")]
)
Data = st.none() | st.binary(max_size=64)
Extent = st.integers(0, 8) | st.sampled_from([-1, -(2**63), 2**40, 2**63 - 1, 2**64 - 1])
Extents = st.lists(Extent, max_size=3).map(tuple) | st.just((8, 8)) | st.just((1,) * 70)
Shard = st.builds(TensorSlice, Extents, Extents, Extents, Extents, Extents)
Item = (
    st.builds(m.PutItem, Key, Meta, Size, Data)
    | st.builds(
        lambda key, data: m.PutItem(key, TensorMeta("uint8", (len(data),)), len(data), data),
        Key,
        st.binary(max_size=64),
    )
    | st.builds(
        m.PutItem,
        Key,
        st.builds(TensorMeta, st.just("uint8"), Extents) | Meta | st.just(StateDictMeta(2)),
        Size | st.integers(0, 64),
        Data,
        st.none() | Shard,
        st.binary(max_size=8),
        st.sampled_from([-1, -1, 0, 1, 3, -2, 2**63]),
    )
)


@st.composite
def shards(draw: st.DrawFn) -> list[m.PutItem]:
    """Nearly right: rows of a matrix of bytes, with something about them that may be wrong."""
    rows = sorted(draw(st.lists(st.integers(0, 8), min_size=2, max_size=4)))
    wrong = draw(st.sampled_from(["", "", "", "", "offset", "size", "shape", "mesh", "twice"]))
    mesh, at = draw(st.sampled_from([((), ()), ((2,), (0,)), ((2,), (1,)), ((2, 2), (0, 1))]))
    items: list[m.PutItem] = []
    for start, end in itertools.pairwise(rows):
        offset, size = start + 5 * (wrong == "offset"), (end - start) * 8 + (wrong == "size")
        whole = (8, 8 + (wrong == "shape"))
        place = (*at, 1) if wrong == "mesh" else at
        part = TensorSlice((offset, 0), (end - start, 8), whole, mesh, place)
        data = draw(st.sampled_from([None, bytes(size)])) if size else b""
        items.append(m.PutItem("fuzz/a", TensorMeta("uint8", (8, 8)), size, data, part))
    return items * (2 if wrong == "twice" else 1)


Group = st.builds(
    m.Publication,
    st.sampled_from(["fuzz/a", "fuzz/b", "fuzz/sd", "fuzz/sd", "", "x" * 5000]),
    st.sampled_from(["0", "1", "", "ü", "x" * 5000]),
    st.sampled_from([1, 2, 2, 0, -1, 2**63]),
    st.booleans(),
    st.sampled_from([1, 2, 0, -1, 2**63]),
    st.booleans(),
)
Version = st.sampled_from([0, 0, 0, 0, 1, 2, 5, -1, 2**63 - 1, 2**63, 2**64 - 1])
WantedBox = st.none() | st.tuples(Extents, Extents)
SomeKey = st.sampled_from(["fuzz/a", "fuzz/sd", "fuzz/sd/w", "fuzz/sd/fuzz/a", "fuzz/b"]) | Key
Wanted = st.builds(m.Want, SomeKey, Version, WantedBox)
JointPut = st.builds(
    lambda i, t, items, version, group: m.Put(i, t, items, version, group),
    st.integers(0, 3),
    st.integers(0, 3),
    shards() | shards() | st.lists(Item, max_size=4) | st.just([]),
    Version,
    st.none() | Group,
)
# What a participant might really put, so that there is something to be hostile to.
Sound = st.builds(
    lambda t, rows, who, data, partial: m.Put(
        t,
        t,
        [
            m.PutItem(
                "w",
                TensorMeta("uint8", (8, 8)),
                rows * 8,
                bytes(rows * 8) if data else None,
                TensorSlice((0 if who == "0" else 8 - rows, 0), (rows, 8), (8, 8)),
                b"\x91\xa1w",
            ),
            m.PutItem(f"own{who}", ObjectMeta("msgpack"), 1, b"\x01"),
            m.PutItem("tied", ObjectMeta("msgpack"), 0, b"", same_as=0),
        ],
        0,
        m.Publication("fuzz/sd", who, 2, partial),
    ),
    st.integers(0, 3),
    st.sampled_from([4, 4, 4, 5, 3]),
    st.sampled_from(["0", "1"]),
    st.booleans(),
    st.sampled_from([False, False, True]),
)
Keys = st.lists(Key, max_size=4)
Ids = st.lists(Id, max_size=4)
Hostile = st.one_of(
    st.builds(m.Put, Id, Id, st.lists(Item, max_size=4)),
    st.builds(
        lambda i, t, k, n: m.Put(i, t, [m.PutItem(k, TensorMeta("uint8", (n,)), n)]),
        Id,
        Id,
        st.sampled_from(["fuzz/a", "fuzz/b"]),
        st.integers(1, 100_000),
    ),
    JointPut,
    JointPut,
    Sound,
    Sound,
    st.builds(m.Put, Id, Id, st.lists(Item, max_size=4), Version, st.none() | Group),
    st.builds(m.Commit, Id, Id),
    st.builds(m.Commit, st.integers(0, 3), st.integers(0, 3)),
    st.builds(m.Abort, Ids),
    st.builds(m.Locate, Id, Id, st.lists(Wanted, max_size=3), Size),
    st.builds(m.Fetch, Id, Id, SomeKey, Version, st.none() | st.lists(Wanted, max_size=3), Size),
    st.builds(m.Fetch, Id, Id, st.just("fuzz/sd"), st.just(0), st.none(), Size),
    st.builds(m.Versions, Id, SomeKey),
    st.builds(m.Locate, Id, Id, st.lists(st.builds(m.Want, Key, Id), max_size=4), Size),
    st.builds(
        lambda i, lease, k, n: m.Locate(i, lease, [m.Want(k)], n),
        Id,
        Id,
        st.sampled_from(["fuzz/a", "fuzz/b"]),
        Size,
    ),
    st.builds(m.Release, Ids, st.lists(st.tuples(Id, st.lists(st.integers(-3, 5), max_size=3)))),
    st.builds(m.Delete, Id, Keys, st.booleans()),
    st.builds(m.Exists, Id, Keys),
    st.builds(m.Keys, Id, st.sampled_from(["fuzz/", "", "\U0010ffff"])),
    st.builds(m.List, Id, st.sampled_from(["fuzz/", ""]), Key),
    st.builds(m.Wait, Id, Keys, Id),
    st.builds(m.Cancel, Id),
    st.builds(m.Stat, Id, Key),
    st.builds(m.Status, Id),
)


def delete_all(target: Target) -> None:
    """What the attackers left, also what was on its way to become a key."""
    with Raw(target.address) as raw:
        raw.send(encode(HELLO), encode(m.Keys(2, "fuzz/")))
        _, found = raw.finish()
    names = ["fuzz/dead", "fuzz/a", "fuzz/b", "fuzz/ü", "fuzz/sd", "", "\0", *found.keys]
    with Raw(target.address) as raw:
        raw.greet()
        raw.send(encode(m.Delete(3, names, False)), encode(m.Keys(4, "fuzz/")))
        _, left = raw.finish()
        assert left.keys == []


def test_valid_messages_that_make_no_sense(target: Target) -> None:
    """Negative and huge sizes, ids used twice, ids of nobody, keys that are none, in any order:
    every request is answered once, and the connection stays.
    """
    answered = 0
    seen: Counter[str] = Counter()

    @settings(fuzz, max_examples=400)
    @given(st.lists(Hostile, min_size=1, max_size=15), Cuts)
    def attack(requests: list[Any], cuts: list[int]) -> None:
        nonlocal answered
        with Raw(target.address) as raw:
            stream = b"".join(bytes(encode(request)) for request in requests)
            raw.send(encode(HELLO), *pieces(stream, cuts), encode(m.Exists(77, ["fuzz/a"])))
            welcome, *replies, last = raw.finish()
            assert isinstance(welcome, m.Welcome)
            assert isinstance(last, (m.Flags, m.Committed))
            assert m.Flags(77, [True]) in [*replies, last] or m.Flags(77, [False]) in [
                *replies,
                last,
            ]
            with_reply = [r for r in requests if hasattr(r, "id")]
            waits = [r for r in with_reply if isinstance(r, m.Wait)]
            assert len(with_reply) - len(waits) <= len(replies) <= len(with_reply)
            for reply in replies:
                seen[reply.code if isinstance(reply, m.Failure) else type(reply).__name__] += 1
            answered += len(replies)

    with target.unharmed():
        attack()
        assert answered > 500
        delete_all(target)
    known = {"protocol", "key-not-found", "version-gone", "store-full", "partial-put"}
    known |= {"layout-mismatch", "configuration"}
    assert {code for code in seen if code.islower()} <= known
    for kind in ("protocol", "key-not-found", "version-gone", "Granted", "Committed", "Located"):
        assert seen[kind] > 10, f"{seen}: this test has lost its teeth"


def test_what_a_connection_leaves_behind_goes_with_it(target: Target) -> None:
    """Unfinished puts, leases, waits that nothing will ever fulfil, ids given back too early."""
    items = [m.PutItem("fuzz/left", TensorMeta("uint8", (500_000,)), 500_000)]
    left: list[Any] = [m.Put(1, 1, items), m.Commit(2, 1)]
    left += [m.Put(3, txn, items) for txn in range(2, 200)]
    left += [m.Locate(4, lease, [m.Want("fuzz/left")] * 2, -1) for lease in range(1000, 1200)]
    left += [m.Wait(wait, ["fuzz/never" * 100, "fuzz/left"], 7) for wait in range(3000)]
    left += [m.Abort(list(range(5000, 25_000))), m.Release(list(range(30_000, 50_000)))]
    stream = b"".join(bytes(encode(message)) for message in left)

    def leave() -> None:
        with Raw(target.address) as raw:
            raw.greet()
            raw.send(stream)
            replies = raw.finish()
            assert [type(r) for r in replies].count(m.Granted) == 199
            assert [type(r) for r in replies].count(m.Located) == 200

    leave()
    with target.unharmed():
        for _ in range(8):
            leave()


def test_what_dead_participants_leave_behind_goes_with_the_next_version(target: Target) -> None:
    """Versions that one of two has put, or has begun to put; nobody else will ever come."""
    size = 20_000

    def put(number: int, key: str, who: str) -> m.Put:
        """Half of a tensor, as an entry or by itself."""
        part = TensorSlice((0,), (size,), (2 * size,), (2,), (int(who),))
        item = m.PutItem(key, TensorMeta("uint8", (2 * size,)), size, None, part)
        group = m.Publication("fuzz/dead", who, 2) if key == "w" else None
        return m.Put(number, number, [item], number, group)

    def leave() -> None:
        said: list[Any] = [put(number, key, "0") for number in range(1, 60) for key in ("w",)]
        said += [m.Commit(number, number) for number in range(1, 30)]
        said += [put(number, "fuzz/dead-t", "0") for number in range(100, 160)]
        said += [m.Commit(number, number) for number in range(100, 130)]
        with Raw(target.address) as raw:
            raw.greet()
            raw.send(*map(encode, said))
            kinds = Counter(type(reply).__name__ for reply in raw.finish())
            assert kinds == {"Granted": 119, "Committed": 59}

    def used() -> int:
        with Raw(target.address) as raw:
            raw.send(encode(HELLO), encode(m.Status(2)))
            _, status = raw.finish()
            return int(status.volumes[0].used_bytes)

    leave()
    with target.unharmed():
        for _ in range(5):
            leave()
            assert used() < (59 + 4) * size + 4 * Neighbour.LARGE
        small = m.PutItem("w", ObjectMeta("msgpack"), 1, b"\x01")
        last = [m.Put(1, 1, [small], 1000, m.Publication("fuzz/dead", "", 1))]
        last += [m.Put(2, 2, [msgspec.structs.replace(small, key="fuzz/dead-t")], 1000)]
        with Raw(target.address) as raw:
            raw.greet()
            raw.send(
                *map(encode, last), encode(m.Stat(3, "fuzz/dead")), encode(m.Stat(4, "fuzz/dead-t"))
            )
            *_, state_dict, tensor = raw.finish()
        assert state_dict.pending == tensor.pending == []
        assert used() < 4 * Neighbour.LARGE
        delete_all(target)


def test_what_belongs_to_another_session_is_out_of_reach(target: Target) -> None:
    """Ids are a session's own: nobody can commit, abort or release what is another's."""
    put = m.Put(2, 9, [m.PutItem("fuzz/own", TensorMeta("uint8", (64,)), 64)])
    with target.unharmed(), Raw(target.address) as mine:
        mine.send(encode(HELLO), encode(put))
        reader = FrameReader(m.MAX_FRAME)
        first: list[Any] = []
        while len(first) < 2:
            first += map(decode_reply, reader.feed(mine.socket.recv(1 << 16)))
        assert isinstance(first[1], m.Granted)
        with Raw(target.address) as other:
            other.send(
                *map(encode, (HELLO, m.Commit(2, 9), m.Abort([9]), m.Release([9], [(9, [0])])))
            )
            _, refused = other.finish()
            assert isinstance(refused, m.Failure)
        mine.send(encode(m.Commit(3, 9)), encode(m.Delete(4, ["fuzz/own"], True)))
        committed, deleted = mine.finish()
        assert isinstance(committed, m.Committed)
        assert deleted == m.Deleted(4, 1)


def test_a_value_that_lies_about_itself_hurts_no_reader(target: Target) -> None:
    """Any client may put what it likes; others get a typed error, and no memory that is not
    theirs.
    """

    lies: list[tuple[Any, int]] = [
        (TensorMeta("float32", (1 << 40,)), 5000),
        (TensorMeta("float32", (1 << 40,)), 64),
        (TensorMeta("float32", (3,)), 100_000),
        (TensorMeta("uint8", (-5000, -1)), 5000),
        (TensorMeta("uint8", (-1,)), 64),
        (TensorMeta("no-such-type", (5000,)), 5000),
        (TensorMeta("Tensor", (5000,)), 5000),
        (TensorMeta("quint8", (5000,)), 5001),
        (ObjectMeta("no-such-codec"), 5000),
        (ObjectMeta("msgpack"), 5000),
        (ObjectMeta("pickle"), 64),
    ]

    async def read(placed: bool) -> None:
        client = await ts.connect(target.address, store_name="reader", timeout=5)
        try:
            for at in range(len(lies)):
                for destination in (None, torch.zeros(3)):
                    with pytest.raises(ts.TorchStoreError):
                        await client.get(f"fuzz/lie{at}", destination)
                    with pytest.raises(ts.TorchStoreError):
                        await client.get_batch({"neighbour/n": None, f"fuzz/lie{at}": None})
            assert await client.delete_batch(await client.keys("fuzz/lie")) == len(lies)
            for volume in (await client.status()).volumes:
                assert volume.leased_bytes < 1 << 20  # at most the neighbour's
        finally:
            await ts.shutdown("reader")

    with target.unharmed():
        for placed in (True, False):
            items = [
                m.PutItem(f"fuzz/lie{at}", meta, nbytes, None if placed else b"\xc1" * nbytes)
                for at, (meta, nbytes) in enumerate(lies)
            ]
            with Raw(target.address) as raw:
                raw.greet()
                raw.send(encode(m.Put(2, 1, items)), encode(m.Commit(3, 1)))
                assert sum(isinstance(r, m.Committed) for r in raw.finish()) == 1
            asyncio.run(read(placed))


def test_shards_and_state_dicts_that_lie_hurt_no_reader(target: Target) -> None:
    """Sizes that are not those of the dtype, kinds that do not exist, paths that make no tree."""
    number = ObjectMeta("msgpack")

    def halves(dtype: str, nbytes: int, shape: tuple[int, ...] = (4,)) -> list[m.PutItem]:
        meta = TensorMeta(dtype, shape)
        rest = shape[1:]
        parts = [TensorSlice((at, *(0 for _ in rest)), (2, *rest), shape) for at in (0, 2)]
        return [m.PutItem("w", meta, nbytes, None, part) for part in parts]

    def entries(*paths: bytes) -> list[m.PutItem]:
        return [m.PutItem(f"e{i}", number, 1, b"\x01", None, p) for i, p in enumerate(paths)]

    lies: list[list[m.PutItem]] = [
        halves("float32", 2),
        halves("float32", 100_000),
        halves("uint8", 6000, (4, 3)),
        halves("no-such-type", 8),
        halves("Tensor", 5000),
        halves("quint8", 4),
    ]
    trees = [
        entries(b"\xc1"),
        entries(b"\x91" * 5000),
        entries(b"\x91\xc4\x01x"),
        entries(b"\x92\xa1a\xa1b", b"\x91\xa1a"),
        entries(b"\x91\xa1a", b"\x92\xa1a\xa1b"),
        entries(b"\x91\xa1a", b"\x91\xa1a"),
    ]

    async def read() -> None:
        client = await ts.connect(target.address, store_name="reader", timeout=5)
        try:
            for at in range(len(lies)):
                for call in (
                    lambda at=at: client.get(f"fuzz/lie{at}"),
                    lambda at=at: client.get(f"fuzz/lie{at}", torch.zeros(4)),
                    lambda at=at: client.get(f"fuzz/lie{at}/w"),
                    lambda at=at: client.get_state_dict(f"fuzz/lie{at}"),
                    lambda at=at: client.get_state_dict(f"fuzz/lie{at}", {"w": torch.zeros(4)}),
                    lambda at=at: client.get_batch({"neighbour/n": None, f"fuzz/lie{at}": None}),
                ):
                    with pytest.raises(ts.TorchStoreError):
                        await call()
            for at in range(len(trees)):
                with pytest.raises(ts.TorchStoreError):
                    await client.get_state_dict(f"fuzz/tree{at}")
                assert await client.get(f"fuzz/tree{at}/e0") == 1
            for volume in (await client.status()).volumes:
                assert volume.leased_bytes < 1 << 20  # at most the neighbour's
        finally:
            await ts.shutdown("reader")

    with target.unharmed():
        for grouped in (True, False):
            with Raw(target.address) as raw:
                raw.greet()
                for at, items in enumerate(lies):
                    key = f"fuzz/lie{at}"
                    group = m.Publication(key, "0", 1) if grouped else None
                    if group is None:
                        items = [msgspec.structs.replace(item, key=key) for item in items]
                    raw.send(encode(m.Put(2, at, items, 0, group)), encode(m.Commit(3, at)))
                for at, items in enumerate(trees):
                    group = m.Publication(f"fuzz/tree{at}", "0", 1)
                    raw.send(encode(m.Put(2, 100 + at, items, 0, group)))
                kinds = Counter(type(reply).__name__ for reply in raw.finish())
                assert kinds["Granted"] == len(lies)
                assert kinds["Committed"] == len(lies) + len(trees)
            asyncio.run(read())
        delete_all(target)


# ---- the hello ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, m.PROTOCOL_VERSION - 1, m.PROTOCOL_VERSION + 1, -1, 2**63])
def test_another_version_is_refused_by_name(target: Target, version: int) -> None:
    with target.unharmed(), Raw(target.address) as raw:
        raw.send(encode(msgspec.structs.replace(HELLO, protocol=version)), encode(m.Status(2)))
        failure = raw.refused()
        assert f"client speaks protocol {version}, this server {m.PROTOCOL_VERSION}" in (
            failure.message
        )


def test_anything_before_the_hello_is_refused(target: Target) -> None:
    with target.unharmed():
        for request in (m.Status(1), m.Shutdown(1), m.Put(1, 1, []), m.Release([1])):
            with Raw(target.address) as raw:
                raw.send(encode(request), encode(HELLO))
                assert "the first message must be a Hello" in raw.refused().message


def test_a_second_hello_is_refused(target: Target) -> None:
    with target.unharmed(), Raw(target.address) as raw:
        raw.send(encode(HELLO), encode(m.Status(2)), encode(HELLO), encode(m.Status(3)))
        welcome, status, failure = raw.finish()
        assert isinstance(welcome, m.Welcome)
        assert isinstance(status, m.StatusReport)
        assert (failure.id, failure.code) == (0, "protocol")
        assert "one Hello" in failure.message


@pytest.mark.parametrize("token", [b"x", bytes(16), bytes(10_000)])
def test_a_wrong_session_token_opens_nothing(target: Target, token: bytes) -> None:
    with target.unharmed(), Raw(target.address) as raw:
        raw.send(encode(msgspec.structs.replace(HELLO, session=token)), encode(m.Status(2)))
        (failure,) = raw.finish()
        assert isinstance(failure, m.Failure)
        assert (failure.id, failure.code) == (1, "store-closed")


def test_the_token_of_a_session_that_ended_opens_nothing(target: Target) -> None:
    with target.unharmed():
        with Raw(target.address) as raw:
            raw.send(encode(HELLO))
            (welcome,) = raw.finish()
        target.settle(lambda: joined(target, welcome.session) == "store-closed")


def joined(target: Target, token: bytes) -> str:
    with Raw(target.address) as raw:
        raw.send(encode(msgspec.structs.replace(HELLO, session=token)))
        (reply,) = raw.finish()
        return reply.code if isinstance(reply, m.Failure) else ""


# ---- size -----------------------------------------------------------------------------------


def test_what_announces_too_much_is_refused_before_it_comes(target: Target) -> None:
    with target.unharmed():
        for greeted, limit in ((False, m.MAX_HELLO_FRAME), (True, m.MAX_FRAME)):
            for size in (limit + 1, 2**31, 2**32 - 1):
                with Raw(target.address) as raw:
                    if greeted:
                        raw.greet()
                    raw.send(size.to_bytes(HEADER, "little"))
                    assert f"frame of {size} bytes" in raw.refused().message


def test_much_is_announced_and_little_comes(target: Target) -> None:
    """Twenty connections that promise 64 MB each, and send it by the byte."""
    with target.unharmed(), contextlib.ExitStack() as stack:
        before = target.rss()
        raws = [stack.enter_context(Raw(target.address)) for _ in range(20)]
        for raw in raws:
            raw.greet()
            raw.send(m.MAX_FRAME.to_bytes(HEADER, "little"))
        for _ in range(200):
            for raw in raws:
                raw.send(b"\x91")
        rounds = target.neighbour.rounds
        target.settle(lambda: target.neighbour.rounds > rounds + 5)
        assert target.rss() < before + (4 << 20)
        for raw in raws[:10]:
            assert raw.finish() == []  # half of a message is none


def test_the_largest_frame_comes_whole(target: Target) -> None:
    """As one value, as nothing the server knows, and as a million entries."""
    head = msgspec.msgpack.encode(["keys", 7, ""])[:-1]
    text = head + b"\xdb" + (m.MAX_FRAME - len(head) - 5).to_bytes(4, "big")
    text += b"z" * (m.MAX_FRAME - len(text))
    with target.unharmed(growth=24 << 20):
        with Raw(target.address) as raw:
            raw.greet()
            raw.send(frame(text))
            assert raw.finish() == [m.KeyList(7, [])]
        with Raw(target.address) as raw:
            raw.greet()
            raw.send(frame(bytes(m.MAX_FRAME)))
            raw.refused()
        with Raw(target.address) as raw:
            raw.greet()
            raw.send(encode(m.Exists(8, ["k"] * 1_000_000)))
            assert raw.finish() == [m.Flags(8, [False] * 1_000_000)]


@pytest.mark.parametrize("depth", [100, 10_000, 5_000_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k", b"\x81\x91"])
def test_deep_nesting(target: Target, depth: int, opening: bytes) -> None:
    """Where a message has a field, where it has none (fields of the future are skipped), and
    instead of a message.
    """
    deep = opening * depth
    with target.unharmed(growth=24 << 20):
        for body in (
            deep,
            b"\x92\xa5abort" + deep,
            b"\x93\xa5abort\x90" + deep,
            b"\x94\xa7release\x90\x90" + deep,
        ):
            with Raw(target.address) as raw:
                raw.greet()
                raw.send(frame(body), encode(m.Status(5)))
                raw.refused()


# ---- the socket -----------------------------------------------------------------------------


def test_descriptors_that_nobody_asked_for(target: Target) -> None:
    """The kernel passes them along with bytes; the server must not end up with them."""
    with target.unharmed(), open(os.devnull) as null:
        for _ in range(100):
            with Raw(target.address) as raw:
                rights = array.array("i", [null.fileno()] * 50)
                raw.socket.sendmsg(
                    [encode(HELLO)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                )
                (welcome,) = raw.finish()
                assert isinstance(welcome, m.Welcome)


def test_connections_that_come_and_go(target: Target) -> None:
    """At every point of the greeting, and many at once."""
    hello = bytes(encode(HELLO))
    with target.unharmed():
        for cut in (0, 1, 4, 5, len(hello) - 1, len(hello)):
            with contextlib.ExitStack() as stack:
                for _ in range(60):
                    raw = stack.enter_context(Raw(target.address))
                    raw.send(hello[:cut])
