"""Volumes in other processes spill, each to a file of its own."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from tests.support import noise, until
from tests.unit.remote.attached import CAPACITY, Attached, attached
from tests.unit.remote.relays import Backstage

import torchstore_core as ts
from torchstore_core.plugins.registry import Registry
from torchstore_core.server.memory.segment import open_memory
from torchstore_core.server.memory.volume import Volume
from torchstore_core.server.remote.attached import VolumeConnection
from torchstore_core.server.remote.spill_files import VolumeFile
from torchstore_core.server.spilling.moves import Mover
from torchstore_core.server.spilling.policy import State
from torchstore_core.server.spilling.spill_file import SpillFile
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import encode

pytestmark = pytest.mark.thorough

MB = 1 << 20


@pytest.fixture(scope="module")
def stage() -> Iterator[Backstage]:
    with Backstage() as made:
        yield made


async def _client(made: Attached, volumes: int) -> ts.Client:
    for index in range(volumes):
        made.stage.do(made.attach(index))
    return await ts.connect(made.address, store_name="attached", timeout=10)


def _mover(made: Attached) -> Mover:
    mover = made.server.controller.spilling.mover
    assert mover is not None
    return mover


def _content(at: int) -> torch.Tensor:
    """Large, small, and small enough to be in the server's own memory, in turn."""
    nbytes = (5 * MB + 64 * at, 60_000, 3000)[at % 3]
    return noise(nbytes, at)


@pytest.mark.parametrize("url", ["", "memory://"], ids=["files", "objects"])
async def test_more_than_fits_into_memory(stage: Backstage, tmp_path: Path, url: str) -> None:
    place = f"{url}{tmp_path}"
    spills = {"spill": place, "when_full": "spillable", "spill_capacity": 1 << 30}
    async with attached(stage, tmp_path, 2, **spills) as made:
        client = await _client(made, 2)
        count = 120
        first = None
        for at in range(count):
            await client.put(f"k{at}", _content(at))
            if at == 3:
                first = await client.get("k3")
        status = (await client.status()).spill
        assert status.spilled_bytes > count // 3 * 5 * MB - 2 * CAPACITY
        assert status.capacity_bytes == 1 << 30
        assert status.directory == place
        assert 0 < status.disk_bytes < status.capacity_bytes
        assert [site.space.capacity for site in _mover(made).sites] == [1 << 29] * 2
        assert all(site.space.used > 10 * MB for site in _mover(made).sites)
        assert not status.trouble
        there = torch.empty(5 * MB + 64 * 6, dtype=torch.uint8)
        await client.get("k6", there)
        assert torch.equal(there, _content(6))
        for at in range(count):
            assert torch.equal(await client.get(f"k{at}"), _content(at)), at
        some = [f"k{at}" for at in range(30)]
        for key, value in (await client.get_batch(some)).items():
            assert torch.equal(value, _content(int(key[1:])))
        assert first is not None
        assert torch.equal(first, _content(3))  # it is leased all the time
        status = (await client.status()).spill
        assert status.read_bytes > 60 * MB
        assert bool(url) == bool(MemoryFileSystem.store)
        await client.delete_batch([f"k{at}" for at in range(count)])
        await until(lambda: _mover(made).used == 0)
        await until(lambda: not MemoryFileSystem.store)
        await client.put_batch({f"k{at}": _content(3 * at) for at in range(12)})  # it is left there
        await client.put_batch({f"k{at}": _content(3 * at) for at in range(12)})
    assert not MemoryFileSystem.store


