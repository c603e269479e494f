"""A server process under attack, its neighbour, and connections that send what they like."""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from hypothesis import strategies as st
from tests.memory import rss
from tests.unit.wire.test_messages import REQUESTS

import torchstore_core as ts
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.machine import topology
from torchstore_core.testing.timers import ends_within
from torchstore_core.values import ObjectMeta, StateDictMeta, TensorMeta, TensorSlice
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import HEADER, FrameReader, decode_reply, encode

CAPACITY = 256 << 20
HERE = topology.probe()
FACTS = ClientFacts(os.getpid(), HERE.host_id, HERE.hostname)
HELLO = m.Hello(1, m.PROTOCOL_VERSION, b"", HERE, FACTS)
HARMLESS = [cls for cls in REQUESTS if cls not in (m.Hello, m.Shutdown)]


class Neighbour:
    """A client in a thread of its own that uses the store all the time, and checks what it gets."""

    LARGE = 300_000

    def __init__(self, address: str, server: int) -> None:
        self.rounds = 0
        self.late = 0
        self.error: BaseException | None = None
        self._address = address
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._work())
        except BaseException as error:
            self.error = error

    async def _work(self) -> None:
        client = await ts.connect(self._address, store_name="neighbour", timeout=60)
        large = torch.empty(self.LARGE, dtype=torch.uint8)
        try:
            while not self._stop.is_set():
                using = asyncio.ensure_future(self._use(client, large))
                self.late += not await ends_within(using, 3.0, done_by=self._server)
                await using
                self.rounds += 1
                await asyncio.sleep(0.001)  # leave the attackers some of the processor
        finally:
            await ts.shutdown("neighbour")

    async def _use(self, client: ts.Client, large: torch.Tensor) -> None:
        number = self.rounds % 251
        large.fill_(number)
        refs = await client.put_batch({"neighbour/large": large, "neighbour/n": number})
        got = await client.get_batch(list(refs.values()))
        assert torch.equal(got["neighbour/large"], large)
        assert got["neighbour/n"] == number
        assert await client.keys("neighbour/") == ["neighbour/large", "neighbour/n"]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)


class Target:
    """The server process that is attacked."""

    def __init__(self) -> None:
        # In memory: a server that logs would wait for a disk that is busy with other things.
        self._log_fd = os.memfd_create("log")
        self._log = Path(f"/proc/self/fd/{self._log_fd}")
        options = msgspec.json.encode({"capacity": CAPACITY, "prefault": 0})
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "torchstore_core.server", options.decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log_fd,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        ready = msgspec.json.decode(self.process.stdout.readline())
        assert ready["pid"] == self.process.pid
        self.address: str = ready["address"]
        self.neighbour = Neighbour(self.address, self.process.pid)

    def close(self) -> None:
        self.neighbour.stop()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert self.process.wait(60) == 0
        os.close(self._log_fd)

    def rss(self) -> int:
        """Bytes of memory of its own."""
        return rss(self.process.pid)

    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @contextlib.contextmanager
    def unharmed(self, *, growth: int = 8 << 20) -> Iterator[None]:
        """Whatever happens inside leaves no trace."""
        self.settle(lambda: self.neighbour.rounds > 0)
        fds, rss = self.fds(), self.rss()
        rounds, late = self.neighbour.rounds, self.neighbour.late
        yield
        self.settle(lambda: self.neighbour.rounds > rounds + 5)
        self.settle(lambda: self.fds() <= fds)
        self.settle(lambda: self.rss() <= rss + growth)
        assert self.neighbour.late == late
        self.settle(self._has_only_its_neighbour)
        assert "Traceback" not in self._log.read_text()

    def _has_only_its_neighbour(self) -> bool:
        with Raw(self.address) as raw:
            raw.send(encode(HELLO), encode(m.Status(2)))
            _, reply = raw.finish()
        assert isinstance(reply, m.StatusReply)
        status = reply.status
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
        deadline = time.monotonic() + 60
        while not predicate():
            assert self.neighbour.error is None, repr(self.neighbour.error)
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, (self.fds(), self.rss(), self.neighbour.rounds)
            time.sleep(0.005)


@contextlib.contextmanager
def a_target() -> Iterator[Target]:
    """A server that has been warmed up; it lives to the end."""
    made = Target()
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
        self.socket.settimeout(60)
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
        self.send_all()
        return self.read_all()

    def send_all(self, *chunks: bytes | bytearray) -> None:
        """Send this, and then no more."""
        self.send(*chunks)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

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


# ---- requests that are well formed ----------------------------------------------------------

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
CollectivePut = st.builds(
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
    CollectivePut,
    CollectivePut,
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
