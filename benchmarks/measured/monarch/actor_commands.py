"""The commands that an actor of a Monarch job obeys, on its own event loop."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import msgspec
import torch
from measured.counting import NO_REPLY
from measured.dicts import Dicts
from measured.monarch.jobs import done
from measured.network.other_hosts import FarVolumes

import torchstore_core as ts
from torchstore_cli.bench import echo, floors, workload
from torchstore_cli.bench.measuring import timed
from torchstore_cli.bench.small import SmallValues
from torchstore_cli.bench.worker_main import Stores


class StoreOfJob(Stores):
    """Commands on the store of the job. Actors find it by themselves."""

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self.run = run
        self._mine = False

    def open(self, **options: Any) -> dict[str, Any]:
        """Start one; options as for ``initialize``."""
        opened = super().open(**options)
        self._mine = True
        return opened

    def connect(self, address: str) -> None:
        """Connect now; ``address`` is not needed."""
        self.run(ts.client())

    def close(self) -> None:
        """End the store if this actor has started it, else drop the connections."""
        mine, self._mine = self._mine, False
        self.run(ts.shutdown() if mine else ts.reset_client())


class SmallInActor(SmallValues):
    """Small values from an actor, whose event loop is not in the main thread."""

    def placed(
        self, count: int, nbytes: int, turn: int, server_pid: int, apart: bool
    ) -> dict[str, Any]:
        """As :meth:`SmallValues.one_by_one`, with every thread of all processes on its CPU."""
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


class OtherHosts:
    """Commands of an actor that go to other hosts: operations of the store, and for comparison bare
    calls of the endpoints of another actor (``peer``).
    """

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run = run
        self.peer: Any = None
        self._calls: list[bool] = []  # of the controller; whether somebody waits for the answer
        self._counting = False

    def call(self, data: bytes) -> Awaitable[object]:
        """Call an endpoint with some bytes."""
        answer: Awaitable[object] = self.peer.nothing.call_one(data)
        return answer

    def bare(self, count: int, nbytes: int) -> list[float]:
        """Seconds of each of ``count`` calls of an endpoint with so many bytes, one by one."""
        data = bytes(nbytes)

        async def calls() -> list[float]:
            return [(await timed(self.call(data)))[0] for _ in range(count)]

        times: list[float] = self._run(calls())
        return times

    def bare_bytes(self, nbytes: int, turn: int) -> dict[str, float]:
        """Seconds to take and give so many bytes in one call each, as ``bytes`` and as tensor."""
        data = bytes(nbytes)
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        calls: dict[str, Callable[[], Any]] = {
            "put bytes": lambda: self.call(data),
            "get bytes": lambda: self.peer.give.call_one(nbytes, False),
            "put tensor": lambda: self.peer.nothing.call_one(tensor),
            "get tensor": lambda: self.peer.give.call_one(nbytes, True),
        }
        measures = {name: partial(self._seconds, call) for name, call in calls.items()}
        return floors.interleave(measures, turn)

    def _seconds(self, call: Callable[[], Any]) -> float:
        return float(self._run(timed(call()))[0])

    def count_calls(self) -> None:
        """From now on, count the calls of the controller that a relay of this process makes for
        clients. (A relay keeps no such count. The agents are in this process if the store was
        opened with ``mesh="procs"``.)
        """
        from torchstore_core.server.remote.relay_server import RelayRequests
        from torchstore_monarch.actors.uplinks import RelayUplink

        if not self._counting:
            exchange = RelayUplink.exchange
            calls = self._calls

            def counted(uplink: RelayUplink, said: bytes) -> Awaitable[bytes]:
                bodies = [one.body for one in RelayRequests.decode(said) if one.body]
                kinds = {msgspec.msgpack.decode(body)[0] for body in bodies}
                calls.append(not kinds <= NO_REPLY)
                return exchange(uplink, said)

            RelayUplink.exchange = counted
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
        """Wait until the server has all leases back; how many requests that took."""
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
        """The transports that reach the first volume with so many bytes, the best first."""
        first = self._run(ts.explain(nbytes))[0]
        return [bid["transport"] for bid in first["bids"] if bid["transport"] != "inline"]


class Commands:
    """The commands of ``worker.py`` in an actor, on its own event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.other_hosts = OtherHosts(self._on_loop)
        self._parts: dict[str, Any] = {
            "store": StoreOfJob(self._on_loop),
            "small": SmallInActor(self._on_loop),
            "dicts": Dicts(self._on_loop),
            "other_hosts": self.other_hosts,
            "far": FarVolumes(self._on_loop, self.other_hosts.call),
        }

    def _on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(done(work), self._loop).result()

    def do(self, op: str, fields: str) -> str:
        """Obey one command, in a thread; the reply as JSON."""
        part, _, name = op.partition(".")
        try:
            if op == "alive":
                return json.dumps({"ok": os.getpid()})
            return json.dumps({"ok": getattr(self._parts[part], name)(**json.loads(fields))})
        except Exception:
            return json.dumps({"error": traceback.format_exc()})