@pytest.mark.parametrize("url", ["", "memory://"], ids=["files", "objects"])
async def test_what_is_on_the_disk_of_a_drained_volume_goes_to_the_others(
    stage: Backstage, tmp_path: Path, url: str
) -> None:
    """And while that goes on, everything can be read; then the volume is taken away."""
    place = f"{url}{tmp_path}"
    spills = {"spill": place, "when_full": "spillable", "spill_capacity": 1 << 30}
    async with attached(stage, tmp_path, 2, repair_bandwidth=0, **spills) as made:
        client = await _client(made, 2)
        count = 84
        for at in range(count):
            await client.put(f"k{at}", _content(at))
        mapped = await client.get("k81")  # zero-copy
        name = (await client.stat("k81")).volume
        volume = int(name[-1])
        assert _mover(made).sites[volume].space.used > 10 * MB
        report = await client.drain(volume, wait=False)
        assert report.spilled_bytes > 10 * MB
        for at in range(0, count, 5):
            assert torch.equal(await client.get(f"k{at}"), _content(at)), at

        async def only_readers_are_left() -> bool:
            now = await client.drain(volume, wait=False)
            return not now.spilled_bytes and now.nbytes == now.leased_bytes

        await until(only_readers_are_left, 100)
        assert torch.equal(mapped, _content(81))
        del mapped
        gc.collect()
        assert (await client.drain(volume, timeout=60)).done
        assert not _mover(made).sites[volume].space.used
        repair = (await client.status()).repair
        assert repair.copied_bytes > 60 * MB
        for at in range(count, count + 6):
            await client.put(f"k{at}", _content(at))
        stage.call(made.lines[volume].close)

        async def is_lost() -> bool:
            return bool((await client.status()).volumes[volume].lost)

        await until(is_lost)
        for at in range(count + 6):
            assert torch.equal(await client.get(f"k{at}"), _content(at)), at
    assert not MemoryFileSystem.store


