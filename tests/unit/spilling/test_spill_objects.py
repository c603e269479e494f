"""Objects that values are spilled to: bytes at every position in a page, failures, what is left."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from tests.support import until

from torchstore_core.errors import ConfigurationError
from torchstore_core.server.keeping.link import Given, KeeperLink
from torchstore_core.server.memory.segment import open_memory
from torchstore_core.server.server import Server, ServerOptions
from torchstore_core.server.spilling.mapped import MappedSegment
from torchstore_core.server.spilling.objects.spill_objects import SpillObjects
from torchstore_core.server.spilling.space import PIECE, SpillSpace
from torchstore_core.server.spilling.spill_file import DamagedError
from torchstore_core.server.spilling.threads import SpillThreads
from torchstore_core.wire.volumes import spilling as orders

CAPACITY = 64 << 20
_FILLED = b"\xaa"


class Storage(MemoryFileSystem):  # type: ignore[misc]
    """One whose requests fail if told so, as ``failing`` says for a method and a path."""

    protocol = "unit-storage"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failing: ClassVar[dict[str, Exception]] = {}
    calls: ClassVar[list[str]] = []
    keeps_from_threads: ClassVar[bool] = False  # nothing is deleted but by the main thread

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("unit-storage://").strip("/")

    def _may(self, method: str) -> None:
        self.calls.append(method)
        if method in self.failing:
            raise self.failing[method]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, mode=mode, **kwargs)
        self._may("pipe_file")  # as when only the reply is lost

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        self._may("cat_file")
        return bytes(super().cat_file(path, start=start, end=end, **kwargs))

    def rm_file(self, path: str) -> None:
        self._may("rm_file")
        if self.keeps_from_threads and threading.current_thread() is not threading.main_thread():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        super().rm_file(path)


@pytest.fixture
def objects() -> Iterator[SpillObjects]:
    fsspec.register_implementation("unit-storage", Storage, clobber=True)
    Storage.failing.clear()
    made = SpillObjects("unit-storage://bucket/spilled", 1 << 30, os.getpid())
    Storage.calls.clear()
    yield made
    Storage.failing.clear()
    made.close()
    assert not Storage.store


@pytest.fixture
def memory() -> Iterator[MappedSegment]:
    fd = open_memory("test", CAPACITY)
    mapped = MappedSegment(fd)
    yield mapped
    mapped.close()
    os.close(fd)


@pytest.mark.parametrize("nbytes", [1, 4096, 100_001, PIECE, 2 * PIECE + 4097])
@pytest.mark.parametrize(("at", "to"), [(0, 0), (64, 64 + 4096), (4032, 128)])
def test_values_anywhere(
    memory: MappedSegment, objects: SpillObjects, at: int, to: int, nbytes: int
) -> None:
    content = os.urandom(nbytes)
    os.pwrite(memory.fd, content, at)
    extent = SpillSpace(1 << 30).reserve(at % 4096, nbytes)
    assert extent is not None
    sums = objects.write(memory, at, extent)
    start = (32 << 20) + to
    os.pwrite(memory.fd, _FILLED * (nbytes + 10_000), start - 5000)
    objects.read(memory, start, extent, sums[:1])  # two threads share the pieces
    objects.read(memory, start, extent, sums[1:], 1)
    found = os.pread(memory.fd, nbytes + 10_000, start - 5000)
    assert found == _FILLED * 5000 + content + _FILLED * 5000
    objects.free(extent.runs)
    objects.tidy()
    assert not Storage.store


def test_room_in_several_places_is_room(memory: MappedSegment, objects: SpillObjects) -> None:
    """A value in three places, of which each is an object; one that lies between them stays."""
    content = os.urandom(5 * 4096)
    os.pwrite(memory.fd, content, 0)
    between = orders.Extent(((8192, 4096),), 0, 4096)
    kept = objects.write(memory, 0, between)
    extent = orders.Extent(((4096, 4096), (12288, 8192), (40960, 8192)), 0, len(content))
    sums = objects.write(memory, 0, extent)
    assert len(Storage.store) == 4
    objects.read(memory, 1 << 20, extent, sums)
    assert os.pread(memory.fd, len(content), 1 << 20) == content
    objects.free(extent.runs)
    objects.tidy()
    assert len(Storage.store) == 1
    objects.read(memory, 1 << 20, between, kept)
    # What is written there takes its place, whenever the object of before is deleted.
    other = objects.write(memory, 4096, between)
    objects.read(memory, 1 << 20, between, other)
    assert os.pread(memory.fd, 4096, 1 << 20) == content[4096:8192]
    with pytest.raises(DamagedError, match="do not match"):
        objects.read(memory, 1 << 20, between, kept)


def test_small_values_of_one_object_are_read_by_one_request(objects: SpillObjects) -> None:
    contents = [os.urandom(1000 + at) for at in range(50)]
    space = SpillSpace(1 << 30)
    room = space.reserve_together([len(one) for one in contents])
    assert room is not None
    whole, extents = room
    sums = objects.write_together(contents, whole)
    wanted = [(extents[at], sums[at]) for at in (7, 3, 40)]
    Storage.calls.clear()
    assert objects.read_together(wanted) == [contents[at] for at in (7, 3, 40)]
    assert Storage.calls == ["cat_file"]
    for at, extent in enumerate(extents):
        if at != 3:
            objects.free(space.release(extent))
    objects.tidy()
    assert objects.read_together(wanted[1:2]) == [contents[3]]  # of which pages are in use still
    Storage.store.clear()
    [lost] = objects.read_together(wanted[1:2])
    assert isinstance(lost, DamagedError)


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), 3),
        (PermissionError(errno.EACCES, "not allowed"), 1),
    ],
)
def test_what_fails_is_repeated_if_that_may_help_and_then_said(
    memory: MappedSegment, objects: SpillObjects, error: OSError, attempts: int
) -> None:
    """What may be stored all the same, because only the reply was lost, is deleted; and who comes
    next does not have to wait as long.
    """
    extent = orders.Extent(((0, 4096),), 0, 4096)
    Storage.failing["pipe_file"] = error
    for _ in range(2):
        with pytest.raises(OSError, match=str(error.strerror)):
            objects.write(memory, 0, extent)
    assert Storage.calls == ["pipe_file"] * attempts
    assert len(Storage.store) == 1
    objects.tidy()
    assert not Storage.store


def test_what_cannot_be_deleted_is_deleted_later(
    memory: MappedSegment, objects: SpillObjects
) -> None:
    extent = orders.Extent(((0, 4096),), 0, 4096)
    objects.write(memory, 0, extent)
    Storage.failing["rm_file"] = PermissionError(errno.EACCES, "not now")
    objects.free(extent.runs)
    with pytest.raises(OSError, match="not now"):
        objects.tidy()
    Storage.failing.clear()
    objects.tidy()
    assert not Storage.store


def test_who_may_not_delete_may_not_spill(objects: SpillObjects) -> None:
    for method in ("pipe_file", "cat_file", "rm_file"):
        Storage.failing[method] = PermissionError(errno.EACCES, "not allowed")
        with pytest.raises(ConfigurationError, match="not allowed"):
            SpillObjects("unit-storage://bucket/other", None, os.getpid())
        Storage.failing.clear()
    Storage.store.clear()


def test_nothing_is_written_or_read_after_a_stop(
    memory: MappedSegment, objects: SpillObjects
) -> None:
    extent = orders.Extent(((0, 4096),), 0, 4096)
    sums = objects.write(memory, 0, extent)
    objects.stop()
    with pytest.raises(OSError, match=os.strerror(errno.ECANCELED)):
        objects.write(memory, 0, extent)
    with pytest.raises(OSError, match=os.strerror(errno.ECANCELED)):
        objects.read(memory, 0, extent, sums)
    objects.go_on()
    objects.read(memory, 0, extent, sums)


class _Late(SpillObjects):
    """One whose threads take their time to delete, once ``held`` is there."""

    held: threading.Event | None = None

    def tidy(self) -> None:
        if self.held is not None:
            self.held.wait(60)
        super().tidy()


async def test_what_is_freed_before_a_write_does_not_take_what_that_has_written(
    memory: MappedSegment, objects: SpillObjects
) -> None:
    """Orders are carried out in any order, but take effect in theirs."""
    late = _Late("unit-storage://bucket/late", None, os.getpid())
    threads = SpillThreads(late, [memory.fd], lambda call: call())
    held = threading.Event()
    try:
        extent = orders.Extent(((0, 4096),), 0, 4096)
        done: list[orders.SpillDone] = []
        place = orders.Place(0, 0, 4096)
        threads.submit(orders.WriteValues(0, [place], [extent]), done.append)
        await until(lambda: len(done) == 1)
        late.held = held
        threads.submit(orders.FreeSpill(0, [(0, 4096)]), done.append)
        os.pwrite(memory.fd, b"new" * 1000, 0)
        threads.submit(orders.WriteValues(0, [place], [extent]), done.append)
        await until(lambda: len(done) == 2)  # the second write, while nothing is deleted
        sums = done[1].sums[0]
        held.set()
        await until(lambda: len(done) == 3)
        other = orders.Place(0, 1 << 20, 4096)
        threads.submit(orders.ReadPieces(0, other, extent, sums, 0), done.append)
        await until(lambda: len(done) == 4)
        assert done[3].trouble() is None
        assert os.pread(memory.fd, 3000, 1 << 20) == b"new" * 1000
        assert len(Storage.store) == 1
    finally:
        held.set()
        threads.close()


async def test_a_server_that_cannot_start_again_leaves_what_its_next_life_needs(
    objects: SpillObjects,
    memory: MappedSegment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not delete everything, as one that ends does. (Its threads would here, sooner or
    later, because its log does not know the value.)
    """
    objects.write(memory, 0, orders.Extent(((0, 4096),), 0, 4096))
    monkeypatch.setattr(Storage, "keeps_from_threads", True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        facts = {"spill folder": objects.folder}
        keeper = KeeperLink(Given(theirs.detach(), {}, facts, life=2, owner_ended=False))
        nowhere = str(tmp_path / "gone")
        options = ServerOptions(
            spill="unit-storage://bucket/spilled", directory=nowhere, capacity=CAPACITY, prefault=0
        )
        with keeper._socket, pytest.raises((OSError, ConfigurationError)):
            await Server(options, keeper).start()
    assert len(Storage.store) == 1
