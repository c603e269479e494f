"""The messages between the ranks and the root process: plain data, as JSON."""

from __future__ import annotations

import msgspec


class StoreReport(msgspec.Struct, frozen=True):
    """The outcome of a start: Unix sockets by host id, or why there is no store (an error code of
    ``torchstore_core.errors``, and its message).
    """

    sockets: dict[str, str] = {}
    error: str = ""
    message: str = ""


class RootOrder(msgspec.Struct, frozen=True):
    """What the root process must start.

    Args:
        workers: the addresses at which the hosts' workers listen.
        request: the store, an encoded ``protocol.StoreRequest``.
        loopback: whether all workers are on this machine's loopback interface.
        address: where the root itself listens (``tcp://ip:port``), unless ``loopback``.
    """

    workers: list[str]
    request: bytes
    loopback: bool
    address: str