async def test_a_volume_is_not_drained_when_the_disk_of_the_other_one_is_full(
    stage: Backstage, tmp_path: Path
) -> None:
    """What cannot go stays; put back in service, or with room elsewhere, all is as before."""
    spills = {"spill": str(tmp_path), "when_full": "spillable", "spill_capacity": 64 * MB}
    async with attached(stage, tmp_path, 2, repair_bandwidth=0, **spills) as made:
        client = await _client(made, 2)
        count = 40
        for at in range(count):
            await client.put(f"k{at}", noise(4 * MB, at))
        with pytest.raises(ts.DrainError, match=r"no room: .*spill_capacity=") as caught:
            await client.drain(0, timeout=100)
        assert caught.value.details["stuck_values"] > 2
        for at in range(count):
            assert torch.equal(await client.get(f"k{at}"), noise(4 * MB, at)), at
        await client.delete_batch([f"k{at}" for at in range(count // 2)])
        assert (await client.drain(0, timeout=100)).done
        assert (await client.drain(0, undo=True)).draining is False
        for at in range(count // 2):
            await client.put(f"k{at}", noise(4 * MB, at))
        for at in range(count):
            assert torch.equal(await client.get(f"k{at}"), noise(4 * MB, at)), at
        assert made.server.controller.volumes[0].used


async def test_a_disk_of_a_volume_that_is_full(
    stage: Backstage, tmp_path: Path, small_files: Callable[[], None]
) -> None:
    spills = {"spill": str(tmp_path), "when_full": "spillable", "strategy": "singleton"}
    async with attached(stage, tmp_path, 1, **spills) as made:
        client = await _client(made, 1)
        small_files()
        count = 0
        error = None
        while error is None:
            try:
                await client.put(f"k{count}", noise(4 * MB, count), timeout=60)
                count += 1
            except ts.StoreFullError as full:
                error = full
        assert error.details["spill"] == os.strerror(errno.EFBIG)
        assert (await client.status()).spill.trouble == os.strerror(errno.EFBIG)
        assert 16 < count <= 32  # what is on disk can still come back
        if count == 32:  # if it is known in time that the disk is full, which the next write says
            count -= 1
            await client.delete(f"k{count}")
        for at in range(count):
            assert torch.equal(await client.get(f"k{at}"), noise(4 * MB, at))


async def test_a_full_disk_of_one_volume_leaves_puts_to_the_others(
    stage: Backstage, tmp_path: Path
) -> None:
    spills = {"spill": str(tmp_path), "when_full": "spillable"}
    async with attached(stage, tmp_path, 2, **spills) as made:
        client = await _client(made, 2)
        count = 45
        for at in range(count):
            await client.put(f"k{at}", noise(4 * MB, at))
        file = made.lines[0]._spill
        assert file is not None
        assert isinstance(file._file, SpillFile)
        fd = file._file.fd
        only_to_read = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)  # nothing can be written to it
        os.dup2(only_to_read, fd, inheritable=False)
        os.close(only_to_read)
        for at in range(count, 2 * count):
            await client.put(f"k{at}", noise(4 * MB, at))
        assert (await client.status()).spill.trouble == os.strerror(errno.EBADF)
        newest = made.server.controller.catalog.newest
        assert {newest[f"k{at}"].volume for at in range(count + 16, 2 * count)} == {1}
        on_its_disk = [
            int(one.key[1:])
            for one in made.server.controller.spilling.values.all()
            if one.state is State.ON_DISK and one.value.volume == 0
        ]
        for at in {*range(2 * count)}.difference(on_its_disk):
            assert torch.equal(await client.get(f"k{at}"), noise(4 * MB, at)), at
            if newest[f"k{at}"].volume == 0:
                await client.delete(f"k{at}")  # there may have been no room that was not needed
        assert on_its_disk
        for at in on_its_disk:
            assert torch.equal(await client.get(f"k{at}"), noise(4 * MB, at)), at


@pytest.fixture
def small_files() -> Iterator[Callable[[], None]]:
    """From the call on, no file of this process may be written to beyond 64 MB, which is where the
    segments end: as if the disk were full then.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (CAPACITY, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_with_a_volume_what_is_on_its_disk_is_lost(stage: Backstage, tmp_path: Path) -> None:
    spills = {"spill": str(tmp_path), "when_full": "spillable"}
    async with attached(stage, tmp_path, 2, **spills) as made:
        client = await _client(made, 2)
        count = 60
        for at in range(count):
            await client.put(f"k{at}", noise(4 * MB, at))
        newest = made.server.controller.catalog.newest
        there = [at for at in range(count) if newest[f"k{at}"].volume == 0]
        values = made.server.controller.spilling.values
        before = values.bytes_of[State.ON_DISK]
        stage.call(made.lines[1].close)  # with what is under way

        async def is_lost() -> bool:
            return bool((await client.status()).volumes[1].lost)

        await until(is_lost)
        assert 0 < values.bytes_of[State.ON_DISK] < before
        for at in range(count):
            if at in there:
                assert torch.equal(await client.get(f"k{at}"), noise(4 * MB, at)), at
                continue
            with pytest.raises(ts.ObjectLostError, match="torchstore-1 is gone"):
                await client.get(f"k{at}")
        for at in range(count, count + 30):
            await client.put(f"k{at}", noise(4 * MB, at))
        for at in range(count, count + 30):
            assert torch.equal(await client.get(f"k{at}"), noise(4 * MB, at)), at
        assert (await client.status()).spill.spilled_bytes > 30 * 4 * MB - CAPACITY


async def test_what_a_lost_volume_was_reading_is_lost(stage: Backstage, tmp_path: Path) -> None:
    """Whoever waits for it is told so."""
    spills = {"spill": str(tmp_path), "when_full": "spillable"}
    async with attached(stage, tmp_path, 2, **spills) as made:
        client = await _client(made, 2)
        for at in range(60):
            await client.put(f"k{at}", noise(4 * MB, at))
        values = made.server.controller.spilling.values
        key = next(
            one.key for one in values.all() if one.state is State.ON_DISK and one.value.volume == 1
        )
        line = made.lines[1]
        file, line._spill = line._spill, None  # from now on, its disk takes for ever
        assert file is not None
        reading = asyncio.ensure_future(client.get(key, timeout=60))
        await until(lambda: values.count_of[State.READING] > 0)
        stage.call(line.close)
        with pytest.raises(ts.ObjectLostError, match="torchstore-1 is gone"):
            await reading
        stage.call(file.close)


async def test_a_volume_attaches_again_when_nothing_is_under_way(
    stage: Backstage, tmp_path: Path
) -> None:
    """To the next life of a server that was killed with many orders under way."""
    volume = Volume("torchstore", 0, CAPACITY, Registry(), str(tmp_path))
    under_way: list[int] = []

    async def lives() -> None:
        file = VolumeFile(str(tmp_path), None, 1, volume.memory.fd)
        attached_again = asyncio.Event()

        async def life(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1 << 16)
            under_way.append(file._open)
            writer.write(encode(m.Attached(1, 1)))
            if len(under_way) == 1:
                for at in range(16):
                    places = [m.Place(0, at * 4 * MB, 4 * MB)]
                    extents = [m.Extent(((at * 4 * MB, 4 * MB),), 0, 4 * MB)]
                    writer.write(encode(m.WriteValues(at, places, extents)))
                await writer.drain()
            else:
                attached_again.set()
                await reader.read(1 << 16)
            writer.close()

        path = str(tmp_path / "server")
        server = await asyncio.start_unix_server(life, path)
        info = await volume.start()
        line = await VolumeConnection.open(path, volume, info, lambda: None, 10, file)
        await attached_again.wait()
        line.close()
        server.close()
        await volume.close()

    stage.do(lives())
    assert under_way == [0, 0]


async def test_what_is_under_way_ends_before_the_volume_attaches_again(
    stage: Backstage, tmp_path: Path
) -> None:
    """A write that is late must not land in what the next life of the server has given away."""
    memory = open_memory("test", CAPACITY)
    answers: list[m.SpillDone] = []
    places = [m.Place(0, at * 4 * MB, 4 * MB) for at in range(16)]
    extents = [m.Extent(((at * 4 * MB, 4 * MB),), 0, 4 * MB) for at in range(16)]

    async def dropped() -> VolumeFile:
        file = VolumeFile(str(tmp_path), None, 1, memory)
        for at in range(16):
            file.order(m.WriteValues(at, places[at : at + 1], extents[at : at + 1]), answers.append)
        await file.drop()
        assert sorted(one.id for one in answers) == list(range(16))
        return file

    async def again(file: VolumeFile) -> None:
        done = asyncio.Event()
        answers.clear()

        def answer(message: m.SpillDone) -> None:
            answers.append(message)
            done.set()

        file.order(m.WriteValues(20, places[:1], extents[:1]), answer)
        await done.wait()
        assert answers[0].trouble() is None
        assert answers[0].most >= 4 * MB
        file.close()

    stage.do(again(stage.do(dropped())))
    os.close(memory)


@pytest.mark.parametrize("spill", ["file", "fine"])
async def test_what_cannot_be_is_refused_in_words(
    stage: Backstage, tmp_path: Path, spill: str
) -> None:
    (tmp_path / "file").touch()
    options = {"spill": str(tmp_path / spill), "when_full": "spillable"}
    if spill == "file":
        async with attached(stage, tmp_path, 1, **options) as made:
            with pytest.raises(ts.ConfigurationError, match="cannot spill to"):
                stage.do(made.attach(0))
        return
    with pytest.raises(ts.ConfigurationError, match="several copies"):
        async with attached(stage, tmp_path, 2, **options, strategy="replicated"):
            raise NotImplementedError
    async with attached(stage, tmp_path, 1, **options) as made:
        made.options = msgspec.structs.replace(made.options, spill=None)
        with pytest.raises(ts.ConfigurationError, match="no file to spill to"):
            stage.do(made.attach(0))
