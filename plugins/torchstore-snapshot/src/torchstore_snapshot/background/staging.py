"""Puts what a rank writes into a store, at the speed of a put, for the writer process to read."""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import Future

import msgspec

from torchstore_core.clients.calls import thread_loops
from torchstore_core.clients.stores import table
from torchstore_core.clients.stores.environment import DEFAULT_NAME
from torchstore_core.errors import (
    ConfigurationError,
    TorchStoreError,
)
from torchstore_snapshot.background import messages as m
from torchstore_snapshot.background.batches import batches, units_of
from torchstore_snapshot.background.process import Job, WriterProcess, the_writer
from torchstore_snapshot.background.rendezvous import report_failure
from torchstore_snapshot.background.stores import bounded, own_store, put, unstage
from torchstore_snapshot.devices import settle
from torchstore_snapshot.errors import SnapshotUndecidedError, SnapshotWriterError
from torchstore_snapshot.format.hashes import Digest
from torchstore_snapshot.progress import metered
from torchstore_snapshot.series.claims import Claim
from torchstore_snapshot.stopping import check, run_in_background
from torchstore_snapshot.storage.base import Storage
from torchstore_snapshot.storage.opening import open_storage
from torchstore_snapshot.storage.remote import RemoteStorage, environment
from torchstore_snapshot.storage.settings import Settings, current, settings_for, using
from torchstore_snapshot.taking.parts import part_of
from torchstore_snapshot.taking.preparing import Agreed, Prepared, plan

__all__ = ["PREFIX", "allowed", "available_memory", "begin", "begin_message", "warm_up"]

#: Under this prefix lies what is being written, for as long as it is.
PREFIX = ".torchstore-snapshot/"
# The share of the memory that is free which staged tensors may take.
_SHARE = 0.5
_TIMEOUT_S = 1800.0


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
        asyncio.run_coroutine_threadsafe(own_store(nbytes), thread_loops.background())


def allowed(storage: Storage) -> None:
    """Check what a take in the background requires of its storage.

    Raises:
        ConfigurationError: another process would not see it, or cannot be sent what it is opened
            with.
    """
    if isinstance(storage, RemoteStorage):
        storage.refuse_private("async_take writes", "take")
        settings_for(storage.url)


def begin(agreed: Agreed) -> Future[None]:
    """Stage everything that this rank writes, and return when its tensors may be changed.

    If this raises, be it because it was interrupted or stopped, no tensor is read any more, nothing
    is committed, and the other ranks are told.

    If there is more to write than may be staged at a time, this call takes as long as writing what
    goes beyond it.

    Returns:
        What has a result when the snapshot is committed.

    Raises:
        LayoutMismatchError: the ranks contradict each other.
        RankFailedError: another rank has failed, or died.
        StoreFullError: not even a part of it fits into the store.
        SnapshotWriterError: the writer process has ended.
    """
    memory_budget = agreed.options.memory_budget
    stage = _Stage(agreed, budget=memory_budget is not None)
    error: BaseException | None = None
    limit = int(available_memory() * _SHARE) if memory_budget is None else memory_budget
    try:
        try:
            stage.join(the_writer())
        except BaseException as caught:  # noqa: BLE001 - the other ranks must hear of it
            error = caught
        # If a rank dies before its writer knows of the take, only this can tell the others; later
        # on, its writer does.
        agreed.ranks.exchange(_Joined(), _Joined, error)
        stage.write(plan(agreed), limit)
    except BaseException as error:
        stage.give_up(f"{type(error).__name__}: {error}")
        raise
    return stage.outcome


class _Joined(msgspec.Struct, array_like=True):
    """That the writer of a rank knows of the take."""


