"""Commands of a publisher or a reader: puts and gets of a complete set of weights."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import torchstore_core as ts
from torchstore_cli.bench import floors, workload
from torchstore_cli.bench.measuring import timed, until_unleased, until_warm

__all__ = ["Weights"]


class Weights:
    """Commands on one set of tensors.

    Args:
        run: runs a coroutine on the process's event loop.
        open_store: starts a store (the command ``store.open``).
    """

    def __init__(
        self, run: Callable[[Any], Any], open_store: Callable[..., dict[str, Any]]
    ) -> None:
        self._run = run
        self._open = open_store
        self._tensors: dict[str, torch.Tensor] = {}
        self._set: tuple[workload.Shapes, int] = ({}, 0)
        self._warm: floors.WarmCopy | None = None
        self._cold: floors.ColdTouch | None = None

    def make(
        self, shapes: dict[str, list[int]], seed: int, filled: bool, limit: int
    ) -> dict[str, int]:
        """Make the set (``filled``) or destinations for it, and warm-copy floors of at most
        ``limit`` bytes (0: none).
        """
        self.drop()
        of = workload.received(shapes)
        self._set = of, seed
        self._tensors = workload.make(of, seed) if filled else workload.make_empty(of)
        sizes = workload.sizes(of)
        self._warm = floors.warm_copy(sizes, limit)
        return {
            "tensors": len(sizes),
            "nbytes": sum(sizes),
            "floor_nbytes": self._warm.nbytes if self._warm is not None else 0,
            "omp_threads": torch.get_num_threads(),
        }

    def make_cold_floor(self, nbytes: int) -> dict[str, float]:
        """Make the cold-touch floors; return the seconds of one round, which warms them up."""
        self._cold = floors.ColdTouch(nbytes)
        return floors.interleave(self._cold.kinds, 0)

    def drop(self) -> None:
        """Drop the set and the floors."""
        for floor in (self._warm, self._cold):
            if floor is not None:
                floor.close()
        self._tensors, self._warm, self._cold = {}, None, None
        gc.collect()

    def put(
        self, stamp: int, turn: int, floor: str = "", fresh: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Run a round: a put of the set, with a new stamp, and each floor (``warm`` or ``cold``).

        ``fresh``: options of a store that is started for this put. If they include a prefault, the
        put waits until that is done. The time includes neither the start nor the wait.
        """
        opened: dict[str, Any] = {}

        def put() -> float:
            if fresh is not None:
                opened.update(self._open(**fresh))
                if fresh["prefault"]:
                    opened["warming"] = self._run(until_warm(fresh["prefault"]))
            workload.stamp(self._tensors, stamp)
            seconds: float = self._run(timed(ts.put_batch(self._tensors)))[0]
            return seconds

        source = {"warm": self._warm, "cold": self._cold}.get(floor)
        kinds = source.kinds if source is not None else {}
        times = floors.interleave({**kinds, "put": put}, turn)
        return {**opened, "times": times}

    def get(self, stamp: int, turn: int, full: bool, floor: bool = True) -> dict[str, Any]:
        """Run a round: an in-place get, a zero-copy get, a read of all its bytes, and each floor.

        After each get, the result is compared with the set: by stamps, or (``full``) bit for bit.
        The destinations are zeroed before each in-place get.
        """
        wrong: list[str] = []
        reading = 0.0
        check = partial(workload.wrong, of=self._set[0], seed=self._set[1], number=stamp, full=full)

        def in_place() -> float:
            for tensor in self._tensors.values():
                tensor.view(torch.int16).zero_()
            seconds, _ = self._run(timed(ts.get_batch(self._tensors)))
            wrong.extend(check(self._tensors))
            return float(seconds)

        def zero_copy() -> float:
            nonlocal reading
            seconds, got = self._run(timed(ts.get_batch(list(self._tensors))))
            if self._warm is not None:
                targets = self._tensors.values()
                reading = floors.copy_tensors(self._warm.threads, targets, got.values())
            wrong.extend(check(got))
            del got
            self._run(until_unleased())
            return float(seconds)

        kinds = self._warm.kinds if self._warm is not None and floor else {}
        times = floors.interleave({**kinds, "in_place": in_place, "zero_copy": zero_copy}, turn)
        return {"times": {**times, "reading": reading}, "wrong": wrong}
