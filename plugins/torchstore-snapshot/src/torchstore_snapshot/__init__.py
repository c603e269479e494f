"""Snapshots of the objects of a program, or of a store."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchstore_snapshot.errors import (
    AppStateError,
    BucketNotFoundError,
    ForeignFileError,
    NotAtomicError,
    NotWrittenError,
    RankFailedError,
    SnapshotAccessError,
    SnapshotCorruptError,
    SnapshotError,
    SnapshotExistsError,
    SnapshotFormatError,
    SnapshotNotFoundError,
    SnapshotReplacedError,
    SnapshotStorageError,
    SnapshotUnavailableError,
    SnapshotUndecidedError,
    SnapshotVersionError,
    SnapshotWriterError,
    TakeLostError,
)

if TYPE_CHECKING:
    from torchstore_snapshot.api.pending import PendingSnapshot
    from torchstore_snapshot.api.series import Series
    from torchstore_snapshot.api.snapshot import Snapshot
    from torchstore_snapshot.api.stateful import AppState, RNGState, StateDict, Stateful
    from torchstore_snapshot.api.stores import load_into_store, snapshot_store
    from torchstore_snapshot.background.staging import warm_up
    from torchstore_snapshot.series.gc import GcReport, gc

__version__ = "0.1.0"

__all__ = [
    "AppState",
    "AppStateError",
    "BucketNotFoundError",
    "ForeignFileError",
    "GcReport",
    "NotAtomicError",
    "NotWrittenError",
    "PendingSnapshot",
    "RNGState",
    "RankFailedError",
    "Series",
    "Snapshot",
    "SnapshotAccessError",
    "SnapshotCorruptError",
    "SnapshotError",
    "SnapshotExistsError",
    "SnapshotFormatError",
    "SnapshotNotFoundError",
    "SnapshotReplacedError",
    "SnapshotStorageError",
    "SnapshotUnavailableError",
    "SnapshotUndecidedError",
    "SnapshotVersionError",
    "SnapshotWriterError",
    "StateDict",
    "Stateful",
    "TakeLostError",
    "gc",
    "load_into_store",
    "snapshot_store",
    "warm_up",
]

_HOMES = {
    "AppState": "api.stateful",
    "GcReport": "series.gc",
    "PendingSnapshot": "api.pending",
    "RNGState": "api.stateful",
    "Series": "api.series",
    "Snapshot": "api.snapshot",
    "StateDict": "api.stateful",
    "Stateful": "api.stateful",
    "gc": "series.gc",
    "load_into_store": "api.stores",
    "snapshot_store": "api.stores",
    "warm_up": "background.staging",
}


def __getattr__(name: str) -> Any:
    """Imports torch only when something is used that needs it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"torchstore_snapshot.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
