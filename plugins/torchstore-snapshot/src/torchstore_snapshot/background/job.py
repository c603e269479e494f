"""A take while the writer process works on it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from functools import cached_property
from typing import Protocol

import msgspec

from torchstore_core.errors import StoreClosedError, TorchStoreError
from torchstore_snapshot.background import messages as m
from torchstore_snapshot.background import staged
from torchstore_snapshot.background.rendezvous import commit_together, report_failure
from torchstore_snapshot.committing.files import OpenFiles, Source
from torchstore_snapshot.committing.merging import Part
from torchstore_snapshot.committing.options import TakeOptions
from torchstore_snapshot.errors import (
    SnapshotError,
    SnapshotNotFoundError,
    SnapshotWriterError,
)
from torchstore_snapshot.format.hashes import Digest, digest_of
from torchstore_snapshot.format.manifest import Entry, ObjectEntry, Piece
from torchstore_snapshot.format.safetensors_files import Layout
from torchstore_snapshot.series.claims import Claim, give_up, withdraw
from torchstore_snapshot.storage.base import Storage
from torchstore_snapshot.storage.gathering import SHORT_STEP
from torchstore_snapshot.storage.opening import read_manifest

__all__ = ["Owner", "WrittenTake"]

# Seconds between two messages about progress.
_NEWS_S = 0.1
# Seconds that a server may need to take memory back before the take goes on without it.
_RELEASE_S = 10.0


class Owner(Protocol):
    """What a take needs to know of the program that takes it."""

    committing: threading.Lock

    def release(self, batch: m.Batch) -> None:
        """Take a batch out of the store, if it is still there."""

    def abandoned(self, job: int) -> str | None:
        """Why the program gives the take up; None if it does not."""


class WrittenTake:
    """A take that is being written. To create one does nothing yet, and so cannot fail.

    Args:
        join: what the program has said about it.
        connection: to the program.
    """

    def __init__(self, join: m.Join, connection: socket.socket, program: Owner) -> None:
        self._join = join
        self._program = program
        self._connection = connection
        self._begin: m.Begin | None = None
        self._files: OpenFiles | None = None
        self._claim: Claim | None = None
        self._news: _News | None = None
        self._committing = False

    @cached_property
    def _storage(self) -> Storage:
        return self._join.open()

    def handle(self, message: m.Begin | m.Batch | m.Finish) -> bool:
        """Handle a message. Returns whether the take is committed."""
        if isinstance(message, m.Begin):
            self._begin = message  # before the check: the claim is the writer's from here on
        self._check()
        match message:
            case m.Begin():
                self._open(message)
            case m.Batch():
                self._write(message)
                # The program, which is told next, puts more at once. Small tensors are given back
                # as soon as they are read, large ones when they are gone: with the memory of the
                # small ones in use again, the next large ones would not fit into what is left. So
                # all of it is given back in one step.
                staged.wait_released(message.address, _RELEASE_S)
                self._program.release(message)
                m.send(self._connection, m.Wrote(message.job))
            case m.Finish():
                self._finish()
                return True
        return False

    def _check(self) -> None:
        reason = self._program.abandoned(self._join.job)
        if reason is not None:
            raise SnapshotError(reason, details={"path": self._join.url})

    def _open(self, begin: m.Begin) -> None:
        if begin.claimed:
            self._claim = Claim.adopt(self._storage, self._join.take)
        files = [(f.name, Layout(f.header, f.starts, f.nbytes)) for f in begin.files]
        if begin.metered:
            self._news = _News(self._connection, begin.job)
        advance = None if self._news is None else self._news.advance
        self._files = OpenFiles(
            self._storage,
            files,
            durable=begin.fsync,
            threads=begin.threads,
            advance=advance,
            step=SHORT_STEP,
        )
        self._files.begin()

    def _opened(self) -> tuple[m.Begin, OpenFiles]:
        if self._begin is None or self._files is None:
            raise SnapshotError("the program has staged a take that it did not begin")
        return self._begin, self._files

    def _write(self, batch: m.Batch) -> None:
        _, files = self._opened()
        try:
            found = staged.read(batch.address, batch.key)
        except StoreClosedError as error:
            raise SnapshotWriterError(
                f"the store in which the snapshot {self._join.url!r} was staged has ended before "
                "everything was written; the take is not committed, take the snapshot again",
                details={"path": self._join.url},
            ) from error
        files.write(_sources(batch, found))

    def _finish(self) -> None:
        begin, files = self._opened()
        join = self._join
        digests = files.close()
        if self._news is not None:
            self._news.send()
        options = TakeOptions(overwrite=begin.overwrite, fsync=begin.fsync)
        part = _with_digests(begin.part, begin.files, digests)
        self._committing = True
        commit_together(
            self._storage,
            join.take,
            part,
            join.size,
            options,
            begin.timeout,
            self._claim,
            self._program.committing,
            self._check,
        )

    def fail(self, error: str, *, undecided: bool = False) -> bool:
        """Remove what was written, and tell the other ranks. Returns whether they could be told.

        Args:
            undecided: the take may be committed nevertheless, so what was written stays.
        """
        # Once rank 0 may know what this rank has written, only rank 0 decides.
        kept = undecided or (self._committing and (self._join.rank > 0 or self._visible()))
        several = self._join.size > 1
        if self._files is not None and not kept:
            self._files.abort()
        # What tells other ranks of it stays, and the claim says whose it is.
        abandoned = several and not kept
        try:
            if self._claim is not None:
                self._claim.abandon() if abandoned else self._claim.release(keep_folder=several)
            elif self._begin is not None and self._begin.claimed:  # nobody renews it any more
                if abandoned:
                    give_up(self._storage, self._join.take)
                else:
                    withdraw(self._storage, self._join.take, keep_folder=several)
            if several:
                report_failure(self._storage, self._join.take, self._join.rank, error)
        except (TorchStoreError, OSError):
            return False
        return True

    def _visible(self) -> bool:
        """Whether the snapshot is there, or may be: something failed after it was committed. The
        program may have been killed at that moment, so that it cannot be told.
        """
        try:
            return read_manifest(self._storage).take == self._join.take
        except SnapshotNotFoundError:
            return False
        except (TorchStoreError, OSError):
            return True


def _sources(batch: m.Batch, found: dict[str, memoryview]) -> list[Source]:
    """What is in a batch. Ranges of a tensor that follow each other are one source: where one ends
    and the next begins may be anywhere in a block.
    """
    sources: list[Source] = []
    parts: list[memoryview] = []
    at = (-1, -1, -1)
    for number, chunk in enumerate(batch.chunks):
        data = found[str(number)]
        if at != (chunk.file, chunk.unit, chunk.begin):
            parts = []
            sources.append(Source(chunk.file, chunk.unit, chunk.begin, parts))
        parts.append(data)
        at = chunk.file, chunk.unit, chunk.begin + data.nbytes
    return sources


class _News:
    """Tells the program how far writing is, not too often."""

    def __init__(self, connection: socket.socket, job: int) -> None:
        self._connection = connection
        self._job = job
        self._lock = threading.Lock()
        self._nbytes = 0
        self._last = 0.0

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes
            due = time.monotonic() - self._last >= _NEWS_S
        if due:
            self.send()

    def send(self) -> None:
        with self._lock:
            self._last, nbytes, self._nbytes = time.monotonic(), self._nbytes, 0
            if nbytes:
                with contextlib.suppress(OSError):  # the program has ended
                    m.send(self._connection, m.Advanced(self._job, nbytes))


def _with_digests(part: Part, files: list[m.NewFile], digests: list[list[Digest]]) -> Part:
    """Fill in the hashes of what was written."""
    known = {
        (index, start): digest
        for index, (file, found) in enumerate(zip(files, digests, strict=True))
        for start, digest in sorted(zip(file.starts, found, strict=True))
    }
    empty = Digest(digest_of(b""))

    def filled(piece: Piece) -> Piece:
        if piece.digest:
            return piece  # in a file of an earlier snapshot
        digest = known[piece.file, piece.start] if piece.nbytes else empty
        return msgspec.structs.replace(piece, digest=digest.whole, blocks=digest.blocks)

    def complete(entry: Entry) -> Entry:
        if isinstance(entry, ObjectEntry):
            if entry.piece is None:
                return entry
            return msgspec.structs.replace(entry, piece=filled(entry.piece))
        return msgspec.structs.replace(entry, pieces=tuple(map(filled, entry.pieces)))

    entries = {
        key: {name: complete(entry) for name, entry in named.items()}
        for key, named in part.entries.items()
    }
    return msgspec.structs.replace(part, entries=entries)
