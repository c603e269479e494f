"""Real processes that put and get, some of which are killed: their calls can be explained by a
store that does one after the other.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from tests.reliability.harness import Child, kill
from tests.reliability.histories import recording
from tests.simulation.promises.recorded import Record, Seen, explain
from tests.support import running_store, until

import torchstore_core as ts

_PROCESSES = 4
_NUMBERS = 1_000_000  # of the calls of one process


class Recorder:
    """The processes, and all that they have said."""

    def __init__(self, address: str, chance: random.Random) -> None:
        self._address = address
        self._chance = chance
        self._members: dict[Child, int] = {}
        self._joined = 0
        self._begun: dict[int, Record] = {}
        self.ended: list[Record] = []
        self.unknown: list[Record] = []

    @property
    def records(self) -> list[Record]:
        return [*self.ended, *self.unknown]

    async def join(self) -> None:
        self._joined += 1
        seed, first = self._chance.randrange(1 << 30), self._joined * _NUMBERS
        child = Child(recording.worker, seed, self._address, first)
        self._members[child] = first
        assert await child.said(180) == "ready"

    async def until_ended(self, calls: float) -> None:
        """Listen until so many calls have ended."""

        def enough_have() -> bool:
            for child in self._members:
                for said in child.said_so_far():
                    self._heard(said)
            return len(self.ended) >= calls

        await until(enough_have, 300)

    async def kill(self) -> None:
        """What a process has said before is heard first."""
        child = self._chance.choice([*self._members])
        first = self._members.pop(child)
        for said in child.last_words():
            self._heard(said)
        child.kill()
        for number in [n for n in self._begun if first < n < first + _NUMBERS]:
            self.unknown.append(self._begun.pop(number))

    async def stop(self) -> None:
        for child in self._members:
            child.tell("stop")
        for child in self._members:
            while (said := await child.said()) != "stopped":
                self._heard(said)
            await child.ended()
        assert not self._begun

    def close(self) -> None:
        for child in self._members:
            child.kill()

    def _heard(self, said: Any) -> None:
        match said:
            case "begins", number, kind, keys, start:
                client = number // _NUMBERS
                self._begun[number] = Record(client, number, kind, keys, start)
            case "ended", number, end, result:
                self.add(self._begun.pop(number), end, result)

    def add(self, begun: Record, end: float, result: Any) -> None:
        """A call has ended."""
        what = begun.client, begun.number, begun.kind, begun.keys, begun.start, end
        if begun.kind == "put":
            self.ended.append(Record(*what, result))
        else:
            self.ended.append(Record(*what, (), tuple([Seen(*one) for one in result])))


@pytest.mark.parametrize("keeper", [False, True], ids=["clients", "server"])
@pytest.mark.parametrize(
    ("calls", "kills"),
    [
        pytest.param(400, 4, id="short"),
        pytest.param(20_000, 200, id="long", marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
    ],
)
async def test_what_processes_are_told_can_be_explained(
    calls: int, kills: int, keeper: bool
) -> None:
    """``keeper``: it is not clients that are killed, but the server, which comes back."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with running_store(keeper=keeper, timeout=30) as client:
        recorder = Recorder(client.address, chance)
        for number, key in enumerate(recording.KEYS, 1):
            start = time.monotonic()
            ref = await ts.put(key, recording.value(number))
            record = Record(0, number, "put", (key,), start)
            recorder.add(record, time.monotonic(), (ref.version,))
        try:
            for _ in range(_PROCESSES):
                await recorder.join()
            for part in range(1, kills + 1):
                await recorder.until_ended(part * calls / (kills + 1))
                if keeper:
                    kill((await ts.status()).controller_pid)
                else:
                    await recorder.kill()
                    await recorder.join()
            await recorder.until_ended(calls)
            await recorder.stop()
        finally:
            recorder.close()
        for number, key in enumerate(recording.KEYS, 10):  # nothing that was acknowledged is lost
            start = time.monotonic()
            with_version = await ts.hold(key)
            found = int((await ts.get(with_version))[0])
            seen = [(found, with_version.version)]
            recorder.add(Record(0, number, "get", (key,), start), time.monotonic(), seen)
    explained = explain(recorder.records)
    assert explained > 0.9 * len(recorder.ended)
