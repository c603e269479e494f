"""Many processes that are forked, spawned and killed at random while they refer to objects: nothing
is freed early, and in the end memory is exactly what is still referred to.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import random
import time
from typing import Any, NamedTuple

import pytest
from tests.reliability.harness import Child, fds
from tests.reliability.references import busy
from tests.support import running_store, until

KILL_EVERY_S = 0.5
# What was received so much before the grace ends cannot have been gone.
MARGIN_S = 0.5
# What has ended is known to have ended after this, also on a busy machine.
LEEWAY_S = 10.0


class Load(NamedTuple):
    """How many processes at a time, and how many of them are spawned; and how long it goes on: so
    many seconds, and until so many references were received and so many processes killed.
    """

    processes: int
    seconds: float
    received: int
    killed: int
    spawned: float
    grace_s: float


class Sent(NamedTuple):
    """A reference on its way from one of the processes to another one."""

    version: int
    encoded: bytes
    sender: Child
    at: float


class Crowd:
    """The processes, and what each has sent to another that has not received it yet.

    What a process was sent and may not have received when it was killed, is received here: so all
    that is in flight arrives somewhere.

    Attributes:
        late: objects of which a reference arrived when the grace was over, or nearly: they may be
            gone. How long a process takes to receive something is up to the machine.
        gone: objects that a process has found to be gone.
    """

    def __init__(self, load: Load, address: str, chance: random.Random) -> None:
        self._load = load
        self._address = address
        self._chance = chance
        self._members: dict[Child, dict[int, Sent]] = {}
        self._died: dict[Child, float] = {}
        self._sent = 0
        self.received = self.killed = 0
        self.late: set[int] = set()
        self.gone: set[int] = set()

    def join(self) -> None:
        start = "spawn" if self._chance.random() < self._load.spawned else "fast"
        seed, joins = self._chance.randrange(1 << 30), self._chance.random() < 0.7
        self._members[Child(busy.worker, seed, self._address, joins, start=start)] = {}

    def kill(self) -> None:
        child = self._chance.choice([*self._members])
        unread = self._members.pop(child)
        self._died[child] = time.monotonic()
        child.kill()
        self.killed += 1
        for sent in unread.values():
            self._receive(sent, again=True)

    def _receive(self, sent: Sent, *, again: bool = False) -> None:
        """Receive it here. ``again``: the process that it was sent to may have done so before."""
        pickle.loads(sent.encoded)
        self._arrived(sent)
        if again and time.monotonic() - sent.at > self._load.grace_s - MARGIN_S:
            self.late.add(sent.version)

    def _arrived(self, sent: Sent) -> None:
        died = self._died.get(sent.sender)
        if died is not None and time.monotonic() - died > self._load.grace_s - MARGIN_S:
            self.late.add(sent.version)

    def listen(self) -> None:
        """Pass on what has been sent."""
        for child in [*self._members]:
            for kind, what in child.said_so_far():
                self._heard(child, kind, what)

    def _heard(self, child: Child, kind: str, what: Any) -> None:
        match kind:
            case "received":
                self._arrived(self._members[child].pop(what))
                self.received += 1
            case "gone":
                self.gone.add(what)
            case "send":
                self._send(Sent(*what, child, time.monotonic()))

    def _send(self, sent: Sent) -> None:
        target = self._chance.choice([*self._members])
        if len(self._members[target]) > 20:  # it is just starting
            self._receive(sent)
            return
        self._sent += 1
        self._members[target][self._sent] = sent
        target.tell((self._sent, sent.encoded))

    async def stop(self) -> dict[int, int]:
        """Stop all; what they hold then: the bytes of each object, by its number."""
        waiting = set(self._members)
        for child in self._members:
            child.tell("stop")
        kept: dict[int, int] = {}

        async def all_have_stopped() -> bool:
            for child in [*waiting]:
                while child in waiting and child.has_said():
                    kind, what = await child.said()
                    if kind == "kept":
                        kept.update(what)
                        waiting.discard(child)
                    elif kind == "send":
                        self._receive(Sent(*what, child, time.monotonic()))
                    else:
                        self._heard(child, kind, what)
            return not waiting

        await until(all_have_stopped, 100)
        for unread in self._members.values():  # what came after it was told to stop
            for sent in unread.values():
                self._receive(sent)
        return kept

    async def end(self) -> None:
        for child in self._members:
            child.tell("end")
        for child in self._members:
            await child.ended()

    def close(self) -> None:
        for child in self._members:
            child.kill()


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(Load(6, 0.0, 40, 6, 0.0, 3.0), id="short"),
        pytest.param(Load(50, 60.0, 60, 6, 0.05, 30.0), id="long", marks=pytest.mark.soak),
    ],
)
async def test_memory_is_exactly_what_is_referred_to(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSTORE_REF_GRACE", str(load.grace_s))
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with running_store() as client:
        pid = (await client.status()).controller_pid
        before = fds(pid)
        crowd = Crowd(load, client.address, chance)
        try:
            for _ in range(load.processes):
                crowd.join()
            next_kill = time.monotonic()
            end = next_kill + load.seconds
            while (
                time.monotonic() < end
                or crowd.received < load.received
                or crowd.killed < load.killed
            ):
                crowd.listen()
                if time.monotonic() > next_kill:
                    next_kill += 2 * chance.random() * KILL_EVERY_S
                    crowd.kill()
                    crowd.join()
                await asyncio.sleep(0.01)  # the processes need the processor, too
            kept = await crowd.stop()
            gc.collect()
            assert crowd.gone <= crowd.late

            # What lies in the segment takes whole cache lines there.
            rounded = sum(n if n <= 5000 else -(-n // 64) * 64 for n in kept.values())

            async def only_what_is_kept_is_held() -> bool:
                held = {ref.version: ref.nbytes for ref in await client.refs()}
                assert held.keys() >= kept.keys()
                (volume,) = (await client.status()).volumes
                return held == kept and (volume.leased_bytes, volume.used_bytes) == (0, rounded)

            await until(only_what_is_kept_is_held, load.grace_s + LEEWAY_S)
            await crowd.end()
        finally:
            crowd.close()

        async def nothing_is_left() -> bool:
            (volume,) = (await client.status()).volumes
            return not await client.refs() and volume.used_bytes == 0 and fds(pid) <= before

        await until(nothing_is_left, load.grace_s + LEEWAY_S)
