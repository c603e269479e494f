"""How many bytes one call of the engine moves."""

from __future__ import annotations

__all__ = ["ChunkSize"]

# A call that takes longer is too large, since progress only shows at its end; one that takes less
# than an eighth of that may be larger.
_LONG_S = 0.4
_QUICK_S = _LONG_S / 8


class ChunkSize:
    """Grows while calls are quick, because each has its cost; shrinks where the network is slow, so
    that a slow transfer can be told from one that stands still.

    Args:
        least: the smallest size in bytes, with which it begins.
        most: the largest.

    >>> size = ChunkSize(1 << 20, 8 << 20)
    >>> size.record(1 << 20, seconds=0.01)
    >>> size.record(2 << 20, seconds=0.02)
    >>> size.nbytes >> 20
    4
    >>> size.record(4 << 20, seconds=1.0)
    >>> size.nbytes >> 20
    2
    """

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most
        #: The size of the next call.
        self.nbytes = least

    def record(self, nbytes: int, seconds: float) -> None:
        """A call with that many bytes took so long."""
        if seconds > _LONG_S:
            self.nbytes = max(self._least, min(self.nbytes, nbytes) // 2)
        elif seconds < _QUICK_S and nbytes >= self.nbytes:
            self.nbytes = min(self._most, 2 * self.nbytes)
