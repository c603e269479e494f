"""Commands of a measured process: a set of weights over a transport, beside its library alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measured.libraries.bare import Bare

import torchstore_core as ts
from torchstore_cli.bench import floors, workload
from torchstore_cli.bench.measuring import timed, timed_call
from torchstore_core.errors import TransportError


class BesideLibrary:
    """Commands on a store whose bytes all go through one transport.

    Args:
        run: runs a coroutine on the process's event loop.
    """

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run = run
        self._source: dict[str, torch.Tensor] = {}
        self._target: dict[str, torch.Tensor] = {}
        self._bare: Bare | None = None

    def open(
        self, shapes: dict[str, list[int]], seed: int, capacity: int, transport: str, library: str
    ) -> dict[str, Any]:
        """Start a store, make the set and a destination for it, and the bare library."""
        of = workload.received(shapes)
        self._source, self._target = workload.make(of, seed), workload.make_empty(of)
        self._bare = Bare(library, list(self._target.values()))

        async def start() -> tuple[ts.Client, int]:
            strategy = ts.SingletonStrategy(transport=transport)
            client = await ts.initialize(strategy=strategy, capacity=capacity)
            return client, (await client.status()).controller_pid

        client, server_pid = self._run(start())
        return {"address": client.address, "server_pid": server_pid}

    def round(self, stamp: int, turn: int) -> dict[str, Any]:
        """A put and a get of the set, and each of them in all ways by the library; what came is
        compared.
        """
        if self._bare is None:
            raise TransportError("nothing is open")
        bare = self._bare
        workload.stamp(self._source, stamp)

        def put() -> float:
            return float(self._run(timed(ts.put_batch(self._source, timeout=120)))[0])

        def get() -> float:
            self._clear()
            return float(self._run(timed(ts.get_batch(self._target, timeout=120)))[0])

        def bare_get(form: str) -> float:
            self._clear()
            return timed_call(partial(bare.get, form))

        puts = {"put": put}
        gets = {"get": get}
        for form in bare.forms:
            puts[f"bare put, {form}"] = partial(timed_call, partial(bare.put, form))
            gets[f"bare get, {form}"] = partial(bare_get, form)
        times = floors.interleave(puts, turn)
        times |= floors.interleave(gets, turn)
        get()
        wrong = [
            name
            for name, tensor in self._target.items()
            if not torch.equal(tensor.view(torch.uint8), self._source[name].view(torch.uint8))
        ]
        return {"times": times, "wrong": wrong}

    @workload.one_thread()
    def _clear(self) -> None:
        """Forget what came, in the same way before every get, so that the memory is as warm."""
        for tensor in self._target.values():
            tensor.view(torch.int16).zero_()

    def close(self) -> None:
        """End the store and the bare library."""
        self._run(ts.shutdown())
        if self._bare is not None:
            self._bare.close()
        self._bare, self._source, self._target = None, {}, {}
