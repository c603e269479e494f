"""Environment variables that are on or off. Torch-free."""

from __future__ import annotations

import os

from torchstore_core.errors import ConfigurationError

_MEANINGS = {"1": True, "true": True, "0": False, "false": False}


def is_on(variable: str, *, default: bool = False) -> bool:
    """What a switch says: ``1`` or ``true``, ``0`` or ``false``; ``default`` if it is not set, or
    empty.

    Raises:
        ConfigurationError: it is something else.
    """
    text = os.environ.get(variable, "").strip().lower()
    if not text:
        return default
    try:
        return _MEANINGS[text]
    except KeyError:
        raise ConfigurationError(f"{variable} is 0 or 1, not {text!r}") from None
