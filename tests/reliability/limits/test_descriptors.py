"""File descriptors that run out: in a server, and in a client. Nobody spins, and it passes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import psutil
import pytest
import torch
from tests.processes import run_script
from tests.reliability.harness import fds
from tests.support import running_store, turn, until

import torchstore_core as ts
from torchstore_core.clients.session.handshake import client_facts
from torchstore_core.machine import topology
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import encode

LIMIT = 64
LARGE = torch.arange(1 << 20, dtype=torch.int64)  # 8 MiB: goes through a link


class ScarceServer:
    """A server that may have :data:`LIMIT` descriptors.

    Args:
        directory: an empty one, of a short name.
        limit: arguments of ``ulimit``.
    """

    def __init__(self, directory: Path, limit: str = f"-n {LIMIT}", **options: object) -> None:
        self._log = directory / "log"
        self.directory = directory
        wanted = {"capacity": 256 << 20, "prefault": 0, "directory": str(directory), **options}
        command = [*(sys.executable, "-P", "-m", "torchstore_core.server")]
        command.append(msgspec.json.encode(wanted).decode())
        with self._log.open("wb") as errors:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f'ulimit {limit}; exec "$@"', "sh", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "TORCHSTORE_LOG_LEVEL": "INFO"},
            )
        assert self._process.stdout is not None
        ready = msgspec.json.decode(self._process.stdout.readline())
        self.address = ready["address"]
        self.idle = 0  # how many it has while nobody is there
        self.process = psutil.Process(self._process.pid)

    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait(60)

    async def busy(self, seconds: float) -> float:
        """Which part of that time it computes."""
        before, started = sum(self.process.cpu_times()[:2]), time.monotonic()
        await asyncio.sleep(seconds)
        return (sum(self.process.cpu_times()[:2]) - before) / (time.monotonic() - started)


@pytest.fixture(scope="module")
def scarce() -> Iterator[ScarceServer]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        server = ScarceServer(Path(folder), owner=os.getpid())
        try:
            with Crowd(server.address, 1) as first:
                first.wait()  # the first connection makes the server's event loop open one more
                server.idle = len(descriptors_of(server))
                yield server
        finally:
            server.close()


class Crowd:
    """Connections to a socket that say nothing and take descriptors."""

    def __init__(self, address: str, count: int) -> None:
        self._sockets: list[socket.socket] = []
        for _ in range(count):
            sock = socket.socket(socket.AF_UNIX)
            self._sockets.append(sock)
            sock.connect(address.removeprefix("unix:"))

    def wait(self) -> None:
        """Have the first of them greeted, so that it stays."""
        here = topology.probe()
        hello = m.Hello(1, m.PROTOCOL_VERSION, b"", here, client_facts({}, here))
        for request in (hello, m.Exists(2, [])):  # the second, when all is done for the first
            self._sockets[0].sendall(encode(request))
            assert self._sockets[0].recv(1 << 16)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        while self._sockets:
            self._sockets.pop().close()


@contextmanager
def crowded(server: ScarceServer, address: str) -> Iterator[None]:
    """The server has as many connections there as it can have, and more wait."""
    with Crowd(address, LIMIT + 20):
        yield


@asynccontextmanager
async def joined(address: str) -> AsyncIterator[ts.Client]:
    client = await ts.connect(address, store_name="scarce", timeout=20.0)
    try:
        yield client
    finally:
        await ts.shutdown("scarce")


async def test_without_descriptors_it_waits_instead_of_spinning(scarce: ScarceServer) -> None:
    path = scarce.address.removeprefix("unix:")
    before = scarce.log().count("resumed")
    with crowded(scarce, scarce.address):
        await until(lambda: f"connects to {path} waits" in scarce.log())
        assert await scarce.busy(1.0) < 0.1
        assert scarce.log().count(f"connects to {path} waits") == 1
        assert "LimitNOFILE" in scarce.log()
        assert "Traceback" not in scarce.log()

        async def late() -> None:
            async with joined(scarce.address) as client:
                await client.put("k", LARGE)
                assert torch.equal(await client.get("k"), LARGE)
                assert await uses_shm(client)

        waiting = asyncio.ensure_future(late())
        done, _ = await asyncio.wait([waiting], timeout=0.5)
        assert not done, done.pop().exception()
    await waiting
    await until(lambda: scarce.log().count("resumed") > before, 10.0)


def said(server: ScarceServer, words: str) -> bool:
    return words in server.log()


async def uses_shm(client: ts.Client) -> bool:
    await client.put("small", torch.arange(10))
    (answer,) = await client.explain(LARGE.nbytes)
    return bool(answer["chosen"] == "shm")


def descriptors_of(server: ScarceServer) -> list[int]:
    return sorted(int(name) for name in os.listdir(f"/proc/{server.process.pid}/fd"))


async def test_memory_that_is_handed_over_too_late_is_not_lost_for_the_session(
    scarce: ScarceServer,
) -> None:
    """The server takes the connection with its last descriptor, and has none for the hand-over."""
    await until(lambda: len(descriptors_of(scarce)) == scarce.idle)
    before = resource.prlimit(scarce.process.pid, resource.RLIMIT_NOFILE)
    used = descriptors_of(scarce)
    last = next(number for number in range(LIMIT) if number not in used)
    path = scarce.address.removeprefix("unix:")
    (shm,) = scarce.directory.glob("shm-*.sock")
    resource.prlimit(scarce.process.pid, resource.RLIMIT_NOFILE, (last + 1, before[1]))
    try:
        with pytest.warns(RuntimeWarning, match="'shm' to volume .* is not ready"):
            client = await ts.connect(scarce.address, store_name="scarce", timeout=2.0)
        try:
            for waits in (path, shm):  # a busy server may find that out after the client
                await until(functools.partial(said, scarce, f"connects to {waits} waits"))
            assert await scarce.busy(0.5) < 0.1
            no_more = "busy, or has no file descriptors left for more clients"
            with pytest.raises(ts.StoreTimeoutError, match=no_more):  # its channel waits as well
                await client.put("late", LARGE, timeout=0.3)
            resource.prlimit(scarce.process.pid, resource.RLIMIT_NOFILE, before)
            await until(lambda: uses_shm(client))
            await client.put("late", LARGE)
            assert torch.equal(await client.get("late"), LARGE)
        finally:
            await ts.shutdown("scarce")
    finally:
        resource.prlimit(scarce.process.pid, resource.RLIMIT_NOFILE, before)


async def sessions_have_ended() -> None:
    """Those of this process, the descriptors of which their reclaimers close in the end."""
    await until(lambda: not [t for t in threading.enumerate() if t.name == "torchstore-reclaimer"])


def free_numbers(count: int) -> list[int]:
    """The descriptors that this process gets next."""
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    for fd in fds:
        os.close(fd)
    return fds


@pytest.mark.parametrize(
    ("left", "forget"),
    [(2, "torchstore_transports.shm.link"), (2, None), (3, None)],
    ids=["not even its code", "no socket for it", "a socket, but not the memory"],
)
async def test_a_client_without_descriptors_says_so_and_tries_again(
    scarce: ScarceServer, monkeypatch: pytest.MonkeyPatch, left: int, forget: str | None
) -> None:
    """A session takes two; the next is the socket for the hand-over, then comes the memory. Code is
    read from a file.
    """
    async with joined(scarce.address):  # whatever is imported or opened once
        pass
    await sessions_have_ended()
    if forget:
        monkeypatch.delitem(sys.modules, forget)
    none_left = "no file descriptor left"
    with descriptors_left(left) as limit, pytest.warns(RuntimeWarning, match=none_left) as warned:
        client = await ts.connect(scarce.address, store_name="scarce", timeout=5.0, block=["tcp"])
    try:
        assert len(warned) == 1
        assert f"its limit is {limit}" in str(warned[0].message)
        (answer,) = await client.explain(LARGE.nbytes)
        assert "will be tried again" in answer["refusals"]["shm"]
        await client.put("small", torch.arange(1 << 16))  # inline
        with (
            descriptors_left(left - 2),
            pytest.raises(ts.TransportNotReadyError, match="no file descriptor left") as caught,
        ):
            await client.put("large", LARGE)  # nothing else takes as much
        assert caught.value.details["volume"] == 0
        assert caught.value.details["descriptor_limit"] > 0
        await client.put("large", LARGE)
        assert torch.equal(await client.get("large"), LARGE)
        assert await uses_shm(client)
    finally:
        await ts.shutdown("scarce")


async def test_no_descriptor_for_a_connection_or_for_a_store(scarce: ScarceServer) -> None:
    """Errors that name the limit, and not those of whatever needed the descriptor."""
    async with joined(scarce.address) as client:
        none_left = "no file descriptor left for a connection"
        channels = [known() for known in (await client._joined.session(5))._channels.values()]
        for channel in channels:
            channel.close()
        with (
            descriptors_left(0) as limit,
            pytest.raises(ts.TransportNotReadyError, match=none_left) as caught,
        ):
            await client.get("any")
        assert caught.value.details["descriptor_limit"] == limit
        await client.put("any", 1)
    await sessions_have_ended()
    none_left = "no file descriptor left for the list of installed plug-ins"
    with descriptors_left(0), pytest.raises(ts.TransportNotReadyError, match=none_left):
        await ts.initialize(store_name="no-descriptors")
    none_left = "no file descriptor left for the list of stores"
    with descriptors_left(0), pytest.raises(ts.TransportNotReadyError, match=none_left):
        await ts.stores()


@contextmanager
def descriptors_left(count: int) -> Iterator[int]:
    """This process can have so many more, the limit says."""
    gc.collect()  # or what a test before has left would be closed meanwhile
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = free_numbers(count + 1)[count]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_child_that_is_forked_without_descriptors_has_what_its_parent_had() -> None:
    """Another put got the memory that its tensor was mapped from, and its reference was gone."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        server = ScarceServer(Path(folder), owner=os.getpid())
        try:
            client = await ts.connect(server.address, store_name="forking")
            await client.put("w", LARGE)
            tensor, ref = await client.get("w"), await client.put_object([1, 2, 3])
            read, write = os.pipe()
            with descriptors_left(0):
                pid = os.fork()
            if not pid:
                _be_child(client, read, tensor, ref)
            del tensor, ref
            await client.delete("w")
            for at in range(3):
                await client.put(f"other {at}", torch.zeros_like(LARGE))
            os.write(write, b"x")
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            for fd in (read, write):
                os.close(fd)
            await ts.shutdown("forking")
        finally:
            server.close()  # nobody else knows that the child does not read any more
    await sessions_have_ended()


