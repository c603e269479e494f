"""Commands of a measured process: large values on several volumes, through a slow transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measured import budgeted_transport
from measured.plugins import InstalledPlugin

import torchstore_core as ts
from torchstore_cli.bench import floors, workload
from torchstore_cli.bench.measuring import timed


class SeveralVolumes:
    """Commands on a store whose bytes all go through the transport ``budgeted``.

    Args:
        run: runs a coroutine on the process's event loop.
    """

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run = run
        self._plugin: InstalledPlugin | None = None
        self._values: dict[str, torch.Tensor] = {}
        self._targets: dict[str, torch.Tensor] = {}

    def open(self, volumes: int, nbytes: int, seed: int) -> dict[str, Any]:
        """Start a store and put a value of ``nbytes`` bytes on each of its volumes."""
        module = budgeted_transport
        self._plugin = InstalledPlugin("torchstore.transports", module.NAME, module.__name__)
        self._values = {
            f"volume-{at}": workload.random_tensor((nbytes // 2,), seed + at).view(torch.uint8)
            for at in range(volumes)
        }
        self._targets = {name: torch.zeros_like(value) for name, value in self._values.items()}

        async def fill() -> tuple[ts.Client, int]:
            client = await ts.initialize(
                num_storage_volumes=volumes,
                strategy="host",  # the emptiest volume first
                capacity=volumes * (nbytes + (16 << 20)),
                prefault=0,
                prefer=[module.NAME],
            )
            for name, value in self._values.items():
                await client.put(name, value, timeout=120)
            places = {(await client.stat(name)).volume for name in self._values}
            if len(places) != volumes:
                raise RuntimeError(f"{volumes} values are on the volumes {sorted(places)}")
            return client, (await client.status()).controller_pid

        client, server_pid = self._run(fill())
        return {"address": client.address, "server_pid": server_pid}

    def get(self, turn: int) -> dict[str, Any]:
        """One round: an in-place get of all values together, and of one of them; both compared."""
        wrong: list[str] = []

        def get(names: list[str]) -> float:
            with workload.one_thread():
                targets = {name: self._targets[name].zero_() for name in names}
            seconds, _ = self._run(timed(ts.get_batch(targets, timeout=120)))
            with workload.one_thread():
                wrong.extend(n for n in names if not torch.equal(targets[n], self._values[n]))
            return float(seconds)

        names = list(self._values)
        one = [names[turn % len(names)]]
        times = floors.interleave({"all": lambda: get(names), "one": lambda: get(one)}, turn)
        return {"times": times, "wrong": wrong}

    def close(self) -> None:
        """End the store; the transport is not installed any more."""
        self._run(ts.shutdown())
        if self._plugin is not None:
            self._plugin.remove()
        self._values, self._targets = {}, {}
