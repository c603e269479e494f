"""In which order the snapshots of a series were committed, whatever clocks said."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torchstore_snapshot.format.heads import HEAD_BYTES, Head, found_head
from torchstore_snapshot.format.paths import MANIFEST
from torchstore_snapshot.storage.base import Storage
from torchstore_snapshot.threads import run_tasks

__all__ = ["next_sequence", "read_head"]

_THREADS = 8


def read_head(folder: Storage) -> Head | None:
    """Return the head of the manifest in a folder; None if there is none that can be read."""
    try:
        return found_head(folder.read_start(MANIFEST, HEAD_BYTES))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None


def next_sequence(folder: Storage, after: int) -> int:
    """Return the number of a snapshot that is committed now: greater than those of all snapshots
    beside it.

    Args:
        after: a number that it is also to be greater than: that of a snapshot to whose files the
            new one refers, and which may be gone by now.

    Raises:
        OSError: the storage failed.
    """
    found = [after]

    def look(name: str) -> None:
        head = read_head(folder.sibling(name))
        if head is not None:
            found.append(head.sequence)

    names = folder.siblings()
    tasks: list[Callable[[], None]] = [partial(look, name) for name in names]
    run_tasks(tasks, min(_THREADS, max(1, len(names) // 4)))
    return max(found) + 1