def _be_child(client: ts.Client, read: int, tensor: torch.Tensor, ref: ts.HeldRef) -> NoReturn:
    """End with status 0 if what was there at the fork still is when something can be read."""
    found = []
    try:
        os.read(read, 1)
        found.append((tensor.numpy() == LARGE.numpy()).all())  # torch would start threads
        # In a thread, because this one runs an event loop of the parent.
        ask = threading.Thread(target=lambda: found.append(asyncio.run(client.get(ref))))
        ask.start()
        ask.join()
    finally:
        os._exit(0 if found == [True, [1, 2, 3]] else 1)


def test_a_server_takes_as_many_descriptors_as_it_may() -> None:
    """The usual soft limit is far below the hard one."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        server = ScarceServer(Path(folder), limit=f"-n {2 * LIMIT}; ulimit -S -n {LIMIT}")
        try:
            limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
            assert limits == (2 * LIMIT, 2 * LIMIT)
        finally:
            server.close()


@pytest.mark.parametrize("keeper", [False, True])
@pytest.mark.parametrize("limit", [7, 12, 13, 19])
def test_a_server_without_descriptors_says_so_when_it_starts(limit: int, keeper: bool) -> None:
    """Before it has started anything that would fail in words of its own."""
    options = {"capacity": 1 << 20, "prefault": 0, "keeper": keeper}
    command = f"ulimit -n {limit}; exec {sys.executable} -P -m torchstore_core.server"
    command += f" '{msgspec.json.encode(options).decode()}'"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, timeout=200, check=False)
    assert ended.returncode == 1
    assert msgspec.json.decode(ended.stdout)["error"] == "transport-not-ready"
    assert f"(its limit is {limit}; see ulimit -n)" in ended.stdout.decode()
    assert not ended.stderr


@contextmanager
def kept() -> Iterator[ScarceServer]:
    """A keeper that may have :data:`LIMIT` descriptors, as its server may."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        server = ScarceServer(Path(folder), owner=os.getpid(), keeper=True)
        try:
            yield server
        finally:
            server.close()


