"""An end of a pair whose other end told its address, and has gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torchstore_core.machine.networks import LOOPBACK
from torchstore_transports.pairs.pair import Pair, Store
from torchstore_transports.pairs.rendezvous import Board, LocalStore

__all__ = ["check_an_end_that_is_alone"]

Make = Callable[[Store, int, str, float], Pair]


class _Recorder(Board):
    """Remembers what each end says."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, bytes]] = []

    def set(self, key: str, value: bytes) -> None:
        self.said.append((key, value))
        super().set(key, value)


def check_an_end_that_is_alone(make: Make, counter: str = "") -> None:
    """It fails within the time that it was given, whichever end it is.

    Args:
        make: makes an end: store, rank, address, seconds.
        counter: a key with which a library counts the pairs of a store.
    """
    board = _Recorder()
    pairs: list[Pair] = []

    def meet(rank: int) -> None:
        pairs.append(make(LocalStore(board), rank, LOOPBACK, 20.0))

    ends = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    assert len(pairs) == 2
    pairs.clear()

    took = []
    for rank in (0, 1):
        alone = Board()
        for key, value in board.said:
            if key != counter:
                alone.set(key, value)
        began = time.monotonic()
        try:
            make(LocalStore(alone), rank, LOOPBACK, 1.0)
        except RuntimeError:
            took.append(time.monotonic() - began)
    assert len(took) == 2
    assert max(took) < 3, f"gave up after {took} s, not after one"
