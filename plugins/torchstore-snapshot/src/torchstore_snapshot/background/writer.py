"""The process that writes snapshots, which :mod:`~torchstore_snapshot.background.process` starts.

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
import threading

from torchstore_core.errors import TorchStoreError
from torchstore_snapshot.background import messages as m
from torchstore_snapshot.background import staged
from torchstore_snapshot.background.job import WrittenTake
from torchstore_snapshot.background.rendezvous import rank_0_was_late, report_failure
from torchstore_snapshot.errors import SnapshotError, SnapshotUndecidedError

__all__ = ["main"]

# While the program keeps all processors busy, the writer gets a seventieth of them.
_NICE = 19
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_BEST_EFFORT_LOWEST = 2 << 13 | 7

_Message = m.Join | m.Begin | m.Batch | m.Finish | m.Abandon


class _Program:
    """What the program has begun and not finished: the takes, and what is staged for them."""

    def __init__(self) -> None:
        self.committing = threading.Lock()
        self._takes: dict[int, m.Join] = {}
        self._staged: dict[str, m.Batch] = {}
        self._abandoned: dict[int, str] = {}

    def note(self, message: _Message) -> None:
        """Note a message as it arrives."""
        match message:
            case m.Join():
                self._takes[message.job] = message
            case m.Batch():
                self._staged[message.key] = message
            case m.Abandon():
                self._abandoned[message.job] = message.error
            case _:
                pass

    def abandoned(self, job: int) -> str | None:
        """Why the program gives a take up; None if it does not."""
        return self._abandoned.get(job)

    def ended(self, job: int) -> None:
        """A take was committed, or has failed."""
        self._takes.pop(job, None)
        for batch in [*self._staged.values()]:
            if batch.job == job:
                self.release(batch)

    def release(self, batch: m.Batch) -> None:
        """Take a batch out of the store, if it is still there. It is forgotten only when that has
        been done: the process may end meanwhile, and does so behind what it knows to be there.
        """
        if batch.key in self._staged:
            # The store has ended, too, or the other thread was sooner.
            with contextlib.suppress(TorchStoreError, OSError):
                staged.delete(batch.address, batch.key)
            self._staged.pop(batch.key, None)

    def bury(self) -> None:
        """The program has ended. Tell the other ranks of its takes, and take what it staged out of
        the store, which may be there for longer.
        """
        self.committing.acquire()  # for good: nothing is reported or committed after this
        for take in [*self._takes.values()]:
            if take.size > 1:
                with contextlib.suppress(TorchStoreError, OSError):
                    storage = take.open()
                    report_failure(storage, take.take, take.rank, "its program has ended")
        for batch in [*self._staged.values()]:
            self.release(batch)


def _serve(
    connection: socket.socket, inbox: queue.SimpleQueue[_Message], program: _Program
) -> None:
    """Handle messages one by one. An error ends its take, not the process."""
    takes: dict[int, WrittenTake] = {}
    while True:
        message = inbox.get()
        if isinstance(message, m.Join):
            takes[message.job] = WrittenTake(message, connection, program)
            continue
        take = takes.get(message.job)
        try:
            if take is None:
                program.ended(message.job)  # it has failed, and more was staged in the meantime
            elif isinstance(message, m.Abandon):
                del takes[message.job]
                told = take.fail(message.error)
                program.ended(message.job)
                given_up = SnapshotError(message.error)
                with contextlib.suppress(OSError):  # the program has ended
                    m.send(connection, m.Failed.of(message.job, given_up, told=told))
            elif take.handle(message):
                del takes[message.job]
                program.ended(message.job)
                with contextlib.suppress(OSError):  # the program has ended
                    m.send(connection, m.Done(message.job))
        except Exception as error:  # noqa: BLE001 - whoever waits for the take is told
            told = True
            if takes.pop(message.job, None) is not None and take is not None:
                text = f"{type(error).__name__}: {error}"
                undecided = isinstance(error, SnapshotUndecidedError) or rank_0_was_late(error)
                told = take.fail(text, undecided=undecided)
            program.ended(message.job)
            with contextlib.suppress(OSError):  # the program has ended
                m.send(connection, m.Failed.of(message.job, error, told=told))


def _lower_priority() -> None:
    """What the program does comes first, on processors and on disks. This concerns the calling
    thread, and those that it starts from now on.
    """
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    call = _IOPRIO_SET.get(os.uname().machine)
    if call is not None:
        ctypes.CDLL(None).syscall(call, 1, 0, _BEST_EFFORT_LOWEST)


def _listen(
    connection: socket.socket, inbox: queue.SimpleQueue[_Message], program: _Program
) -> None:
    """Pass messages on until the program has ended; then clean up after it, and end."""
    while (data := m.receive(connection)) is not None:
        message = m.to_writer.decode(data)
        program.note(message)
        inbox.put(message)
    # Files of unfinished jobs stay where they are, invisible: to remove them could take long, and
    # the other thread may be writing to them.
    program.bury()
    os._exit(0)


def main(descriptor: int) -> None:
    """Serve the program at the other end of a socket until it closes it."""
    connection = socket.socket(fileno=descriptor)
    inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
    program = _Program()
    # This thread keeps the priority of the program: others wait for what is cleaned up after it
    # has ended, and no thread may raise its priority again.
    threading.Thread(target=_listen, args=(connection, inbox, program), daemon=True).start()
    _lower_priority()
    _serve(connection, inbox, program)