async def test_a_session_that_the_server_has_no_descriptors_for_is_refused_in_words() -> None:
    """It is let in whole or not at all: it was, and ended at once."""
    with kept() as scarce:
        (server,) = scarce.process.children()
        async with joined(scarce.address) as client:
            await client.put("w", LARGE)
            used = [int(name) for name in os.listdir(f"/proc/{server.pid}/fd")]
            free = [number for number in range(LIMIT) if number not in used]
            limit_descriptors(server.pid, free[1] + 1)
            none_left = f"process {server.pid} has no file descriptor left for another session"
            with pytest.raises(ts.TransportNotReadyError, match=none_left):
                await ts.connect(scarce.address, store_name="one more")
            limit_descriptors(server.pid, LIMIT)
            other = await ts.connect(scarce.address, store_name="one more")
            assert await other.exists("w")
            await ts.shutdown("one more")


async def test_a_keeper_without_descriptors_loses_nothing() -> None:
    """It ended, and the store with it, with the next session; or when the server had died."""
    with kept() as scarce:
        keeper = scarce.process
        async with joined(scarce.address) as client:
            await client.put("w", LARGE)
            limit_descriptors(keeper.pid, max(descriptors_of(scarce)) + 1)
            other = await ts.connect(scarce.address, store_name="unkept")
            ref = await other.put_object([1, 2, 3])
            await until(lambda: "has no file descriptor left for what is to" in scarce.log())
            held = len(descriptors_of(scarce))
            limit_descriptors(keeper.pid, LIMIT)
            await until(lambda: len(descriptors_of(scarce)) == held + 1)  # the session, too
            (server,) = keeper.children()
            limit_descriptors(keeper.pid, 5)
            server.kill()
            await until(lambda: "the server cannot be started" in scarce.log())
            limit_descriptors(keeper.pid, LIMIT)
            assert await other.get(ref) == [1, 2, 3]
            assert torch.equal(await other.get("w"), LARGE)
            assert torch.equal(await client.get("w"), LARGE)
            await ts.shutdown("unkept")


