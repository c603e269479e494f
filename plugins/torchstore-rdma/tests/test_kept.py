"""Tensors' memory stays registered where registering pins it, as long as it is the same memory."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.support import running_store, until

from torchstore_core.contracts.transport import Copy, LinkContext, Memory
from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_core.machine.topology import probe
from torchstore_rdma import fabric
from torchstore_rdma.link import RdmaLink, RegisteringLink
from torchstore_transports.registered.memory_locks import is_locked

from .pairs import MB, needs_nixl, pair, paused
from .pairs import Memory as Bytes

pytestmark = needs_nixl
_SMALL = MB // 4


def _memory(tensors: Sequence[torch.Tensor]) -> list[Memory]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return [Memory(one.data_ptr(), one.nbytes(), one) for one in storages]


def _copies(tensors: Sequence[torch.Tensor]) -> list[Copy]:
    sizes = [tensor.nbytes for tensor in tensors]
    places = [sum(sizes[:at]) for at in range(len(sizes))]
    return [
        Copy(tensor.data_ptr(), 0, place, tensor.nbytes)
        for tensor, place in zip(tensors, places, strict=True)
    ]


async def _read(link: RdmaLink, tensors: Sequence[torch.Tensor]) -> None:
    assert isinstance(link, RegisteringLink)
    await link.read_into(_copies(tensors), _memory(tensors))


def _page(tensor: torch.Tensor) -> int:
    return -(-tensor.data_ptr() // 4096) * 4096


async def test_what_is_read_twice_is_registered_once(tmp_path: Path) -> None:
    async with pair(tmp_path, 8 * MB, cuda_devices=1) as volume:
        link = await volume.link()
        tensors = [torch.zeros(_SMALL, dtype=torch.uint8) for _ in range(8)]
        for value in (1, 2, 3):
            volume.fill(value)
            await _read(link, tensors)
            assert all(bool((one == value).all()) for one in tensors)
            assert link.kept() == (8 * _SMALL, 8, 8)
        assert isinstance(link, RegisteringLink)
        await link.write_from(_copies(tensors[:4]), _memory(tensors[:4]))
        await _read(link, [one[:100] for one in tensors])  # a part of what is registered
        assert link.kept() == (8 * _SMALL, 8, 8)
        assert all(is_locked(_page(one)) for one in tensors)
        engine = link._connection and link._connection._engine
        assert engine is not None
        link.close()
        await until(engine.ended.done)
        assert engine.kept == (0, 0, 8)
        assert not any(is_locked(_page(one)) for one in tensors)


async def test_the_memory_of_a_dead_tensor_is_deregistered_without_a_transfer(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path, 8 * MB, cuda_devices=1) as volume:
        link = await volume.link()
        tensors = [torch.zeros(_SMALL, dtype=torch.uint8) for _ in range(3)]
        await _read(link, tensors)
        view = tensors[1][5:]  # its storage lives on
        del tensors[:2]
        await until(lambda: link.kept()[0] == 2 * _SMALL)
        del view
        await until(lambda: link.kept()[0] == _SMALL)


async def test_another_tensor_at_the_same_address_is_registered_anew(tmp_path: Path) -> None:
    async with pair(tmp_path, 8 * MB, cuda_devices=1) as volume:
        link = await volume.link()
        block = (ctypes.c_char * MB)()
        for at, value in enumerate((1, 2, 3), 1):
            tensor = torch.frombuffer(block, dtype=torch.uint8)
            volume.fill(value)
            await _read(link, [tensor])
            assert bool((tensor == value).all())
            assert link.kept()[1:] == (1, at)
            del tensor


def _in_heap(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return line.endswith("[heap]")
    return False


async def test_a_storage_that_was_freed_and_allocated_again_is_registered_anew(
    tmp_path: Path,
) -> None:
    """What FSDP does: the storage, its address and its size are what they were, its pages not."""
    size = 64 * MB  # so large that malloc maps it, and unmaps it when it is freed
    async with pair(tmp_path, size, cuda_devices=1) as volume:
        link = await volume.link()
        tensor = torch.zeros(size, dtype=torch.uint8)
        storage = tensor.untyped_storage()
        # It may be given another address: that of free memory of the heap, as long as there is so
        # much, or one where another thread has got a part of what was freed.
        again, taken, addresses = 0, [], set()
        for at in range(1, 100):
            volume.fill(at)
            await _read(link, [tensor])
            assert bool((tensor == at).all())
            address = tensor.data_ptr()
            addresses.add(address)
            nbytes, count, registered = link.kept()
            assert nbytes == size * count
            assert 1 <= count <= len(addresses)
            assert registered == at
            if again == 2:
                break
            storage.resize_(0)
            if _in_heap(address):
                taken.append(torch.empty(size, dtype=torch.uint8))
            storage.resize_(size)
            again += tensor.data_ptr() == address and not _in_heap(address)
        assert again == 2, "the allocator gives other addresses"
        # Given back for good, it is not kept either: the next transfer notices. What was registered
        # in the heap is still mapped, and may stay for as long as the storage lives.
        kept = link.kept()[0]
        storage.resize_(0)
        small = torch.zeros(_SMALL, dtype=torch.uint8)

        async def is_gone() -> bool:
            await _read(link, [small])
            return link.kept()[0] <= kept - size + _SMALL

        await until(is_gone, 60)


async def test_no_more_is_kept_than_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fabric.KEPT_BYTES, str(3 * _SMALL))
    async with pair(tmp_path, 8 * MB, cuda_devices=1) as volume:
        volume.fill(7)
        link = await volume.link()
        tensors = [torch.zeros(_SMALL, dtype=torch.uint8) for _ in range(5)]
        for one in tensors[:3]:
            await _read(link, [one])
        await _read(link, tensors[:1])  # used last but one
        await _read(link, tensors[3:4])
        assert link.kept() == (3 * _SMALL, 3, 4)
        assert [is_locked(_page(one)) for one in tensors] == [True, False, True, True, False]
        await _read(link, tensors)  # at the same time: some of them for this batch alone
        assert link.kept()[0] == 3 * _SMALL
        assert all(bool((one == 7).all()) for one in tensors)
    monkeypatch.setenv(fabric.KEPT_BYTES, "0")
    async with pair(tmp_path, 8 * MB, cuda_devices=1) as volume:
        link = await volume.link()
        await _read(link, tensors)
        assert link.kept() == (0, 0, 0)
        assert not any(bool(one.any()) for one in tensors)


async def test_a_bound_that_is_no_number_is_refused_before_the_server_half_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fabric.KEPT_BYTES, "lots")
    asked: list[bytes] = []

    async def handshake(request: bytes) -> bytes:
        asked.append(request)
        return b""

    here = probe()
    context = LinkContext(here, here, same_host=True, offered=True, handshake=handshake)
    with pytest.raises(TransportUnavailableError, match="KEPT_BYTES='lots' is not a number"):
        await RdmaLink.connect(b"", context)
    assert not asked, "it would have kept what it made for this client"


async def test_memory_in_use_outlives_its_owner_until_the_batch_has_ended(tmp_path: Path) -> None:
    async with pair(tmp_path, 512 * MB, "tcp", cuda_devices=1) as volume:
        link, target = await volume.link(), Bytes(512 * MB)
        block = target._buffer
        tensor = torch.frombuffer(block, dtype=torch.uint8)
        volume.put(0, b"\7")
        with paused(lambda: bytes(block[:1]) == b"\7") as jobs:
            reading = asyncio.ensure_future(_read(link, [tensor]))
            await until(lambda: jobs, 20)
            del tensor
        await asyncio.wait_for(reading, 60)
        await until(lambda: link.kept()[0] == 0)


async def test_a_connection_that_ends_within_a_batch_leaves_nothing_locked(tmp_path: Path) -> None:
    async with pair(tmp_path, 512 * MB, "tcp", cuda_devices=1) as volume:
        link = await volume.link()
        tensor = torch.zeros(512 * MB, dtype=torch.uint8)
        connection = link._connection
        assert connection is not None
        assert connection._engine is not None
        with paused(lambda: is_locked(_page(tensor))) as jobs:
            reading = asyncio.ensure_future(_read(link, [tensor]))
            await until(lambda: jobs, 20)
            link.close()
        with pytest.raises(TransportError):
            await asyncio.wait_for(reading, 20)
        await until(connection._engine.ended.done)
        assert not is_locked(_page(tensor))


async def test_tensors_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client tells the transport whose memory it is: contiguous tensors, views and rows."""
    monkeypatch.setenv("UCX_TLS", "all")
    monkeypatch.setattr(fabric, "pins", lambda *_: True)
    async with running_store(
        prefer=["rdma"], block=["shm", "inline"], capacity=256 * MB, prefault=0
    ) as client:
        values = {f"t{at}": torch.full((_SMALL,), at, dtype=torch.uint8) for at in range(6)}
        whole = torch.arange(1 << 20).view(1024, 1024)
        await client.put_batch({**values, "rows": whole[:, :512]})
        into = {key: torch.zeros_like(value) for key, value in values.items()}
        wide = torch.zeros_like(whole)
        for _ in range(3):
            await client.get_batch(into)
            await client.get("rows", wide[:, 512:])
            (link,) = (await client._joined.session(5)).volumes[0]._links.values()
            assert isinstance(link, RdmaLink)
        assert all(torch.equal(into[key], value) for key, value in values.items())
        assert torch.equal(wide[:, 512:], whole[:, :512])
        # Both sides of the put and of the gets, each once.
        assert link.kept()[1:] == (14, 14)
