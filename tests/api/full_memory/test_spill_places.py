"""The file that values are spilled to: full, damaged, left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.reliability.harness import is_running
from tests.support import disk_of, noise, open_files, running_store, until

import torchstore_core as ts
from torchstore_cli.doctor.examination import examine
from torchstore_strategies import ReplicatedStrategy

pytestmark = [pytest.mark.local_only, pytest.mark.thorough]
MB = 1 << 20


def value(seed: int, nbytes: int = 4 * MB) -> torch.Tensor:
    """Bytes that no other seed has."""
    return noise(nbytes, seed)


async def away(key: str) -> int:
    """How many bytes of a key are only on disk."""
    return (await ts.stat(key)).spilled_bytes


def spill_file(pid: int, folder: Path) -> Path:
    """The open file of a server in a folder, which has no name there."""
    for link, file in open_files(pid).items():
        if file.startswith(str(folder)):
            return link
    raise AssertionError(f"process {pid} has no file in {folder}")


async def fill(nbytes: int = 4 * MB) -> tuple[int, ts.StoreFullError]:
    """Put values until one is refused. Returns how many were stored, and the error."""
    for at in range(100):
        try:
            await ts.put(f"k{at}", value(at, nbytes))
        except ts.StoreFullError as error:
            return at, error
    raise AssertionError("it is never full")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of(tmp_path / "disk", 9 << 20) as folder:
        yield folder


async def test_the_doctor_and_the_status_tell_of_it(small_disk, runtime):
    async with running_store(runtime, capacity=16 * MB, spill=small_disk, when_full="spillable"):
        for at in range(5):
            await ts.put(f"k{at}", value(at))
        found = await examine(await ts.address(), 10.0)
        notes = [note for note in found.notes if str(small_disk) in note]
        assert len(notes) == 2
        assert "which is in memory (tmpfs)" in notes[0]
        assert "room for 9.0 MiB, less than its memory (16.0 MiB)" in notes[1]
        status = await ts.status()
        assert status.spill.file_system == "tmpfs"
        assert "8.0 MiB of 9.0 MiB on disk used" in str(status)
        assert "of it on disk only" in str(await ts.stat("k0"))


async def test_a_full_disk(small_disk, runtime):
    async with running_store(
        runtime, capacity=16 * MB, spill=small_disk, when_full="spillable", timeout=30
    ):
        stored, error = await fill()
        assert "no more can be" in error.message
        assert stored == 5  # two on the disk, for one of which there is always room in memory
        for at in range(5):
            assert torch.equal(await ts.get(f"k{at}", torch.empty_like(value(0))), value(at))
        assert error.details["spill"]
        await ts.delete_batch(["k0", "k3"])
        for at in (1, 2, 4):
            assert torch.equal(await ts.get(f"k{at}", torch.empty_like(value(0))), value(at))

        async def goes_on() -> bool:
            try:
                await ts.put("next", value(9))
            except ts.StoreFullError:
                return False
            return True

        await until(goes_on)


async def test_a_disk_that_others_fill(small_disk, runtime):
    async with running_store(
        runtime, capacity=16 * MB, spill=small_disk, when_full="spillable", timeout=30
    ):
        (small_disk / "filler").write_bytes(bytes(6 * MB))
        stored, error = await fill(MB)
        assert error.details["spill"] == "No space left on device"
        assert stored >= 16
        assert (await ts.status()).spill.trouble == "No space left on device"
        for at in range(stored):
            assert torch.equal(
                await ts.get(f"k{at}", torch.empty_like(value(0, MB))), value(at, MB)
            )
        (small_disk / "filler").unlink()

        # As large as the others: which of these are spilled first depends on what could be written
        # when, so that a larger one may find all room in pieces.
        more = {f"next{at}": value(90 + at, MB) for at in range(4)}

        async def goes_on() -> bool:
            try:
                await ts.put_batch(more)
            except ts.StoreFullError:
                return False
            return True

        await until(goes_on)
        assert (await ts.status()).spill.trouble != "No space left on device"


async def test_a_get_that_a_full_disk_keeps_waiting(tmp_path, runtime):
    """Its time-out tells of the disk and of readers, and it is refused when nothing happens."""
    with disk_of(tmp_path / "disk", 40 * MB) as disk:
        async with running_store(
            runtime, capacity=16 * MB, spill=disk, when_full="spillable", timeout=60
        ):
            await ts.put("small", value(1, MB))
            await ts.put("large", value(2))
            pinned = [f"pinned{at}" for at in range(3)]
            for key in pinned:
                await ts.put(key, value(3), when_full="pinned")
            assert await away("small")
            assert await away("large")
            left = os.statvfs(disk)
            (disk / "filler").write_bytes(bytes(left.f_bavail * left.f_frsize))
            await ts.delete_batch(pinned)
            for at in range(3):
                await ts.put(f"k{at}", value(at))
            held = await ts.get("small")
            for timeout, kind in ((3, ts.StoreTimeoutError), (None, ts.StoreFullError)):
                with pytest.raises(kind, match="No space left on device") as caught:
                    await ts.get("large", timeout=timeout)
                if timeout:
                    why = caught.value.details["waiting_for"]
                    assert "readers held 1.0 MiB" in why
                    assert str(disk) in why
            assert caught.value.details["spill"] == "No space left on device"
            assert torch.equal(held, value(1, MB))
            (disk / "filler").unlink()
            assert torch.equal(await ts.get("large"), value(2))


async def test_a_capacity_of_its_own(runtime, tmp_path):
    async with running_store(
        runtime, capacity=16 * MB, spill=tmp_path, spill_capacity=8 * MB, when_full="spillable"
    ):
        _, error = await fill()
        assert "of 8.0 MiB are left" in error.message or "its capacity of 8.0 MiB" in error.message
        assert await ts.keys() == ["k0", "k1", "k2", "k3", "k4"]
        assert (await ts.status()).spill.disk_bytes <= 8 * MB
        for at in range(5):
            assert torch.equal(await ts.get(f"k{at}", torch.empty_like(value(0))), value(at))


async def test_room_that_was_freed_on_a_full_disk_is_used_at_once(runtime, tmp_path):
    async with running_store(
        runtime, capacity=16 * MB, spill=tmp_path, spill_capacity=20 * MB, when_full="spillable"
    ):
        assert "its capacity of 20.0 MiB is used up" in str((await fill())[1])
        assert "is used up" in str((await ts.status()).spill)
        assert await ts.delete_batch(["k0", "k1", "k2", "k3"]) == 4
        assert "cannot write" not in str((await ts.status()).spill)
        await ts.put("new", value(50))
        assert torch.equal(await ts.get("new"), value(50))


async def test_a_full_disk_is_read_at_once_while_the_value_before_is_held(runtime, tmp_path):
    """As in a loop, whose variable has that value. Each has to change places with one in memory."""
    async with running_store(
        runtime, capacity=16 * MB, spill=tmp_path, spill_capacity=20 * MB, when_full="spillable"
    ):
        count, error = await fill()
        assert "its capacity of 20.0 MiB is used up" in str(error)
        for at in range(count):
            got = await ts.get(f"k{at}", timeout=20)
            assert torch.equal(got, value(at))


async def test_what_was_damaged_is_lost_alone(runtime, tmp_path):
    async with running_store(runtime, capacity=16 * MB, spill=tmp_path, when_full="spillable"):
        await ts.put_batch({"bad": value(0), "good": value(1)})
        for at in range(5):
            await ts.put(f"k{at}", value(2 + at))
        assert await away("bad")
        assert await away("good")
        file = spill_file((await ts.status()).controller_pid, tmp_path)
        with file.open("r+b") as opened:
            found = opened.read().find(bytes(value(0)[:64].tolist()))
            assert found >= 0
            opened.seek(found + 3 * MB)
            byte = opened.read(1)
            opened.seek(found + 3 * MB)
            opened.write(bytes([byte[0] ^ 1]))
        for _ in range(2):  # it stays so
            with pytest.raises(ts.ObjectLostError, match="do not match their checksum") as caught:
                await ts.get("bad")
            assert caught.value.key == "bad"
            assert caught.value.details["version"] == 1
        with pytest.raises(ts.ObjectLostError):
            await ts.get_batch(["good", "bad"])
        assert torch.equal(await ts.get("good"), value(1))
        await ts.put("bad", value(7))
        assert torch.equal(await ts.get("bad", torch.empty_like(value(7))), value(7))


async def test_a_file_that_was_cut_is_an_error_too(runtime, tmp_path):
    async with running_store(runtime, capacity=16 * MB, spill=tmp_path, when_full="spillable"):
        for at in range(6):
            await ts.put(f"k{at}", value(at))
        assert await away("k0")
        os.truncate(spill_file((await ts.status()).controller_pid, tmp_path), 4096)
        with pytest.raises(ts.ObjectLostError, match=r"become shorter|checksum"):
            await ts.get("k0")
        assert torch.equal(await ts.get("k5", torch.empty_like(value(5))), value(5))


async def test_nothing_is_left_behind(runtime, tmp_path):
    client = await ts.initialize(
        capacity=16 * MB, prefault=0, spill=tmp_path, when_full="spillable"
    )
    for at in range(8):
        await ts.put(f"k{at}", value(at))
    pid = (await client.status()).controller_pid
    assert list(tmp_path.iterdir()) == []
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not is_running(pid))
    assert list(tmp_path.iterdir()) == []
    await ts.shutdown()


async def test_files_of_dead_servers_are_removed(runtime, tmp_path):
    (tmp_path / ".torchstore-spill-left").write_bytes(b"x" * 100)
    (tmp_path / "other").write_bytes(b"x")
    async with running_store(runtime, spill=tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["other"]


async def test_copies_in_several_volumes(runtime, tmp_path):
    async with running_store(
        runtime,
        capacity=32 * MB,
        num_storage_volumes=2,
        strategy=ReplicatedStrategy(copies=2),
        spill=tmp_path,
        when_full="spillable",
    ):
        for at in range(12):
            await ts.put(f"k{at}", value(at))
        for at in range(12):
            assert torch.equal(await ts.get(f"k{at}", torch.empty_like(value(0))), value(at))
        await ts.delete_batch([f"k{at}" for at in range(12)])

        async def empty() -> bool:
            status = await ts.status()
            used = sum(v.used_bytes + v.leased_bytes for v in status.volumes)
            return used == 0 and status.spill.disk_bytes == 0

        await until(empty)
