"""A Monarch job whose actors are measured processes: they obey the commands of ``peers.py``.

The root of the job is a measured process too (its part ``job``). Nothing of Monarch is imported
before a job begins; this folder has no module of the name ``monarch``, which it would hide.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import echo
import msgspec
import torch
import workload
from dicts import Dicts
from small import Small
from watching import NO_REPLY, process_size, timed, until_quiet

import torchstore_core as ts

_HERE = str(Path(__file__).parent)
_WORKER = (
    "import sys; from monarch.actor import run_worker_loop_forever; "
    "run_worker_loop_forever(address=sys.argv[1], ca='trust_all_connections')"
)


class Job:
    """Commands on the job whose root this process is.

    Args:
        run: runs a coroutine on the process's event loop.
    """

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._run = run
        self._workers: list[subprocess.Popen[bytes]] = []
        self._hosts: Any = None
        self._procs: Any = None
        self._actors: list[Any] = []
        self._asked: dict[int, Any] = {}

    def begin(self, actors: int, hosts: int = 0) -> None:
        """Start a job with so many actors, a process each.

        ``hosts``: on so many emulated hosts, ``actors`` on each; 0: on this one.
        """
        self._run(self._begin(actors, hosts))

    async def _begin(self, actors: int, hosts: int) -> None:
        paths = [_HERE, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # actors import this module
        from job_actors import Measured
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
        """Of the actors' processes."""
        for at in range(len(self._actors)):
            self.start(at, "alive", {})
        return [self.result(at) for at in range(len(self._actors))]

    # ---- actors ---------------------------------------------------------------------------

    def start(self, actor: int, what: str, fields: dict[str, Any]) -> None:
        """Send a command to an actor; :meth:`result` gets what it returns."""
        self._asked[actor] = self._actors[actor].do.call_one(what, json.dumps(fields))

    def result(self, actor: int) -> Any:
        """What an actor's command returned."""
        reply = json.loads(self._run(_done(self._asked.pop(actor))))
        if "error" in reply:
            raise RuntimeError(f"actor {actor}: {reply['error']}")
        return reply["ok"]

    def introduce(self, one: int, other: int) -> None:
        """Tell an actor of another one, which it is to call."""
        self._run(_done(self._actors[one].meet.call_one(self._actors[other])))

    # ---- stores ---------------------------------------------------------------------------

    def open(self, mesh: str = "", transport: str = "", **options: Any) -> dict[str, Any]:
        """Start a store: on the ``hosts`` of the job, in its ``procs``, or where it likes; all
        bytes by that ``transport``, or by the best.
        """
        where = {"hosts": self._hosts, "procs": self._procs}.get(mesh)
        if transport:
            options["strategy"] = ts.SingletonStrategy(transport=transport)
        seconds, client = self._run(timed(ts.initialize(mesh=where, **options)))
        pid = self._run(ts.status()).controller_pid
        return {"seconds": seconds, "address": client.address, "server_pid": pid}

    def close(self) -> float:
        """End the store; seconds."""
        seconds: float = self._run(timed(ts.shutdown()))[0]
        return seconds

    def spawn(self) -> float:
        """Seconds until two fresh processes have answered one call each: what Monarch itself takes
        for the processes of a store with one volume.
        """

        async def spawn() -> float:
            from bare_actor import Bare
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
            for worker in self._workers:
                worker.kill()
                worker.wait()
            self._workers = []


async def _done(future: Awaitable[Any]) -> Any:
    return await future


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- in an actor --------------------------------------------------------------------------


class StoreOfJob:
    """Commands on the store of the job, which actors find by themselves."""

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run = run
        self._mine = False

    def open(self, **options: Any) -> dict[str, Any]:
        """Start one."""
        seconds, client = self._run(timed(ts.initialize(**options)))
        self._mine = True
        pid = self._run(ts.status()).controller_pid
        return {"seconds": seconds, "address": client.address, "server_pid": pid}

    def connect(self, address: str) -> None:
        """Connect now; ``address`` is not needed."""
        self._run(ts.client())

    def close(self) -> None:
        """End the store if this actor has started it, else drop the connections."""
        mine, self._mine = self._mine, False
        self._run(ts.shutdown() if mine else ts.reset_client())

    def settle(self) -> None:
        """Wait until no background warming goes on."""
        self._run(until_quiet())

    def size(self, pid: int) -> dict[str, int]:
        """Size of a process."""
        return process_size(pid)


class SmallInActor(Small):
    """Small values from an actor: on its event loop, which is not in the main thread."""

    def placed(
        self, count: int, nbytes: int, turn: int, server_pid: int, apart: bool
    ) -> dict[str, Any]:
        """As :meth:`Small.one_by_one`, with all threads of both processes placed."""
        cpus = echo.two_cpus()
        mine = sorted(os.sched_getaffinity(0))
        if cpus is None:
            return self.one_by_one(count, nbytes, turn, server_pid)
        others = (server_pid, *(one.pid for one in self._echoes.values()))
        _place(os.getpid(), cpus[:1])
        for pid in others:
            _place(pid, cpus[1:] if apart else cpus[:1])
        try:
            return self.one_by_one(count, nbytes, turn, server_pid)
        finally:
            for pid in (os.getpid(), *others):
                _place(pid, mine)


def _place(pid: int, cpus: Any) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:  # it has ended meanwhile
            continue


