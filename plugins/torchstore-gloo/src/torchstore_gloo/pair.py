"""Pairs made from ``ProcessGroupGloo``."""

from __future__ import annotations

import contextlib
import functools
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from torchstore_transports.pairs.pair import TIMEOUT_S, Pair, Store, Wait

__all__ = ["GlooPair", "make"]

_TIMEOUT = timedelta(seconds=TIMEOUT_S)
# gloo waits for a connection this many times its time-out, which is therefore divided by it: an end
# whose peer has vanished must not wait, with descriptors and threads, long after it was given up.
_CONNECT_FACTOR = 5
# gloo matches the messages of a tag in the order in which they were sent.
_TAG, _NEVER_SENT = 1, 2
_Group: Any = distributed.ProcessGroupGloo  # torch does not describe its methods


class GlooPair(Pair):
    """A process group of two processes, which is not registered with ``torch.distributed``."""

    def __init__(self, group: Any, store: Store, peer: int) -> None:
        self._group = group
        self._store = store  # the group calls methods that are implemented in Python
        self._peer = peer

    def send(self, tensor: torch.Tensor) -> Wait:
        """See ``Pair``."""
        work = self._group.send([tensor], self._peer, _TAG)
        return functools.partial(_wait, work, tensor)

    def receive(self, tensor: torch.Tensor) -> Wait:
        """See ``Pair``."""
        work = self._group.recv([tensor], self._peer, _TAG)
        return functools.partial(_wait, work, tensor)

    def kill(self) -> None:
        """See ``Pair``.

        gloo cannot interrupt a wait, but it closes the connection of a pair as soon as one wait has
        timed out. It does so under the lock under which it reads and writes the socket, so it
        touches no message afterwards.
        """
        with contextlib.suppress(RuntimeError):  # the time-out, or an earlier failure of the pair
            nothing = torch.empty(1, dtype=torch.uint8)
            self._group.recv([nothing], self._peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


def _wait(work: Any, tensor: torch.Tensor) -> None:
    """Wait for ``work``. The tensor is an argument so that it lives until then."""
    work.wait(_TIMEOUT)


def make(store: Store, rank: int, address: str, timeout_s: float = TIMEOUT_S) -> Pair:
    """See ``torchstore_transports.pairs.pair.PairFactory``.

    The time-out of the group is only for its connections: messages have one of their own.
    """
    options = _Group._Options()
    options._devices = [_Group.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout_s) / _CONNECT_FACTOR
    options._threads = 1
    return GlooPair(_Group(store, rank, 2, options), store, 1 - rank)
