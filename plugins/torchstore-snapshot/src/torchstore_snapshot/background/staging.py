"""Puts what a rank writes into a store, at the speed of a put, for the writer process to read."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

import torchstore_core as ts
from torchstore_core.clients.calls import thread_loops
from torchstore_core.clients.stores import table
from torchstore_core.clients.stores.environment import DEFAULT_NAME
from torchstore_core.clients.values.tensors import from_buffer
from torchstore_core.errors import (
    ConfigurationError,
    StoreClosedError,
    StoreFullError,
    TorchStoreError,
)
from torchstore_snapshot.background import messages as m
from torchstore_snapshot.background.process import Job, WriterProcess, the_writer
from torchstore_snapshot.background.rendezvous import report_failure
from torchstore_snapshot.errors import SnapshotWriterError
from torchstore_snapshot.format.hashes import BLOCK, Digest
from torchstore_snapshot.storage.remote import RemoteStorage, environment
from torchstore_snapshot.taking.merging import part_of
from torchstore_snapshot.taking.take import Prepared

__all__ = ["PREFIX", "available_memory", "begin", "warm_up"]

#: Under this prefix lies what is being written, for as long as it is.
PREFIX = ".torchstore-snapshot/"
# The share of the memory that is free which staged tensors may take.
_SHARE = 0.5
_TIMEOUT_S = 1800.0


class _Staged(NamedTuple):
    """A tensor to be staged, and what it is part of."""

    chunk: m.Chunk
    tensor: torch.Tensor


def available_memory() -> int:
    """Return the bytes of memory that are free on this host."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def warm_up(nbytes: int | None = None) -> None:
    """Start what ``Snapshot.async_take`` needs, in the background, so that the first one blocks the
    program no longer than later ones do: the process that writes and, if this process has no store,
    the one that tensors are staged in. Returns at once. If it fails, the first take tries again.

    Args:
        nbytes: bytes that this rank will stage; that much memory is made ready. None: up to 1 GiB.

    Raises:
        ConfigurationError: ``nbytes`` is not a positive number.
    """
    number: object = nbytes
    if number is not None and (type(number) is not int or number < 1):
        raise ConfigurationError(f"nbytes is an int above 0, not {nbytes!r}")
    the_writer()
    if table.known(DEFAULT_NAME) is None:
        asyncio.run_coroutine_threadsafe(_own_store(nbytes), thread_loops.background())


def begin(prepared: Prepared, memory_budget: int | None) -> Future[None]:
    """Stage everything that this rank writes, and return when its tensors may be changed.

    Args:
        memory_budget: bytes that may be staged at a time; None: half of what is free. If there is
            more to write, this call takes as long as writing what goes beyond it.

    Returns:
        What has a result when the snapshot is committed.

    Raises:
        ConfigurationError: the budget is not a positive number.
        StoreFullError: not even a part of it fits into the store.
        SnapshotWriterError: the writer process has ended.
    """
    budget: object = memory_budget
    if budget is not None and (type(budget) is not int or budget < 1):
        if prepared.claim is not None:
            prepared.claim.release()
        raise ConfigurationError(f"memory_budget is an int above 0, not {budget!r}")
    limit = int(available_memory() * _SHARE) if memory_budget is None else memory_budget
    try:
        storage = prepared.storage
        if isinstance(storage, RemoteStorage) and not storage.shared:
            raise ConfigurationError(
                f"async_take writes in another process, which does not see {prepared.url!r}; "
                "use take"
            )
        writer = the_writer()
    except BaseException:
        if prepared.claim is not None:
            prepared.claim.release()
        raise
    if prepared.claim is not None:
        prepared.claim.stop()  # the writer takes it over
    # A store of its own has as much memory ready as takes need, but none beyond a budget.
    prefault = None if memory_budget is None else 0
    stage = _stage(prepared, limit, writer, prefault)
    return asyncio.run_coroutine_threadsafe(stage, thread_loops.background()).result()


async def _stage(
    prepared: Prepared, limit: int, writer: WriterProcess, prefault: int | None
) -> Future[None]:
    loop = asyncio.get_running_loop()
    batches = list(_batches(prepared, limit))
    if prefault is None:
        prefault = sum(staged.tensor.nbytes for batch in batches[:2] for staged in batch)
    credit = asyncio.Semaphore(2 if len(batches) > 1 else 1)

    def released() -> None:
        loop.call_soon_threadsafe(credit.release)

    job = writer.job(released)
    key = f"{PREFIX}{prepared.take}/{prepared.ranks.rank}"
    keys: list[str] = []
    outcome: Future[None] = Future()

    async def settle(error: BaseException | None) -> None:
        try:
            if isinstance(error, SnapshotWriterError):  # it can tell nobody, and tidy nothing up
                await _lost(prepared, keys, str(error))
        finally:
            if error is None:
                outcome.set_result(None)
            else:
                outcome.set_exception(error)

    def ended(done: Future[None]) -> None:
        asyncio.run_coroutine_threadsafe(settle(done.exception()), loop)

    job.done.add_done_callback(ended)
    writer.send(_begin(prepared, job))
    try:
        for number, batch in enumerate(batches):
            await credit.acquire()
            if job.done.done():  # it failed
                break
            where = f"{key}/{number}"
            keys.append(where)
            values = {str(i): staged.tensor for i, staged in enumerate(batch)}
            address = await _put(where, values, prefault)
            writer.send(m.Batch(job.number, address, where, [staged.chunk for staged in batch]))
        writer.send(m.Finish(job.number))
    except BaseException as error:
        writer.send(m.Abandon(job.number, f"{type(error).__name__}: {error}"))
        raise
    return outcome


