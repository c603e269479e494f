"""Commands of a measured process: a store of its own with few keys, or with very many."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchstore_core as ts

_PROBE = "probe"
_LOT = 10_000


class ManyKeys:
    """Commands on a store whose keys are named like the weights of a model.

    Args:
        run: runs a coroutine on the process's event loop.
    """

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run = run
        self._server = 0

    def open(self, keys: int, listed: int, *, keeper: bool = False) -> dict[str, Any]:
        """Start a store, maybe with a keeper, and put ``keys`` values of 16 bytes, each under a key
        of its own, and ``listed`` more below one prefix; the memory of the server for each of the
        former.
        """

        async def fill() -> tuple[ts.Client, int, float]:
            client = await ts.initialize(capacity=1 << 30, prefault=0, keeper=keeper)
            server = (await client.status()).controller_pid
            value = torch.ones(4)
            await client.put_batch({f"listed/{at}": value for at in range(listed)})
            await client.put(_PROBE, value)
            before = _anonymous(server)
            for start in range(0, keys, _LOT):
                lot = range(start, min(start + _LOT, keys))
                await client.put_batch(
                    {f"model/layers/{at // 100}/weights/{at % 100}": value for at in lot}
                )
            return client, server, (_anonymous(server) - before) / keys

        client, self._server, each = self._run(fill())
        return {"address": client.address, "server_pid": self._server, "bytes": each}

    def killed(self) -> dict[str, Any]:
        """Kill the server, whose keeper starts it again: the seconds until the next get is
        answered, and what is wrong then.
        """

        async def kill() -> dict[str, Any]:
            before = await ts.put(_PROBE, torch.ones(256))
            count = (await ts.status()).keys
            os.kill((await ts.status()).controller_pid, signal.SIGKILL)
            begun = time.perf_counter()
            got = await ts.get(_PROBE)
            seconds = time.perf_counter() - begun
            wrong = [] if torch.equal(got, torch.ones(256)) else ["the value"]
            if (await ts.put(_PROBE, got)).version != before.version + 1:
                wrong.append("the version")
            if (await ts.status()).keys != count:
                wrong.append("the number of keys")
            return {"seconds": seconds, "wrong": wrong}

        return self._run(kill())  # type: ignore[no-any-return]

    def one_by_one(self, count: int) -> dict[str, float]:
        """Seconds of the median put and get of one small value, and of ``keys`` of a prefix; with
        them the number of keys found.
        """

        async def measure() -> dict[str, float]:
            value = torch.ones(256)
            seconds: dict[str, list[float]] = {"put": [], "get": [], "keys": []}
            found: list[str] = []
            for turn in range(count):
                begun = time.perf_counter()
                await ts.put(_PROBE, value)
                put = time.perf_counter()
                await ts.get(_PROBE)
                got = time.perf_counter()
                seconds["put"].append(put - begun)
                seconds["get"].append(got - put)
                if turn % 20 == 0:
                    begun = time.perf_counter()
                    found = await ts.keys("listed/")
                    seconds["keys"].append(time.perf_counter() - begun)
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            return {**medians, "found": len(found)}

        return self._run(measure())  # type: ignore[no-any-return]


def _anonymous(pid: int) -> int:
    """Bytes of a process that are neither files nor shared memory."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith("Anonymous:"))
    return int(found.split()[1]) * 1024
