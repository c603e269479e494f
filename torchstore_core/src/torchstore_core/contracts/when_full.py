"""What is done with a value when memory is full: the words for it, as users write them."""

from __future__ import annotations

import os
import re

from torchstore_core.errors import ConfigurationError

__all__ = [
    "SPILL_URL",
    "URL_END_S",
    "WHEN_FULL",
    "check_spill",
    "check_when_full",
    "is_url",
    "shown_place",
    "when_full_code",
]

#: The words, and the numbers that messages have for them.
WHEN_FULL = {"pinned": 1, "spillable": 2, "evictable": 3}

#: The variable that has the URL to spill to for a server that is started: the list of processes
#: shows to all what is on command lines.
SPILL_URL = "TORCHSTORE_SPILL_URL"

#: How many seconds more the end of a store may take that has to delete what it has at a URL.
URL_END_S = 8.0


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
            'when_full="spillable" needs a place to spill to: pass spill= (a directory or URL), too'
        )


def check_spill(spill: object, capacity: object) -> str | None:
    """Return the place to spill to: the absolute path of a directory, or a URL; None if nothing is
    to be spilled.

    Raises:
        ConfigurationError: it is neither, or the capacity is not a number of bytes.

    >>> check_spill("file:///local/disk", None), check_spill("s3://bucket/prefix/", None)
    ('/local/disk', 's3://bucket/prefix')
    """
    if capacity is not None and (type(capacity) is not int or capacity < 4096):
        raise ConfigurationError(
            f"spill_capacity is a whole number of bytes, at least a page, not {capacity!r}"
        )
    if spill is None:
        if capacity is not None:
            raise ConfigurationError("spill_capacity= needs spill=, the place to spill to")
        return None
    if not isinstance(spill, str | os.PathLike):
        raise ConfigurationError(f"spill is the path of a directory, a URL, or None, not {spill!r}")
    path = os.fspath(spill)
    if not isinstance(path, str) or not path:
        raise ConfigurationError(f"spill is the path of a directory, or a URL, not {path!r}")
    scheme, separator, rest = path.partition("://")
    if separator and scheme not in ("file", "local"):
        if not scheme:
            raise ConfigurationError(f"spill={path!r} is a URL without a protocol")
        if "?versionId=" in path:  # all that follows would be taken for the version
            raise ConfigurationError(
                f"spill={shown_place(path)!r} names a version of one object; give the beginning of "
                "the names of many, without ?versionId="
            )
        return path.rstrip("/") if rest.rstrip("/") else path
    try:
        return os.path.abspath(os.path.expanduser(rest if separator else path))
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"spill={path!r} is below the current directory, which somebody has removed; give the "
            "absolute path of a directory"
        ) from error


def is_url(place: str) -> bool:
    """Whether a place to spill to, as :func:`check_spill` returns it, is a URL."""
    return "://" in place


def shown_place(place: str) -> str:
    """A place to spill to for people and logs: without what only its user may know.

    >>> shown_place("ftp://me:secret@host/a?token=b"), shown_place("s3://bucket/a")
    ('ftp://***@host/a?***', 's3://bucket/a')
    """
    if not is_url(place):
        return place
    return _QUERY.sub(r"\1***", _USER.sub("://***@", place))


_USER = re.compile(r"://[^/]*@")
_QUERY = re.compile(r"([?#])[^:]*")
