"""Volumes in other processes grow only as far as their hosts have memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.integration.attacks.hostile import Raw
from tests.simulation.promises.states import state_of
from tests.support import until
from tests.unit.remote.attached import Attached, attached
from tests.unit.remote.relays import Backstage
from tests.unit.server.test_controller import HERE, facts, inline, placed

import torchstore_core as ts
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import StoreFullError
from torchstore_core.machine.topology import memory_left_bytes
from torchstore_core.server.keeping.log import Log
from torchstore_core.server.keeping.recorded import RecordedController
from torchstore_core.server.remote.attached_volume import AttachedVolume, KnownVolume
from torchstore_core.server.spilling.delays import Delayed
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, decode_reply, encode

MB = 1 << 20
HUGE = 1 << 44


@pytest.fixture(scope="module")
def stage() -> Iterator[Backstage]:
    with Backstage() as made:
        yield made


def _put_only(made: Attached, nbytes: int) -> m.Reply:
    """The answer to the beginning of a put, of which nothing is written then."""
    with Raw(made.address) as raw:
        raw.greet()
        raw.send(encode(m.Put(2, 1, [placed("k", nbytes)])))
        reader = FrameReader(m.MAX_FRAME)
        while True:
            for body in reader.feed(raw.socket.recv(1 << 16)):
                answer = decode_reply(body)
                if not isinstance(answer, m.Delayed | m.Warmed):
                    return answer


async def test_what_the_host_has_no_memory_for_is_refused(stage: Backstage, tmp_path: Path) -> None:
    async with attached(stage, tmp_path, 2) as made:
        for index in range(2):
            stage.do(made.attach(index, capacity=HUGE))
        left = memory_left_bytes()
        assert left is not None
        for _ in range(2):  # the second time, it is still known
            answer = await asyncio.to_thread(_put_only, made, 4 * left)
            assert isinstance(answer, m.Failure)
            assert answer.code == StoreFullError.code
            assert 0 < answer.details["host_left_bytes"] < 2 * left
        assert isinstance(await asyncio.to_thread(_put_only, made, left // 4), m.Granted)
        client = await ts.connect(made.address, store_name="attached", timeout=10)
        await client.put("k", torch.arange(MB))
        assert torch.equal(await client.get("k"), torch.arange(MB))


async def test_small_puts_are_asked_about_in_steps(stage: Backstage, tmp_path: Path) -> None:
    async with attached(stage, tmp_path, 1) as made:
        stage.do(made.attach(0, capacity=HUGE))
        client = await ts.connect(made.address, store_name="attached", timeout=10)
        (volume,) = made.server.controller.volumes
        limits = {volume.allocator.assured}
        for at in range(80):
            await client.put(f"k{at}", torch.ones(MB, dtype=torch.uint8))
            limits.add(volume.allocator.assured)
        assert 1 < len(limits) <= 4
        assert min(limits) < 80 * MB < volume.allocator.used + MB


async def test_a_volume_is_asked_again_after_it_has_given_memory_back(
    stage: Backstage, tmp_path: Path
) -> None:
    async with attached(stage, tmp_path, 1, trim_after=0.5) as made:
        stage.do(made.attach(0, capacity=HUGE))
        client = await ts.connect(made.address, store_name="attached", timeout=10)
        await client.put("k", torch.ones(32 * MB, dtype=torch.uint8))
        await client.delete("k")
        (volume,) = made.server.controller.volumes
        await until(lambda: volume.allocator.assured == 0)
        await client.put("k", torch.full((32 * MB,), 3, dtype=torch.uint8))
        assert (await client.get("k")).unique().tolist() == [3]
        assert volume.allocator.assured >= 32 * MB


class _Life:
    """A server that comes back, and what it says to its volumes."""

    def __init__(self, log: Log) -> None:
        info = [m.VolumeInfo(f"v{at}", at, 1, HERE, HUGE, {}) for at in range(2)]
        volumes = [AttachedVolume(KnownVolume(one, 0, 0, usable=MB)) for one in info]
        self.controller = RecordedController(log, volumes, Strategy(), prefault=False)
        self.said: list[m.Message] = []
        for volume in volumes:
            volume.memory.delayed = self.controller.spilling.delayed
            volume.connected(self.said.append)
        self.volumes = volumes

    def grown(self, index: int, usable: int) -> None:
        """A volume answers what it was asked last."""
        asked = self.said[-1]
        assert isinstance(asked, m.MayGrow)
        message = m.Grown(asked.end, usable, usable)
        self.volumes[index].memory.grown(message)
        self.controller.grown(index, message.usable)


def _comes_back(before: _Life) -> _Life:
    after = _Life(before.controller.log)
    after.controller.restore()
    assert state_of(after.controller) == state_of(before.controller)
    assert after.said == []
    return after


def test_a_server_that_comes_back_does_not_ask_what_it_was_told() -> None:
    """What was delayed then has changed nothing, what was granted is, and what was refused has made
    room for nothing else.
    """
    log = Log()
    before = _Life(log)
    session = before.controller.open_session(facts(), HERE)
    put, large = before.controller.put, m.Put(1, 1, [placed("a", 4 * MB)])
    retried: list[int] = []
    put(session, m.Put(3, 3, [inline("cached", bytes(100))], when_full=m.EVICTABLE))
    with pytest.raises(Delayed) as delayed:
        put(session, large)
    delayed.value.then(lambda: retried.append(len(put(session, large))))
    assert before.said == [m.MayGrow(4 * MB)]
    put(session, m.Put(2, 2, [placed("b", MB // 2)]))  # which fits, and does not wait
    before.grown(0, 68 * MB)
    assert retried == [2]
    _comes_back(before)
    assert "cached" in before.controller.catalog.newest
    refused = m.Put(4, 4, [placed("c", 1 << 40)])
    for index in range(2):  # one volume is asked after the other
        with pytest.raises(Delayed):
            put(session, refused)
        before.grown(index, (80 + index) * MB)
    with pytest.raises(StoreFullError) as full:
        put(session, refused)
    assert full.value.details["host_left_bytes"] == 81 * MB
    before.controller.commit(session, 1)
    assert "cached" not in before.controller.catalog.newest
    after = _comes_back(before)
    assert [v.allocator.assured for v in after.volumes] == [80 * MB, 81 * MB]
    log.close()
