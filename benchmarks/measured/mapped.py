"""Commands of a measured process: a zero-copy get of many large tensors, and of an object that has
them all, beside bare mappings, and beside Ray where it is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

import torchstore_core as ts
from torchstore_cli.bench import floors, workload
from torchstore_cli.bench.measuring import timed, timed_call, until_unleased

BARE, RAY = "mmap and frombuffer of each", "ray.get"
OBJECT = "mapped-object"


class MappedTensors:
    """Commands on tensors that are got without a copy.

    Args:
        run: runs a coroutine on the process's event loop.
    """

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run = run
        self._values: dict[str, torch.Tensor] = {}
        self._bare: floors.Mappings | None = None
        self._references: list[Any] = []
        self._object: Any = None

    def make(self, count: int, nbytes: int, seed: int) -> list[str]:
        """Put ``count`` tensors of ``nbytes`` bytes, and a dict of them, into Ray as well where it
        is installed; what a get is compared with.
        """
        self._values = {
            f"mapped-{at}": workload.random_tensor((nbytes // 2,), seed + at).view(torch.uint8)
            for at in range(count)
        }
        self._run(ts.put_batch(self._values))
        self._run(ts.put(OBJECT, self._values))
        self._bare = floors.Mappings(count, nbytes)
        if not importlib.util.find_spec("ray"):
            return [BARE]
        import ray

        ray.init(num_cpus=1, include_dashboard=False, object_store_memory=4 * count * nbytes)
        arrays = {name: value.numpy() for name, value in self._values.items()}
        self._references = [ray.put(array) for array in arrays.values()]
        self._object = ray.put(arrays)
        return [BARE, RAY]

    def get(self, turn: int) -> dict[str, Any]:
        """One round: a zero-copy get of all tensors, and of the object, which are compared, and the
        others once.
        """
        wrong: list[str] = []

        def store(call: Callable[[], Any]) -> float:
            seconds, got = self._run(timed(call()))
            with workload.one_thread():
                wrong.extend(n for n, v in self._values.items() if not torch.equal(got[n], v))
            del got
            self._run(until_unleased())
            return float(seconds)

        measures: dict[str, Callable[[], float]] = {
            "get": lambda: store(lambda: ts.get_batch(list(self._values))),
            "object": lambda: store(lambda: ts.get(OBJECT)),
        }
        if self._bare is not None:
            measures[BARE] = self._bare.map_each
        if self._references:
            measures[RAY] = lambda: self._ray_get(self._references)
            measures[f"{RAY} of the object"] = lambda: self._ray_get(self._object)
        return {"times": floors.interleave(measures, turn), "wrong": wrong}

    @staticmethod
    def _ray_get(references: Any) -> float:
        import ray

        return timed_call(lambda: ray.get(references))

    def drop(self) -> None:
        """Forget the tensors and what they were compared with."""
        if self._bare is not None:
            self._bare.close()
        if self._references:
            import ray

            ray.shutdown()
        self._values, self._bare, self._references, self._object = {}, None, [], None
