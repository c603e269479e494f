"""The program's end of its writer process: one process, started once and used for all takes."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import IO

import msgspec

from torchstore_snapshot.background import messages as m
from torchstore_snapshot.errors import SnapshotWriterError
from torchstore_snapshot.progress import Advance

__all__ = ["Job", "WriterProcess", "the_writer"]

# It is to find the same packages as this program. That may have thousands of folders in its path
# (Bazel), more than a variable of the environment may have.
_START = """
import os, sys
with open(int(sys.argv[1]), "rb") as path:
    sys.path[:] = map(os.fsdecode, path.read().split(b"\\0"))
from torchstore_snapshot.background.writer import main
main(int(sys.argv[2]))
"""


# A message, and what is told when it was sent.
_Unsent = tuple[msgspec.Struct, Future[None]]


class Job:
    """A take that the writer process works on.

    Args:
        done: has a result when the take is committed, and an error when it has failed.
        written: called in another thread, each time that a batch has been written.
        advance: called in another thread with numbers of bytes that have been written.
        told: whether the other ranks were told why it has failed.
        error: what ``advance`` raised.
    """

    def __init__(
        self, number: int, written: Callable[[], None], advance: Advance | None = None
    ) -> None:
        self.number = number
        self.done: Future[None] = Future()
        self.written = written
        self.advance = advance
        self.told = False
        self.error: BaseException | None = None


class WriterProcess:
    """A running writer process. It ends when this process does, however that ends."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        for end in (here, there):
            end.setblocking(True)  # whatever `socket.setdefaulttimeout` says
        self._connection = here
        # The kernel hangs a process group up that is stopped when its parent dies.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # is inherited
        try:
            with there, _own_path() as path:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, str(path.fileno()), str(there.fileno())],
                    pass_fds=[path.fileno(), there.fileno()],
                    stdin=subprocess.DEVNULL,
                    # Ctrl-C is meant for the program. Not a session of its own: where the kernel
                    # divides processors between sessions, priorities count only within one.
                    process_group=0,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._jobs: dict[int, Job] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[_Unsent | None] = queue.SimpleQueue()
        self.alive = True
        self._sender = threading.Thread(
            target=self._send, name="torchstore-snapshot-sender", daemon=True
        )
        self._sender.start()
        self._listener = threading.Thread(
            target=self._listen, name="torchstore-snapshot-writer", daemon=True
        )
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def job(self, written: Callable[[], None], advance: Advance | None = None) -> Job:
        """Return a new job; its messages follow.

        Args:
            written, advance: see :class:`Job`.

        Raises:
            SnapshotWriterError: the process has ended.
        """
        with self._lock:
            if not self.alive:
                raise self._error()
            self._next += 1
            job = self._jobs[self._next] = Job(self._next, written, advance)
            return job

    def forget(self, job: Job) -> None:
        """Listen to nothing more about a job."""
        with self._lock:
            self._jobs.pop(job.number, None)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message to the process. Even if this is interrupted, all of it is sent.

        Raises:
            SnapshotWriterError: it has ended.
        """
        sent: Future[None] = Future()
        self._outbox.put((message, sent))
        # Only now, since the thread may have ended before it saw the message.
        if not self.alive:
            raise self._error()
        try:
            sent.result()
        except OSError as error:
            raise self._error() from error

    def _send(self) -> None:
        """In a thread, which no signal interrupts: a part of a message would make everything that
        comes after it a part of it, too.
        """
        while (unsent := self._outbox.get()) is not None:
            message, sent = unsent
            try:
                m.send(self._connection, message)
            except Exception as error:  # noqa: BLE001 - raised by whoever waits
                sent.set_exception(error)
            else:
                sent.set_result(None)
            del unsent, message, sent

    def _listen(self) -> None:
        while (data := m.receive(self._connection)) is not None:
            reply = m.from_writer.decode(data)
            with self._lock:
                job = self._jobs.get(reply.job)
                if not isinstance(reply, m.Wrote | m.Advanced):
                    self._jobs.pop(reply.job, None)
            if job is None:
                continue
            match reply:
                case m.Wrote():
                    job.written()
                case m.Advanced():
                    self._advance(job, reply.nbytes)
                case m.Done() if job.error is not None:  # it was committed before it was given up
                    job.told = True
                    job.done.set_exception(job.error)
                case m.Done():
                    job.done.set_result(None)
                case m.Failed():
                    job.told = reply.told
                    job.done.set_exception(job.error or reply.error())
                    job.written()
        with self._lock:
            self.alive = False
            jobs, self._jobs = [*self._jobs.values()], {}
        self._outbox.put(None)
        self._sender.join()
        self._connection.close()
        self._process.wait()
        for job in jobs:
            job.done.set_exception(self._error())
            job.written()

    def _advance(self, job: Job, nbytes: int) -> None:
        """Say how far a take is. If whoever is told raises, the take is given up."""
        try:
            if job.advance is not None:
                job.advance(nbytes)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the take is told
            job.advance, job.error = None, error
            with contextlib.suppress(SnapshotWriterError):
                self.send(m.Abandon(job.number, f"{type(error).__name__}: {error}"))

    def _error(self) -> SnapshotWriterError:
        return SnapshotWriterError(
            f"the process that writes snapshots (pid {self._process.pid}) has ended with status "
            f"{self._process.poll()}; the take is not committed, unless that was done just "
            "before: if there is no such snapshot, take it again"
        )

    def close(self) -> None:
        """End the process. Jobs that are not done fail."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._listener.join()


def _own_path() -> IO[bytes]:
    """A file of the folders where this program finds its packages."""
    file = os.fdopen(os.memfd_create("torchstore-path"), "w+b")
    file.write(b"\0".join([os.fsencode(folder) for folder in sys.path]))
    file.seek(0)
    return file


_current: WriterProcess | None = None
_starting = threading.Lock()


def the_writer() -> WriterProcess:
    """Return the writer process of this process; start one if there is none, or it has ended."""
    global _current
    with _starting:
        if _current is None or not _current.alive:
            _current = WriterProcess()
        return _current


def _after_fork_in_child() -> None:
    global _current, _starting
    if _current is not None:
        _current._connection.close()  # otherwise the process would outlive the parent
    _current, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
