"""A rank of ``test_spmd_hosts.py``: does what it is told, one line of JSON for each call.

A line ``[function, arguments]`` on standard input is answered by ``{"value", "error", "seconds"}``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import torch

import torchstore_core as ts

RANK = int(os.environ["RANK"])
SIZE = 300_000  # elements: too many to ride in a message


async def start(arguments: dict[str, Any]) -> None:
    await ts.initialize_spmd(**{"capacity": 64 << 20, "prefault": 0, "timeout": 100.0, **arguments})


async def put(key: str) -> str:
    """Put a tensor of this rank's number; the id of the host where it lies."""
    await ts.put(key, torch.full((SIZE,), float(RANK)))
    volume = (await ts.stat(key)).volume
    hosts = {one.id: one.host_id for one in (await ts.status()).volumes}
    return f"{volume} {hosts[volume]}"


async def get(key: str) -> float:
    """The number of the rank that put it."""
    await ts.wait(key)
    got = await ts.get(key)
    assert torch.equal(got, got[0].expand(SIZE))
    return float(got[0])


async def server() -> int:
    """The pid of the store's server."""
    return (await ts.status()).controller_pid


async def asked() -> int:
    """How often the server was asked for its status, in this life."""
    return (await ts.status()).operations["Status"]


async def spilled() -> int:
    """How many bytes of values are on disk alone."""
    spill = (await ts.status()).spill
    return 0 if spill is None else spill.spilled_bytes


async def leave(store_name: str = "torchstore") -> None:
    await ts.shutdown(store_name)


async def main() -> None:
    functions = {
        "start": start,
        "put": put,
        "get": get,
        "server": server,
        "asked": asked,
        "spilled": spilled,
        "leave": leave,
    }
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, arguments = json.loads(line)
        value, error = None, ["", ""]
        begin = time.monotonic()
        try:
            value = await functions[name](*arguments)
        except ts.TorchStoreError as caught:
            error = [caught.code, str(caught)]
        answer = {"value": value, "error": error, "seconds": time.monotonic() - begin}
        os.write(1, json.dumps(answer).encode() + b"\n")


asyncio.run(main())
