"""Snapshots of the objects of a program, or of a store."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchstore_snapshot.errors import (
    RankFailedError,
    SnapshotCorruptError,
    SnapshotError,
    SnapshotExistsError,
    SnapshotFormatError,
    SnapshotNotFoundError,
    SnapshotWriterError,
)

if TYPE_CHECKING:
    from torchstore_snapshot.api.pending import PendingSnapshot
    from torchstore_snapshot.api.snapshot import Snapshot
    from torchstore_snapshot.api.stateful import AppState, RNGState, StateDict, Stateful
    from torchstore_snapshot.api.stores import load_into_store, snapshot_store

__version__ = "0.1.0"

__all__ = [
    "AppState",
    "PendingSnapshot",
    "RNGState",
    "RankFailedError",
    "Snapshot",
    "SnapshotCorruptError",
    "SnapshotError",
    "SnapshotExistsError",
    "SnapshotFormatError",
    "SnapshotNotFoundError",
    "SnapshotWriterError",
    "StateDict",
    "Stateful",
    "load_into_store",
    "snapshot_store",
]

_HOMES = {
    "AppState": "stateful",
    "PendingSnapshot": "pending",
    "RNGState": "stateful",
    "Snapshot": "snapshot",
    "StateDict": "stateful",
    "Stateful": "stateful",
    "load_into_store": "stores",
    "snapshot_store": "stores",
}


def __getattr__(name: str) -> Any:
    """Imports torch only when something is used that needs it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"torchstore_snapshot.api.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
