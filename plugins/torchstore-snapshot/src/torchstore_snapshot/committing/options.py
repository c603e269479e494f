"""How a snapshot is taken."""

from __future__ import annotations

import os
from enum import Enum
from typing import Final, Literal, NamedTuple

from torchstore_core.clients.calls.arguments import check_bools
from torchstore_core.errors import ConfigurationError
from torchstore_snapshot.format.safetensors_files import FILE_MAX
from torchstore_snapshot.progress import Progress, check_progress
from torchstore_snapshot.storage.opening import path_text

__all__ = ["NEWEST", "Base", "TakeOptions"]


class Base(Enum):
    """Which base a take chooses itself."""

    NEWEST = "newest"


#: The snapshot that was committed last of those beside the new one, if there is any.
NEWEST: Final = Base.NEWEST


class TakeOptions(NamedTuple):
    """How to take a snapshot.

    Args:
        overwrite: replace a snapshot that is already there; it stays whole until the new one is.
        fsync: flush everything before the snapshot becomes visible.
        allow_pickle: store values that need pickle, instead of refusing them.
        file_max: bytes of tensors in one data file, unless a single tensor is larger.
        threads: how many threads write; None: the number of copy threads.
        progress: who is told how far writing is.
        base: the path of a snapshot beside the new one, to whose files it refers for what has not
            changed; or :data:`NEWEST`.
        memory_budget: bytes that may be staged at a time, by a take that stages (None: a share of
            what is free), or that tensors on devices may pass through (None: two slots for each
            thread).
    """

    overwrite: bool = False
    fsync: bool = True
    allow_pickle: bool = False
    file_max: int = FILE_MAX
    threads: int | None = None
    progress: Progress = False
    base: str | os.PathLike[str] | Literal[Base.NEWEST] | None = None
    memory_budget: int | None = None

    def check(self) -> None:
        """Raise ConfigurationError if a value is invalid."""
        check_bools(overwrite=self.overwrite, fsync=self.fsync, allow_pickle=self.allow_pickle)
        check_progress(self.progress)
        if self.base is not None and self.base is not NEWEST:
            path_text(self.base)
        for name in ("file_max", "threads", "memory_budget"):
            number: object = getattr(self, name)
            if (type(number) is not int or number < 1) and not (
                number is None and name != "file_max"
            ):
                raise ConfigurationError(f"{name} is an int above 0, not {number!r}")