class _Stage:
    """A take between this process and the writer.

    Attributes:
        outcome: has a result when the take is committed.
    """

    def __init__(self, agreed: Agreed, *, budget: bool) -> None:
        self.outcome: Future[None] = Future()
        self._budget = budget
        self._in_use = False
        self._agreed = agreed
        self._claim = self._first_claim = agreed.claim
        self._options = current()
        self._loop = thread_loops.background()
        self._credit = asyncio.Semaphore(2)
        self._meter = contextlib.ExitStack()
        self._keys: list[str] = []
        self._writer: WriterProcess | None = None
        self._job: Job | None = None

    def join(self, writer: WriterProcess) -> None:
        """Tell the writer about the take, so that it can tell others if this process dies.

        Raises:
            SnapshotWriterError: the writer has ended.
        """
        first, ranks = self._agreed.first, self._agreed.ranks
        remote = isinstance(open_storage(first.url), RemoteStorage)
        settings = settings_for(first.url) if remote else Settings()
        job = writer.job(self._released)
        self._writer, self._job = writer, job
        job.done.add_done_callback(self._ended)
        environs = environment() if remote else {}
        writer.send(
            m.Join(job.number, first.url, first.take, ranks.rank, ranks.size, environs, settings)
        )

    def write(self, prepared: Prepared, limit: int) -> None:
        """Stage everything, and have it written and committed.

        Args:
            limit: bytes that may be staged at a time.
        """
        if self._writer is None or self._job is None:
            raise SnapshotWriterError("the writer does not know of the take")
        options = prepared.options
        if options.progress:
            total = sum(file.layout.nbytes - len(file.layout.header) for file in prepared.files)
            self._job.advance = self._meter.enter_context(
                metered(options.progress, "taking", total)
            )
        if self._claim is not None:
            self._claim.stop()  # the writer takes it over
        begun = begin_message(prepared, self._job.number)
        self._claim = None
        self._writer.send(begun)
        settle(piece.tensor for item in prepared.items for piece in item.pieces)
        run_in_background(self._stage(prepared, limit, self._writer, self._job))
        check()
        self._writer.send(m.Finish(self._job.number))

    async def _stage(self, prepared: Prepared, limit: int, writer: WriterProcess, job: Job) -> None:
        place = f"{PREFIX}{prepared.take}/{prepared.ranks.rank}"
        total = sum(nbytes for _, nbytes in units_of(prepared))
        # A store of its own has as much memory ready as takes need, but none beyond a budget.
        ready = None if self._budget else min(total, limit)
        self._in_use = self._budget
        if self._in_use:
            bounded.begin()
        for number, batch in enumerate(batches(prepared, limit)):
            await self._credit.acquire()
            if job.done.done():  # it has failed
                return
            where = f"{place}/{number}"
            self._keys.append(where)
            values = {str(i): staged.tensor for i, staged in enumerate(batch)}
            chunks = [staged.chunk for staged in batch]
            del batch
            try:
                address = await put(where, values, ready)
            except asyncio.CancelledError:
                await unstage([where])  # it may be there; the writer does not know of it
                raise
            del values
            writer.send(m.Batch(job.number, address, where, chunks))

    def give_up(self, error: str) -> None:
        """Tell the writer, which tells the other ranks, that this rank gives the take up."""
        self._meter.close()
        self._loop.call_soon_threadsafe(self._leave_store)
        if self._claim is not None:  # the writer does not have it
            self._end(self._claim)
        if self._writer is not None and self._job is not None:
            self._writer.forget(self._job)
            with contextlib.suppress(SnapshotWriterError):
                self._writer.send(m.Abandon(self._job.number, error))
                return
        self._abandon_claim()
        self._tell_others(error)

    def _end(self, claim: Claim) -> None:
        """End the claim of a take that has failed. What tells other ranks of it stays, and belongs
        to the claim.
        """
        claim.abandon() if self._agreed.ranks.size > 1 else claim.release()

    def _tell_others(self, error: str) -> None:
        agreed = self._agreed
        if agreed.ranks.size > 1:
            with contextlib.suppress(TorchStoreError, OSError), using(self._options):
                storage = open_storage(agreed.first.url)
                report_failure(storage, agreed.first.take, agreed.ranks.rank, error)

    def _leave_store(self) -> None:
        """In the loop: the take needs the store for takes with a budget no longer."""
        if self._in_use:
            self._in_use = False
            bounded.end()

    def _abandon_claim(self) -> None:
        """Let gc collect what the writer, which has ended, has left: it may have ended before it
        took the claim over, and then nobody but this process can say so.
        """
        if self._first_claim is not None:
            with using(self._options):
                self._first_claim.abandon()

    def _released(self) -> None:
        """A batch was written, or the take has failed."""
        self._loop.call_soon_threadsafe(self._credit.release)

    def _ended(self, done: Future[None]) -> None:
        asyncio.run_coroutine_threadsafe(self._settle(done.exception()), self._loop)

    async def _settle(self, error: BaseException | None) -> None:
        try:
            self._meter.close()
            if error is not None and not (self._job and self._job.told):
                await asyncio.to_thread(self._tell_others, str(error))
            if isinstance(error, SnapshotWriterError):  # it can tidy nothing up
                await unstage(self._keys)
                await asyncio.to_thread(self._abandon_claim)
            elif isinstance(error, SnapshotUndecidedError):
                pass  # the claim stays
            elif error is not None and self._first_claim is not None:
                # The writer has done so, unless it cannot do with the storage what this can.
                await asyncio.to_thread(self._end, self._first_claim)
        finally:
            self._leave_store()
            if error is None:
                self.outcome.set_result(None)
            else:
                self.outcome.set_exception(error)


def begin_message(prepared: Prepared, job: int) -> m.Begin:
    """Return what the writer must know to write the files of a take."""
    files = prepared.files
    blank = [[Digest("")] * len(file.units) for file in files]
    part = part_of(
        prepared.ranks.rank, prepared.keys, prepared.items, files, blank, prepared.reused
    )
    options = prepared.options
    return m.Begin(
        job,
        options.overwrite,
        options.fsync,
        options.threads,
        _TIMEOUT_S,
        part,
        [m.NewFile(f.name, f.layout.header, f.layout.starts, f.layout.nbytes) for f in files],
        prepared.claim is not None,
        bool(options.progress),
    )
