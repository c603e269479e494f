"""At which ports processes listen, as the kernel says."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

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
    inodes = set()
    for one in descendants(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for entry in Path(f"/proc/{one}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # it was just closed
                    link = os.readlink(entry)
                    if link.startswith("socket:"):
                        inodes.add(link[8:-1])
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found
