"""Warnings that point to the line of the user's code that caused them. Torch-free."""

from __future__ import annotations

import sys
import warnings

# Frames of these packages are between the user's code and ours, and are skipped.
_BETWEEN = ("torchstore_core", "asyncio", "contextlib")


def warn(text: str) -> None:
    """Issue a RuntimeWarning for the innermost line of the user's code on the stack."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=level)
