"""Commands of a reader in a network of its own: parts of a state dict from a server in another
network, beside plain sockets between the same two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from inputs import layouts
from measured.dicts import Dicts
from measured.network.loopback import streams
from measured.network.sockets import STREAMS, PlainSockets

from torchstore_cli.bench import floors, workload
from torchstore_cli.bench.measuring import timed_call

_RECEIVED = 0  # the column of /proc/net/dev with what an interface has received


class BetweenNetworks:
    """Gets of the parts that this process holds.

    Args:
        run: runs a coroutine on the process's event loop.
        dicts: has the parts.
    """

    def __init__(self, run: Callable[[Any], Any], dicts: Dicts) -> None:
        self._run = run
        self._dicts = dicts
        self._plain: dict[int, PlainSockets] = {}

    def open(self, address: str, wrapper: Sequence[str]) -> None:
        """Connect plain sockets to processes that ``wrapper`` runs in the other network."""
        self._plain = {
            count: PlainSockets(self._tensors(), count, address, wrapper) for count in STREAMS
        }

    def round(self, number: int, turn: int) -> dict[str, Any]:
        """A get of version ``number`` and each plain copy of as many bytes, once; the bytes that
        came over the network with the get, everything below TCP included; what is wrong.
        """
        received = 0

        def get() -> float:
            nonlocal received
            self._clear()
            before = _received()
            done = self._dicts.get(number)
            received = _received() - before
            return done["end"] - done["start"]

        def plain(sockets: PlainSockets) -> float:
            self._clear()
            return timed_call(sockets.get)

        measures: dict[str, Callable[[], float]] = {
            f"plain get, {count}": partial(plain, sockets) for count, sockets in self._plain.items()
        }
        times = floors.interleave({**measures, "get": get}, turn)
        get()
        return {
            "times": times,
            "received": received,
            "wrong": self._dicts.wrong(number, full=False),
            "streams": self._run(streams())["get"],
        }

    def close(self) -> None:
        """End the plain sockets."""
        while self._plain:
            self._plain.popitem()[1].close()

    def _tensors(self) -> list[torch.Tensor]:
        return [layouts.local(value) for part in self._dicts.parts for value in part.values()]

    @workload.one_thread()
    def _clear(self) -> None:
        for tensor in self._tensors():
            tensor.view(torch.int16).zero_()


def _received() -> int:
    """Bytes that all interfaces of this network but the loopback have received."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    fields = [line.partition(":") for line in lines]
    return sum(int(rest.split()[_RECEIVED]) for name, _, rest in fields if name.strip() != "lo")
