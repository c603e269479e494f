"""A controller that spills is made again from its log, at any moment, with what is on disk."""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import os
import queue
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from tests.simulation.promises.states import state_of
from tests.unit.repairing.draining_worlds import Draining
from tests.unit.server.test_controller import HERE, META, facts, volumes

from torchstore_core.errors import EvictedError, KeyNotFoundError, ObjectLostError, StoreFullError
from torchstore_core.plugins.registry import Registry
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.keeping.log import Log
from torchstore_core.server.keeping.recorded import RecordedController
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.spilling.delays import Delayed
from torchstore_core.server.spilling.moves import Mover, Site
from torchstore_core.server.spilling.objects.spill_objects import SpillObjects
from torchstore_core.server.spilling.policy import State, Tracked
from torchstore_core.server.spilling.spill_file import SpillFile
from torchstore_core.server.spilling.threads import SpillThreads
from torchstore_core.wire import messages as m
from torchstore_core.wire.volumes.spilling import Extent, spanned

CAPACITY = 256 << 10
SIZES = (100, 4096, 20_000, 70_000)  # the last of them is not small
INLINE = 0.4  # of the values, whose bytes come with the put
WAIT_S = 30.0
RETRIED_S = 2.5  # the server waits a second after the disk was full before it tries again
MOMENT_S = 0.001


def _own(extent: Extent) -> list[tuple[int, int]]:
    """The parts of the file that belong to a value; others may share its first and last page."""
    if len(extent.runs) > 1:
        return list(extent.runs)
    return [(extent.runs[0][0] + extent.head, extent.nbytes)]


def _failure(tracked: Tracked) -> str:
    return tracked.failure if tracked.state is State.ON_DISK else ""


