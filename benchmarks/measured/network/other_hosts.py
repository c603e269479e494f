"""Commands of an actor that go to volumes of other hosts: a set of weights by several transports in
the same rounds, and small values beside bare calls of the engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import torch

import torchstore_core as ts
from torchstore_cli.bench import floors, workload
from torchstore_cli.bench.measuring import timed

_SMALL = "small"


class FarVolumes:
    """Commands on stores that have their only volume on another host.

    Args:
        run: runs a coroutine on the process's event loop.
        bare: calls an endpoint on another host with some bytes.
    """

    def __init__(
        self, run: Callable[[Any], Any], bare: Callable[[bytes], Awaitable[object]]
    ) -> None:
        self._run = run
        self._bare = bare
        self._source: dict[str, torch.Tensor] = {}
        self._target: dict[str, torch.Tensor] = {}

    def make(self, shapes: dict[str, list[int]], seed: int) -> None:
        """Make the set, and a destination for it."""
        of = workload.received(shapes)
        self._source, self._target = workload.make(of, seed), workload.make_empty(of)

    def round(self, stamp: int, turn: int, stores: Sequence[str]) -> dict[str, Any]:
        """A put and an in-place get of the set in each of these stores; what came is compared."""
        workload.stamp(self._source, stamp)
        wrong: list[str] = []

        def put(store: str) -> float:
            work = ts.put_batch(self._source, store_name=store, timeout=300)
            return float(self._run(timed(work))[0])

        def get(store: str) -> float:
            with workload.one_thread():
                for tensor in self._target.values():
                    tensor.view(torch.int16).zero_()
            work = ts.get_batch(self._target, store_name=store, timeout=300)
            seconds = float(self._run(timed(work))[0])
            wrong.extend(
                f"{name} by {store}"
                for name, tensor in self._target.items()
                if not torch.equal(tensor.view(torch.uint8), self._source[name].view(torch.uint8))
            )
            return seconds

        times = floors.interleave({f"put, {one}": partial(put, one) for one in stores}, turn)
        times |= floors.interleave({f"get, {one}": partial(get, one) for one in stores}, turn)
        return {"times": times, "wrong": wrong}

    def put_small(self, store: str, nbytes: int) -> dict[str, Any]:
        """Put a small value; where it is, and which host this is."""
        value = workload.random_tensor((nbytes // 2,), 1).view(torch.uint8)
        self._source = {_SMALL: value}
        self._run(ts.put(_SMALL, value, store_name=store))
        return {"volume": self._run(ts.stat(_SMALL, store_name=store)).volume}

    def get_small(self, store: str, count: int) -> dict[str, Any]:
        """Seconds of each of ``count`` gets of that value, and of as many bare calls with as many
        bytes; the two take turns, so that both meet the same load. The last value is compared.
        """
        data = bytes(self._source[_SMALL].nbytes)

        async def take_turns() -> tuple[list[float], list[float], torch.Tensor]:
            gets: list[float] = []
            calls: list[float] = []
            for _ in range(count):
                calls.append((await timed(self._bare(data)))[0])
                seconds, got = await timed(ts.get(_SMALL, store_name=store))
                gets.append(seconds)
            return gets, calls, got

        gets, calls, got = self._run(take_turns())
        same = torch.equal(got, self._source[_SMALL])
        return {"gets": gets, "calls": calls, "wrong": [] if same else [_SMALL]}

    def close(self, stores: Sequence[str]) -> None:
        """Drop the sets and leave the stores."""
        self._source, self._target = {}, {}
        for store in stores:
            self._run(ts.reset_client(store))
