"""``monarch-rdma``, over the engine's TCP fallback: there is no RDMA hardware here."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.monarch import acts
from tests.monarch.jobs import Job
from tests.support import until

import torchstore_core as ts
from torchstore_core.clients.session.volume_links import VolumeLinks
from torchstore_core.contracts.transport import Copy, Link, SupportsProgress
from torchstore_core.errors import TransportError
from torchstore_core.testing.timers import ends_within
from torchstore_monarch.rdma.server import RdmaServer

MB = 1 << 20


@pytest.fixture(scope="module")
def rdma() -> Iterator[Job]:
    """A volume in a worker of each of two hosts, between which there is nothing but
    ``monarch-rdma``.
    """
    with Job(workers=1, hosts=2) as made:
        arguments = {
            "num_storage_volumes": 2,
            "strategy": "host",
            "block": ["monarch-rpc", "tcp"],
        }
        asyncio.run(made.root(acts.initialize_on_workers, arguments))
        yield made


def _many(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [1, 17, 4096, 70_001, 300_000, 3 * MB + 5, *([4096] * 300)]
    return {
        str(i): torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        for i, size in enumerate(sizes)
    }


async def _put_many(seed: int) -> None:
    await ts.put_batch(_many(seed))


async def _many_are_right(seed: int) -> bool:
    expected = _many(seed)
    got = await ts.get_batch(list(expected))
    into = {key: torch.zeros_like(value) for key, value in expected.items()}
    await ts.get_batch(into)
    return all(
        torch.equal(got[key], expected[key]) and torch.equal(into[key], expected[key])
        for key in expected
    )


async def _links() -> list[tuple[VolumeLinks, Link]]:
    """Those of this process that the transport has, each with the volume that it leads to."""
    session = await (await ts.client())._joined.session(10)
    return [
        (volume, await volume.connect(candidate))
        for volume in session.volumes
        for candidate in volume.candidates(MB)
        if candidate.spec.name == "monarch-rdma"
    ]


async def _progress() -> int:
    """What the links of this process report to have moved."""
    return sum(link.progress() for _, link in await _links() if isinstance(link, SupportsProgress))


async def _read_beyond_the_end() -> list[int]:
    """What new links say to have done of a batch whose last copy is nowhere."""
    for volume, link in await _links():
        volume.close_when_unused(link)  # what it moved before may have made its calls larger
    memory = torch.zeros(MB, dtype=torch.uint8)
    good, bad = Copy(memory.data_ptr(), 0, 0, MB), Copy(memory.data_ptr(), 0, 1 << 50, MB)
    done = []
    for volume, link in await _links():
        with pytest.raises(TransportError, match="not in segment") as raised:
            await link.read([good] * 6 + [bad])
        done.append(raised.value.details["done"])
        volume.close_when_unused(link)
    return done


async def test_what_has_arrived_when_a_batch_fails_is_told(rdma: Job) -> None:
    """The first call takes 4 MiB; the next has the bad copy in it, and moves nothing."""
    assert await rdma.root(_read_beyond_the_end) == [4, 4]


@pytest.mark.parametrize("nbytes", [2 * MB, 65 * MB + 3])
async def test_large_values_go_both_ways(rdma: Job, nbytes: int) -> None:
    """More than one request at a time can carry, too."""
    for writer in (0, 1):
        await rdma.at(writer, acts.put_ones, "large", nbytes, writer + 1)
        before = await rdma.at(1 - writer, _progress)
        got = await rdma.at(1 - writer, acts.get_shape, "large")
        assert got == ((nbytes,), [writer + 1])
        assert await rdma.at(1 - writer, _progress) == before + nbytes
    await rdma.at(0, acts.put_ones, "large", 1)


async def test_a_batch_of_many_sizes(rdma: Job) -> None:
    """Small pieces are gathered on one side and spread on the other."""
    for seed, writer in enumerate((0, 1)):
        await rdma.at(writer, _put_many, seed)
        assert await rdma.at(1 - writer, _many_are_right, seed)


async def test_who_writes_to_another_host(rdma: Job) -> None:
    """The root's host has no volume: it puts to others, too."""
    await rdma.root(_put_many, 7)
    assert await rdma.at(0, _many_are_right, 7)
    assert await rdma.root(_many_are_right, 7)


async def _cancel_puts(moments: int) -> list[int]:
    """Cancel large puts, and put small values where they were being written; what those hold."""
    large = torch.full((32 * MB,), 7, dtype=torch.uint8)
    small = torch.full((2 * MB,), 1, dtype=torch.uint8)
    seen: set[int] = set()
    for moment in range(moments):
        task = asyncio.ensure_future(ts.put("cancelled", large))
        await asyncio.wait([task], timeout=moment * 12e-3)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await ts.put_batch({f"{i}": small for i in range(4)})
        for i in range(4):
            seen.update((await ts.get(f"{i}")).unique().tolist())
        await ts.delete_batch([key for key in await ts.keys() if key in {"cancelled", *"0123"}])
    return sorted(seen)


async def test_a_cancelled_put_writes_no_more(rdma: Job) -> None:
    assert await rdma.root(_cancel_puts, 5) == [1]
    for entry in await rdma.root(acts.explain):
        bids = {bid["transport"] for bid in entry["bids"]}
        assert "monarch-rdma" in bids  # the link is as good as before


_arrived, _go = threading.Event(), threading.Event()
_putting: list[asyncio.Task[Any]] = []
_LATE = "late"


