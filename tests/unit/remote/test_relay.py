"""Relays: a server reached through two calls, as if it were on this host."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.integration.attacks.hostile import HELLO, Raw
from tests.support import turn, until
from tests.unit.remote.relays import Backstage, Relayed

import torchstore_core as ts
from torchstore_core.machine import topology
from torchstore_core.server.remote import relay
from torchstore_core.server.remote.relay_server import EXPIRE_S, RelayServer
from torchstore_core.testing.timers import within
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import encode

MB = 1 << 20
# Holds a lease of 1 MB and an unfinished put of 2 MB.
HOLD = """
import os, socket, sys
from torchstore_core.machine import topology
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import encode
here = topology.probe()
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
facts = ClientFacts(os.getpid(), here.host_id, here.hostname)
sock.sendall(encode(m.Hello(1, m.PROTOCOL_VERSION, b"", here, facts)))
sock.recv(1 << 16)
put = m.Put(3, 6, [m.PutItem("new", TensorMeta("uint8", (2 << 20,)), 2 << 20)])
if sys.argv[2] != "fork" or os.fork():
    sock.sendall(encode(m.Locate(2, 5, [m.Want("k")], -1)) + encode(put))
os.read(0, 1)
"""


class Holder:
    """A process that holds something, see HOLD; its end is the end of its children too."""

    def __init__(self, relayed: Relayed, how: str = "") -> None:
        path = relayed.address.partition(":")[2]
        command = [sys.executable, "-c", HOLD, path, how]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.pid = self._process.pid

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.end_children()

    def kill(self) -> None:
        """``kill -9``, it alone."""
        self._process.kill()
        self._process.wait()

    def end_children(self) -> None:
        """They see the end of their standard input."""
        if self._process.stdin is not None:
            self._process.stdin.close()


@pytest.fixture(scope="module")
def stage() -> Iterator[Backstage]:
    with Backstage() as made:
        yield made


@pytest.fixture(params=[False, True], ids=["here", "lines"])
def relayed(stage: Backstage, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Relayed]:
    with Relayed(stage, tmp_path, lines=request.param) as made:
        yield made


@pytest.fixture(params=[False, True], ids=["here", "lines"])
def impatient(
    stage: Backstage, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Relayed]:
    """A server that gives up a silent relay after 1.5 s."""
    with Relayed(stage, tmp_path, expire_s=1.5, lines=request.param) as made:
        yield made


async def _client(relayed: Relayed) -> ts.Client:
    """One that has been used, so that its channel is open."""
    client = await ts.connect(relayed.address, store_name=relayed.address, timeout=10)
    await client.keys()
    return client


async def _holding(relayed: Relayed, how: str = "") -> Holder:
    holder = Holder(relayed, how)
    await until(lambda: relayed.books() == (1, MB, 2 * MB), 30)
    return holder


async def _put_one(relayed: Relayed) -> None:
    """``k``, of 1 MB, by a client that is gone again."""
    client = await _client(relayed)
    await client.put("k", torch.ones(MB, dtype=torch.uint8))
    await ts.shutdown(relayed.address)
    await until(lambda: relayed.books() == (0, 0, 0))


# ---- operations ---------------------------------------------------------------------------


async def test_every_kind_of_operation_goes_through(relayed: Relayed) -> None:
    client = await _client(relayed)
    large = torch.arange(MB, dtype=torch.float32)
    await client.put("small", torch.arange(3))
    await client.put("large", large)
    await client.put("object", {"a": (1, 2)})
    assert (await client.get("small")).tolist() == [0, 1, 2]
    assert torch.equal(await client.get("large"), large)
    assert await client.get("object") == {"a": (1, 2)}
    await client.put_state_dict({"w": large, "n": 1}, "sd")
    got = await client.get_state_dict("sd")
    assert torch.equal(got["w"], large)
    assert got["n"] == 1
    assert await client.keys("s") == ["sd", "sd/n", "sd/w", "small"]
    with pytest.raises(ts.KeyNotFoundError):
        await client.get("nothing")
    await client.delete("small")
    assert not await client.exists("small")
    del got
    await until(lambda: relayed.books() == (1, 0, 0))
    await ts.shutdown(relayed.address)
    await until(lambda: relayed.books() == (0, 0, 0))


async def test_a_batch_is_one_call_however_many_values_it_has(relayed: Relayed) -> None:
    client = await _client(relayed)
    many = {f"k{i}": torch.tensor([i]) for i in range(100)}
    nested = {"layers": [{"w": torch.tensor([float(i)]), "step": i} for i in range(50)]}
    calls = relayed.uplink.calls

    async def costs(work: object) -> int:
        before = calls["exchange"]
        await work  # type: ignore[misc]
        return calls["exchange"] - before

    assert await costs(client.put_batch(many)) == 1
    assert await costs(client.get_batch(list(many))) == 1
    assert await costs(client.put("one", 1)) == 1
    assert await costs(client.get("one")) == 1
    assert await costs(client.put_state_dict(nested, "sd")) == 1
    assert await costs(client.get_state_dict("sd")) == 1
    assert await costs(client.delete_batch(list(many))) == 1
    # Begin and commit: the bytes themselves are not in them.
    assert await costs(client.put("large", torch.ones(MB))) == 2
    await ts.shutdown(relayed.address)


async def test_an_answer_that_an_exchange_carries_ends_no_poll(relayed: Relayed) -> None:
    """A poll that ended with nothing would cost the engine as much as the call itself."""
    client = await _client(relayed)
    await client.put("k", 1)
    before = Counter(relayed.uplink.calls)
    for _ in range(20):
        assert await client.get("k") == 1
    calls = relayed.uplink.calls - before
    assert calls["exchange"] == 20
    # Those that end because it is time; what comes over a line is never ready at once.
    assert calls["poll"] <= (22 if relayed.lines else 2)
    await ts.shutdown(relayed.address)


async def test_what_comes_together_is_carried_together(relayed: Relayed) -> None:
    """Usually some twenty messages. On a busy machine puts may come one at a time, so it may take
    several rounds.
    """
    client = await _client(relayed)
    counts: list[int] = []
    while min(counts, default=200) >= 100 and len(counts) < 5:
        before = len(relayed.uplink.said)
        await asyncio.gather(*(client.put(f"k{i}", i) for i in range(200)))
        carried = relayed.uplink.said[before:]
        assert sum(carried) == 200
        counts.append(len(carried))
    assert min(counts) < 100, counts
    assert len(await client.keys()) == 200
    await ts.shutdown(relayed.address)


async def test_requests_keep_their_order_whatever_the_answers_do(relayed: Relayed) -> None:
    client = await _client(relayed)
    relayed.uplink.delays = [(i % 7) / 500 for i in range(100)]
    refs = await asyncio.gather(*(client.put("k", i) for i in range(100)))
    assert [ref.version for ref in refs] == list(range(1, 101))
    assert await client.get("k") == 99
    await ts.shutdown(relayed.address)


async def test_a_wait_is_answered_by_a_poll(relayed: Relayed) -> None:
    client = await _client(relayed)
    other = await ts.connect(relayed.direct, store_name="direct")
    waiting = asyncio.create_task(client.wait("later", timeout=20))
    await until(lambda: relayed.stage.call(lambda: relayed.server.controller.operations[m.Wait]))
    assert not waiting.done()
    exchanges = relayed.uplink.calls["exchange"]
    await other.put("later", 1)
    await asyncio.wait_for(waiting, 50)
    assert relayed.uplink.calls["exchange"] == exchanges
    await ts.shutdown("direct")
    await ts.shutdown(relayed.address)


# ---- clients that end ---------------------------------------------------------------------


async def test_what_a_killed_client_held_is_given_back(relayed: Relayed) -> None:
    await _put_one(relayed)
    with await _holding(relayed) as holder:
        holder.kill()
        await until(lambda: relayed.books() == (0, 0, 0))


async def test_a_killed_clients_forked_child_keeps_leases_but_no_puts(relayed: Relayed) -> None:
    await _put_one(relayed)
    with await _holding(relayed, "fork") as holder:
        holder.kill()
        await until(lambda: relayed.books() == (1, MB, 0))
        holder.end_children()
        await until(lambda: relayed.books() == (0, 0, 0))


async def test_before_close_is_awaited(relayed: Relayed) -> None:
    await _put_one(relayed)
    pids: list[int] = []
    still: asyncio.Event = relayed.stage.call(asyncio.Event)

    async def writing(pid: int) -> None:
        pids.append(pid)
        await still.wait()

    relayed.relay.before_close = writing
    with await _holding(relayed) as holder:
        holder.kill()
        await until(lambda: pids)
        # Its unfinished put is nobody's any more, but what an agent still writes stays taken.
        await until(lambda: relayed.uplink.calls["poll"] > 0)
        assert relayed.books()[1] == MB
        relayed.stage.call(still.set)
        await until(lambda: relayed.books() == (0, 0, 0))
    assert set(pids) == {holder.pid}


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff" * 64,  # a frame over the limit
        (4).to_bytes(4, "little") + b"\xc1\xc1\xc1\xc1",  # no message
        bytes(encode(m.Keys(1, ""))),  # not greeted
        bytes(encode(HELLO)) * 2,
    ],
    ids=["oversize", "garbage", "early", "twice"],
)
async def test_a_bad_client_ends_alone(relayed: Relayed, sent: bytes) -> None:
    client = await _client(relayed)
    with Raw(relayed.address) as raw:
        raw.send(sent)
        await asyncio.to_thread(raw.read_all)
    await client.put("k", 1)
    assert await client.get("k") == 1
    await until(lambda: relayed.books() == (1, 0, 0))
    assert relayed.losses == 0
    await ts.shutdown(relayed.address)


# ---- relays that end ----------------------------------------------------------------------


async def test_a_silent_relay_frees_what_its_clients_cannot_have_mapped(
    impatient: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their leases stay until their processes end: these may still read the volume's memory."""
    close = impatient.relay_server.close
    found: list[object] = []

    def given_up(token: bytes | None = None, why: str = "") -> None:
        found.append((impatient.relay.valid, impatient.books_now()))
        close(token, why)

    await _put_one(impatient)
    with await _holding(impatient) as holder:
        monkeypatch.setattr(impatient.relay_server, "close", given_up)
        impatient.uplink.silent = True
        await until(lambda: impatient.books() == (1, MB, 0))
        assert found == [(False, (1, MB, 2 * MB))]  # the relay has given up first
        (session,) = impatient.stage.call(impatient.server.status).sessions
        assert (session.pid, session.role, session.leased_bytes) == (holder.pid, "orphan", MB)
        holder.kill()
        await until(lambda: impatient.books() == (0, 0, 0))
    assert impatient.losses == 1