def has_said_all(scarce: ScarceServer) -> bool:
    """Its standard output is closed, and it has no descriptor for that any more."""
    found: list[int] = []
    for fd in descriptors_of(scarce):
        with contextlib.suppress(FileNotFoundError):  # it is closed just now
            if os.readlink(f"/proc/{scarce.process.pid}/fd/{fd}") == os.devnull:
                found.append(fd)
    return found == [0, 1]


async def test_a_session_that_the_keeper_had_no_descriptor_for_comes_back_by_itself() -> None:
    """Its connection ends with the server; it connects again, with all that it holds."""
    with kept() as scarce:
        keeper = scarce.process
        (server,) = keeper.children()
        await until(functools.partial(has_said_all, scarce))
        limit_descriptors(keeper.pid, max(descriptors_of(scarce)) + 1)
        client = await ts.connect(scarce.address, store_name="unkept")
        await client.put("w", LARGE)
        ref = await client.put_object([1, 2, 3])
        tensor = await client.get("w")  # zero-copy
        await until(lambda: "has no file descriptor left for what is to" in scarce.log())
        server.suspend()  # it does not ask the keeper again
        limit_descriptors(keeper.pid, LIMIT)
        server.kill()
        assert await client.get(ref) == [1, 2, 3]
        assert await leased(client) >= LARGE.nbytes
        await client.put("w", LARGE + 1)
        assert torch.equal(tensor, LARGE)
        del tensor
        await until(functools.partial(leases_nothing, client))
        assert torch.equal(await client.get("w"), LARGE + 1)
        await ts.shutdown("unkept")


