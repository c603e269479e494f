"""The process that writes snapshots: ``python -m torchstore_snapshot.background.writer FD``.

It reads staged tensors from a store without copying them, writes them to files, and commits. It is
given jobs over a socket; when the socket closes, the program has ended: what is not committed by
then never is, and this process ends, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import socket
import sys
import threading

import msgspec

import torchstore_core.blocking as ts
from torchstore_core.errors import TorchStoreError
from torchstore_snapshot.background import messages as m
from torchstore_snapshot.background.rendezvous import (
    commit_together,
    rank_0_was_late,
    report_failure,
)
from torchstore_snapshot.errors import SnapshotNotFoundError
from torchstore_snapshot.format.hashes import Digest, digest_of
from torchstore_snapshot.format.manifest import Entry, ObjectEntry, Piece
from torchstore_snapshot.format.safetensors_files import Layout
from torchstore_snapshot.series.claims import Claim
from torchstore_snapshot.storage.opening import open_storage, read_manifest
from torchstore_snapshot.storage.remote import set_environment
from torchstore_snapshot.taking.merging import Part
from torchstore_snapshot.taking.take import TakeOptions
from torchstore_snapshot.taking.writing import OpenFiles, Source, bytes_of

__all__ = ["main"]

_STORE = "staged"
# While the program keeps all processors busy, the writer gets a twentieth of them.
_NICE = 13
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_BEST_EFFORT_LOWEST = 2 << 13 | 7

_Message = m.Begin | m.Batch | m.Finish | m.Abandon


class _Program:
    """What the program has begun and not finished: the takes, and what is staged for them."""

    def __init__(self) -> None:
        self.committing = threading.Lock()
        self._takes: dict[int, m.Begin] = {}
        self._staged: dict[str, m.Batch] = {}

    def note(self, message: _Message) -> None:
        """Note a message as it arrives."""
        match message:
            case m.Begin():
                self._takes[message.job] = message
            case m.Batch():
                self._staged[message.key] = message
            case _:
                pass

    def ended(self, job: int) -> None:
        """A take was committed, or has failed."""
        self._takes.pop(job, None)
        for batch in [*self._staged.values()]:
            if batch.job == job:
                self.release(batch)

    def release(self, batch: m.Batch) -> None:
        """Take a batch out of the store, if it is still there."""
        if self._staged.pop(batch.key, None) is not None:
            with contextlib.suppress(TorchStoreError, OSError):  # the store has ended, too
                ts.connect(batch.address, store_name=_STORE).delete(batch.key)

    def bury(self) -> None:
        """The program has ended. Tell the other ranks of its takes, and take what it staged out of
        the store, which may be there for longer.
        """
        self.committing.acquire()  # for good: nothing is committed after others have been told
        for begin in [*self._takes.values()]:
            if begin.size > 1:
                with contextlib.suppress(TorchStoreError, OSError):
                    storage = open_storage(begin.url)
                    report_failure(storage, begin.take, begin.rank, "its program has ended")
        for batch in [*self._staged.values()]:
            self.release(batch)


class _Job:
    """A take that is being written."""

    def __init__(self, begin: m.Begin, connection: socket.socket, program: _Program) -> None:
        self._begin = begin
        self._program = program
        self._connection = connection
        if begin.environment:
            set_environment(begin.environment)
        self._storage = open_storage(begin.url)
        self._committing = False
        self._claim = Claim.adopt(self._storage, begin.take) if begin.claimed else None
        files = [(f.name, Layout(f.header, f.starts, f.nbytes)) for f in begin.files]
        try:
            self._files = OpenFiles(self._storage, files, begin.threads)
        except BaseException:
            self._release()
            raise

    def handle(self, message: _Message) -> bool:
        """Handle a message of this job. Returns whether the job has ended."""
        match message:
            case m.Batch():
                self._write(message)
                m.send(self._connection, m.Wrote(message.job))
                return False
            case m.Finish():
                self._finish()
                m.send(self._connection, m.Done(message.job))
                return True
            case m.Abandon():
                self.fail(message.error)
                return True
            case m.Begin():
                return False

    def _write(self, batch: m.Batch) -> None:
        client = ts.connect(batch.address, store_name=_STORE)
        staged = client.get_state_dict(batch.key)
        # The lease keeps the memory until the tensors are gone, and the store needs it soon.
        self._program.release(batch)
        self._files.write(
            Source(chunk.file, chunk.unit, chunk.begin, bytes_of(name, tensor), tensor)
            for chunk, (name, tensor) in zip(
                batch.chunks, ((str(i), staged[str(i)]) for i in range(len(staged))), strict=True
            )
        )

    def _finish(self) -> None:
        begin = self._begin
        digests = self._files.close(durable=begin.fsync)
        options = TakeOptions(overwrite=begin.overwrite, fsync=begin.fsync)
        part = _with_digests(begin.part, begin.files, digests)
        self._committing = True
        commit_together(
            self._storage,
            begin.take,
            part,
            begin.size,
            options,
            begin.timeout,
            self._claim,
            self._program.committing,
        )

    def fail(self, error: str, *, undecided: bool = False) -> None:
        """Remove what was written, and tell the other ranks.

        Args:
            undecided: another rank may still commit the take, so what was written stays.
        """
        # Once rank 0 may know what this rank has written, only rank 0 decides.
        reported = self._committing and (self._begin.rank > 0 or self._visible())
        if not undecided and not reported:
            self._files.abort()
        self._release()
        if self._begin.size > 1:
            with contextlib.suppress(OSError):
                report_failure(self._storage, self._begin.take, self._begin.rank, error)

    def _visible(self) -> bool:
        """Whether the snapshot is there, or may be: something failed after it was committed. The
        program may have been killed at that moment, so that it cannot be told.
        """
        try:
            return read_manifest(self._storage).take == self._begin.take
        except SnapshotNotFoundError:
            return False
        except (TorchStoreError, OSError):
            return True

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()


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


def _serve(
    connection: socket.socket, inbox: queue.SimpleQueue[_Message], program: _Program
) -> None:
    """Handle messages one by one. An error ends its job, not the process."""
    jobs: dict[int, _Job] = {}
    while True:
        message = inbox.get()
        try:
            if isinstance(message, m.Begin):
                jobs[message.job] = _Job(message, connection, program)
                continue
            job = jobs.get(message.job)
            if job is None:
                program.ended(message.job)  # it has failed, and more was staged in the meantime
            elif job.handle(message):
                del jobs[message.job]
                program.ended(message.job)
        except Exception as error:  # noqa: BLE001 - whoever waits for the job is told
            failed = jobs.pop(message.job, None)
            if failed is not None:
                failed.fail(f"{type(error).__name__}: {error}", undecided=rank_0_was_late(error))
            program.ended(message.job)
            with contextlib.suppress(OSError):  # the program has ended
                m.send(connection, m.Failed.of(message.job, error))


def _lower_priority() -> None:
    """What the program does comes first, on processors and on disks."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    call = _IOPRIO_SET.get(os.uname().machine)
    if call is not None:
        ctypes.CDLL(None).syscall(call, 1, 0, _BEST_EFFORT_LOWEST)


def main(descriptor: int) -> None:
    """Serve the program at the other end of a socket until it closes it."""
    _lower_priority()
    connection = socket.socket(fileno=descriptor)
    inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
    program = _Program()
    threading.Thread(target=_serve, args=(connection, inbox, program), daemon=True).start()
    while (data := m.receive(connection)) is not None:
        message = m.to_writer.decode(data)
        program.note(message)
        inbox.put(message)
    # Files of unfinished jobs stay where they are, invisible: to remove them could take long, and
    # the thread may be writing to them.
    program.bury()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