class World:
    """One store, its segment, its spill file, and what its clients know."""

    capacities: tuple[int, ...] = (CAPACITY,)
    strategy = "singleton"

    def __init__(self, folder: Path, records: list[VolumeRecord], seed: int, disk: int) -> None:
        self.chance = random.Random(seed)
        self.records = records
        self.folder = folder
        self.logs = [Log()]
        self.numbers = itertools.count(1)
        self.there: dict[str, bytes] = {}
        self.cached: dict[str, bytes] = {}
        self.leased: list[int] = []
        self.waiting: list[Callable[[], None]] = []
        self.file = self.new_file(disk)
        self.restarts = self.away = self.reading = self.answered = 0
        self.now = 0.0  # of the timers, of which one is over in each turn of the event loop
        self.draining = Draining(self)
        self.begin(self.file)
        self.session: SessionRecord = self.controller.open_session(facts(), HERE)

    def new_file(self, disk: int) -> Any:
        """What values are spilled to."""
        return SpillFile(str(self.folder), disk)

    def file_again(self) -> Any:
        """The same for the next life, before this one has let go of it."""
        return SpillFile(str(self.folder), self.file.capacity, os.dup(self.file.fd))

    def mover_of(self, file: Any, records: list[VolumeRecord], memories: list[int]) -> Mover:
        return Mover.here(file, records, memories, self.soon.put)

    def begin(self, file: Any) -> None:
        """One life of the server."""
        self.file = file
        self.soon: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        records = [VolumeRecord(v.info, v.memory, v.halves) for v in self.records]
        memories = [v.memory.fd for v in records]  # type: ignore[attr-defined]
        self.mover = self.mover_of(file, records, memories)
        self.controller = RecordedController(
            self.logs[-1],
            records,
            Registry().strategy(self.strategy)(),
            prefault=False,
            mover=self.mover,
            later=self.later,
            start_copier=self.draining.start,
            repair_bandwidth=0,
        )
        self.controller.restore()

    def later(self, delay: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (self.now + delay, next(self.numbers), call))

    def lose_the_controller(self, *, anew: bool) -> None:
        """Without a word; ``anew``: its log was written anew before."""
        if anew:
            self.logs.append(Log())
            self.controller.write_state(self.logs[-1])
        before, known = state_of(self.controller), self.known()
        drained = [volume.draining for volume in self.controller.volumes]
        self.reading += bool(self.mover.reading)
        token, file = self.session.token, self.file_again()
        self.mover.close()
        waiting, self.waiting = self.waiting, []
        self.begin(file)
        assert state_of(self.controller) == before
        assert self.known() == known
        assert [volume.draining for volume in self.controller.volumes] == drained
        self.session = self.controller.sessions[token]
        self.restarts += 1
        self.draining.killed()
        for ask in waiting:  # as their clients do
            self.request(ask)

    def known(self) -> Any:
        """Of the values that may leave memory: whether they have, and where they are then. That a
        read has failed is known when that is over.
        """
        values = self.controller.spilling.values
        self.away = max(self.away, values.away)
        for site in range(len(self.mover.sites)):
            end = 0
            extents = [
                t.extent
                for t in values.all()
                if t.extent is not None and self.mover._number(t) == site
            ]
            for offset, size in sorted(part for extent in extents for part in _own(extent)):
                assert offset >= end, "two values have the same part of the file"
                end = offset + size
        kept = (State.CACHED, State.ON_DISK, State.READING)
        return sorted(
            (t.number, t.key, t.state, t.state in kept[1:] and (t.extent, t.sums, _failure(t)))
            if t.state in kept
            else (t.number, t.key)
            for t in values.all()
        ), values.next_number

    def turn(self, *, wait: bool = False) -> None:
        """What the event loop does; ``wait``: for a thread, or if a timer is due, not for long."""
        try:
            self.soon.get(wait, MOMENT_S if self.timers else WAIT_S)()
        except queue.Empty:
            assert self.timers or not wait, "no thread does anything"
        if self.timers:
            self.now, _, call = heapq.heappop(self.timers)
            call()

    def answer(self) -> None:
        """Everything that waits."""
        while self.waiting:
            self.turn(wait=True)
            self.draining.copy()

    def spoil_disk(self, at: int) -> None:
        """Nothing of what a volume that was drained has on its disk can be read any more."""

    def request(self, ask: Callable[[], None]) -> None:
        """Ask now, and again when it is worth while."""
        try:
            ask()
        except Delayed as delayed:
            self.waiting.append(ask)

            def again() -> None:
                if ask in self.waiting:
                    self.waiting.remove(ask)
                    self.request(ask)

            delayed.then(again)

    def put(self, key: str) -> None:
        number = next(self.numbers)
        data = self.chance.randbytes(self.chance.choice(SIZES))
        evictable = key.startswith("c")
        inline = data if self.chance.random() < INLINE else None
        item = m.PutItem(key, META, len(data), inline)
        how = m.EVICTABLE if evictable else m.SPILLABLE
        put = m.Put(number, number, [item], when_full=how)

        def ask() -> None:
            try:
                _, grants = self.controller.put(self.session, put)
            except StoreFullError:  # readers hold the rest
                return
            if grants is None:
                (self.cached if evictable else self.there)[key] = data
                return
            [grant] = grants
            assert grant is not None
            fd = self.records[grant.volume].memory.fd  # type: ignore[attr-defined]
            os.pwrite(fd, data, grant.offset)
            self.controller.commit(self.session, number)
            (self.cached if evictable else self.there)[key] = data

        self.request(ask)

    def get(self, key: str) -> None:
        number = next(self.numbers)
        locate = m.Locate(number, number, [m.Want(key)], 0)

        def ask() -> None:
            try:
                [entry], leased = self.controller.locate(self.session, locate)
            except EvictedError:  # which is a KeyNotFoundError
                assert key.startswith("c")
                return
            except KeyNotFoundError:
                assert key not in self.there
                return
            except StoreFullError:
                return
            except ObjectLostError:
                if not self.may_be_lost(key):
                    raise
                self.there.pop(key, None)
                self.answered += 1
                return
            self.answered += 1
            data = (self.cached if key.startswith("c") else self.there)[key]
            if not leased:
                assert entry.data == data
                return
            self.leased.append(number)
            assert entry.grant is not None
            fd = self.records[entry.grant.volume].memory.fd  # type: ignore[attr-defined]
            assert os.pread(fd, len(data), entry.grant.offset) == data

        self.request(ask)

    def may_be_lost(self, key: str) -> bool:
        """Whether what was put may not be there any more."""
        return False

    def fill_the_log(self) -> None:
        """Until not even the smallest record finds room, as the file cannot grow."""
        for size in (10_000, 1):
            with contextlib.suppress(StoreFullError):
                while True:
                    self.controller.delete(["x" * size], False, (self.session, 0))
        while self.controller.catch_up():  # these are not refused, but wait
            self.controller.release(self.session, [], [])

    def step(self) -> None:
        chance = self.chance
        if len(self.records) > 1 and chance.random() < 0.4:
            self.draining.step()
        key = f"{chance.choice('kkkc')}{chance.randrange(30)}"
        what = chance.random()
        if what < 0.35:
            self.put(key)
        elif what < 0.6:
            self.get(key)
        elif what < 0.65:
            self.controller.delete([key], False, (self.session, next(self.numbers)))
            self.there.pop(key, None)
            self.cached.pop(key, None)
        elif what < 0.75 or len(self.leased) > 2:
            self.controller.release(self.session, self.leased, [])
            self.leased.clear()
        elif what < 0.97:
            self.turn(wait=bool(self.waiting))
        else:
            self.lose_the_controller(anew=chance.random() < 0.4)

    def live(self) -> None:
        """Take steps until everything has happened: restarts, values on disk, and while some were
        being read.
        """
        steps = 0  # how much happens in so many depends on how fast the threads are
        while steps < 600 or self.is_too_early():
            self.step()
            steps += 1
            assert steps < 10_000

    def is_too_early(self) -> bool:
        """Whether something has not happened yet."""
        early = self.restarts <= 10 or self.away <= 3 or not self.reading
        return early or (len(self.records) > 1 and self.draining.copied < 6)

    def finish(self) -> None:
        """Drain a volume, if there are several; read everything, delete it; nothing is left in
        memory or on disk.
        """
        if len(self.records) > 1 and not any(v.lost for v in self.controller.volumes):
            self.take_one_away()
        self.controller.release(self.session, self.leased, [])
        self.leased.clear()
        self.answer()
        for key in list(self.there):
            if key in self.there:
                self.read_back(key)
            self.controller.release(self.session, self.leased, [])
            self.leased.clear()
        while self.mover.reading or self.controller.spilling.values.count_of[State.WRITING]:
            self.turn(wait=True)
        self.controller.delete([*self.there, *self.cached], False, (self.session, 0))
        assert not any(volume.used for volume in self.controller.volumes)
        while self.mover.used:  # what was deleted while it was being written
            self.turn(wait=True)

    def take_one_away(self) -> None:
        """If there is too much for the others, some of it is deleted."""
        at = self.chance.randrange(len(self.records))
        self.answer()
        while not self.draining.take_away(at):
            parked = list(self.controller.repairs.parked)
            keys = {entry.value.key for entry in parked}
            assert keys
            self.controller.delete([*keys], False, (self.session, next(self.numbers)))
            for key in keys:
                self.there.pop(key, None)
                self.cached.pop(key, None)

    def read_back(self, key: str) -> None:
        """Get a value. What is refused while the disk is full, or although there is room by now, is
        tried again; if there still is none, or it is in pieces, values have to go.
        """
        start = time.monotonic()
        answered = self.answered
        volume = self.controller.volumes[self.controller.catalog.newest[key].volume]  # type: ignore[union-attr]
        while self.answered == answered:
            self.get(key)
            self.answer()
            if self.leased and self.answered == answered:  # others that waited had the room
                self.controller.release(self.session, self.leased, [])
                self.leased.clear()
                start = time.monotonic()
            # What the server has in its own memory counts, and is in no range.
            room = min(volume.free, volume.allocator.largest_free)
            patience = RETRIED_S if room < max(SIZES) else WAIT_S
            if self.answered > answered or time.monotonic() - start < patience:
                continue
            assert room < max(SIZES), "it is refused although there is room"
            values = self.controller.spilling.values
            there = [
                t
                for t in values.all()
                if not self.mover.by_volume or t.value.volume == volume.index
            ]
            stays = [t for t in there if t.state is State.DIRTY]
            free = self.mover.sites[volume.index if self.mover.by_volume else 0].space.free
            assert free < min(spanned(0, t.nbytes) for t in stays)
            largest = max(stays, key=lambda t: t.nbytes).key
            self.controller.delete([largest], False, (self.session, next(self.numbers)))
            del self.there[largest]

    def close(self) -> None:
        self.mover.close()
        for log in self.logs:
            log.close()


