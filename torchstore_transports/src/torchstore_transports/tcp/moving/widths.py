"""How many streams a link should use, found by trying."""

from __future__ import annotations

from collections import deque

__all__ = ["CHOICES", "LARGE", "Widths"]

#: Numbers of streams that are tried.
CHOICES = (1, 2, 4, 8)
#: Batches of at least this size are measured; smaller ones show latency rather than rate.
LARGE = 64 << 20

_FIRST = 2
_SAMPLES = 2  # measured before a width is judged; the first one often pays for new connections
_KEPT = 3
_BETTER = 1.05  # factor by which more streams must be faster; less is noise
_LOOK_AGAIN = 32  # batches after which a neighbour is measured again
_SMALL = 4 << 20


class Widths:
    """The rates measured for each number of streams, and the choice for the next batch.

    The choice climbs: the neighbours of the best width so far are tried, too. Every now and then,
    one of them is measured again, because networks change.
    """

    def __init__(self) -> None:
        self._rates: dict[int, deque[float]] = {}
        self._batches = 0

    def choose(self, nbytes: int) -> int:
        """Return the number of streams for a batch of ``nbytes`` bytes."""
        best = self.best()
        if nbytes < LARGE:
            return max(1, min(best, nbytes // _SMALL))
        around = [width for width in (best, *self._neighbours(best)) if not self._judged(width)]
        if around:
            return around[0]
        self._batches += 1
        if self._batches % _LOOK_AGAIN == 0:
            neighbours = self._neighbours(best)
            return neighbours[self._batches // _LOOK_AGAIN % len(neighbours)]
        return best

    def record(self, width: int, nbytes: int, seconds: float) -> None:
        """Record how long a batch of ``nbytes`` bytes took with ``width`` streams."""
        if nbytes >= LARGE and seconds > 0:
            kept = self._rates.setdefault(width, deque(maxlen=_KEPT))
            kept.append(nbytes / seconds)

    def best(self) -> int:
        """Return the width with the best rate so far; if rates are nearly equal, the smaller one.

        >>> widths = Widths()
        >>> for width, seconds in ((2, 2.0), (2, 1.0), (4, 0.99), (4, 0.99)):
        ...     widths.record(width, 1 << 30, seconds)
        >>> widths.best()
        2
        """
        best, best_rate = 0, 0.0
        for width in CHOICES:
            rate = max(self._rates.get(width, ()), default=0.0)
            if rate > best_rate * _BETTER:
                best, best_rate = width, rate
        return best or _FIRST

    def _judged(self, width: int) -> bool:
        return len(self._rates.get(width, ())) >= _SAMPLES

    def _neighbours(self, width: int) -> list[int]:
        at = CHOICES.index(width)
        return [*CHOICES[at + 1 : at + 2], *CHOICES[max(0, at - 1) : at]]
