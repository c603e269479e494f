"""A real server under requests that are well formed, and make no sense or lie.

Every one of them is answered; what they leave behind goes with those who sent them, and the
neighbour notices nothing. See `test_fuzz_server.py` for what is no request at all.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tests.integration.attacks.hostile import (
    HELLO,
    Cuts,
    Hostile,
    Neighbour,
    Raw,
    Target,
    a_target,
    pieces,
)
from tests.profiles import many
from tests.support import until

import torchstore_core as ts
from torchstore_core.values import ObjectMeta, TensorMeta, TensorSlice
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, decode_reply, encode


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with a_target() as made:
        yield made


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


@pytest.mark.hypothesis
def test_valid_messages_that_make_no_sense(target: Target) -> None:
    """Negative and huge sizes, ids used twice, ids of nobody, keys that are none, in any order:
    every request is answered once, and the connection stays.
    """
    attempts = answered = 0
    seen: Counter[str] = Counter()

    def attack(requests: list[Any], cuts: list[int]) -> None:
        nonlocal attempts, answered
        attempts += 1
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

    attacks = given(st.lists(Hostile, min_size=1, max_size=15), Cuts)
    # For code that has never run, and buffers that have never been full: that makes a server larger
    # by 5 to 10 MB, but not in each run.
    fresh = target.rss()
    for _ in range(8):
        settings()(attacks(attack))()
        if target.rss() > fresh + (4 << 20):
            break
    with target.unharmed():
        while attempts < 250:  # enough to see below what is rare
            many()(attacks(attack))()
        assert answered > 500
        delete_all(target)
    known = {"protocol", "key-not-found", "version-gone", "store-full", "partial-put"}
    known |= {"layout-mismatch", "configuration"}
    assert {code for code in seen if code.islower()} <= known
    for kind in ("protocol", "key-not-found", "version-gone", "Granted", "Committed", "Located"):
        assert seen[kind] > 10, f"{seen}: this test has lost its teeth"


def joint(txn: int, who: str, *items: m.PutItem, version: int = 0, count: int = 2) -> m.Put:
    return m.Put(txn, txn, list(items), version, m.Publication("fuzz/sd", who, count))


def whole(name: str, copy: int | None = None, **how: Any) -> m.PutItem:
    """A tensor that others hold too."""
    part = None if copy is None else TensorSlice((0,), (64,), (64,), (2,), (copy,))
    return m.PutItem(name, TensorMeta("uint8", (64,)), 64, None, part, **how)


NUMBER = m.PutItem("number", ObjectMeta("msgpack"), 1, b"\x01", None, b"\x91\xa6number")
EMPTY = m.PutItem("tied", TensorMeta("uint8", (4,)), 0, b"", TensorSlice((4,), (0,), (4,)))
TIED = m.PutItem("tied", ObjectMeta("msgpack"), 0, b"", same_as=0)
LARGEST = 2**63 - 1


@pytest.mark.parametrize(
    ("said", "last"),
    [
        (  # only the copy of one that gave up is committed
            [
                m.Put(1, 1, [whole("fuzz/t", 0)]),
                m.Put(2, 2, [whole("fuzz/t", 1)]),
                m.Abort([1]),
                m.Commit(3, 2),
                m.Stat(4, "fuzz/t"),
            ],
            "partial-put",
        ),
        (  # what was given up has paths, ties and empty shards of its own
            [
                joint(1, "0", whole("gone", path=b"\x91\xa4gone"), TIED, NUMBER),
                joint(2, "1", NUMBER),
                m.Abort([1]),
                joint(3, "0", NUMBER),
                m.Fetch(4, 4, "fuzz/sd", 0, None, 100),
            ],
            "Fetched",
        ),
        (  # ties that lead in a circle
            [
                joint(1, "0", EMPTY, m.PutItem("b", NUMBER.meta, 0, b"", same_as=0)),
                joint(2, "1", structs.replace(EMPTY, key="b"), TIED),
                m.Fetch(3, 3, "fuzz/sd", 0, None, 100),
            ],
            "partial-put",
        ),
        (
            [
                joint(1, "0", NUMBER, version=LARGEST, count=1),
                joint(2, "0", NUMBER, count=1),
                m.Put(3, 3, [structs.replace(NUMBER, key="fuzz/t", path=b"")], 2**64 - 1),
                m.Put(4, 4, [structs.replace(NUMBER, key="fuzz/t", path=b"")], LARGEST),
                m.Put(5, 5, [structs.replace(NUMBER, key="fuzz/t", path=b"")]),
                m.Put(6, 6, [structs.replace(NUMBER, key="fuzz/t", path=b"")], 2**63),
                m.Versions(7, "fuzz/t"),
            ],
            "Committed",
        ),
        (  # dropped while it is written
            [
                joint(1, "0", whole("w")),
                m.Delete(2, ["fuzz/sd"], True),
                joint(3, "1", whole("w")),
                m.Abort([1, 3]),
                m.Commit(4, 3),
            ],
            "protocol",
        ),
    ],
)
def test_odd_orders(target: Target, said: list[Any], last: str) -> None:
    """Each is answered, as often as one likes, and by nothing that went wrong in the server."""
    with target.unharmed():
        for _ in range(3):
            with Raw(target.address) as raw:
                raw.send(encode(HELLO), *map(encode, said), encode(m.Exists(9, [])))
                *_, reply, end = raw.finish()
                assert end == m.Flags(9, [])
                kind = reply.code if isinstance(reply, m.Failure) else type(reply).__name__
                assert kind == last
            delete_all(target)


def test_what_a_connection_leaves_behind_goes_with_it(target: Target) -> None:
    """Unfinished puts, leases, waits that nothing will ever fulfil, ids given back too early.
    The answers are read meanwhile: else the server would read no more.
    """
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
            sending = threading.Thread(target=raw.send_all, args=(stream,))
            sending.start()
            replies = raw.read_all()
            sending.join()
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
            _, reply = raw.finish()
            return int(reply.status.volumes[0].used_bytes)

    leave()
    with target.unharmed():
        for _ in range(5):
            leave()
            target.settle(lambda: used() < (59 + 4) * size + 4 * Neighbour.LARGE)
        small = m.PutItem("w", ObjectMeta("msgpack"), 1, b"\x01")
        last = [m.Put(1, 1, [small], 1000, m.Publication("fuzz/dead", "", 1))]
        last += [m.Put(2, 2, [structs.replace(small, key="fuzz/dead-t")], 1000)]
        with Raw(target.address) as raw:
            raw.greet()
            raw.send(
                *map(encode, last), encode(m.Stat(3, "fuzz/dead")), encode(m.Stat(4, "fuzz/dead-t"))
            )
            *_, state_dict, tensor = raw.finish()
        assert state_dict.found.pending == tensor.found.pending == []
        target.settle(lambda: used() < 4 * Neighbour.LARGE)
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


async def nothing_is_leased(client: ts.Client) -> bool:
    """Except by the neighbour, whose leases may end a moment after its tensors."""
    return all(v.leased_bytes < 2 * Neighbour.LARGE for v in (await client.status()).volumes)


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
        client = await ts.connect(target.address, store_name="reader", timeout=60)
        try:
            for at in range(len(lies)):
                for destination in (None, torch.zeros(3)):
                    with pytest.raises(ts.TorchStoreError):
                        await client.get(f"fuzz/lie{at}", destination)
                    with pytest.raises(ts.TorchStoreError):
                        await client.get_batch({"neighbour/n": None, f"fuzz/lie{at}": None})
            assert await client.delete_batch(await client.keys("fuzz/lie")) == len(lies)
            await until(lambda: nothing_is_leased(client))
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
        client = await ts.connect(target.address, store_name="reader", timeout=60)
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
            await until(lambda: nothing_is_leased(client))
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
                        items = [structs.replace(item, key=key) for item in items]
                    raw.send(encode(m.Put(2, at, items, 0, group)), encode(m.Commit(3, at)))
                for at, items in enumerate(trees):
                    group = m.Publication(f"fuzz/tree{at}", "0", 1)
                    raw.send(encode(m.Put(2, 100 + at, items, 0, group)))
                kinds = Counter(type(reply).__name__ for reply in raw.finish())
                assert kinds["Granted"] == len(lies)
                assert kinds["Committed"] == len(lies) + len(trees)
            asyncio.run(read())
        delete_all(target)
