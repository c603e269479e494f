"""The second process of ``torchstore bench``: gets what the first one put, and checks it.

It says ``true`` when it is ready; for each line that comes it measures and says the result.
Meanwhile a thread echoes whatever comes through the socket it inherited.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time

import msgspec
import torch

from torchstore_core import api
from torchstore_core.clients.client import Client

__all__ = ["Job", "Measured", "pattern"]

_STORE_NAME = "torchstore-bench"


class Job(msgspec.Struct, frozen=True):
    """``key`` will hold ``pattern(elements, version)``; get it ``rounds`` times each way."""

    address: str
    key: str
    elements: int
    version: int
    rounds: int
    timeout: float


class Measured(msgspec.Struct, frozen=True):
    """Best times of one get, in seconds, and whether every byte was right."""

    in_place_s: float
    zero_copy_s: float
    same: bool


def pattern(elements: int, version: int) -> torch.Tensor:
    """What the large key holds: different in every element and version."""
    return torch.arange(version, version + elements, dtype=torch.int32)


async def _serve(job: Job) -> None:
    expected = pattern(job.elements, job.version)
    mine = torch.zeros_like(expected)
    client = await api.connect(job.address, store_name=_STORE_NAME, timeout=job.timeout)
    _say(True)
    while sys.stdin.readline():
        _say(await _get(client, job, mine, expected))
    await api.shutdown(_STORE_NAME)


async def _get(client: Client, job: Job, mine: torch.Tensor, expected: torch.Tensor) -> Measured:
    same = True
    in_place: list[float] = []
    for _ in range(job.rounds):
        mine.zero_()
        start = time.perf_counter()
        await client.get(job.key, mine)
        in_place.append(time.perf_counter() - start)
        same = same and torch.equal(mine, expected)
    zero_copy: list[float] = []
    for _ in range(job.rounds):
        start = time.perf_counter()
        mapped = await client.get(job.key)
        zero_copy.append(time.perf_counter() - start)
        same = same and torch.equal(mapped, expected)
        del mapped
    return Measured(min(in_place), min(zero_copy), same)


def _echo(fd: int) -> None:
    with socket.socket(fileno=fd) as sock:
        while data := sock.recv(4096):
            sock.sendall(data)


def _say(what: Measured | bool) -> None:
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


def _main() -> None:
    threading.Thread(target=_echo, args=(int(sys.argv[2]),), daemon=True).start()
    asyncio.run(_serve(msgspec.json.decode(sys.argv[1], type=Job)))


if __name__ == "__main__":
    _main()
