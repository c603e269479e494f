"""Commands of a measured process: a set of weights over ``tcp``, beside plain sockets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measured.network.sockets import STREAMS, PlainSockets

import torchstore_core as ts
from torchstore_cli.bench import floors, workload
from torchstore_cli.bench.measuring import timed, timed_call
from torchstore_transports.tcp.link import TcpLink


class OverNetwork:
    """Commands on a store whose bytes all go through ``tcp``.

    Args:
        run: runs a coroutine on the process's event loop.
    """

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run = run
        self._source: dict[str, torch.Tensor] = {}
        self._target: dict[str, torch.Tensor] = {}
        self._plain: dict[int, PlainSockets] = {}

    def open(self, shapes: dict[str, list[int]], seed: int, capacity: int) -> dict[str, Any]:
        """Start a store, make the set and a destination for it, and the plain sockets."""
        of = workload.received(shapes)
        self._source, self._target = workload.make(of, seed), workload.make_empty(of)
        targets = list(self._target.values())
        self._plain = {streams: PlainSockets(targets, streams) for streams in STREAMS}

        async def start() -> tuple[ts.Client, int]:
            client = await ts.initialize(capacity=capacity, prefer=["tcp"])
            return client, (await client.status()).controller_pid

        client, server_pid = self._run(start())
        return {"address": client.address, "server_pid": server_pid}

    def round(self, stamp: int, turn: int) -> dict[str, Any]:
        """A put and a get of the set, and each of them by plain sockets; what came is compared."""
        workload.stamp(self._source, stamp)

        def put() -> float:
            return float(self._run(timed(ts.put_batch(self._source, timeout=120)))[0])

        def get() -> float:
            self._clear()
            return float(self._run(timed(ts.get_batch(self._target, timeout=120)))[0])

        def plain_get(sockets: PlainSockets) -> float:
            self._clear()
            return timed_call(sockets.get)

        def plain(way: str) -> dict[str, Callable[[], float]]:
            calls = {"put": lambda each: timed_call(each.put), "get": plain_get}
            return {
                f"plain {way}, {streams}": partial(calls[way], sockets)
                for streams, sockets in self._plain.items()
            }

        times = floors.interleave({**plain("put"), "put": put}, turn)
        times |= floors.interleave({**plain("get"), "get": get}, turn)
        get()
        wrong = [
            name
            for name, tensor in self._target.items()
            if not torch.equal(tensor.view(torch.uint8), self._source[name].view(torch.uint8))
        ]
        return {"times": times, "wrong": wrong, "streams": self._run(streams())}

    @workload.one_thread()
    def _clear(self) -> None:
        """Forget what came, in the same way before every get, so that the memory is as warm."""
        for tensor in self._target.values():
            tensor.view(torch.int16).zero_()

    def close(self) -> None:
        """End the store and the plain sockets."""
        self._run(ts.shutdown())
        while self._plain:
            self._plain.popitem()[1].close()
        self._source, self._target = {}, {}


async def streams() -> dict[str, int]:
    """How many streams the link of ``tcp`` has settled on, for puts and gets."""
    session = await (await ts.client())._joined.session(10)
    (volume,) = session.volumes
    candidate = next(one for one in volume.candidates(1 << 30) if one.spec.name == "tcp")
    link = await volume.connect(candidate)
    if not isinstance(link, TcpLink):
        raise TypeError(type(link))
    return {"put": link._writes.best(), "get": link._reads.best()}
