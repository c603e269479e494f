"""The root client of a test's job, and its workers: they run what they are given."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import (
    Actor,
    ChannelTransport,
    HostMesh,
    MeshFailure,
    ProcMesh,
    attach_to_workers,
    concurrent_endpoint,
    enable_transport,
    this_host,
)
from tests.monarch.jobs import Function

__all__ = ["HERE", "Worker", "main"]


class Worker(Actor):
    """Runs functions of test modules."""

    @concurrent_endpoint
    async def do(self, function: Function, args: tuple[Any, ...]) -> tuple[bool, Any]:
        """Whether it went well, and its result or exception."""
        return await _attempt(function, args)


class _Here:
    """What the root client has made; for functions that run in it.

    Attributes:
        hosts: the emulated ones.
        workers: processes.
        actors: a :class:`Worker` in each, flat.
        failures: meshes that have failed, as told to the root.
        error: what ``main`` raises when it is told to leave.
    """

    hosts: HostMesh | None = None
    workers: ProcMesh
    actors: Any
    failures: list[str]
    error: Exception | None = None


HERE = _Here()
HERE.failures = []


def main(
    pipe: Connection,
    workers: int,
    transport: str,
    addresses: Sequence[str],
    command: Sequence[str],
) -> None:
    """Serve the pipe until it closes. With ``command``, that is started in place of workers."""
    monarch.actor.unhandled_fault_hook = _note
    if addresses:
        enable_transport(transport or ChannelTransport.TcpWithLocalhost)
    asyncio.run(_serve(pipe, workers, addresses, command))


def _note(failure: MeshFailure) -> None:
    HERE.failures.append(str(failure))


async def _serve(
    pipe: Connection, workers: int, addresses: Sequence[str], command: Sequence[str]
) -> None:
    if addresses:
        HERE.hosts = attach_to_workers(ca="trust_all_connections", workers=list(addresses))
        await HERE.hosts.initialized
    hosts = HERE.hosts or this_host()
    how = BootstrapCommand(command[0], None, [*command[1:]], {}) if command else None
    HERE.workers = hosts.spawn_procs({"procs": workers}, bootstrap_command=how)
    HERE.actors = HERE.workers.spawn("worker", Worker).flatten("worker")
    await HERE.actors.do.call(_ready, ())
    pipe.send_bytes(pickle.dumps((0, True, None)))
    tasks = set()
    while True:
        call = pickle.loads(await asyncio.to_thread(pipe.recv_bytes))
        if call is None:
            if HERE.error is not None:
                raise HERE.error
            return
        ident, worker, function, args = call
        task = asyncio.create_task(_do(pipe, ident, worker, function, args))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _ready() -> None:
    return None


async def _do(
    pipe: Connection, ident: int, worker: int | None, function: Function, args: tuple[Any, ...]
) -> None:
    if worker is None:
        good, value = await _attempt(function, args)
    else:
        try:
            good, value = await HERE.actors.slice(worker=worker).do.call_one(function, args)
        except Exception as error:
            good, value = False, RuntimeError(f"worker {worker}: {error}")
    pipe.send_bytes(pickle.dumps((ident, good, value)))


async def _attempt(function: Function, args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, await function(*args)
    except Exception as error:
        error.add_note("raised in a process of the job")
        try:
            pickle.dumps(error)
        except Exception:
            return False, RuntimeError(f"{type(error).__name__}: {error}")
        return False, error