class Far:
    """Commands that go to other hosts: the store's, and bare calls of another actor's endpoints."""

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run = run
        self.other: Any = None
        self._calls: list[bool] = []  # of the controller; whether somebody waits for the answer
        self._counting = False

    def bare(self, count: int, nbytes: int) -> list[float]:
        """Seconds of each of ``count`` calls of an endpoint with so many bytes, one by one."""
        data = bytes(nbytes)

        async def calls() -> list[float]:
            return [(await timed(self.other.nothing.call_one(data)))[0] for _ in range(count)]

        times: list[float] = self._run(calls())
        return times

    def bare_bytes(self, nbytes: int, turn: int) -> dict[str, float]:
        """Seconds to take and give so many bytes in one call each, as ``bytes`` and as tensor."""
        data = bytes(nbytes)
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        calls: dict[str, Callable[[], Any]] = {
            "put bytes": lambda: self.other.nothing.call_one(data),
            "get bytes": lambda: self.other.give.call_one(nbytes, False),
            "put tensor": lambda: self.other.nothing.call_one(tensor),
            "get tensor": lambda: self.other.give.call_one(nbytes, True),
        }
        names = list(calls)[turn % 4 :] + list(calls)[: turn % 4]
        return {name: self._run(timed(calls[name]()))[0] for name in names}

    def count_calls(self) -> None:
        """From now on, count calls of the controller that a relay of this process makes for
        clients. (A relay keeps no such count; the agents are in this process when the store is
        opened with ``mesh="procs"``.)
        """
        from torchstore_core.server.remote.uplinks import SaidList
        from torchstore_monarch.actors import host

        if not self._counting:
            exchange = host._Uplink.exchange
            calls = self._calls

            async def counted(uplink: Any, said: bytes) -> bytes:
                bodies = [one.body for one in SaidList.decode(said) if one.body]
                kinds = {msgspec.msgpack.decode(body)[0] for body in bodies}
                calls.append(not kinds <= NO_REPLY)
                return await exchange(uplink, said)

            host._Uplink.exchange = counted
            self._counting = True

    def operations(self, count: int, nbytes: int, keys: int, turn: int) -> dict[str, Any]:
        """``count`` rounds of a put and a get of batches and state dicts of ``keys`` tensors with
        ``nbytes`` bytes together, all compared: seconds; calls of the controller that it waits for,
        and those that nobody waits for (what was leased is given back).
        """
        size = max(1, nbytes // keys // 2)
        one = {
            f"t{i}": workload.random_tensor((size,), turn * keys + i).view(torch.uint8)
            for i in range(keys)
        }
        names = list(one)
        operations: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "put_batch": lambda: ts.put_batch(one),
            "get_batch": lambda: ts.get_batch(names),
            "put_state_dict": lambda: ts.put_state_dict(one, "far"),
            "get_state_dict": lambda: ts.get_state_dict("far"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in operations}
        calls: dict[str, list[int]] = {name: [] for name in operations}
        after: dict[str, list[int]] = {name: [] for name in operations}
        wrong: list[str] = []

        async def all_of_them() -> None:
            for _ in range(count):
                for name, operation in operations.items():
                    before = len(self._calls)
                    took, got = await timed(operation())
                    seconds[name].append(took)
                    if name.startswith("get"):
                        wrong.extend(k for k, v in one.items() if not torch.equal(got[k], v))
                    del got
                    asked = await self._until_unleased()
                    made = self._calls[before:]
                    calls[name].append(sum(made) - asked if made else 0)
                    after[name].append(len(made) - sum(made))

        self._run(all_of_them())
        return {"seconds": seconds, "calls": calls, "after": after, "wrong": wrong}

    async def _until_unleased(self) -> int:
        """Wait until the server has back what was got; how many requests that took."""
        for asked in itertools.count(1):
            if not any(volume.leased_bytes for volume in (await ts.status()).volumes):
                return asked
        return 0

    def rates(self, nbytes: int, turn: int) -> dict[str, Any]:
        """Seconds of a put and of an in-place get of one tensor; it is compared."""
        value = workload.random_tensor((nbytes // 2,), turn).view(torch.uint8)
        mine = torch.zeros_like(value)
        put: float = self._run(timed(ts.put("bulk", value)))[0]
        get: float = self._run(timed(ts.get("bulk", mine)))[0]
        wrong = [] if torch.equal(mine, value) else ["bulk"]
        return {"times": {"put": put, "get": get}, "wrong": wrong}

    def transports(self, nbytes: int) -> list[str]:
        """Those that reach the first volume with so many bytes, the best first."""
        first = self._run(ts.explain(nbytes))[0]
        return [bid["transport"] for bid in first["bids"] if bid["transport"] != "inline"]


class Commands:
    """What an actor does: the parts of ``peers.py`` on the actor's own event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.far = Far(self._on_loop)
        self._parts: dict[str, Any] = {
            "store": StoreOfJob(self._on_loop),
            "small": SmallInActor(self._on_loop),
            "dicts": Dicts(self._on_loop),
            "far": self.far,
        }

    def _on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(_done(work), self._loop).result()

    def do(self, op: str, fields: str) -> str:
        """Obey one command, in a thread; the reply as JSON."""
        part, _, name = op.partition(".")
        try:
            if op == "alive":
                return json.dumps({"ok": os.getpid()})
            return json.dumps({"ok": getattr(self._parts[part], name)(**json.loads(fields))})
        except Exception:
            return json.dumps({"error": traceback.format_exc()})
