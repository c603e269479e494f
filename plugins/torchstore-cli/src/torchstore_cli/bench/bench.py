"""``torchstore bench``: a short measurement beside this machine's floors. The full one is
``make bench`` in the repository.

A large value is put here and got by a second process, which checks every byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import msgspec
import torch

from torchstore_cli.bench.peer import Job, Measured, pattern
from torchstore_cli.connecting import choose
from torchstore_cli.reports import BenchReport, Floors, Large, Small
from torchstore_core import api
from torchstore_core.clients.client import Client
from torchstore_core.errors import StoreTimeoutError, TorchStoreError, TransportError
from torchstore_core.machine import copying
from torchstore_core.machine.virtual_memory import map_shared, unmap
from torchstore_core.server.memory.segment import open_memory

__all__ = ["measure"]

T = TypeVar("T")

_STORE_NAME = "torchstore-bench"
_ROUNDS = 5
_SMALL_BYTES = 1024
_SMALL_ROUNDS = 1000
_ECHO_BYTES = 185  # about a small put's frame
_ECHO_ROUNDS = 2000
_PEER_TIMEOUT_S = 60.0
_WARM_S = 15.0


async def measure(address: str | None, timeout: float, nbytes: int) -> BenchReport:
    """Measure in the store that ``address`` names, or (None) in one that ends with this call.

    Args:
        address: of the option; the environment's is left alone.
        timeout: seconds, of each operation.
        nbytes: of the large value, rounded down to elements of 4 bytes, at least one.

    Raises:
        TransportError: the other process got other bytes.
        StoreFullError: the store has no room for the value twice.
    """
    elements = max(nbytes // 4, 1)
    large = pattern(elements, 0)
    where = await choose(address) if address else None
    if where is not None:
        client = await api.connect(where, store_name=_STORE_NAME, timeout=timeout)
    else:
        room = 2 * large.nbytes + (16 << 20)  # an overwrite holds the old version and the new
        client = await api.initialize(
            store_name=_STORE_NAME, capacity=room + (64 << 20), prefault=room, timeout=timeout
        )
    keys = f"torchstore-bench/{os.getpid()}/"
    job = Job(client.address, f"{keys}large", elements, _ROUNDS, _ROUNDS, timeout)
    try:
        if where is None:
            await _warm(client, room)
        first = await _put(client, job.key, large)
        with _peer(job) as (process, echo):
            await _answer(process, bool)
            before = await _floors(large, echo)
            small = await _small(client, f"{keys}small")
            again = min([await _put(client, job.key, large) for _ in range(1, job.version)])
            measured = await _answer(process, Measured, ask=True)
            floors = _best(before, await _floors(large, echo))
    finally:
        with contextlib.suppress(TorchStoreError):
            await client.delete_batch(await client.keys(keys))
        await api.shutdown(_STORE_NAME)
    if not measured.same:
        raise TransportError(
            f"another process got other bytes than were put under {job.key!r}: please report this",
            key=job.key,
        )
    return BenchReport(
        address=where,
        verified=True,
        copy_threads=copying.copy_threads(),
        floors=floors,
        small=small,
        large=Large(large.nbytes, first, again, measured.in_place_s, measured.zero_copy_s),
        ratios={
            "first_put": floors.warm_copy_s / first,
            "put": floors.warm_copy_s / again,
            "get_in_place": floors.warm_copy_s / measured.in_place_s,
            "small_put_p50": small.put_p50_s / floors.echo_s,
            "small_get_p50": small.get_p50_s / floors.echo_s,
        },
    )


async def _warm(client: Client, nbytes: int) -> None:
    """Wait for the background prefault, so that the first put shows what it is good for."""
    deadline = time.monotonic() + _WARM_S
    while sum(v.warm_bytes for v in (await client.status()).volumes) < nbytes:
        if time.monotonic() > deadline:
            return  # the first put then shows it
        await asyncio.sleep(0.01)


async def _timed(action: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await action()
    return time.perf_counter() - start


async def _put(client: Client, key: str, value: torch.Tensor) -> float:
    """Seconds of one put of the next version of the pattern, which ``value`` becomes."""
    value.add_(1)
    return await _timed(lambda: client.put(key, value))


async def _small(client: Client, key: str) -> Small:
    value = torch.zeros(_SMALL_BYTES, dtype=torch.uint8)
    puts = [await _timed(lambda: client.put(key, value)) for _ in range(_SMALL_ROUNDS)]
    gets = [await _timed(lambda: client.get(key)) for _ in range(_SMALL_ROUNDS)]
    return Small(_SMALL_BYTES, *_percentiles(puts), *_percentiles(gets))


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return cuts[49], cuts[98]


# ---- floors -------------------------------------------------------------------------------


async def _floors(source: torch.Tensor, echo: socket.socket) -> Floors:
    nbytes = source.nbytes
    warm = torch.zeros_like(source)
    best = [
        min([await _copy(warm.data_ptr(), source, plain=plain) for _ in range(_ROUNDS)])
        for plain in (False, True)
    ]
    cold: list[float] = []
    for _ in range(2):
        fd = open_memory("bench", nbytes)
        address = map_shared(fd, nbytes)
        os.close(fd)
        try:
            cold.append(await _copy(address, source, plain=False))
        finally:
            unmap(address, nbytes)
    return Floors(min(best), min(cold), await _echo(echo))


def _best(one: Floors, two: Floors) -> Floors:
    """Of floors from before and after, because others may use the machine too."""
    pairs = zip(msgspec.structs.astuple(one), msgspec.structs.astuple(two), strict=True)
    return Floors(*map(min, pairs))


async def _copy(destination: int, source: torch.Tensor, *, plain: bool) -> float:
    """Seconds; ``plain``: with memmove, else past the cache where that is compiled in."""

    def task(chunk: list[copying.Piece]) -> None:
        if plain:
            for to, start, nbytes in chunk:
                ctypes.memmove(to, start, nbytes)
        else:
            copying.copy_pieces(chunk, stream=source.nbytes >= copying.STREAM_MIN)

    chunks = copying.plan([(destination, source.data_ptr(), source.nbytes)])
    tasks = [lambda chunk=chunk: task(chunk) for chunk in chunks]
    return await _timed(lambda: copying.run(tasks, source.nbytes))


async def _echo(sock: socket.socket) -> float:
    """Seconds, median, of one message from this loop to a thread of the other process and back."""
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    message = bytes(_ECHO_BYTES)
    seconds: list[float] = []
    for _ in range(_ECHO_ROUNDS):
        start = time.perf_counter()
        await loop.sock_sendall(sock, message)
        left = _ECHO_BYTES
        while left:
            got = len(await loop.sock_recv(sock, left))
            if not got:
                raise _ended()
            left -= got
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


# ---- the other process --------------------------------------------------------------------


@contextlib.contextmanager
def _peer(job: Job) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """The reading process, and a socket on which it echoes. It ends with its standard input."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        argument = msgspec.json.encode(job).decode()
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "torchstore_cli.bench.peer",
                argument,
                str(theirs.fileno()),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        with process:
            try:
                yield process, ours
            except BaseException:
                process.kill()
                raise


async def _answer(process: subprocess.Popen[bytes], kind: type[T], *, ask: bool = False) -> T:
    """The other process's next line, once it was asked for it."""
    asking, answering = process.stdin, process.stdout
    if asking is None or answering is None:
        raise _ended()
    if ask:
        asking.write(b"\n")
        asking.flush()
    try:
        line = await asyncio.wait_for(asyncio.to_thread(answering.readline), _PEER_TIMEOUT_S)
    except TimeoutError as error:
        raise StoreTimeoutError(
            f"the reading process did not answer within {_PEER_TIMEOUT_S:.0f} s",
            details={"timeout": _PEER_TIMEOUT_S},
        ) from error
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise _ended() from error


def _ended() -> TorchStoreError:
    return TorchStoreError("the reading process ended early; its standard error says why")