async def test_what_a_client_of_a_dead_relay_has_mapped_is_not_used_again(
    impatient: Relayed,
) -> None:
    block = ("inprocess",)  # it maps nothing
    client = await ts.connect(impatient.address, store_name=impatient.address, block=block)
    await client.put("k", torch.full((16 * MB,), 7, dtype=torch.uint8))
    held = await client.get("k")
    await client.delete("k")
    impatient.uplink.silent = True
    await until(lambda: impatient.losses == 1)
    await until(lambda: [s.role for s in _sessions(impatient)] == ["orphan"])
    async with _direct(impatient) as other:
        with pytest.raises(ts.StoreFullError) as caught:
            await other.put("other", torch.ones(50 * MB, dtype=torch.uint8))
        assert caught.value.details["holders"] == [
            {"pid": os.getpid(), "leased": 16 * MB, "unfinished": 0}
        ]
        for i in range(3):
            await other.put(f"other{i}", torch.ones(15 * MB, dtype=torch.uint8))
        assert held.unique().tolist() == [7]
    await ts.shutdown(impatient.address)
    del held


async def test_silence_does_not_count_while_nobody_can_be_heard() -> None:
    now = [0.0]

    def converse(*_: object) -> Any:
        pytest.fail("nobody speaks")

    relays = RelayServer(converse, clock=lambda: now[0])
    token = relays.open(msgspec.msgpack.encode(topology.probe()))
    relays.suspend()
    now[0] += 100.0
    relays.close_silent()
    assert token in relays.tokens
    relays.resume()
    now[0] += EXPIRE_S - 1.0
    relays.close_silent()
    assert token in relays.tokens
    now[0] += 2.0
    relays.close_silent()
    assert token not in relays.tokens
    relays.close()


