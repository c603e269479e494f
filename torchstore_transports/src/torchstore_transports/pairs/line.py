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
from torchstore_transports.pairs.batches import MESSAGE_MAX, Message, Run, messages
from torchstore_transports.pairs.pair import Pair, Wait, memory_at

__all__ = ["Line"]

# Messages under way at a time: one moves while the next is being prepared.
_WINDOW = 4


class Line:
    """A pair, with the memory to stage small pieces in. One batch moves over it at a time.

    A message that is one run of host memory is sent from there, and received there, directly. This
    is safe although a thread that waits for a message cannot be interrupted: :meth:`kill` ends the
    pair, and a pair that has ended touches no memory. Small pieces are gathered in staging memory
    of the line, and copied only as long as it has not been killed.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._staging: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._killed = False

    def send(self, runs: Iterable[Run]) -> None:
        """Send ``(address, nbytes)`` runs.

        Raises:
            TransportError: the pair has failed, or was killed.
        """
        pending: deque[tuple[Wait, torch.Tensor | None]] = deque()
        with _failures():
            for message in messages(runs):
                tensor, staged = self._tensor(message)
                if staged is not None:
                    self._copy(message, staged, gather=True)
                pending.append((self._pair.send(tensor), staged))
                if len(pending) >= _WINDOW:
                    self._sent(*pending.popleft())
            while pending:
                self._sent(*pending.popleft())

    def receive(self, runs: Iterable[Run]) -> None:
        """Receive what the other end sends with runs of the same sizes.

        Raises:
            TransportError: the pair has failed, or was killed.
        """
        pending: deque[tuple[Wait, torch.Tensor | None, Message]] = deque()
        with _failures():
            for message in messages(runs):
                tensor, staged = self._tensor(message)
                pending.append((self._pair.receive(tensor), staged, message))
                if len(pending) >= _WINDOW:
                    self._received(*pending.popleft())
            while pending:
                self._received(*pending.popleft())

    def send_token(self) -> None:
        """Send a message without contents.

        Raises:
            TransportError: the pair has failed, or was killed.
        """
        with _failures():
            self._pair.send(self._token())()

    def receive_token(self) -> None:
        """Wait for a message without contents.

        Raises:
            TransportError: the pair has failed, or was killed.
        """
        with _failures():
            self._pair.receive(self._token())()

    def kill(self) -> None:
        """End the pair. When this returns, no memory that was given to the line is touched any
        more; threads that are in its other methods raise, though maybe not at once. Idempotent.
        """
        self._pair.kill()
        with self._lock:
            self._killed = True

    def leak(self) -> None:
        """Keep the pair for ever: in a forked child its threads do not exist, and a library that
        waits for them to end would wait in vain.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pair))

    def _token(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8, device=self._pair.device)

    def _tensor(self, message: Message) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the memory of a message, and again if it is staging memory."""
        if len(message.runs) == 1 and self._pair.device.type == "cpu":
            return memory_at(*message.runs[0]), None
        if self._staging:
            staged = self._staging.pop()
        else:
            staged = torch.empty(MESSAGE_MAX, dtype=torch.uint8, device=self._pair.device)
        return staged[: message.nbytes], staged

    def _sent(self, wait: Wait, staged: torch.Tensor | None) -> None:
        wait()
        if staged is not None:
            self._staging.append(staged)

    def _received(self, wait: Wait, staged: torch.Tensor | None, message: Message) -> None:
        wait()
        if staged is not None:
            self._copy(message, staged, gather=False)
            self._staging.append(staged)

    def _copy(self, message: Message, staged: torch.Tensor, *, gather: bool) -> None:
        with self._lock:
            if self._killed:
                raise TransportError("the pair was given up")
            if staged.is_cpu:
                _copy_runs(message.runs, staged.data_ptr(), gather=gather)
            else:
                _copy_device(message.runs, staged, gather=gather)


@contextmanager
def _failures() -> Iterator[None]:
    """Raise the RuntimeError of a library as a TransportError."""
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
    """Copy between host memory and the device's; returns when the bytes are there."""
    at = 0
    for address, nbytes in runs:
        host, device = memory_at(address, nbytes), staged[at : at + nbytes]
        if gather:
            device.copy_(host)
        else:
            host.copy_(device)
        at += nbytes
