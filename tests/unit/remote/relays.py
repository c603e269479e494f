"""A server and a relay to it in a thread of the test's, without an engine in between."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from torchstore_core.machine import topology
from torchstore_core.machine.directories import PrivateDirectory
from torchstore_core.server.remote.lines import Line
from torchstore_core.server.remote.relay import Relay
from torchstore_core.server.remote.relay_server import Converse, RelayRequests, RelayServer
from torchstore_core.server.server import Server, ServerOptions
from torchstore_core.server.serving.conversation import Conversation

__all__ = ["Backstage", "Direct", "Relayed"]

T = TypeVar("T")
CAPACITY = 64 << 20


class Backstage:
    """An event loop in a thread; a context manager."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> Backstage:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(60)
        self.loop.close()

    def do(self, work: Coroutine[Any, Any, T], timeout: float = 60.0) -> T:
        """Run it there."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a plain function there."""

        async def work() -> T:
            return function(*args)

        return self.do(work())


class Direct:
    """An uplink without an engine.

    Attributes:
        calls: how many ``exchange`` and ``poll`` there were.
        said: how many messages of clients each exchange carried.
        silent: neither side hears the other any more, and nothing fails.
        paused: see ``Uplink``.
        delays: how long the answers to the next exchanges take, seconds.
    """

    def __init__(self, relay_server: RelayServer, here: topology.Topology) -> None:
        self._relay_server = relay_server
        self.token = relay_server.open(msgspec.msgpack.encode(here))
        self.calls: Counter[str] = Counter()
        self.said: list[int] = []
        self.silent = False
        self.paused = False
        self.delays: list[float] = []

    def exchange(self, said: bytes) -> Awaitable[bytes]:
        """See ``Uplink``: what was said is there before this returns."""
        self.calls["exchange"] += 1
        self.said.append(len(RelayRequests.decode(said)))
        if self.silent:
            return asyncio.get_running_loop().create_future()
        answer = self._relay_server.exchange(self.token, said)
        seconds = self.delays.pop() if self.delays else 0.0
        return asyncio.ensure_future(self._later(answer, seconds))

    async def _later(self, answer: bytes, seconds: float) -> bytes:
        await asyncio.sleep(seconds)
        return answer

    async def poll(self) -> bytes:
        """See ``Uplink``."""
        self.calls["poll"] += 1
        answer = b"" if self.silent else await self._relay_server.poll(self.token)
        if self.silent:
            await asyncio.Event().wait()
        return answer


class Relayed:
    """A server (its own socket: ``direct``), and a relay to it (``address``); ends with it.

    Args:
        stage: where both run.
        base: an empty directory.
        expire_s: see ``RelayServer``.
        lines: the server is reached over its socket, as if it were in another process.
    """

    def __init__(
        self, stage: Backstage, base: Path, expire_s: float = 60.0, *, lines: bool = False
    ) -> None:
        self.stage = stage
        self.lines = lines
        self.lost_at = 0.0
        self.losses = 0
        stage.do(self._start(base, expire_s))

    async def _start(self, base: Path, expire_s: float) -> None:
        for name in ("server", "relay"):
            (base / name).mkdir(mode=0o700)
        self.server = Server(
            ServerOptions(capacity=CAPACITY, prefault=0, directory=str(base / "server"))
        )
        self.direct = await self.server.start()
        converse: Converse = partial(Conversation, self.server)
        if self.lines:
            converse = partial(Line, self.direct.partition(":")[2])
        self.relay_server = RelayServer(converse, expire_s=expire_s)
        self.uplink = Direct(self.relay_server, topology.probe())
        self.relay = Relay(
            self.uplink, PrivateDirectory(str(base / "relay")), self._lost, expire_s=expire_s
        )
        self.address = await self.relay.start()

    def _lost(self) -> None:
        self.losses += 1
        self.lost_at = time.monotonic()

    def __enter__(self) -> Relayed:
        return self

    def __exit__(self, *_: object) -> None:
        self.stage.call(self.relay.close)
        self.stage.call(self.relay_server.close)
        self.stage.do(self.server.close())

    def books(self) -> tuple[int, int, int]:
        """Sessions; leased and unfinished bytes."""
        return self.stage.call(self.books_now)

    def books_now(self) -> tuple[int, int, int]:
        """The same, for what runs on the stage."""
        status = self.server.status()
        (volume,) = status.volumes
        return len(status.sessions), volume.leased_bytes, volume.unfinished_bytes
