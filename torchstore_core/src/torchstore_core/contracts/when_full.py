"""What is done with a value when memory is full: the words for it, as users write them."""

from __future__ import annotations

import os

from torchstore_core.errors import ConfigurationError

__all__ = ["WHEN_FULL", "check_spill", "check_when_full", "when_full_code"]

#: The words, and the numbers that messages have for them.
WHEN_FULL = {"pinned": 1, "spillable": 2, "evictable": 3}


def when_full_code(word: object) -> int:
    """The number for a word; 0 for None, which leaves it to the store.

    Raises:
        ConfigurationError: there is no such word.

    >>> when_full_code("spillable"), when_full_code(None)
    (2, 0)
    """
    if word is None:
        return 0
    code = WHEN_FULL.get(word) if isinstance(word, str) else None
    if code is None:
        words = ", ".join(map(repr, WHEN_FULL))
        raise ConfigurationError(f"when_full is one of {words}, or None, not {word!r}")
    return code


def check_when_full(word: str | None, spill: str | None) -> None:
    """Check the default of a store.

    Raises:
        ConfigurationError: there is no such word, or the store has no place to spill to.
    """
    when_full_code(word)
    if word == "spillable" and spill is None:
        raise ConfigurationError(
            'when_full="spillable" needs a place to spill to: pass spill= (a directory), too'
        )


def check_spill(spill: object, capacity: object) -> str | None:
    """Return the directory to spill to, as an absolute path; None if nothing is to be spilled.

    Raises:
        ConfigurationError: it is not a path, or the capacity is not a number of bytes.
    """
    if capacity is not None and (type(capacity) is not int or capacity < 4096):
        raise ConfigurationError(
            f"spill_capacity is a whole number of bytes, at least a page, not {capacity!r}"
        )
    if spill is None:
        if capacity is not None:
            raise ConfigurationError("spill_capacity= needs spill=, the directory to spill to")
        return None
    if not isinstance(spill, str | os.PathLike):
        raise ConfigurationError(f"spill is the path of a directory, or None, not {spill!r}")
    path = os.fspath(spill)
    if not isinstance(path, str) or not path:
        raise ConfigurationError(f"spill is the path of a directory, not {path!r}")
    scheme, separator, rest = path.partition("://")
    if separator and scheme != "file":
        raise ConfigurationError(
            f"spill={path!r}: a store spills to a directory of a local disk. Object storage and "
            "other URLs would need a back end for spilling, and there is none for "
            f"{scheme!r} yet; to keep copies there, take snapshots (torchstore-snapshot)",
            details={"spill": path},
        )
    return os.path.abspath(os.path.expanduser(rest if separator else path))