async def _lost(prepared: Prepared, staged: list[str], error: str) -> None:
    """The writer has ended: tell the other ranks, and take what is staged out of the stores."""
    if prepared.ranks.size > 1:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(
                report_failure, prepared.storage, prepared.take, prepared.ranks.rank, error
            )
    for name in (DEFAULT_NAME, _own_name()):
        if table.known(name) is not None:
            for key in staged:
                with contextlib.suppress(TorchStoreError):  # written, or the store has ended, too
                    client: Any = await ts.client(name)
                    await client.delete(key)


def _begin(prepared: Prepared, job: Job) -> m.Begin:
    files = prepared.files
    blank = [[Digest("")] * len(file.units) for file in files]
    part = part_of(
        prepared.ranks.rank, prepared.keys, prepared.items, files, blank, prepared.reused
    )
    options = prepared.options
    return m.Begin(
        job.number,
        prepared.url,
        prepared.take,
        prepared.ranks.rank,
        prepared.ranks.size,
        options.overwrite,
        options.fsync,
        options.threads,
        _TIMEOUT_S,
        part,
        [m.NewFile(f.name, f.layout.header, f.layout.starts, f.layout.nbytes) for f in files],
        prepared.claim is not None,
        environment() if isinstance(prepared.storage, RemoteStorage) else {},
    )


def _batches(prepared: Prepared, limit: int) -> Iterator[list[_Staged]]:
    """Everything to be staged, in batches of which two are within the limit."""
    everything = list(_tensors(prepared))
    if sum(staged.tensor.nbytes for staged in everything) <= limit:
        if everything:
            yield everything
        return
    room = size = max(limit // 2, 1)
    batch: list[_Staged] = []
    for staged in everything:
        for part in _cut(staged, max(size // BLOCK, 1) * BLOCK):
            nbytes = part.tensor.nbytes
            if batch and nbytes > room:
                yield batch
                batch, room = [], size
            batch.append(part)
            room -= nbytes
    if batch:
        yield batch


def _tensors(prepared: Prepared) -> Iterator[_Staged]:
    for index, file in enumerate(prepared.files):
        order = sorted(range(len(file.units)), key=lambda i: file.layout.starts[i])
        for position in order:
            item = prepared.items[file.units[position].item]
            if item.is_tensor:
                tensor = item.pieces[file.units[position].piece].tensor
            else:
                data = bytearray(item.data)
                tensor = from_buffer(data, 0, (len(data),), torch.uint8)
            yield _Staged(m.Chunk(index, position, 0), tensor)


def _cut(staged: _Staged, size: int) -> Iterator[_Staged]:
    """Cut a tensor into ranges of bytes, at multiples of a block."""
    if staged.tensor.nbytes <= size:
        yield staged
        return
    flat = staged.tensor.contiguous().view(-1).view(torch.uint8)
    for begin in range(0, flat.numel(), size):
        chunk = m.Chunk(staged.chunk.file, staged.chunk.unit, begin)
        yield _Staged(chunk, flat[begin : begin + size])


async def _put(key: str, values: dict[str, torch.Tensor], prefault: int) -> str:
    """Put into the store of this process if there is one with room; otherwise, into one of its own.

    Args:
        prefault: bytes of memory that a store of its own keeps ready.

    Returns:
        The address of the store.
    """
    client: Any
    if table.known(DEFAULT_NAME) is not None:
        try:
            client = await ts.client(DEFAULT_NAME)
            await client.put_state_dict(values, key)
            return await ts.address(DEFAULT_NAME)
        except (StoreClosedError, StoreFullError):
            pass  # a store of its own it is
    client = await _own_store(prefault)
    await client.put_state_dict(values, key)
    return await ts.address(_own_name())


async def _own_store(prefault: int | None = None) -> Any:
    name = _own_name()
    return await ts.connect_or_initialize(store_name=name, runtime="local", prefault=prefault)


def _own_name() -> str:
    return f"snapshot-{os.getpid()}"
