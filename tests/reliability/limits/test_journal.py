"""What a server says of itself: a line each, in the log that an operator reads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from tests.support import until

import torchstore_core as ts
from torchstore_cli import queries as asking
from torchstore_core.clients.stores import discovery
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.machine import topology
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, encode

MB = 1 << 20
CAPACITY = 8 * MB


class LoggedServer:
    """A server in a process of its own, and its log."""

    def __init__(
        self,
        directory: Path,
        level: str | None = "INFO",
        log: Path | None = None,
        **options: object,
    ) -> None:
        self._log = log or directory / "log"
        wanted = {"capacity": CAPACITY, "prefault": 0, "directory": str(directory), **options}
        env = {k: v for k, v in os.environ.items() if k != "TORCHSTORE_LOG_LEVEL"}
        if level is not None:
            env["TORCHSTORE_LOG_LEVEL"] = level
        with self._log.open("wb") as errors:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "torchstore_core.server"),
                    msgspec.json.encode(wanted).decode(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
            )
        assert self._process.stdout is not None
        self.ready = msgspec.json.decode(self._process.stdout.readline())
        self.address = self.ready.get("address", "")
        self.pid = self._process.pid

    def lines(self, word: str = "") -> list[str]:
        """What it said, without the prefix; those that start with ``word``."""
        said = [line.partition(" torchstore.server: ")[2] for line in self.text().splitlines()]
        return [line for line in said if line.startswith(word)]

    def text(self) -> str:
        return self._log.read_text()

    def stop(self) -> int:
        self._process.terminate()
        return self.ended()

    def ended(self) -> int:
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self._process.wait(60)


def put_half(address: str) -> None:
    """Say that this is rank 3 of another host, begin a put, and end without a word."""
    here = topology.probe()
    reader = FrameReader(m.MAX_FRAME)
    item = m.PutItem("half", TensorMeta("uint8", (1 << 20,)), 1 << 20)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(address.removeprefix("unix:"))
        facts = ClientFacts(4711, here.host_id, "far", 3)
        for request in (m.Hello(1, m.PROTOCOL_VERSION, b"", here, facts), m.Put(2, 1, [item])):
            sock.sendall(encode(request))
            while not reader.feed(sock.recv(1 << 16)):
                continue


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


async def test_a_server_says_what_happened_and_nothing_of_operations(directory: Path) -> None:
    server = LoggedServer(directory, store_name="logged")
    try:
        (started,) = server.lines("started: ")
        for part in ("'logged'", server.address, f"pid {server.pid}", f"{CAPACITY:,} bytes"):
            assert part in started
        client = await ts.connect(server.address, store_name="logged")
        (joined,) = await until(lambda: server.lines("joined: "))
        assert f"pid {os.getpid()} on " in joined
        assert joined.endswith("now 1")

        before = server.text()
        await discovery.probe(server.address)
        await asking.ask_keys(server.address, 10, "")
        status = await asking.ask_status(server.address, 10)
        assert status.keys == 0
        await until(lambda: _sessions_of(client))
        assert server.text() == before  # nor one for those that only look

        for at in range(20):
            await client.put(f"k{at}", torch.arange(100))
            await client.get(f"k{at}")
        with pytest.raises(ts.StoreTimeoutError):
            await client.wait("never", timeout=0.01)
        assert server.text() == before  # no line for an operation

        for _ in range(5):
            with pytest.raises(ts.StoreFullError):
                await client.put("large", torch.zeros(CAPACITY, dtype=torch.uint8))
        (full,) = server.lines("full: ")  # once in a while, not for every put
        assert f"pid {os.getpid()}" in full
        assert "does not fit" in full

        await asyncio.to_thread(put_half, server.address)
        (undone,) = await until(lambda: server.lines("left: pid 4711 on far, rank 3"))
        assert undone.endswith(f"now 1. Undone: 1 unfinished put of {1 << 20:,} bytes ('half')")
        await ts.shutdown("logged")
        left = await until(lambda: [x for x in server.lines("left: ") if x.endswith("now 0")])
        assert f"pid {os.getpid()}" in left[0]
    finally:
        assert server.stop() == 0
    (stopped,) = server.lines("stopped: ")
    assert "'logged'" in stopped


async def _sessions_of(client: ts.Client) -> bool:
    """Whether this client's session is the only one."""
    return len((await client.status()).sessions) == 1


def test_by_default_an_embedded_server_says_nothing(directory: Path) -> None:
    server = LoggedServer(directory, level=None)
    assert server.stop() == 0
    assert server.text() == ""


async def test_nobody_has_to_read_what_it_says(directory: Path) -> None:
    """A pipe that is full stops neither the server nor its keeper, which starts it again."""
    pipe = directory / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    filling = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(filling, b"." * 4096)
    server = LoggedServer(directory, log=pipe, keeper=True)
    try:
        client = await ts.connect(server.address, store_name="unread")
        for at in range(2):
            await client.put("k", at)
            os.kill((await client.status()).controller_pid, signal.SIGKILL)
            assert await client.get("k", timeout=20) == at
        said = b""
        with contextlib.suppress(BlockingIOError):  # it may say something in the midst of this
            while True:
                said = (said + os.read(reader, 1 << 16)).lstrip(b".")
        await ts.reset_client("unread")
        assert await client.get("k") == 1
        await until(lambda: said or select.select([reader], [], [], 0)[0])
        with contextlib.suppress(BlockingIOError):
            said += os.read(reader, 1 << 16)
        assert re.match(rb"\[\d+ lines that nobody read are left out\]\n", said), said
    finally:
        await ts.shutdown("unread")
        assert server.stop() == 0
        os.close(reader)
        os.close(filling)


def test_a_level_that_is_none_is_an_error_in_words(directory: Path) -> None:
    server = LoggedServer(directory, level="loud")
    assert server.ended() == 1
    assert server.ready["error"] == "configuration"
    assert "TORCHSTORE_LOG_LEVEL" in server.ready["message"]
    assert "Traceback" not in server.text()


def test_a_capacity_above_the_memory_is_warned_of_and_not_refused(directory: Path) -> None:
    limit = topology.memory_limit_bytes()
    server = LoggedServer(directory, level=None, capacity=2 * limit, num_storage_volumes=2)
    assert server.address
    assert server.stop() == 0
    (line,) = server.text().splitlines()
    assert f"a capacity of {2 * limit:,} bytes is more than the {limit:,} bytes" in line


async def test_initialize_warns_of_a_capacity_above_the_memory() -> None:
    limit = topology.memory_limit_bytes()
    with pytest.warns(RuntimeWarning, match=f"more than the {limit:,} bytes") as warned:
        client = await ts.initialize(capacity=limit + MB, prefault=0)
    try:
        assert f"{limit + MB:,} bytes" in str(warned[0].message)
        assert warned[0].filename == __file__  # and not a line of ours
        await client.put("k", torch.arange(MB))
        assert torch.equal(await client.get("k"), torch.arange(MB))
    finally:
        await ts.shutdown()
