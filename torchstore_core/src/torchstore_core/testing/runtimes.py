"""The requirements for runtimes, as tests: subclass them and override how a runtime is made.

The tests start real stores, so they take some seconds. Linux only: they read ``/proc``.
While a test runs, ``XDG_RUNTIME_DIR`` is a private directory, so that the files of this user's
other stores are not mistaken for leftovers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, ClassVar, Concatenate, ParamSpec

import msgspec
import pytest
import torch

import torchstore_core as ts
from torchstore_core.contracts.runtime import Runtime, RuntimeSpec, StoreOptions
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import ConfigurationError, StoreTimeoutError, TorchStoreError
from torchstore_core.plugins.registry import Registry, load_class
from torchstore_core.testing import leftovers
from torchstore_core.testing.owners import plain_environment, start_owner

__all__ = ["RuntimeConformance"]

P = ParamSpec("P")
_MIB = 1 << 20
_TIMEOUT_S = 150.0

# A program that joins the store from a process that does not belong to the engine.
_JOIN = """
import asyncio, sys
import torchstore_core as ts
async def main():
    await ts.connect(sys.argv[1])
    got = await ts.get("large")
    await ts.put("answer", float(got.sum()))
asyncio.run(main())
"""


def _leaves_nothing(
    test: Callable[Concatenate[RuntimeConformance, P], Coroutine[Any, Any, None]],
) -> Callable[Concatenate[RuntimeConformance, P], None]:
    """Make a test of a coroutine, which also fails if anything is left behind."""

    @functools.wraps(test)
    def run(self: RuntimeConformance, /, *args: P.args, **kwargs: P.kwargs) -> None:
        self._run(test(self, *args, **kwargs))

    return run


class RuntimeConformance:
    """Subclass this in a test module, as ``class TestMine(RuntimeConformance)``.

    Attributes:
        name: the entry-point name of the runtime; None: its package is not installed, and tests of
            its ``RuntimeSpec`` are skipped, unless :meth:`spec` is overridden.
        factory: the runtime as ``"module:Class"``, for a process that creates it; None: the
            factory of the spec.
        mesh: the mesh that would be passed to ``initialize``.
        options: additional fields of every ``StoreOptions``.
        gone_within: seconds after ``stop`` within which everything that a store made must be gone.
        ends_within: seconds after the death of the owner within which everything must be gone.
        cycles: how often a store is started and stopped, to check that this process does not grow.
    """

    name: str | None = None
    factory: str | None = None
    mesh: object | None = None
    gone_within: float = 10.0
    ends_within: float = 30.0
    cycles: int = 3
    options: ClassVar[dict[str, Any]] = {"prefault": 0}
    _numbers = itertools.count()

    def make(self) -> Runtime:
        """Return a fresh, unstarted runtime."""
        raise TypeError(f"{type(self).__name__} must override make()")

    def left_behind(self) -> set[str]:
        """Return everything that exists now and that a store may have made: by default, the
        descendants of this process, and the contents of the runtime directory.

        Override it to exclude, or to add, things that your engine makes apart from the store.
        """
        processes = {f"process {pid}: {name}" for pid, name in leftovers.descendants(os.getpid())}
        return processes | {f"directory {path}" for path in leftovers.directories()}

    def held(self) -> dict[str, int]:
        """Count resources of this process that must not grow with every store: by default, its
        descriptors and threads. Override it for the same reasons as :meth:`left_behind`.
        """
        return {"descriptors": leftovers.descriptors(), "threads": leftovers.threads()}

    def spec(self) -> RuntimeSpec | None:
        """Return the runtime's descriptor, from the entry point :attr:`name`."""
        return None if self.name is None else Registry().runtime(self.name)

    # ---- helpers --------------------------------------------------------------------------

    def _asked(self, **fields: Any) -> StoreOptions:
        name = f"conformance-{os.getpid()}-{next(self._numbers)}"
        given = {"store_name": name, "capacity": 64 * _MIB, "timeout": _TIMEOUT_S}
        return StoreOptions(**{**given, **self.options, **fields})

    @contextlib.asynccontextmanager
    async def _serving(self, options: StoreOptions) -> AsyncIterator[tuple[Runtime, ts.Client]]:
        """Yield a store, which is stopped at the end, and its client, which leaves it then."""
        runtime = self.make()
        address = await asyncio.wait_for(runtime.start(options, self.mesh), options.timeout)
        try:
            name = options.store_name
            yield runtime, await ts.connect(address, store_name=name, timeout=_TIMEOUT_S)
        finally:
            await runtime.stop(_TIMEOUT_S)
        await ts.shutdown(options.store_name)

    async def _refused(self, field: str, options: StoreOptions) -> None:
        """Check that starting fails because of one field, which proves that it was passed on."""
        runtime = self.make()
        try:
            await runtime.start(options, self.mesh)
        except TorchStoreError:
            return
        finally:
            await runtime.stop(_TIMEOUT_S)
        pytest.fail(f"asked for {field}={getattr(options, field)!r}, the server does not know")

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a test, and check that it leaves nothing behind."""
        with leftovers.private_runtime_directory():
            before = self.left_behind()
            asyncio.run(work)
            left = leftovers.until_empty(lambda: self.left_behind() - before, self.gone_within)
        if left:
            pytest.fail(f"this was left behind {self.gone_within:g} s after stop(): {sorted(left)}")

    def _spec(self) -> RuntimeSpec:
        spec = self.spec()
        if spec is None:
            pytest.skip("name is not set: no descriptor")
        return spec

    # ---- tests ----------------------------------------------------------------------------

    @_leaves_nothing
    async def test_a_store_starts_serves_and_ends(self) -> None:
        """Small and large puts and gets work; after ``stop``, the store no longer answers."""
        options = self._asked()
        async with self._serving(options) as (runtime, client):
            large = torch.arange(_MIB, dtype=torch.float32)
            await client.put("small", torch.tensor([1, 2, 3]))
            await client.put("large", large)
            if (await client.get("small")).tolist() != [1, 2, 3]:
                pytest.fail("a small tensor came back changed")
            if not torch.equal(await client.get("large"), large):
                pytest.fail("a large tensor came back changed")
            await client.delete("large")
            await runtime.stop(_TIMEOUT_S)
            with pytest.raises(TorchStoreError):
                await client.get("small", timeout=self.gone_within)

    @pytest.mark.parametrize("volumes", [1, 3])
    @_leaves_nothing
    async def test_options_reach_the_store(self, volumes: int) -> None:
        """The store has the given name, number of volumes, total capacity and strategy."""
        strategy = _NotInstalled(note="from the kit")
        options = self._asked(num_storage_volumes=volumes)
        async with self._serving(options) as (_, client):
            status = await client.status()
            got = (status.store_name, len(status.volumes))
            if got != (options.store_name, volumes):
                pytest.fail(f"asked for {(options.store_name, volumes)}, the store is {got}")
            capacity = sum(volume.capacity_bytes for volume in status.volumes)
            if not 0 <= 64 * _MIB - capacity < 4096 * volumes:
                pytest.fail(f"asked for {64 * _MIB} bytes in all, the store has {capacity}")
        await self._refused("strategy", self._asked(strategy=strategy))  # it is not installed

    @_leaves_nothing
    async def test_what_is_blocked_is_not_loaded_by_the_server(self) -> None:
        """``block`` reaches the server: here, it blocks the default strategy."""
        asked = self._asked(strategy=None, block=("singleton",))
        await self._refused("block", asked)

    @_leaves_nothing
    async def test_another_process_of_this_host_joins(self) -> None:
        """It joins at ``local_address``, or at the address that ``start`` returned."""
        options = self._asked()
        runtime = self.make()
        address = await runtime.start(options, self.mesh)
        try:
            client = await ts.connect(address, store_name=options.store_name)
            await client.put("large", torch.ones(_MIB))
            command = [sys.executable, "-c", _JOIN, runtime.local_address or address]
            await asyncio.to_thread(
                subprocess.run, command, check=True, timeout=_TIMEOUT_S, env=plain_environment()
            )
            if await client.get("answer") != float(_MIB):
                pytest.fail("the other process did not see the same bytes")
        finally:
            await runtime.stop(_TIMEOUT_S)
        await ts.shutdown(options.store_name)

    @_leaves_nothing
    async def test_stop_may_come_twice_and_without_a_start(self) -> None:
        """Error handling may call ``stop`` in these ways."""
        await self.make().stop(_TIMEOUT_S)
        async with self._serving(self._asked()) as (runtime, _):
            await runtime.stop(_TIMEOUT_S)  # and once more at the end

    @_leaves_nothing
    async def test_stores_side_by_side_and_one_after_the_other(self) -> None:
        """Stores are distinguished by name; a name is free again when its store has ended."""
        first, second = self._asked(), self._asked()
        async with self._serving(second) as (_, another):
            async with self._serving(first) as (_, client):
                await client.put("k", 1)
                await another.put("k", 2)
                if (await client.get("k"), await another.get("k")) != (1, 2):
                    pytest.fail("two stores share their keys")
            if await another.get("k") != 2:
                pytest.fail("ending one store changed another")
            async with self._serving(first) as (_, client):
                if await client.keys():
                    pytest.fail("a new store has the keys of an old one")

    @_leaves_nothing
    async def test_what_cannot_start_says_so_and_leaves_nothing(self) -> None:
        """A failed start raises a typed error; the name is free, and the next start works."""
        with pytest.raises(TorchStoreError):  # less than a page
            await self.make().start(self._asked(capacity=1), self.mesh)
        with pytest.raises(StoreTimeoutError):
            await self.make().start(self._asked(timeout=1e-3), self.mesh)
        async with self._serving(self._asked()) as (_, client):
            await client.put("k", 1)

    @pytest.mark.parametrize("turns", [0, 3])
    @_leaves_nothing
    async def test_a_start_that_is_cancelled_leaves_nothing(self, turns: int) -> None:
        """Whenever a start is cancelled, ``stop`` undoes it, and the name is free again."""
        options = self._asked()
        runtime = self.make()
        starting = asyncio.ensure_future(runtime.start(options, self.mesh))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        await runtime.stop(_TIMEOUT_S)
        async with self._serving(options):
            pass

    def test_this_process_does_not_grow(self) -> None:
        """Starting and stopping again leaves no further descriptors or threads behind."""

        async def work() -> None:
            options = self._asked()
            async with self._serving(options) as (_, client):
                await client.put("large", torch.ones(_MIB))
                await client.get("large")

        def again() -> None:
            for _ in range(self.cycles):
                self._run(work())

        self._run(work())
        if left := leftovers.left_by(again, self.held, self.cycles, self.gone_within):
            found = "; ".join(left)
            pytest.fail(f"{self.cycles} times start() and stop() left this in the process: {found}")

    def test_the_store_ends_when_its_owner_is_killed(self) -> None:
        """If the process that started it is killed (``SIGKILL``) during use, nothing is left."""
        spec = self.spec()
        factory = self.factory or (None if spec is None else spec.factory)
        if factory is None:
            pytest.skip("neither name nor factory is set: no other process can make it")
        if self.mesh is not None:
            pytest.skip("a mesh is of this process")
        options = msgspec.to_builtins(self._asked())
        del options["strategy"]
        mark = options["store_name"]
        with leftovers.private_runtime_directory():
            before = self.left_behind()

            def left() -> set[str]:
                processes = {f"process {pid}: {name}" for pid, name in leftovers.marked(mark)}
                return processes | (self.left_behind() - before)

            try:
                owner = start_owner(factory, options, mark, _TIMEOUT_S)
                owner.kill()
                owner.communicate()
                still = leftovers.until_empty(left, self.ends_within)
            finally:
                leftovers.kill_marked(mark)
        if still:
            pytest.fail(
                f"this was left behind {self.ends_within:g} s after its owner was killed: "
                f"{sorted(still)}"
            )

    # ---- the descriptor -------------------------------------------------------------------

    def test_its_descriptor_leads_to_it(self) -> None:
        """The descriptor creates this runtime, and accepts only this runtime's mesh."""
        spec = self._spec()
        made = type(self.make())
        if load_class(spec.factory) is not made:
            pytest.fail(f"the factory {spec.factory!r} does not make a {made.__name__}")
        if spec.applies(self.mesh) is None:
            pytest.fail(f"applies({self.mesh!r}) is None: it does not take its own mesh")
        if spec.applies(object()) is not None:
            pytest.fail("applies(object()) is not None: it takes what is no mesh at all")

    @_leaves_nothing
    async def test_it_finds_and_ends_stores_by_name(self) -> None:
        """``find`` and ``end`` work, if the runtime has them."""
        spec = self._spec()
        if spec.find is None:
            pytest.skip("it finds no stores")
        find = load_class(spec.find)
        options = self._asked()
        if await find(options.store_name, _TIMEOUT_S) is not None:
            pytest.fail("find() knows a store that never was")
        async with self._serving(options) as (_, client):
            await client.put("k", 1)
            if spec.here is not None and not spec.here():
                pytest.fail("here() is False in a process where a store was started")
            found = await find(options.store_name, _TIMEOUT_S)
            if found is None:
                pytest.fail("find() does not know the store that was started")
            other = await ts.connect(found, store_name=f"{options.store_name}-found")
            if await other.get("k") != 1:
                pytest.fail("find() leads to another store")
            await self._ends_by_name(spec, options)
        await ts.shutdown(f"{options.store_name}-found")
        if await find(options.store_name, _TIMEOUT_S) is not None:
            pytest.fail("find() knows a store that has ended")

    async def _ends_by_name(self, spec: RuntimeSpec, options: StoreOptions) -> None:
        if spec.end is None:
            return
        end = load_class(spec.end)
        if await end(f"{options.store_name}-never-was", _TIMEOUT_S):
            pytest.fail("end() of a store that never was said that it ended it")
        if not await end(options.store_name, _TIMEOUT_S):
            pytest.fail("end() did not know the store that was started")
        async with self._serving(options) as (_, client):  # the name is free
            if await client.keys():
                pytest.fail("end() did not end the store: a new one has its keys")

    @_leaves_nothing
    async def test_a_shared_name_is_taken_once(self) -> None:
        """``shared``: the engine refuses a second store of a name; the first is unaffected."""
        if not self.make().shared:
            pytest.skip("names are of a process, not of the engine")
        options = self._asked()
        async with self._serving(options) as (_, client):
            await client.put("k", 1)
            second = self.make()
            try:
                await second.start(options, self.mesh)
            except ConfigurationError:
                pass
            else:
                pytest.fail("a second store of the same name was started")
            finally:
                await second.stop(_TIMEOUT_S)
            if await client.get("k") != 1:
                pytest.fail("a second start of the name changed the first store")


class _NotInstalled(Strategy, frozen=True, tag="conformance-not-installed"):
    """A strategy that is installed on no server."""

    note: str = ""
