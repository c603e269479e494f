"""What a simulation finds."""

from __future__ import annotations

__all__ = ["Violation"]


class Violation(Exception):
    """Something that the store promises does not hold.

    Args:
        kind: which promise: one word.
        what: what was seen.
    """

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind
        self.what = what
