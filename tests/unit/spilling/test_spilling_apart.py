"""The same of volumes in other processes, each of which has a spill file of its own."""

from __future__ import annotations

import functools
import itertools
import os
import queue
from pathlib import Path
from typing import Any

import pytest
from tests.unit.keeping.test_spilling_coming_back import CAPACITY, World, _own
from tests.unit.server.test_controller import volumes

from torchstore_core.plugins.registry import Registry
from torchstore_core.plugins.strategy_data import decode_strategy
from torchstore_core.server.keeping.recorded import RecordedController
from torchstore_core.server.remote.attached_volume import AttachedVolume, KnownVolume
from torchstore_core.server.spilling.moves import Mover, Site
from torchstore_core.server.spilling.policy import State
from torchstore_core.server.spilling.spill_file import SpillFile
from torchstore_core.server.spilling.threads import SpillThreads
from torchstore_core.wire import messages as m

pytestmark = pytest.mark.thorough

_STEP = 16 << 10  # so far a volume's memory grows until it asks again


class Apart(World):
    """Two volumes with all that is theirs, and a server that only orders what they do."""

    fds: tuple[int | None, ...] = (None, None)

    def begin(self, file: Any) -> None:
        """One life of the server; of the world above, the file is not used."""
        self.file = file
        self.soon = queue.SimpleQueue()
        self.timers = []
        self.threads: list[SpillThreads] = []
        self.attached: list[AttachedVolume] = []
        for record, fd in zip(self.records, self.fds, strict=True):
            spill_file = SpillFile(str(self.folder), file.capacity, fd)
            place = m.SpillPlace(spill_file.capacity, spill_file.most, spill_file.file_system)
            memory = record.memory.fd  # type: ignore[attr-defined]
            self.threads.append(SpillThreads(spill_file, [memory], self.soon.put))
            self.attached.append(AttachedVolume(KnownVolume(record.info, 0, 0, 0, place)))
        spilled = [volume.spilled for volume in self.attached]
        sites = [Site(one.capacity, one) for one in spilled if one is not None]
        self.mover = Mover(str(self.folder), sites, self.attached, by_volume=True)
        strategy = decode_strategy("spread", b"{}", Registry())
        options: dict[str, Any] = {
            "mover": self.mover,
            "later": self.later,
            "prefault": False,
            "start_copier": self.draining.start,
            "repair_bandwidth": 0,
        }
        self.controller = RecordedController(self.logs[-1], self.attached, strategy, **options)
        self.controller.restore()
        for at, volume in enumerate(self.attached):
            volume.memory.delayed = self.controller.spilling.delayed
            if volume.lost:
                volume.spilled.lost(volume.lost)  # type: ignore[union-attr]
            else:
                volume.connected(functools.partial(self.told, at))

    def told(self, at: int, message: m.Message) -> None:
        """A volume is told something."""
        volume = self.attached[at]
        if isinstance(message, m.MayGrow):
            answer = m.Grown(message.end, message.end + _STEP, 1 << 40)
            self.soon.put(functools.partial(self.grown, at, answer))
        elif not isinstance(message, m.HurrySpill):
            self.threads[at].submit(message, volume.spilled.done)  # type: ignore[arg-type, union-attr]

    def grown(self, at: int, answer: m.Grown) -> None:
        if not self.attached[at].lost:
            self.attached[at].memory.grown(answer)
            self.controller.grown(at, answer.usable)

    def spoil_disk(self, at: int) -> None:
        assert not self.mover.sites[at].space.used
        os.ftruncate(self.threads[at].file.fd, 0)  # type: ignore[attr-defined]

    def lose_the_controller(self, *, anew: bool) -> None:
        self.fds = tuple([os.dup(threads.file.fd) for threads in self.threads])
        mover, threads = self.mover, self.threads
        self.mover = _Closes(mover, threads)  # type: ignore[assignment]
        super().lose_the_controller(anew=anew)

    def lose_a_volume(self) -> None:

        self.controller.lose_volume(1, "it was killed")
        self.attached[1].spilled.lost("it was killed")  # type: ignore[union-attr]

    def may_be_lost(self, key: str) -> bool:
        stored = self.controller.catalog.newest[key]
        return self.controller.volumes[stored.volume].lost != ""  # type: ignore[union-attr]

    def known(self) -> Any:
        """Two values may lie in the same part of two files."""
        values = self.controller.spilling.values
        self.away = max(self.away, values.away)
        for at in range(2):
            there = [t for t in values.all() if t.value.volume == at and t.extent is not None]
            parts = sorted(part for t in there if t.extent is not None for part in _own(t.extent))
            for (start, nbytes), (after, _) in itertools.pairwise(parts):
                assert start + nbytes <= after, "two values have the same part of a file"
        kept = (State.CACHED, State.ON_DISK, State.READING)
        return sorted(
            (t.number, t.key, t.state, t.state in kept[1:] and (t.extent, t.sums))
            if t.state in kept
            else (t.number, t.key)
            for t in values.all()
        ), values.next_number

    def close(self) -> None:
        self.mover = _Closes(self.mover, self.threads)  # type: ignore[assignment]
        super().close()
        self.file.close()


class _Closes:
    """A mover whose volumes carry out nothing more, either."""

    def __init__(self, mover: Mover, threads: list[SpillThreads]) -> None:
        self._mover, self._threads = mover, threads
        self.reading = mover.reading

    def close(self) -> None:
        self._mover.close()
        for one in self._threads:
            one.close()


@pytest.mark.parametrize(
    ("seed", "disk"),
    [(0, 4 << 20), (1, 384 << 10), pytest.param(2, 384 << 10, marks=pytest.mark.soak)],
)
def test_what_is_on_the_disks_of_volumes_is_there_again(
    tmp_path: Path, seed: int, disk: int
) -> None:
    with volumes(CAPACITY, CAPACITY) as records:
        world = Apart(tmp_path, records, seed, disk)
        try:
            world.live()
            world.finish()
        finally:
            world.close()


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2))])
def test_with_a_volume_what_is_on_its_disk_is_lost_and_nothing_else(
    tmp_path: Path, seed: int
) -> None:
    """Whatever was under way then; also in the next life."""
    with volumes(CAPACITY, CAPACITY) as records:
        world = Apart(tmp_path, records, seed, 4 << 20)
        try:
            steps = 0
            while (
                steps < 400 or not world.mover.reading or not world.controller.spilling.values.away
            ):
                world.step()
                steps += 1
                assert steps < 10_000
            world.lose_a_volume()
            for _ in range(200):
                world.step()
            world.lose_the_controller(anew=bool(seed % 2))
            world.finish()
        finally:
            world.close()


def test_a_drain_fetches_what_has_room_before_it_waits_for_more(tmp_path: Path) -> None:
    """More is on the disk of the volume than the memory of the other one takes."""
    with volumes(CAPACITY, CAPACITY) as records:
        world = Apart(tmp_path, records, 0, 4 << 20)
        try:
            departures = world.controller.repairs.departures
            for number in range(200):
                world.put(f"k{number}")
                world.answer()
                if departures.disk_bytes(0) > 2 * CAPACITY:
                    break
            tracked = world.controller.spilling.values.all()
            others = [t.key for t in tracked if (t.state, t.value.volume) != (State.ON_DISK, 0)]
            world.controller.delete(others, False, (world.session, next(world.numbers)))
            world.draining.drain(0, "begin")
            while world.controller.repairs.status().scanning:
                world.turn()
            assert departures.coming > CAPACITY // 2
        finally:
            world.close()
