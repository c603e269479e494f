"""The engine ends an actor that calls one that has stopped; the stores of its process go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.monarch import acts
from tests.monarch.jobs import Job
from tests.support import until

ONE_VOLUME = {"num_storage_volumes": 1}


@pytest.fixture
def away() -> Iterator[Job]:
    """A worker on a host on which no store has an agent."""
    with Job(workers=1, hosts=1) as made:
        yield made


# ---- relays -------------------------------------------------------------------------------


async def _stop_the_actor_first(stopped: str, polled: str) -> None:
    """In the root: the controller's actor stops, and its process goes on until a relay has been
    there."""
    from torchstore_monarch.actors.directory import Directory

    class Slow:
        def __init__(self, procs: Any, actor: Any) -> None:
            self._procs, self._actor = procs, actor

        async def stop(self) -> None:
            await self._actor.stop()
            Path(stopped).touch()
            await until(Path(polled).exists)
            await self._procs.stop()

    real = Directory._start

    async def start(self: Any, store: Any, mesh: Any) -> Any:
        found = await real(self, store, mesh)
        store.procs[0] = Slow(store.procs[0], store.controller)
        return found

    Directory._start = start


async def _poll_late(stopped: str, polled: str) -> None:
    """Relays of this process poll for the second time when the controller's actor has stopped."""
    from torchstore_monarch.actors.uplinks import RelayUplink

    class Late:
        def __init__(self, controller: Any) -> None:
            self._controller = controller
            self.poll = self
            self._calls = 0

        async def call_one(self, token: bytes) -> Any:
            self._calls += 1
            if self._calls > 1:
                await until(Path(stopped).exists, 30)
            return await self._controller.poll.call_one(token)

    real = RelayUplink._show_life

    async def show_life(self: Any) -> None:
        self._controller = Late(self._controller)
        try:
            await real(self)
        finally:
            Path(polled).touch()

    RelayUplink._show_life = show_life


async def test_relays_do_not_call_a_controller_that_has_stopped(away: Job, tmp_path: Path) -> None:
    """They learn from the answer to the poll that is waiting that the store has ended."""
    files = str(tmp_path / "stopped"), str(tmp_path / "polled")
    await away.root(_stop_the_actor_first, *files)
    await away.at(0, _poll_late, *files)
    for number in range(2):
        await away.root(acts.initialize, ONE_VOLUME)
        await away.at(0, acts.put, "k", number)
        assert await away.root(acts.get, "k") == number
        await away.root(acts.shutdown)
        await until(lambda: away.directories() == [], 20)
        for file in files:
            Path(file).unlink()
    assert "torchstore_caller" not in away.output()
