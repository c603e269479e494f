"""What the ranks, and the root process, tell each other: plain data, as JSON."""

from __future__ import annotations

import msgspec

__all__ = ["RootOrder", "StoreReport"]


class StoreReport(msgspec.Struct, frozen=True):
    """What the ranks are told: Unix sockets by host id, or why there is no store (an error code of
    ``torchstore_core.errors``, and its message).
    """

    sockets: dict[str, str] = {}
    error: str = ""
    message: str = ""


class RootOrder(msgspec.Struct, frozen=True):
    """What the root process is to do.

    Args:
        workers: where the hosts' workers listen.
        request: the store, an encoded ``protocol.StoreRequest``.
        loopback: all workers are on this machine's loopback interface.
        address: where the root itself listens (``tcp://ip:port``), if they are not.
    """

    workers: list[str]
    request: bytes
    loopback: bool
    address: str
