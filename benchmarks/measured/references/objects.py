"""Commands of a measured process: objects without a key, put, read and dropped, beside the same
with a key, and beside Ray where it is installed.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch

import torchstore_core as ts
from torchstore_cli.bench import floors, workload
from torchstore_cli.bench.measuring import until_unleased

BY_KEY, RAY = "put, get, delete by key", "ray.put, ray.get, del"
IN_PLACE = "in place"  # of a tensor made by ``ts.empty``
_KEY = "by key"


class References:
    """Commands on objects that live as long as their reference.

    Args:
        run: runs a coroutine on the process's event loop.
    """

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run = run
        self._value = torch.empty(0)
        self._ray: Any = None

    def make(self, nbytes: int, seed: int) -> list[str]:
        """Make a value of so many bytes; what is compared with putting, reading and dropping it."""
        self._value = workload.random_tensor((nbytes // 2,), seed).view(torch.uint8)
        if importlib.util.find_spec("ray"):
            import ray

            if not ray.is_initialized():
                ray.init(num_cpus=1, include_dashboard=False, object_store_memory=1 << 30)
            self._ray = ray
        return [BY_KEY, RAY] if self._ray is not None else [BY_KEY]

    def cycle(self, count: int, turn: int) -> dict[str, Any]:
        """One round: put, read and drop the value ``count`` times in each way; seconds each."""
        wrong: list[str] = []

        async def once() -> Any:
            ref = await ts.put_object(self._value)
            return await ts.get(ref)

        async def by_key() -> Any:
            await ts.put(_KEY, self._value)
            got = await ts.get(_KEY)
            await ts.delete(_KEY)
            return got

        def awaited(call: Callable[[], Awaitable[Any]], name: str) -> float:
            async def times() -> float:
                start = time.perf_counter()
                for _ in range(count):
                    got = await call()
                seconds = time.perf_counter() - start
                if not torch.equal(got, self._value):
                    wrong.append(name)
                return seconds / count

            seconds = self._run(times())
            self._run(until_unleased())
            return float(seconds)

        measures: dict[str, Callable[[], float]] = {
            "references": lambda: awaited(once, "references"),
            BY_KEY: lambda: awaited(by_key, BY_KEY),
            IN_PLACE: lambda: self._in_place(count, wrong),
        }
        if self._ray is not None:
            measures[RAY] = lambda: self._ray_cycle(count)
        return {"times": floors.interleave(measures, turn), "wrong": wrong}

    def _in_place(self, count: int, wrong: list[str]) -> float:
        """The same of values that were made where they are put; making them does not count, as with
        the others.
        """

        async def times() -> float:
            seconds = 0.0
            for _ in range(count):
                made = await ts.empty(self._value.shape, dtype=torch.uint8)
                made.copy_(self._value)
                start = time.perf_counter()
                ref = await ts.put_object(made)
                got = await ts.get(ref)
                del ref
                seconds += time.perf_counter() - start
                if not torch.equal(got, self._value):
                    wrong.append(IN_PLACE)
                del made, got  # to unmap what has been read is no part of it, as with the others
            return seconds / count

        seconds = self._run(times())
        self._run(until_unleased())
        return float(seconds)

    def _ray_cycle(self, count: int) -> float:
        array = self._value.numpy()
        start = time.perf_counter()
        for _ in range(count):
            ref = self._ray.put(array)
            self._ray.get(ref)
            del ref
        return (time.perf_counter() - start) / count

    def drop(self) -> None:
        """Forget the value, and end Ray."""
        self._value = torch.empty(0)
        if self._ray is not None:
            self._ray.shutdown()
            self._ray = None
