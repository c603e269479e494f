"""A Monarch job whose actors are measured processes, with commands as those of ``worker.py``.

The root of the job is a measured process too; this is its part ``job``. Nothing of Monarch is
imported before a job begins.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import measured

import torchstore_core as ts
from torchstore_cli.bench.measuring import timed

_BENCHMARKS = str(Path(next(iter(measured.__path__))).parent)
_WORKER = (
    "import sys; from monarch.actor import run_worker_loop_forever; "
    "run_worker_loop_forever(address=sys.argv[1], ca='trust_all_connections')"
)


class Job:
    """Commands on a job of which this process is the root client.

    Args:
        run: runs a coroutine on the process's event loop.
    """

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._run = run
        self._workers: list[subprocess.Popen[bytes]] = []
        self._hosts: Any = None
        self._procs: Any = None
        self._actors: list[Any] = []
        self._calls: dict[int, Any] = {}

    def begin(self, actors: int, hosts: int = 0) -> None:
        """Start a job with so many actors, a process each.

        ``hosts``: on so many emulated hosts, ``actors`` on each; 0: on this one.
        """
        try:
            self._run(self._begin(actors, hosts))
        except BaseException:
            self._kill_workers()
            raise

    async def _begin(self, actors: int, hosts: int) -> None:
        paths = [_BENCHMARKS, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # actors import this module
        from measured.monarch.job_actors import Measured
        from monarch.actor import ChannelTransport, attach_to_workers, enable_transport, this_host

        if hosts:
            addresses = [f"tcp://127.0.0.1:{_free_port()}" for _ in range(hosts)]
            for at, address in enumerate(addresses):
                environment = {**os.environ, "TORCHSTORE_HOST_ID": f"host-{at}"}
                command = [sys.executable, "-c", _WORKER, address]
                self._workers.append(subprocess.Popen(command, env=environment))
            enable_transport(ChannelTransport.TcpWithLocalhost)
            self._hosts = attach_to_workers(ca="trust_all_connections", workers=addresses)
            await self._hosts.initialized
        where = self._hosts if hosts else this_host()
        self._procs = where.spawn_procs({"procs": actors})
        mesh = self._procs.spawn("measured", Measured).flatten("at")
        self._actors = [mesh.slice(at=at) for at in range(actors * max(1, hosts))]
        if hosts:  # one more, on the host of the root, as the store's controller is
            other = this_host().spawn_procs({"procs": 1}).spawn("measured_root", Measured)
            self._actors.append(other.flatten("at").slice(at=0))
        await asyncio.gather(*(actor.do.call_one("alive", "{}") for actor in self._actors))

    def pids(self) -> list[int]:
        """Process ids of the actors."""
        for at in range(len(self._actors)):
            self.start(at, "alive", {})
        return [self.result(at) for at in range(len(self._actors))]

    # ---- actors ---------------------------------------------------------------------------

    def start(self, actor: int, what: str, fields: dict[str, Any]) -> None:
        """Send a command to an actor; :meth:`result` gets what it returns."""
        self._calls[actor] = self._actors[actor].do.call_one(what, json.dumps(fields))

    def result(self, actor: int) -> Any:
        """What an actor's command returned."""
        reply = json.loads(self._run(done(self._calls.pop(actor))))
        if "error" in reply:
            raise RuntimeError(f"actor {actor}: {reply['error']}")
        return reply["ok"]

    def introduce(self, one: int, other: int) -> None:
        """Tell an actor which other one its bare calls go to."""
        self._run(done(self._actors[one].meet.call_one(self._actors[other])))

    # ---- stores ---------------------------------------------------------------------------

    def open(self, mesh: str = "", transport: str = "", **options: Any) -> dict[str, Any]:
        """Start a store: on the ``hosts`` of the job, in its ``procs``, or (by default) where the
        runtime places it. All bytes go through ``transport``, or through the best one.
        """
        where = {"hosts": self._hosts, "procs": self._procs}.get(mesh)
        if transport:
            options["strategy"] = ts.SingletonStrategy(transport=transport)
        seconds, client = self._run(timed(ts.initialize(mesh=where, **options)))
        name = {key: options[key] for key in ("store_name",) if key in options}
        pid = self._run(ts.status(**name)).controller_pid
        return {"seconds": seconds, "address": client.address, "server_pid": pid}

    def close(self, **options: Any) -> float:
        """End a store; seconds. Options as for ``shutdown``."""
        seconds: float = self._run(timed(ts.shutdown(**options)))[0]
        return seconds

    def spawn(self) -> float:
        """Seconds until two fresh processes have answered one call each: what Monarch itself takes
        for the processes of a store with one volume.
        """

        async def spawn() -> float:
            from measured.monarch.bare_actor import Bare
            from monarch.actor import this_host

            begun = time.perf_counter()
            meshes = [this_host().spawn_procs({"procs": 1}) for _ in range(2)]
            actors = [mesh.spawn("bare", Bare) for mesh in meshes]
            await asyncio.gather(*(actor.nothing.call_one() for actor in actors))
            seconds = time.perf_counter() - begun
            await asyncio.gather(*(mesh.stop() for mesh in meshes))
            return seconds

        return float(self._run(spawn()))

    def end(self) -> None:
        """End the job: its hosts, and what runs there."""

        async def end() -> None:
            if self._hosts is not None:
                await self._hosts.shutdown()

        try:
            self._run(end())
        finally:
            self._kill_workers()

    def _kill_workers(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()
        self._workers = []


async def done(future: Awaitable[Any]) -> Any:
    """A coroutine that awaits what is none itself."""
    return await future


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