async def _hold_back() -> None:
    """From now on the engine says of each transfer only when it may that the bytes have come."""
    from monarch import rdma

    class Late(rdma.RDMAAction):  # type: ignore[misc]
        async def submit(self, *, timeout: int = 60) -> None:
            await super().submit(timeout=timeout)
            _arrived.set()
            await asyncio.to_thread(_go.wait, 60)

    rdma.RDMAAction = Late


async def _begin_put() -> None:
    value = torch.full((40 * MB,), 7, dtype=torch.uint8)
    _putting.append(asyncio.ensure_future(ts.put("old", value, store_name=_LATE)))


async def _has_arrived() -> bool:
    return await asyncio.to_thread(_arrived.wait, 30)


async def _cancel_put() -> bool:
    """Whether it ends soon."""
    (task,) = _putting
    task.cancel()
    return await ends_within(task, 2)  # one, and what others leave of this machine


async def _put_new() -> None:
    await ts.put("new", torch.ones(40 * MB, dtype=torch.uint8), store_name=_LATE, timeout=20)


async def _let_go() -> list[int]:
    """What the new value is when the old transfer has ended."""
    _go.set()
    (half,) = [half for half in RdmaServer._here.values() if half._moves]
    await until(lambda: half._moves == 0, 20)
    found: list[int] = (await ts.get("new", store_name=_LATE)).unique().tolist()
    return found


async def test_bytes_of_a_cancelled_put_that_come_late_are_not_written(rdma: Job) -> None:
    """There is room for one value, so the new one is where the old one was to be."""
    arguments = {"num_storage_volumes": 1, "capacity": 64 * MB, "block": ["monarch-rpc", "tcp"]}
    await rdma.root(acts.initialize_on_workers, {**arguments, "store_name": _LATE})
    await rdma.at(0, _hold_back)
    await rdma.at(1, _begin_put)
    assert await rdma.at(0, _has_arrived)
    assert await rdma.at(1, _cancel_put)
    await rdma.at(0, _put_new)
    assert await rdma.at(0, _let_go) == [1]
    await rdma.root(acts.shutdown, _LATE)


async def _cancel_while_it_registers() -> tuple[int, int]:
    """How many buffers were registered, and how many dropped."""
    from monarch.rdma import RDMABuffer

    from torchstore_monarch.rdma import link

    loop, counts = asyncio.get_running_loop(), [0, 0]

    class Counted(RDMABuffer):  # type: ignore[misc]
        def __init__(self, data: memoryview) -> None:
            loop.call_soon_threadsafe(putting.cancel)
            super().__init__(data)
            counts[0] += 1

        def drop(self) -> Any:
            counts[1] += 1
            return super().drop()

    before, link.RDMABuffer = link.RDMABuffer, Counted
    try:
        putting = asyncio.ensure_future(ts.put("x", torch.ones(4 * MB, dtype=torch.uint8)))
        with pytest.raises(asyncio.CancelledError):
            await putting
    finally:
        link.RDMABuffer = before
    return counts[0], counts[1]


async def test_memory_that_is_registered_while_a_put_is_cancelled_is_dropped(rdma: Job) -> None:
    assert await rdma.root(_cancel_while_it_registers) == (1, 1)


def test_memory_is_looked_at_while_a_thread_imports_torch() -> None:
    body = """
    import importlib
    import threading
    from monarch._src.rdma.rdma import _make_local_memory_handle
    from torchstore_monarch.threads import finish_torch, is_torch_unfinished
    importing = threading.Thread(target=importlib.import_module, args=["torch"])
    importing.start()
    while not is_torch_unfinished():
        pass
    finish_torch()
    print(_make_local_memory_handle(memoryview(bytearray(7))).size)
    importing.join()
    """
    command = [sys.executable, "-c", textwrap.dedent(body)]
    assert subprocess.run(command, check=True, capture_output=True).stdout.split() == [b"7"]


async def _put_for_ever() -> str:
    large = torch.zeros(64 * MB, dtype=torch.uint8)
    while True:
        try:
            await ts.put("large", large, timeout=20)
        except ts.TorchStoreError as error:
            return type(error).__name__


async def _is_being_put() -> bool:
    return (await ts.status()).operations.get("Commit", 0) > 1


@pytest.mark.soak
async def test_a_store_that_ends_under_a_put_takes_no_process_along() -> None:
    """The engine goes on touching memory after a transfer has failed."""
    with Job(workers=2, hosts=1) as job:
        arguments = {
            "num_storage_volumes": 2,
            "capacity": 512 * MB,
            "block": ["monarch-rpc", "tcp"],
        }
        await job.root(acts.initialize_on_workers, arguments)
        puts = [asyncio.ensure_future(job.root(_put_for_ever)) for _ in range(3)]

        async def under_way() -> bool:
            return bool(await job.at(0, _is_being_put))

        await until(under_way, 30)
        await job.at(0, acts.shutdown)
        assert set(await asyncio.gather(*puts)) <= {"StoreClosedError", "StoreTimeoutError"}
        for worker in (0, 1):
            assert await job.at(worker, acts.pid) > 0
        assert job.ended() is None


async def test_it_says_that_there_is_no_hardware(rdma: Job) -> None:
    for entry in await rdma.at(0, acts.explain):
        bids = {bid["transport"]: bid for bid in entry["bids"]}
        assert "TCP fallback" in bids["monarch-rdma"]["reason"]
        expected = "inprocess" if entry["volume"] == "torchstore-0" else "monarch-rdma"
        assert entry["chosen"] == expected
