"""Moving runs of memory over a pair. Everything here blocks, so it is called in threads."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from torchstore_core.errors import TransportError
from torchstore_core.machine.copying import copy_pieces
from torchstore_transports.pairs.batches import MESSAGE_MAX, Message, Run, groups, messages
from torchstore_transports.pairs.pair import TIMEOUT_S, Pair, Wait, memory_at
from torchstore_transports.pairs.threads import before_exit, in_library

__all__ = ["PairConnection"]

# Messages, and groups of them, that are under way at a time: one moves while others are prepared.
_WINDOW = 8
_GROUPS = 3
# How long a library may take to end a pair.
_KILL_S = 5.0


class _Sent:
    """A message that is being sent, and the staging memory that it needs."""

    def __init__(self, wait: Wait, staged: torch.Tensor | None) -> None:
        self._wait: Wait | None = wait
        self.staged = staged

    def wait(self) -> None:
        """Wait until the message has been moved; libraries allow only one such wait."""
        wait, self._wait = self._wait, None
        if wait is not None:
            with in_library(TIMEOUT_S):
                wait()


class _Received(_Sent):
    """A message that is being received; ``is_last`` marks the last one of a group."""

    def __init__(self, wait: Wait, staged: torch.Tensor | None, message: Message | None) -> None:
        super().__init__(wait, staged)
        self.message = message
        self.is_last = False


class PairConnection:
    """A pair, with staging memory for small pieces. One batch moves over it at a time.

    A message that is one run of host memory is sent from there, and received there, directly. This
    is safe although a thread that waits for a message cannot be interrupted: :meth:`kill` ends the
    pair, and a pair that has ended touches no memory. Small pieces are gathered in the connection's
    staging memory, and copied only while the connection has not been killed.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._staging: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._killed = False
        #: The number of messages that have been sent or received.
        self.moved = 0
        #: How many bytes of the last upload or download have certainly arrived, from its first.
        self.arrived = 0
        before_exit(self, PairConnection.kill)

    # The client calls upload and download, the server half serve and take.

    def upload(self, runs: Iterable[Run]) -> None:
        """Send ``(address, nbytes)`` runs. When this returns, they have arrived.

        Raises:
            TransportError: the pair has failed, or was killed.
        """
        pending: deque[tuple[int, list[_Sent | _Received]]] = deque()
        self.arrived = 0

        def finish_first() -> None:
            nbytes, operations = pending.popleft()
            self._finish(*operations)
            self.arrived += nbytes

        with _failures():
            for group in groups(messages(runs)):
                sent = [self._send(message) for message in group]
                nbytes = sum([message.nbytes for message in group])
                pending.append((nbytes, [self._receive(None), *sent]))
                if len(pending) >= _GROUPS:
                    finish_first()
            while pending:
                finish_first()

    def download(self, runs: Iterable[Run]) -> None:
        """Receive into runs what :meth:`serve` at the other end sends from runs of these sizes.

        Raises:
            TransportError: the pair has failed, or was killed.
        """
        pending: deque[_Received] = deque()
        self.arrived = 0
        with _failures():
            for message in (*messages(runs), None):
                pending.append(self._receive(message))
                if len(pending) > _WINDOW:
                    self._finish_first(pending)
            while pending:
                self._finish_first(pending)

    def serve(self, runs: Iterable[Run]) -> None:
        """Send ``(address, nbytes)`` runs.

        Raises:
            TransportError: the pair has failed, or was killed.
        """
        pending: deque[_Sent] = deque()
        with _failures():
            for message in (*messages(runs), None):
                pending.append(self._send(message))
                if len(pending) >= _WINDOW:
                    self._finish(pending.popleft())
            self._finish(*pending)

    def take(self, runs: Iterable[Run]) -> None:
        """Receive into runs what :meth:`upload` at the other end sends from runs of these sizes.

        Raises:
            TransportError: the pair has failed, or was killed.
        """
        pending: deque[_Received] = deque()
        acknowledged: list[_Sent] = []
        with _failures():
            for group in groups(messages(runs)):
                for message in group:
                    pending.append(self._receive(message))
                    if len(pending) > _WINDOW:
                        self._finish_first(pending, acknowledged)
                pending[-1].is_last = True
            while pending:
                self._finish_first(pending, acknowledged)
            self._finish(*acknowledged)

    def kill(self) -> None:
        """End the pair. When this returns, it touches no memory any more; threads in its other
        methods raise, though maybe not at once. Idempotent.
        """
        with in_library(_KILL_S):
            self._pair.kill()
        with self._lock:
            self._killed = True
        self._pair = _Ended()  # the library frees its resources when no thread waits any more

    def leak(self) -> None:
        """Keep the pair for ever, in a forked child: its threads do not exist there, and a library
        that waits for them to end would wait in vain.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pair))

    def _send(self, message: Message | None) -> _Sent:
        """Begin to send a message; None is an empty one, which acknowledges."""
        tensor, staged = self._tensor(message)
        if message is not None and staged is not None:
            self._copy(message, staged, gather=True)
        with in_library(TIMEOUT_S):  # it may begin to write in this thread
            return _Sent(self._pair.send(tensor), staged)

    def _receive(self, message: Message | None) -> _Received:
        tensor, staged = self._tensor(message)
        with in_library(TIMEOUT_S):
            return _Received(self._pair.receive(tensor), staged, message)

    def _tensor(self, message: Message | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the tensor to send or receive, and the staging memory that it lies in, if any."""
        if message is None:
            return torch.zeros(1, dtype=torch.uint8, device=self._pair.device), None
        if len(message.runs) == 1 and self._pair.device.type == "cpu":
            return memory_at(*message.runs[0]), None
        if self._staging:
            staged = self._staging.pop()
        else:
            staged = torch.empty(MESSAGE_MAX, dtype=torch.uint8, device=self._pair.device)
        return staged[: message.nbytes], staged

    def _finish_first(
        self, pending: deque[_Received], acknowledged: list[_Sent] | None = None
    ) -> None:
        """Finish the first of several receives, and acknowledge its group if it is the last one.

        When a pair ends, libraries wake threads that wait for a message that has not begun, but not
        those whose message has arrived in part. Therefore this waits first for the second message,
        which completes after the first.
        """
        if len(pending) > 1:
            pending[1].wait()
        first = pending.popleft()
        self._finish(first)
        if first.message is not None:
            self.arrived += first.message.nbytes
        if first.is_last and acknowledged is not None:
            acknowledged.append(self._send(None))

    def _finish(self, *operations: _Sent | _Received) -> None:
        for one in operations:
            one.wait()
            self.moved += 1
            if one.staged is None:
                continue
            if isinstance(one, _Received) and one.message is not None:
                self._copy(one.message, one.staged, gather=False)
            self._staging.append(one.staged)

    def _copy(self, message: Message, staged: torch.Tensor, *, gather: bool) -> None:
        with self._lock:
            if self._killed:
                raise TransportError("the pair was given up")
            if staged.is_cpu:
                _copy_runs(message.runs, staged.data_ptr(), gather=gather)
            else:
                _copy_device(message.runs, staged, gather=gather)


class _Ended(Pair):
    """Replaces the pair of a connection that was killed."""

    def send(self, tensor: torch.Tensor) -> Wait:
        """See ``Pair``."""
        raise RuntimeError("it was given up")

    receive = send

    def kill(self) -> None:
        """See ``Pair``."""


@contextmanager
def _failures() -> Iterator[None]:
    """Turn a library's RuntimeError into a TransportError."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(f"the pair has failed: {error}") from error


def _copy_runs(runs: Sequence[Run], staged: int, *, gather: bool) -> None:
    pieces: list[tuple[int, int, int]] = []
    for address, nbytes in runs:
        pieces.append((staged, address, nbytes) if gather else (address, staged, nbytes))
        staged += nbytes
    copy_pieces(pieces, stream=False)


def _copy_device(runs: Sequence[Run], staged: torch.Tensor, *, gather: bool) -> None:
    """Copy between host memory and the device's; when this returns, the bytes have arrived."""
    at = 0
    for address, nbytes in runs:
        host, device = memory_at(address, nbytes), staged[at : at + nbytes]
        if gather:
            device.copy_(host)
        else:
            host.copy_(device)
        at += nbytes
