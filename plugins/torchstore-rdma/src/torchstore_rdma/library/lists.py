"""Descriptor lists that the library has prepared, kept for layouts that repeat.

The same tensors are moved at every step of a training. To prepare a list, the library looks up each
piece among all that is registered, which takes several times as long as to find the list again
where each tensor has a registration of its own. A prepared list refers to registrations: one of
local memory is forgotten before any of that memory is deregistered. The peer's segments stay
registered as long as the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Lists", "Prepared"]

# With its key, a list takes some 100 bytes for each piece.
_MOST_PIECES = 1 << 18
_Key = tuple[str, bytes]


class Prepared:
    """A prepared list. ``kept``: it may serve further transfers.

    Args:
        span: the first address of its memory, and the end.
    """

    __slots__ = ("handle", "kept", "pieces", "span", "users")

    def __init__(self, handle: Any, pieces: int, span: tuple[int, int]) -> None:
        self.handle = handle
        self.pieces = pieces
        self.span = span
        self.users = 0
        self.kept = True


class Lists:
    """The prepared lists of an agent, the least recently used first to go. For one thread.

    Args:
        prepare: prepares rows of ``address, nbytes, 0, stride, count`` of a peer's memory or, if
            its name is empty, of memory of this process.
        most: how many pieces the lists that are kept may have together.
    """

    def __init__(
        self, prepare: Callable[[str, np.ndarray[Any, Any]], Any], most: int = _MOST_PIECES
    ) -> None:
        self._prepare = prepare
        self._most = most
        self._kept: dict[_Key, Prepared] = {}  # the least recently used one first
        self._pieces = 0

    def take(self, peer: str, rows: np.ndarray[Any, Any], pieces: int) -> Prepared:
        """Return a list for a transfer, until :meth:`give_back`."""
        key = peer, rows.tobytes()
        one = self._kept.pop(key, None)
        if one is None:
            one = Prepared(self._prepare(peer, rows), pieces, _span(rows))
            self._pieces += pieces
        self._kept[key] = one
        one.users += 1
        while self._pieces > self._most:
            self._forget(next(iter(self._kept)))
        return one

    def give_back(self, used: Sequence[Prepared]) -> None:
        """A transfer has ended, or has never begun."""
        for one in used:
            one.users -= 1
            if not (one.kept or one.users):
                one.handle.release()

    def forget(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Keep no list of local memory near any of these, ``(address, nbytes)``."""
        first = min(address for address, _ in ranges)
        end = max(address + nbytes for address, nbytes in ranges)
        for key, one in self._kept.copy().items():
            if not key[0] and one.span[0] < end and first < one.span[1]:
                self._forget(key)

    def clear(self) -> None:
        """Keep none."""
        for key in list(self._kept):
            self._forget(key)

    def _forget(self, key: _Key) -> None:
        one = self._kept.pop(key)
        one.kept = False
        self._pieces -= one.pieces
        if not one.users:
            one.handle.release()


def _span(rows: np.ndarray[Any, Any]) -> tuple[int, int]:
    starts, nbytes, strides, counts = (rows[:, at] for at in (0, 1, 3, 4))
    return int(starts.min()), int((starts + (counts - 1) * strides + nbytes).max())
