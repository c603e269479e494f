"""Warnings that show the line of the user's code that they are about. Torch-free."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn"]

# Whose code it is that calls a coroutine of ours: theirs is not.
_BETWEEN = ("torchstore_core", "asyncio", "contextlib")


def warn(text: str) -> None:
    """A RuntimeWarning at the line of the user's that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=level)
