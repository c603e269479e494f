"""What every runtime must do, as tests: subclass and say how to make yours.

They start real stores, so they take a few seconds. Linux only: what is left behind is looked for in
``/proc``.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import torch

import torchstore_core as ts
from torchstore_core.contracts.runtime import Runtime, StoreOptions
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import StoreTimeoutError, TorchStoreError

__all__ = ["RuntimeConformance"]

T = TypeVar("T")
_MIB = 1 << 20
_TIMEOUT_S = 60.0

# What a process that is not the engine's does with the address it is given.
_JOIN = """
import asyncio, sys
import torchstore_core as ts
async def main():
    await ts.connect(sys.argv[1])
    got = await ts.get("large")
    await ts.put("answer", float(got.sum()))
asyncio.run(main())
"""


class RuntimeConformance:
    """Subclass it in a test module, as ``class TestMine(RuntimeConformance)``.

    Attributes:
        mesh: what ``initialize`` would be given.
        options: further fields of every ``StoreOptions``.
        gone_within: seconds after ``stop`` in which all that a store made must be gone.
    """

    mesh: object | None = None
    gone_within: float = 10.0
    options: ClassVar[dict[str, Any]] = {"prefault": 0}
    _numbers = itertools.count()

    def make(self) -> Runtime:
        """A fresh, unstarted runtime."""
        raise TypeError(f"{type(self).__name__} must override make()")

    def left_behind(self) -> set[str]:
        """What is there that a store may have made: by default, the processes below this one.

        Override it to leave out, or to add, what your engine makes beside the store.
        """
        return {f"process {pid}: {name}" for pid, name in _descendants(os.getpid())}

    # ---- helpers --------------------------------------------------------------------------

    def _asked(self, **fields: Any) -> StoreOptions:
        name = f"conformance-{os.getpid()}-{next(self._numbers)}"
        given = {"store_name": name, "capacity": 64 * _MIB, "timeout": _TIMEOUT_S}
        return StoreOptions(**{**given, **self.options, **fields})

    async def _serving(self, options: StoreOptions) -> tuple[Runtime, ts.Client]:
        runtime = self.make()
        address = await asyncio.wait_for(runtime.start(options, self.mesh), options.timeout)
        try:
            client = await ts.connect(address, store_name=options.store_name, timeout=_TIMEOUT_S)
        except BaseException:
            await runtime.stop(_TIMEOUT_S)
            raise
        return runtime, client

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a test; afterwards everything must be as it was."""
        before = self.left_behind()
        result = asyncio.run(work)
        deadline = time.monotonic() + self.gone_within
        while (left := self.left_behind() - before) and time.monotonic() < deadline:
            time.sleep(0.01)
        if left:
            pytest.fail(
                f"this was left behind {self.gone_within:.0f} s after stop(): {sorted(left)}"
            )
        return result

    # ---- tests ----------------------------------------------------------------------------

    def test_a_store_starts_serves_and_ends(self) -> None:
        """Puts and gets work, small and large; after ``stop`` nobody answers."""

        async def work() -> None:
            options = self._asked()
            runtime, client = await self._serving(options)
            try:
                large = torch.arange(_MIB, dtype=torch.float32)
                await client.put("small", torch.tensor([1, 2, 3]))
                await client.put("large", large)
                if (await client.get("small")).tolist() != [1, 2, 3]:
                    pytest.fail("a small tensor came back changed")
                if not torch.equal(await client.get("large"), large):
                    pytest.fail("a large tensor came back changed")
                await client.delete("large")
            finally:
                await runtime.stop(_TIMEOUT_S)
            with pytest.raises(TorchStoreError):
                await client.get("small", timeout=self.gone_within)
            await ts.shutdown(options.store_name)

        self._run(work())

    @pytest.mark.parametrize("volumes", [1, 3])
    def test_options_reach_the_store(self, volumes: int) -> None:
        """Its name, number of volumes, capacity in all, and strategy."""

        async def work() -> None:
            strategy = _NotInstalled(note="from the kit")
            options = self._asked(num_storage_volumes=volumes)
            runtime, client = await self._serving(options)
            try:
                status = await client.status()
                got = (status.store_name, len(status.volumes))
                if got != (options.store_name, volumes):
                    pytest.fail(f"asked for {(options.store_name, volumes)}, the store is {got}")
                capacity = sum(volume.capacity_bytes for volume in status.volumes)
                if not 0 <= 64 * _MIB - capacity < 4096 * volumes:
                    pytest.fail(f"asked for {64 * _MIB} bytes in all, the store has {capacity}")
            finally:
                await runtime.stop(_TIMEOUT_S)
            await ts.shutdown(options.store_name)
            with pytest.raises(TorchStoreError):  # not installed, so the server cannot find it
                await self.make().start(self._asked(strategy=strategy), self.mesh)

        self._run(work())

    def test_another_process_of_this_host_joins(self) -> None:
        """By ``local_address``, or by what ``start`` returned."""

        async def work() -> None:
            options = self._asked()
            runtime = self.make()
            address = await runtime.start(options, self.mesh)
            try:
                client = await ts.connect(address, store_name=options.store_name)
                await client.put("large", torch.ones(_MIB))
                command = [sys.executable, "-c", _JOIN, runtime.local_address or address]
                await asyncio.to_thread(
                    subprocess.run, command, check=True, timeout=_TIMEOUT_S, env=_plain()
                )
                if await client.get("answer") != float(_MIB):
                    pytest.fail("the other process did not see the same bytes")
            finally:
                await runtime.stop(_TIMEOUT_S)
            await ts.shutdown(options.store_name)

        self._run(work())

    def test_stop_may_come_twice_and_without_a_start(self) -> None:
        """It is what error handling calls."""

        async def work() -> None:
            await self.make().stop(_TIMEOUT_S)
            options = self._asked()
            runtime, _ = await self._serving(options)
            await runtime.stop(_TIMEOUT_S)
            await runtime.stop(_TIMEOUT_S)
            await ts.shutdown(options.store_name)

        self._run(work())

    def test_stores_side_by_side_and_one_after_the_other(self) -> None:
        """Names tell them apart; a name is free again when its store has ended."""

        async def work() -> None:
            first, second = self._asked(), self._asked()
            one, client = await self._serving(first)
            other, another = await self._serving(second)
            try:
                await client.put("k", 1)
                await another.put("k", 2)
                if (await client.get("k"), await another.get("k")) != (1, 2):
                    pytest.fail("two stores share their keys")
            finally:
                await one.stop(_TIMEOUT_S)
            if await another.get("k") != 2:
                pytest.fail("ending one store changed another")
            await ts.shutdown(first.store_name)
            again, client = await self._serving(first)
            try:
                if await client.keys():
                    pytest.fail("a new store has the keys of an old one")
            finally:
                await again.stop(_TIMEOUT_S)
                await other.stop(_TIMEOUT_S)
            await ts.shutdown(first.store_name)
            await ts.shutdown(second.store_name)

        self._run(work())

    def test_what_cannot_start_says_so_and_leaves_nothing(self) -> None:
        """A typed error; the name is free, and the next start works."""

        async def work() -> None:
            options = self._asked()
            with pytest.raises(TorchStoreError):  # less than a page
                await self.make().start(self._asked(capacity=1), self.mesh)
            with pytest.raises(StoreTimeoutError):
                await self.make().start(self._asked(timeout=1e-3), self.mesh)
            runtime, client = await self._serving(options)
            await client.put("k", 1)
            await runtime.stop(_TIMEOUT_S)
            await ts.shutdown(options.store_name)

        self._run(work())

    @pytest.mark.parametrize("turns", [0, 3])
    def test_a_start_that_is_cancelled_leaves_nothing(self, turns: int) -> None:
        """Whenever it is cancelled, ``stop`` ends what was begun, and the name is free."""

        async def work() -> None:
            options = self._asked()
            runtime = self.make()
            starting = asyncio.ensure_future(runtime.start(options, self.mesh))
            for _ in range(turns):
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.wait([starting])
            await runtime.stop(_TIMEOUT_S)
            again, _ = await self._serving(options)
            await again.stop(_TIMEOUT_S)
            await ts.shutdown(options.store_name)

        self._run(work())


class _NotInstalled(Strategy, frozen=True, tag="conformance-not-installed"):
    """A strategy that no server has."""

    note: str = ""


def _plain() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name[:10] != "TORCHSTORE"}


def _descendants(root: int) -> list[tuple[int, str]]:
    """Processes below ``root``, zombies left out: pid and name."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text()
        except OSError:  # gone meanwhile
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        state, parent = rest.split()[:2]
        if state != "Z":
            parents.setdefault(int(parent), []).append((int(entry.name), name))
    found: list[tuple[int, str]] = []
    todo = [root]
    while todo:
        below = parents.get(todo.pop(), [])
        found += below
        todo += [pid for pid, _ in below]
    return found
