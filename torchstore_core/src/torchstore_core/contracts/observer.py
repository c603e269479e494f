"""What an observer plug-in (group ``torchstore.plugins``) is told about each client operation."""

from __future__ import annotations

import msgspec

__all__ = ["Operation"]


class Operation(msgspec.Struct, frozen=True):
    """One finished client operation.

    Args:
        name: ``put``, ``get``, ``delete``, ...
        store_name: which store.
        entries: number of keys.
        nbytes: tensor bytes moved or mapped.
        transport: name of the transport that moved them, ``""`` if none did.
        seconds: from call to return, by the monotonic clock.
        phases: seconds by phase: ``plan`` (control message), ``copy``, ``commit``.
        error: code of the error it ended with, ``""`` if it succeeded.
    """

    name: str
    store_name: str
    entries: int
    nbytes: int
    transport: str
    seconds: float
    phases: dict[str, float]
    error: str = ""
