"""The interface between this package and a send/receive library."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["TIMEOUT_S", "Pair", "PairFactory", "Store", "Wait", "memory_at"]

#: How long, in seconds, a pair waits for its other end: until it is made, and for each message.
TIMEOUT_S = 20.0

#: Blocks until a message has been sent or received. Raises RuntimeError if the pair has failed or
#: :data:`TIMEOUT_S` have passed, which ends the pair.
Wait = Callable[[], None]


class Pair(ABC):
    """A connection between two processes over which tensors are sent and received.

    Messages arrive in the order in which they were sent. A receiver must know the size of each,
    because most libraries end a process that receives more bytes than it expects.

    Attributes:
        device: the device on which tensors must be. Memory elsewhere is staged there.
    """

    device: torch.device = torch.device("cpu")

    @abstractmethod
    def send(self, tensor: torch.Tensor) -> Wait:
        """Begin to send a contiguous tensor of bytes. The caller keeps its memory until it is sent.

        Raises:
            RuntimeError: the pair has failed.
        """

    @abstractmethod
    def receive(self, tensor: torch.Tensor) -> Wait:
        """Begin to receive a message that is exactly as large as ``tensor``.

        Raises:
            RuntimeError: the pair has failed.
        """

    @abstractmethod
    def kill(self) -> None:
        """End the pair, from any thread, at any time. Idempotent.

        When this returns, the library touches the memory of messages no more, whether or not the
        threads that wait for messages have noticed. It takes milliseconds.
        """


#: Makes a pair: ``make(store, rank, address)``. Blocks until both ends have been made, or raises
#: RuntimeError after :data:`TIMEOUT_S`. The store is a rendezvous for this pair only, the rank is 0
#: or 1, and ``address`` is where the other end reaches this host.
PairFactory = Callable[[Store, int, str], Pair]


def memory_at(address: int, nbytes: int) -> torch.Tensor:
    """Return memory of this process as a tensor of bytes. The caller keeps the memory alive."""
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
