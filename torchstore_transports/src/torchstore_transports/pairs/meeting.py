"""Making a pair, to which nobody else can connect afterwards. Imports torch."""

from __future__ import annotations

from torchstore_transports.listeners import listeners, refuse_all
from torchstore_transports.pairs.connection import PairConnection
from torchstore_transports.pairs.pair import PairFactory
from torchstore_transports.pairs.rendezvous import PairStore

__all__ = ["meet"]


def meet(make: PairFactory, store: PairStore, rank: int, address: str) -> PairConnection:
    """Make a pair. Blocks until both ends have been made.

    gloo listens as long as its pair exists, and keeps a descriptor for whoever connects. An end
    tells the other, through the store, where it listens: those sockets take nobody else.

    Raises:
        RuntimeError: see :data:`~.pair.PairFactory`.
    """
    pair = make(store, rank, address)
    if pair.device.type == "cpu":
        told = b"\0".join(store.told)
        refuse_all([one.inode for one in listeners() if one.packed() in told])
    return PairConnection(pair)
