"""The public conformance kit for runtimes, on those that are here."""

from __future__ import annotations

import asyncio

import pytest

from torchstore_core.contracts.runtime import Runtime, StoreOptions
from torchstore_core.runtimes.local import LocalRuntime
from torchstore_core.testing import RuntimeConformance


class TestLocal(RuntimeConformance):
    """The embedded server."""

    name = "local"

    def make(self) -> Runtime:
        return LocalRuntime()


class TestMonarch(RuntimeConformance):
    """Actors; this process is the root of the job."""

    name = "monarch"

    @pytest.fixture(autouse=True)
    def _job(self) -> None:
        """What the engine makes once for a job is not of the store."""
        pytest.importorskip("monarch.actor")

    def make(self) -> Runtime:
        from torchstore_monarch.runtime import MonarchRuntime

        return MonarchRuntime()


class _Forgetful(LocalRuntime):
    """Does not end what it started."""

    async def stop(self, timeout: float) -> None:
        return

    async def really_stop(self) -> None:
        await super().stop(5.0)


class _Deaf(LocalRuntime):
    """Does not pass the options on."""

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        return await super().start(StoreOptions("other", capacity=1 << 20), mesh)


def test_the_kit_notices_a_runtime_that_leaves_its_server() -> None:
    """Else it would be no evidence."""
    made = _Forgetful()

    class Kit(RuntimeConformance):
        gone_within = 0.5

        def make(self) -> Runtime:
            return made

    try:
        with pytest.raises(pytest.fail.Exception, match="left behind"):
            Kit().test_stop_may_come_twice_and_without_a_start()
    finally:
        asyncio.run(made.really_stop())


def test_the_kit_notices_a_runtime_that_ignores_its_options() -> None:
    """Name, volumes and capacity."""

    class Kit(RuntimeConformance):
        def make(self) -> Runtime:
            return _Deaf()

    with pytest.raises(pytest.fail.Exception, match="asked for"):
        Kit().test_options_reach_the_store(2)


def test_a_kit_without_make_says_what_is_missing() -> None:
    """The first mistake of everybody."""
    with pytest.raises(TypeError, match="make"):
        RuntimeConformance().test_stop_may_come_twice_and_without_a_start()
