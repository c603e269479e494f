"""Commands of any measured process: small values one at a time, in a batch, and many cycles."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import torchstore_core as ts
from torchstore_cli.bench import echo, floors, workload
from torchstore_cli.bench.measuring import process_size, timed, until_unleased

__all__ = ["SmallValues"]


class SmallValues:
    """Commands on small values; ``run`` runs a coroutine on the process's event loop."""

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run = run
        self._echoes: dict[str, echo.Echo] = {}

    def start_echo(self, kinds: Sequence[str] = ()) -> list[str]:
        """Start the far ends of these kinds of echo (default: all), and return the kinds."""
        self._echoes = {kind: echo.Echo(kind) for kind in kinds or echo.kinds()}
        return list(self._echoes)

    def end_echo(self) -> None:
        """End the far ends."""
        for one in self._echoes.values():
            one.close()
        self._echoes = {}

    def one_by_one(
        self,
        count: int,
        nbytes: int,
        turn: int,
        server_pid: int,
        apart: bool | None = None,
        key: str = "small",
    ) -> dict[str, Any]:
        """Run a round of ``count`` puts and gets and ``count`` echoes of each kind, one operation
        at a time; return the seconds of each. The last value got is compared with the one put.

        ``apart``: this process's loop gets one CPU; the server and the far ends get another one
        (True) or the same one (False). None: the scheduler decides.
        """
        mine = sorted(os.sched_getaffinity(0)) if apart is not None else []
        cpus = echo.two_cpus() if apart is not None else None
        if cpus is not None:
            os.sched_setaffinity(0, cpus[:1])
            for pid in (server_pid, *(one.pid for one in self._echoes.values())):
                os.sched_setaffinity(pid, cpus[1:] if apart else cpus[:1])
        try:
            return self._one_by_one(count, nbytes, turn, key)
        finally:
            if cpus is not None:
                os.sched_setaffinity(0, mine)

    def _one_by_one(self, count: int, nbytes: int, turn: int, key: str) -> dict[str, Any]:
        value = workload.random_tensor((nbytes // 2,), turn).view(torch.uint8)
        samples: dict[str, list[float]] = {}
        wrong: list[str] = []

        async def store() -> None:
            puts, gets, got = [], [], None
            for _ in range(count):
                seconds, _ = await timed(ts.put(key, value))
                puts.append(seconds)
            for _ in range(count):
                seconds, got = await timed(ts.get(key))
                gets.append(seconds)
            if got is None or not torch.equal(got, value):
                wrong.append(key)
            samples.update(put=puts, get=gets)

        def far(kind: str) -> float:
            samples[kind] = self._echoes[kind].measure(count)
            return sum(samples[kind])

        blocks: dict[str, Callable[[], float]] = {k: partial(far, k) for k in self._echoes}
        floors.interleave({**blocks, "store": lambda: self._run(timed(store()))[0]}, turn)
        return {"samples": samples, "wrong": wrong}

    def batch(self, count: int, nbytes: int, turn: int) -> dict[str, Any]:
        """Run a round: put and get ``count`` tensors of ``nbytes`` bytes, compare them, and clone
        the same tensors one by one.
        """
        items = {
            f"batch/{i}": workload.random_tensor((nbytes // 2,), turn * count + i).view(torch.uint8)
            for i in range(count)
        }
        times: dict[str, float] = {}
        wrong: list[str] = []

        async def store() -> None:
            times["put"], _ = await timed(ts.put_batch(items))
            times["get"], got = await timed(ts.get_batch(list(items)))
            wrong.extend(key for key, value in items.items() if not torch.equal(got[key], value))

        measures: dict[str, Callable[[], float]] = {
            "clone": lambda: floors.clone_each(items.values()),
            "store": lambda: self._run(timed(store()))[0],
        }
        clone = floors.interleave(measures, turn)["clone"]
        return {"times": {**times, "clone": clone}, "wrong": wrong}

    def cycles(self, count: int, server_pid: int) -> dict[str, Any]:
        """Repeat put, get and delete; every fourth value is large enough to be mapped. Return also
        the sizes of this process and of the server afterwards.
        """
        small, large = torch.ones(256), torch.ones(64 << 10)
        wrong: list[str] = []

        async def cycles() -> None:
            for i in range(count):
                value = small if i % 4 else large
                await ts.put("cycle", value)
                got = await ts.get("cycle")
                if not torch.equal(got, value):
                    wrong.append(f"cycle {i}")
                await ts.delete("cycle")
                del got
            await until_unleased()

        seconds, _ = self._run(timed(cycles()))
        sizes = {"client": process_size(os.getpid()), "server": process_size(server_pid)}
        return {"seconds": seconds, "sizes": sizes, "wrong": wrong}
