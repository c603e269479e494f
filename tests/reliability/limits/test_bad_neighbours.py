"""Clients that read no replies, stop, or say nothing, do not hurt the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import statistics
import time

import pytest
import torch
from tests.memory import rss
from tests.reliability import children
from tests.reliability.harness import (
    MB,
    Account,
    Child,
    account,
    directory_of,
    fds,
    is_running,
    settled,
    used_at_rest,
)
from tests.support import halt, running_store, until

import torchstore_core as ts
from torchstore_core.clients.session.handshake import client_facts, handshake
from torchstore_core.machine import topology
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, decode_reply, encode

SMALL = 16 << 10


async def greeted(address: str) -> socket.socket:
    """A connection that has said hello, with nobody behind it."""
    here = topology.probe()
    sock, _ = await handshake(address, b"", client_facts({}, here), here, 5)
    return sock


async def flood(sock: socket.socket, client: ts.Client) -> int:
    """Send gets until the server takes no more of them, however often it answers another client;
    how many were sent, all whole.
    """
    frames = bytes(encode(m.Locate(7, 7, [m.Want("small")], 1 << 20))) * 100
    sent, rest, answered = 0, frames, 0
    while sent < 1_000_000:
        try:
            rest = rest[sock.send(rest) :]
        except BlockingIOError:
            if answered == 100:
                return sent  # the last hundred went out in part, or not at all
            assert not await client.exists("nothing")
            answered += 1
            continue
        answered = 0
        if not rest:
            sent, rest = sent + 100, frames
    raise AssertionError("the server reads for ever what it cannot answer")


async def work_of_others() -> None:
    """What everybody else does goes on, and fast."""
    value = torch.arange(MB // 8)
    mine = torch.empty_like(value)
    took: list[float] = []
    for number in range(100):
        begun = time.monotonic()
        await ts.put("mine", value)
        assert torch.equal(await ts.get("mine"), value)
        await ts.get("mine", mine)
        await ts.put("mine too", number)
        await ts.delete("mine too")
        took.append(time.monotonic() - begun)
    assert statistics.median(took) < 0.5
    assert max(took) < 10


async def test_a_client_that_never_reads_its_replies():
    async with running_store() as client:
        await ts.put("small", bytes(SMALL))
        await work_of_others()
        used = await used_at_rest()
        server = (await ts.status()).controller_pid
        before = rss(server)
        with await greeted(client.address) as stuck:
            sent = await flood(stuck, client)
            assert sent * SMALL > 16 * MB
            # The server neither answers into the void nor keeps the questions.
            assert rss(server) < before + 8 * MB
            await work_of_others()
            # It was only slow: it reads on, and every answer is there, in order.
            loop = asyncio.get_running_loop()
            reader = FrameReader(m.MAX_FRAME)
            answers = 0
            while answers < sent:
                async with asyncio.timeout(60):
                    data = await loop.sock_recv(stuck, 1 << 20)
                assert data
                for body in reader.feed(data):
                    reply = decode_reply(body)
                    assert isinstance(reply, m.Located)
                    assert reply.entries[0].nbytes > SMALL
                    answers += 1
            await flood(stuck, client)
        await work_of_others()
        await settled(Account(1, used))


async def test_a_stuck_client_that_holds_a_lease_and_goes():
    async with running_store() as client:
        await ts.put_batch({"small": bytes(SMALL), "large": torch.zeros(MB)})
        used = (await account()).used
        with await greeted(client.address) as stuck:
            stuck.send(encode(m.Locate(2, 2, [m.Want("large")], 0)))
            await flood(stuck, client)
            await ts.delete("large")
            assert await account() == Account(2, used, 4 * MB)
        await settled(Account(1, used - 4 * MB))


async def test_clients_that_say_nothing():
    async with running_store() as client:
        server = (await ts.status()).controller_pid
        before = fds(server)
        paths = sorted(directory_of(client.address).glob("*.sock"))
        assert len(paths) >= 2  # the control socket, and that of the shm transport
        half = bytes(encode(m.Status(1)))[:-1]
        with contextlib.ExitStack() as stack:
            for path in paths:
                for said in (b"", b"\x00", half) * 30:
                    silent = stack.enter_context(socket.socket(socket.AF_UNIX))
                    silent.connect(str(path))
                    with contextlib.suppress(OSError):  # shm answers and hangs up at once
                        silent.send(said)
            await until(lambda: fds(server) >= before + 90)
            await work_of_others()
            await ts.put("a", torch.full((4,), 3))
            with Child(children.hold, client.address, ["a"]) as newcomer:
                assert await newcomer.said() == [3]
        await until(lambda: fds(server) <= before, 20)


async def test_a_client_that_is_stopped():
    async with running_store() as client:
        await ts.put("a", torch.zeros(16 * MB, dtype=torch.uint8))
        with Child(children.read_for_ever, client.address, "a") as child:
            assert await child.said() == "begins"
            await halt(child.pid)
            await work_of_others()
            os.kill(child.pid, signal.SIGCONT)
            await work_of_others()
            assert not child.has_said()


@pytest.mark.parametrize("end", ["shutdown", "killed owner"])
async def test_the_server_ends_while_a_client_does_not_read(end: str):
    with Child(children.own, "alone") as owner:
        server, address, _ = await owner.said()
        client = await ts.connect(address, store_name="theirs")
        try:
            await client.put("small", bytes(SMALL))
            with await greeted(address) as stuck:
                await flood(stuck, client)
                if end == "shutdown":
                    owner.tell("shut down")
                    assert await owner.said() == "shut down"
                    assert not is_running(server)
                else:
                    owner.kill()
                    await until(lambda: not is_running(server), 10)
                assert not directory_of(address).exists()
        finally:
            await ts.shutdown("theirs")