class AtAUrl(World):
    """One that spills to objects, in the memory of this process."""

    life = 1

    def new_file(self, disk: int) -> Any:
        return SpillObjects(f"memory://{self.folder}", disk, os.getpid())

    def file_again(self) -> Any:
        self.life += 1
        file = self.file
        file.leave()
        return SpillObjects(
            f"memory://{self.folder}", file.capacity, os.getpid(), self.life, file.folder
        )

    def finish(self) -> None:
        super().finish()
        while MemoryFileSystem.store:  # also objects of earlier lives
            self.turn(wait=True)


class Apart(World):
    """One of two volumes, each with a spill file of its own, of which one is soon full."""

    capacities = (CAPACITY, CAPACITY)
    strategy = "spread"
    reserved = 0

    def new_file(self, disk: int) -> Any:
        return [SpillFile(str(self.folder), size) for size in (disk, 4 << 20)]

    def file_again(self) -> Any:
        return [SpillFile(str(self.folder), one.capacity, os.dup(one.fd)) for one in self.file]

    def mover_of(self, file: Any, records: list[VolumeRecord], memories: list[int]) -> Mover:
        both = zip(file, memories, strict=True)
        threads = [SpillThreads(one, [memory], self.soon.put) for one, memory in both]
        sites = [Site(one.file.capacity, one) for one in threads]
        return Mover(str(self.folder), sites, records, by_volume=True)

    def spoil_disk(self, at: int) -> None:
        assert not self.mover.sites[at].space.used
        os.ftruncate(self.file[at].fd, 0)

    def lose_the_controller(self, *, anew: bool) -> None:
        spilling, sites = self.controller.spilling, self.mover.sites
        full, takes_more = (
            not spilling._leaves_room(at, site, self.controller.volumes[at : at + 1], max(SIZES))
            for at, site in enumerate(sites)
        )
        self.reserved += full and not takes_more
        super().lose_the_controller(anew=anew)

    def is_too_early(self) -> bool:
        """A put has to leave the volume alone whose disk is full."""
        return not self.reserved or super().is_too_early()


