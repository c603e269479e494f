"""A volume's memory: unnamed, sparse, warmed in the background, given back when idle."""

from __future__ import annotations

import os
import threading

import pytest

from torchstore_core.machine.topology import probe
from torchstore_core.server.controller import Controller
from torchstore_core.server.memory.segment import SegmentMemory, open_memory
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.remote.attached_volume import AttachedHalves
from torchstore_core.server.remote.volume_line import VolumeLine
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_strategies import SingletonStrategy

MIB = 1 << 20


def backed(fd: int) -> int:
    """Bytes of a memfd that have pages."""
    return os.fstat(fd).st_blocks * 512


@pytest.fixture
def memory():
    made = SegmentMemory("test", 64 * MIB)
    yield made
    made.close()


def warm_up(memory: SegmentMemory, nbytes: int) -> None:
    done = threading.Event()
    memory.prefault(nbytes, done.set)
    assert done.wait(60)


def settle() -> None:
    """Wait for background prefaults to end."""
    for thread in threading.enumerate():
        if thread.name == "torchstore-prefault":
            thread.join(60)
            assert not thread.is_alive()


def test_memory_is_sparse_and_unnamed(memory):
    assert os.fstat(memory.fd).st_size == 64 * MIB
    assert backed(memory.fd) == 0
    assert os.fstat(memory.fd).st_nlink == 0


def test_without_memfd_an_unlinked_file_does_the_same(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    fd = open_memory("test", MIB)
    try:
        info = os.fstat(fd)
        assert (info.st_size, info.st_nlink) == (MIB, 0)
        assert not os.get_inheritable(fd)
        os.pwrite(fd, b"abc", 1000)
        assert os.pread(fd, 5, 999) == b"\0abc\0"
    finally:
        os.close(fd)


def test_prefault_warms_exactly_what_was_asked_for(memory):
    warm_up(memory, 10 * MIB)
    assert memory.warm == 10 * MIB
    assert backed(memory.fd) == 10 * MIB


def test_prefault_ends_at_a_target_that_is_no_whole_page(memory):
    warm_up(memory, MIB + 64)
    assert memory.warm == MIB + 64
    settle()


def test_prefault_does_not_disturb_bytes_that_are_there(memory):
    os.pwrite(memory.fd, b"x" * 100, 3 * MIB + 5)
    warm_up(memory, 8 * MIB)
    assert memory.read(3 * MIB + 5, 100) == b"x" * 100


def test_a_system_without_threads_warms_later(memory):
    before = threading.stack_size(1 << 60)  # no thread gets so large a stack
    try:
        memory.prefault(MIB, lambda: None)
    finally:
        threading.stack_size(before)
    assert backed(memory.fd) == 0
    warm_up(memory, MIB)
    assert backed(memory.fd) == MIB


def test_close_ends_a_running_prefault():
    memory = SegmentMemory("test", 1 << 33)
    memory.prefault(1 << 33, lambda: None)
    memory.close()
    assert not [t for t in threading.enumerate() if t.name == "torchstore-prefault"]


def test_trim_gives_pages_back_from_there_on(memory):
    warm_up(memory, 16 * MIB)
    os.pwrite(memory.fd, b"keep", 4 * MIB - 4)
    assert memory.trim(4 * MIB - 1) == 12 * MIB  # rounded up to whole pages
    assert (memory.warm, backed(memory.fd)) == (4 * MIB, 4 * MIB)
    assert memory.read(4 * MIB - 4, 4) == b"keep"
    assert memory.trim(4 * MIB) == 0


def test_pages_that_a_registration_made_are_given_back_when_it_is_gone(memory):
    """Nobody has written to them, so nobody has told of them."""
    warm_up(memory, 4 * MIB)
    os.posix_fallocate(memory.fd, 0, 32 * MIB)
    memory.registered = lambda: 32 * MIB
    assert memory.trim(MIB) == 0
    memory.registered = lambda: 0
    assert memory.trim(MIB) == 31 * MIB
    assert (memory.warm, backed(memory.fd)) == (MIB, MIB)


def test_what_is_registered_is_not_given_back(memory):
    """The pages are pinned: others in their place would be stale for whoever reads by them."""
    warm_up(memory, 16 * MIB)
    memory.registered = lambda: 8 * MIB
    assert memory.trim(4 * MIB) == 8 * MIB
    assert (memory.warm, backed(memory.fd)) == (8 * MIB, 8 * MIB)
    memory.registered = lambda: 0
    assert memory.trim(4 * MIB) == 4 * MIB


def make_controller(memory: SegmentMemory) -> Controller:
    info = m.VolumeInfo("v", 0, os.getpid(), probe(), memory.nbytes, {})
    return Controller(
        [VolumeRecord(info, memory, AttachedHalves("v", VolumeLine()))], SingletonStrategy()
    )


def put(controller: Controller, session, txn: int, nbytes: int) -> int:
    """Put and commit one value as a client would; its offset."""
    meta = TensorMeta("uint8", (nbytes,))
    _, (grant,) = controller.put(session, m.Put(1, txn, [m.PutItem("k", meta, nbytes)]))
    fd = controller.volumes[0].memory.fd
    os.pwrite(fd, b"v" * nbytes, grant.offset)
    controller.commit(session, txn)
    return grant.offset


def test_controller_trims_only_when_idle_and_never_what_is_used(memory):
    controller = make_controller(memory)
    session = controller.open_session(m.ClientFacts(1, "h", "h"), probe())
    put(controller, session, 1, 2 * MIB)
    offset = put(controller, session, 2, 2 * MIB)
    settle()
    controller.delete(["other"], strict=False)
    assert controller.trim(1000.0, 0) == 0, "a put has just come"
    before = backed(memory.fd)
    controller.trim(0.0, 0)
    assert memory.read(offset, 2 * MIB) == b"v" * (2 * MIB)
    controller.delete(["k"], strict=True)
    assert controller.trim(0.0, MIB) > 0
    assert backed(memory.fd) == MIB < before


def test_nothing_is_trimmed_while_a_client_page_locks(memory):
    controller = make_controller(memory)
    session = controller.open_session(m.ClientFacts(1, "h", "h"), probe())
    put(controller, session, 1, 2 * MIB)
    settle()
    controller.delete(["k"], strict=True)
    session.keeps_memory = True
    assert controller.trim(0.0, 0) == 0
    controller.close_session(session)
    assert controller.trim(0.0, 0) > 0


def test_a_put_makes_room_for_its_successor_warm(memory):
    controller = make_controller(memory)
    session = controller.open_session(m.ClientFacts(1, "h", "h"), probe())
    put(controller, session, 1, 8 * MIB)
    settle()
    assert memory.warm == 16 * MIB
    put(controller, session, 2, 8 * MIB)
    put(controller, session, 3, 8 * MIB)
    settle()
    assert backed(memory.fd) == 16 * MIB, "two versions alternate in the same memory"
