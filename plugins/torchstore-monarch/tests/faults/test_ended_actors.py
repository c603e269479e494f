"""The engine ends an actor that calls one that has stopped; the stores of its process go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.monarch import acts
from tests.monarch.jobs import Function, Job
from tests.support import turn, until

import torchstore_core as ts

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

        async def call_one(self, token: bytes, got: int) -> Any:
            self._calls += 1
            if self._calls > 1:
                await until(Path(stopped).exists, 30)
            return await self._controller.poll.call_one(token, got)

    real = RelayUplink._show_life

    async def show_life(self: Any) -> None:
        self.controller = Late(self.controller)
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


# ---- actors that have ended ---------------------------------------------------------------


async def _with_a_stopped_actor(act: Function) -> Any:
    """Call a function in the worker with a controller's actor that has stopped, in a process that
    runs on."""
    from tests.monarch.root import HERE

    from torchstore_monarch.actors.controller import ControllerActor

    stopped = HERE.workers.spawn("stopped", ControllerActor)
    await stopped.end.call()
    await stopped.stop()
    good, value = await HERE.actors.slice(worker=0).do.call_one(act, (stopped,))
    if not good:
        raise value
    return value


async def _end_the_caller_and_get(stopped: Any) -> int:
    from torchstore_monarch import job

    actor = await job.store_actor()
    await _end(actor, stopped)
    await ts.reset_client()
    got: int = await ts.get("k", timeout=20)
    return got


async def _end(actor: Any, stopped: Any) -> None:
    """Nothing else may be under way as that actor: the engine ends whoever answers it, too."""

    async def call() -> None:
        await stopped.end.call_one()

    with contextlib.suppress(Exception):
        await actor.run(call)
    await until(lambda: actor._ended, 20)


async def test_a_process_whose_actor_has_ended_calls_as_another(away: Job) -> None:
    await away.root(acts.initialize, ONE_VOLUME)
    await away.root(acts.put, "k", 1)
    assert await away.at(0, acts.get, "k") == 1
    assert await away.root(_with_a_stopped_actor, _end_the_caller_and_get) == 1


async def _open_a_relay(stopped: Any) -> str:
    from torchstore_monarch import job
    from torchstore_monarch.protocol import FoundStore

    actor = await job._relay_actor()
    found = FoundStore("away", "", "", {}, "")
    try:
        await actor.run(lambda: actor.host.open_relay(found, stopped, {}, 20))
    except ts.StoreClosedError as error:
        return error.code
    finally:
        actor.relaying = False
        await until(lambda: actor._ended, 20)
    return "it has opened"


@pytest.mark.soak  # as the one above calls as another
async def test_a_process_whose_relay_has_ended_opens_another(away: Job) -> None:
    """Though the engine starts no actor there any more. What is begun too late leaves nothing."""
    await away.root(acts.initialize, ONE_VOLUME)
    await away.at(0, acts.put, "k", 1)
    before = set(away.directories())
    assert await away.root(_with_a_stopped_actor, _open_a_relay) == "store-closed"
    await until(lambda: set(away.directories()) == before, 20)
    await away.root(acts.shutdown)
    await until(lambda: away.directories() == [], 20)
    await away.root(acts.initialize, ONE_VOLUME)
    await away.at(0, acts.put, "k", 2)
    assert await away.root(acts.get, "k") == 2


async def _end_all_and_get(stopped: Any) -> str:
    """How a call ends when all of the process's actors have ended."""
    from torchstore_monarch import job

    for actor in list(job._actors):
        await _end(actor, stopped)
    await ts.reset_client()
    try:
        await ts.get("k", timeout=20)
    except ts.StoreClosedError as error:
        return error.message
    return "it gets"


async def test_a_process_that_gets_no_actor_says_so(away: Job) -> None:
    await away.root(acts.initialize, ONE_VOLUME)
    await away.at(0, acts.put, "k", 1)
    said = await away.root(_with_a_stopped_actor, _end_all_and_get)
    assert "the engine starts no actor of the store in this process" in said


# ---- what waits for such an actor ---------------------------------------------------------


async def _wait_as_an_actor_that_ends() -> list[str]:
    """How waiting ends: when the actor does, when it has, and when who waits is cancelled."""
    from torchstore_monarch import job

    actor = job.StoreActor(None)
    tasks = [asyncio.ensure_future(actor.run(asyncio.Event().wait)) for _ in range(2)]
    await turn()
    tasks[1].cancel()
    await asyncio.to_thread(actor.end)
    tasks.insert(1, asyncio.ensure_future(actor.run(asyncio.Event().wait)))
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    return [f"{type(error).__name__} {error}" for error in errors]


async def test_who_waits_for_an_actor_learns_that_it_has_ended(away: Job) -> None:
    told = "_EndedError the actor as which this process called has ended"
    assert await away.root(_wait_as_an_actor_that_ends) == [told, told, "CancelledError "]