async def test_a_server_without_descriptors_to_start_again_waits_for_them() -> None:
    """It failed in the midst of it, and was given up after some thirty attempts."""
    with kept() as scarce:
        keeper = scarce.process
        (server,) = keeper.children()
        few = len(descriptors_of(scarce)) + 5
        resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (few, few))
        server.kill()
        in_words = "cannot start again: transport-not-ready: process "
        await until(lambda: scarce.log().count(in_words) > 1)
        assert "Traceback" not in scarce.log()
        assert keeper.is_running()


async def leased(client: ts.Client) -> int:
    return sum(session.leased_bytes for session in (await client.status()).sessions)


async def leases_nothing(client: ts.Client) -> bool:
    return not await leased(client)


async def test_thousands_of_tensors_take_no_descriptors() -> None:
    """Neither while they are put, nor as long as they are mapped, together or one by one."""
    async with running_store(capacity=512 << 20) as client:
        server = (await client.status()).controller_pid
        few = {"before": torch.ones(20_000)}
        await client.put_batch(few)
        mapped = [await client.get_batch(list(few))]
        before = fds(), fds(server)
        values = {f"k{at}": torch.full((20_000,), float(at)) for at in range(3000)}
        await client.put_batch(values)
        mapped.append(await client.get_batch(list(values)))
        mapped += [{key: await client.get(key)} for key in [*values][::10]]
        await client.put_state_dict(values, "model", when_full="evictable")
        mapped.append(await client.get_state_dict("model"))
        assert (await client.status()).volumes[0].leased_bytes > 200 << 20
        # What is open for a moment, such as what the server has just read, may be in either count.
        await until(lambda: fds() <= before[0] and fds(server) <= before[1])
        for got in mapped[1:]:
            assert all(torch.equal(tensor, values[key]) for key, tensor in got.items())


def limit_descriptors(pid: int, limit: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, LIMIT))


async def test_what_is_printed_without_standard_streams_goes_nowhere() -> None:
    """A daemon that closes its standard streams, and opens nothing in their place, has their
    numbers free for what is opened next: connections, and the memory of the store.
    """
    name = printing_into_what_is_there.__name__
    await run_script(f"from {__name__} import {name}\nawait {name}()")


async def printing_into_what_is_there() -> None:
    streams = [os.dup(fd) for fd in range(3)]
    await turn()  # the loop has its own descriptors
    for fd in range(3):
        os.close(fd)
    try:
        await ts.initialize(capacity=256 << 20, prefault=0)
        await ts.put("w", LARGE)
        server = (await ts.status()).controller_pid
        for fd in range(3):
            with contextlib.suppress(OSError):
                os.write(fd, b"printed by a library" * 1000)
        again = await ts.get("w", torch.zeros_like(LARGE))
        await ts.put("v", LARGE + 1)
        opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3) if is_open(fd)]
        of_server = [os.readlink(f"/proc/{server}/fd/{fd}") for fd in range(3)]
        await ts.shutdown()
    finally:
        for fd, stream in enumerate(streams):
            os.dup2(stream, fd)
    assert torch.equal(again, LARGE)
    assert [name for name in opened if name.startswith(("socket:", "/memfd:"))] == []
    assert of_server == ["/dev/null"] * 3


def is_open(fd: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


async def test_who_wakes_a_session_that_ends_writes_to_no_other_file(
    scarce: ScarceServer,
) -> None:
    """A finalizer in another thread may be about to."""
    client = await ts.connect(scarce.address, store_name="scarce", timeout=5.0)
    session = await client._joined.session(5.0)
    late = session._reclaimer._write
    place = f"/proc/self/fd/{late.__self__.fileno()}"
    assert os.readlink(place) == "anon_inode:[eventfd]"
    await ts.shutdown("scarce")
    await sessions_have_ended()
    assert os.readlink(place) == "anon_inode:[eventfd]"
    late((1).to_bytes(8, sys.byteorder))
    session._reclaimer.wake()
    del late
    assert not os.path.lexists(place) or "eventfd" not in os.readlink(place)
