"""The values that lack copies, those with the fewest copies first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from torchstore_core.server.index.records import Value


class Entry(msgspec.Struct, eq=False):
    """A value that lacks copies.

    Args:
        key: by which the strategy places it; that of an entry of a state dict is ``<key>/<name>``.
        copies: how many copies there are of it.
        why: why it cannot be copied at the moment; empty if it is not known that it cannot.
        waits: whether it only waits for memory of its own volume, to be read from disk.
    """

    value: Value
    key: str
    copies: int
    why: str = ""
    waits: bool = False


class Backlog:
    """Values that wait for a copy.

    Attributes:
        nbytes: how many bytes they have.
    """

    def __init__(self) -> None:
        self._queues: dict[int, deque[Entry]] = {}  # by the number of copies that there are
        self._known: dict[int, Entry] = {}  # by the id() of the value
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def add(self, entry: Entry, *, first: bool = False) -> None:
        """Add a value. ``first``: it is the next one among those with as many copies."""
        known = self._known.get(id(entry.value))
        if known is None:
            self.nbytes += entry.value.nbytes
        elif known.copies <= entry.copies:
            return
        self._known[id(entry.value)] = entry
        queue = self._queues.setdefault(entry.copies, deque())
        if first:
            queue.appendleft(entry)
        else:
            queue.append(entry)

    def take(self) -> Entry | None:
        """Remove and return the next value; None if there is none."""
        for copies in sorted(self._queues):
            queue = self._queues[copies]
            while queue:
                entry = queue.popleft()
                if self._known.get(id(entry.value)) is entry:
                    self.forget(entry.value)
                    return entry
            del self._queues[copies]
        return None

    def forget(self, value: Value) -> None:
        """Remove a value, if it is there."""
        if self._known.pop(id(value), None) is not None:
            self.nbytes -= value.nbytes


class Parked:
    """Values that lack copies and cannot have any at the moment.

    Attributes:
        nbytes: how many bytes they have.
    """

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}  # by the id() of the value
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def add(self, entry: Entry, why: str) -> None:
        """Add a value, and why it cannot be copied."""
        entry.why = why
        if self._entries.setdefault(id(entry.value), entry) is entry:
            self.nbytes += entry.value.nbytes

    def forget(self, value: Value) -> None:
        """Remove a value, if it is there."""
        if self._entries.pop(id(value), None) is not None:
            self.nbytes -= value.nbytes

    def take_all(self) -> list[Entry]:
        """Remove and return all of them."""
        entries = list(self._entries.values())
        self._entries.clear()
        self.nbytes = 0
        return entries
