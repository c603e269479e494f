"""Commands of a measured process: state dicts of a CUDA device, there and back, beside copies of
the same tensors to and from page-locked memory of their own.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch

import torchstore_core as ts
from torchstore_cli.bench import floors, workload

PUT, GET = "put_state_dict", "get_state_dict"
OUT, IN = "copies to page-locked memory", "copies from page-locked memory"
_KEY = "on a device"


class OnDevice:
    """Commands on a set of tensors that are on the current CUDA device.

    Args:
        run: runs a coroutine on the process's event loop.
    """

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run = run
        self._ours: dict[str, torch.Tensor] = {}
        self._mine: dict[str, torch.Tensor] = {}
        self._locked: list[torch.Tensor] = []

    def name(self) -> str:
        """The name of the device; empty if torch sees none."""
        return torch.cuda.get_device_name() if torch.cuda.is_available() else ""

    def make(self, shapes: workload.Shapes, seed: int) -> int:
        """Make a set, destinations for it, and page-locked memory of its own; the set's bytes."""
        self._ours = {name: t.cuda() for name, t in workload.make(shapes, seed).items()}
        self._mine = {name: torch.zeros_like(tensor) for name, tensor in self._ours.items()}
        self._locked = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            for tensor in self._ours.values()
        ]
        return workload.nbytes(shapes)

    def round(self, turn: int) -> dict[str, Any]:
        """One round: the seconds of each measure, and what came back different."""
        for tensor in self._mine.values():
            tensor.zero_()
        torch.cuda.synchronize()
        measures = {
            PUT: lambda: self._awaited(lambda: ts.put_state_dict(self._ours, _KEY)),
            OUT: lambda: self._copied(self._locked, [*self._ours.values()]),
            GET: lambda: self._awaited(lambda: ts.get_state_dict(_KEY, self._mine)),
            IN: lambda: self._copied([*self._mine.values()], self._locked),
        }
        if not turn:  # the first round puts what the others get, and fills the locked memory
            times = {name: measure() for name, measure in measures.items()}
        else:
            times = floors.interleave(measures, turn)
        wrong = [
            name
            for name, mine in self._mine.items()  # of random bits, some are NaN
            if not torch.equal(mine.view(torch.int16), self._ours[name].view(torch.int16))
        ]
        return {"times": times, "wrong": wrong}

    def _awaited(self, call: Callable[[], Awaitable[Any]]) -> float:
        async def timed() -> float:
            start = time.perf_counter()
            await call()  # nothing has to be synchronised when it returns
            return time.perf_counter() - start

        return float(self._run(timed()))

    @staticmethod
    def _copied(to: list[torch.Tensor], of: list[torch.Tensor]) -> float:
        start = time.perf_counter()
        for target, source in zip(to, of, strict=True):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def drop(self) -> None:
        """Forget the set."""
        self._ours, self._mine, self._locked = {}, {}, []