class Shared(World):
    """One of two volumes that share a spill file."""

    capacities = (CAPACITY, CAPACITY)
    strategy = "spread"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "seed", "disk"),
    [
        *((World, seed, disk) for seed, disk in ((0, 4 << 20), (2, 384 << 10))),
        (Apart, 0, 192 << 10),
        *((Shared, seed, disk) for seed, disk in ((0, 4 << 20), (1, 384 << 10))),
        *((AtAUrl, seed, disk) for seed, disk in ((0, 4 << 20), (2, 384 << 10))),
        pytest.param(World, 1, 4 << 20, marks=pytest.mark.soak),
        pytest.param(World, 4, 384 << 10, marks=pytest.mark.soak),
        pytest.param(Apart, 1, 192 << 10, marks=pytest.mark.soak),
    ],
)
def test_what_is_on_disk_is_there_again(
    tmp_path: Path, kind: type[World], seed: int, disk: int
) -> None:
    """Where values lie, in memory and on disk, is what it was; also while some are being read, and
    when copies on disk are given up because the disk is full.
    """
    with volumes(*kind.capacities) as records:
        world = kind(tmp_path, records, seed, disk)
        try:
            world.live()
            world.finish()
        finally:
            world.close()
    assert not list(tmp_path.iterdir())
    assert not MemoryFileSystem.store


def begin_reading(world: World) -> Tracked:
    """Put values until one has left memory, and get that; which is now being read."""
    values = world.controller.spilling.values
    for number in itertools.count():
        if values.away:
            break
        world.put(f"k{number}")
        world.answer()
    world.get(next(one.key for one in values.all() if one.state is State.ON_DISK))
    while not world.mover.reading:  # there is no room for it yet
        world.turn(wait=True)
    [reading] = world.mover.reading
    return reading


def _is_call(one: object, other: functools.partial[None]) -> bool:
    return isinstance(one, functools.partial) and (one.func, one.args) == (other.func, other.args)


def test_a_read_whose_end_finds_no_room_in_the_log_ends_later(tmp_path: Path) -> None:
    with volumes(CAPACITY) as records:
        world = World(tmp_path, records, 0, 4 << 20)
        try:
            reading = begin_reading(world)
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (os.fstat(world.logs[-1].fd).st_size, limits[1])
            )
            try:
                world.fill_the_log()
                again = functools.partial(world.mover._end_read_again, reading)
                while not any(_is_call(call, again) for _, _, call in world.timers):
                    world.turn(wait=True)
                assert reading.state is State.READING
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            before = world.answered
            world.answer()
            assert world.answered > before
            world.lose_the_controller(anew=False)
            world.finish()
        finally:
            world.close()


def test_a_read_that_failed_and_is_not_noted_yet_stays_failed(tmp_path: Path) -> None:
    """Others that want the value wait for that: told of the failure, they would have it tried
    again, and the end of the read, which comes later, would take it for read.
    """
    with volumes(CAPACITY) as records:
        world = World(tmp_path, records, 0, 4 << 20)
        try:
            reading = begin_reading(world)
            reading.failure = "the disk failed"  # and the log cannot grow
            with pytest.raises(Delayed):
                world.controller.spilling.use([reading.value])
            assert (reading.state, reading.failure) == (State.READING, "the disk failed")
        finally:
            world.close()


def test_a_failed_read_that_was_told_is_not_told_again_in_the_next_life(tmp_path: Path) -> None:
    with volumes(CAPACITY) as records:
        world = World(tmp_path, records, 0, 4 << 20)
        try:
            reading = begin_reading(world)
            reading.failure = "the disk failed"
            with pytest.raises(ObjectLostError, match="the disk failed"):
                world.answer()
            world.lose_the_controller(anew=False)
            world.finish()
        finally:
            world.close()


def test_a_read_that_failed_is_tried_again_in_the_next_life(tmp_path: Path) -> None:
    """If that it failed was not noted yet; the log, written anew, knows of it."""
    with volumes(CAPACITY) as records:
        world = World(tmp_path, records, 0, 4 << 20)
        try:
            begin_reading(world).failure = "the disk failed"
            world.lose_the_controller(anew=True)
            world.finish()
        finally:
            world.close()