async def test_silence_of_a_server_does_not_count_while_a_relay_is_paused(
    impatient: Relayed,
) -> None:
    """It is not certain of anything meanwhile, and is kept as long as it is heard."""
    impatient.uplink.paused = impatient.uplink.silent = True
    token, relays = impatient.uplink.token, impatient.relay_server

    async def it_is_not_certain() -> bool:
        impatient.stage.call(relays.heard, token)
        return not impatient.relay.valid

    await until(it_is_not_certain)
    for _ in range(20):  # twice as long as it would be borne
        impatient.stage.call(relays.heard, token)
        await asyncio.sleep(0.1)
    assert impatient.losses == 0
    assert token in relays.tokens


async def test_a_process_that_died_with_its_relay_holds_nothing(impatient: Relayed) -> None:
    await _put_one(impatient)
    with await _holding(impatient) as holder:
        impatient.uplink.silent = True
        holder.kill()
        assert impatient.books() == (1, MB, 2 * MB)  # nobody has heard of it
        await until(lambda: impatient.books() == (0, 0, 0))


@pytest.mark.parametrize("how", ["namespace", "child"])
async def test_an_unseen_process_is_not_taken_for_dead(
    stage: Backstage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What has that pid in another namespace may live, and so may a forked child, which reads what
    it inherited.
    """
    if how == "namespace":
        monkeypatch.setattr(relay, "pid_namespace", lambda: 1)
    with Relayed(stage, tmp_path) as relayed:
        await _put_one(relayed)
        with await _holding(relayed, "fork" if how == "child" else "") as holder:
            if how == "child":
                holder.kill()
                await until(lambda: relayed.books() == (1, MB, 0))
            stage.call(relayed.relay_server.close, relayed.uplink.token)
            assert relayed.books() == (1, MB, 0)
            holder.kill()
            await _turns(stage)
            assert relayed.books() == (1, MB, 0)


async def _turns(stage: Backstage) -> None:
    """Whatever the loop of the server could know by now, it has acted upon."""
    for _ in range(5):
        stage.do(turn())


def _sessions(relayed: Relayed) -> list[m.SessionStatus]:
    return relayed.stage.call(relayed.server.status).sessions


@asynccontextmanager
async def _direct(relayed: Relayed) -> AsyncIterator[ts.Client]:
    """A client of the server's own host."""
    try:
        yield await ts.connect(relayed.direct, store_name="direct")
    finally:
        await ts.shutdown("direct")


async def test_a_server_that_says_nothing_is_given_up(impatient: Relayed) -> None:
    """The engine may wait for ever for an actor that is dead."""
    client = await _client(impatient)
    async with within(10):
        impatient.uplink.silent = True
        with pytest.raises(ts.StoreClosedError):
            await client.get("k", timeout=20)
    await until(lambda: impatient.losses == 1)
    await ts.shutdown(impatient.address)


async def test_a_relay_in_use_does_not_expire(impatient: Relayed) -> None:
    client = await _client(impatient)
    polls = impatient.uplink.calls["poll"]
    await until(lambda: impatient.uplink.calls["poll"] > polls + 1, 10)
    assert impatient.relay.valid
    await client.put("k", 1)
    assert impatient.losses == 0
    await ts.shutdown(impatient.address)


async def test_closing_a_relay_ends_its_clients_and_nobody_else(relayed: Relayed) -> None:
    client = await _client(relayed)
    other = await ts.connect(relayed.direct, store_name="direct")
    relayed.stage.call(relayed.relay.close)
    with pytest.raises(ts.StoreClosedError):
        await client.get("k")
    assert not relayed.relay.valid
    relayed.stage.call(relayed.relay_server.close, relayed.uplink.token)
    await until(lambda: relayed.books()[0] == 1)
    await other.put("k", 1)
    await ts.shutdown("direct")
    await ts.shutdown(relayed.address)
    assert relayed.losses == 0  # it was closed, not lost


async def test_a_server_that_ends_is_told_once(relayed: Relayed) -> None:
    client = await _client(relayed)
    relayed.stage.call(relayed.relay_server.close)
    with pytest.raises(ts.StoreClosedError):
        await client.put("k", 1)
    await until(lambda: relayed.losses == 1)
    await ts.shutdown(relayed.address)


async def _end(relayed: Relayed, within: float) -> float:
    """How long the end of the server's side takes that waits until the relay knows of it."""
    began = time.monotonic()
    await asyncio.to_thread(relayed.stage.do, relayed.relay_server.end("it ends", within), 30)
    return time.monotonic() - began


async def test_a_relay_that_waits_is_told_by_its_poll(relayed: Relayed) -> None:
    """It polls no more."""
    await until(lambda: relayed.uplink.calls["poll"] == 1)
    assert await _end(relayed, 30) < 20
    await until(lambda: relayed.losses == 1)
    assert relayed.uplink.calls["poll"] == 1


@pytest.mark.parametrize("polls", [True, False])
async def test_a_relay_between_two_polls_is_waited_for(relayed: Relayed, polls: bool) -> None:
    """One that polls no more, for as long as was said."""
    server, stage = relayed.relay_server, relayed.stage
    token = stage.call(server.open, msgspec.msgpack.encode(topology.probe()))
    ending = asyncio.ensure_future(_end(relayed, 30 if polls else 0.5))
    await until(lambda: relayed.losses == 1)  # the other one knows
    if polls:
        assert not ending.done()
        with pytest.raises(ts.StoreClosedError):
            await asyncio.to_thread(stage.do, server.poll(token))
        assert await ending < 20
    else:
        assert await ending >= 0.5


async def test_an_unknown_relay_is_told_so(relayed: Relayed) -> None:
    with pytest.raises(ts.StoreClosedError, match="unknown"):
        relayed.stage.call(relayed.relay_server.exchange, b"nobody", b"\x90")


async def test_the_server_knows_which_relay_carries_a_client(relayed: Relayed) -> None:
    """By the id that transports know; of its own clients, that it is none."""

    def tokens() -> list[bytes | None]:
        return [relayed.relay_server.token_of(session.peer) for session in sessions]

    async with _direct(relayed):
        await _client(relayed)
        sessions = list(relayed.server.controller.sessions.values())
        assert set(relayed.stage.call(tokens)) == {None, relayed.uplink.token}
        await ts.shutdown(relayed.address)
        await until(lambda: relayed.books()[0] == 1)
        relayed.stage.call(relayed.relay_server.close, relayed.uplink.token)
        assert relayed.stage.call(tokens) == [None, None]
