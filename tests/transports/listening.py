"""At which ports processes listen, as the kernel says."""

from __future__ import annotations

import contextlib
from pathlib import Path

from torchstore_core.testing import leftovers

__all__ = ["descendants", "listening"]


def descendants(pid: int) -> set[int]:
    """A process, and all that it has started."""
    found = {pid}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends at this moment
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found |= descendants(int(child))
    return found


def listening(pid: int) -> set[tuple[str, int]]:
    """Where a process and all that it has started listen: addresses as the kernel writes them, and
    ports.
    """
    return leftovers.listening(descendants(pid))
