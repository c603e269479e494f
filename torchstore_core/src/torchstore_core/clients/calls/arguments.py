"""Checks of the keys and versions that callers pass. Torch-free."""

from __future__ import annotations

import re

from torchstore_core.errors import ConfigurationError, UnsupportedValueError
from torchstore_core.wire import messages as m

__all__ = ["check_allow_pickle", "check_key", "check_version"]

_SURROGATES = re.compile("[\ud800-\udfff]")


def check_key(key: object) -> str:
    """Return ``key`` if it is a valid key.

    Raises:
        UnsupportedValueError: it is not a str, is empty or too long, or has half a character.
    """
    if isinstance(key, str) and 0 < len(key) <= m.MAX_KEY:
        if key.isascii() or not _SURROGATES.search(key):
            return key
        raise UnsupportedValueError(
            f"a key is Unicode text, and {key!r} has half a character, a surrogate"
        )
    what = f"{len(key)} characters" if isinstance(key, str) else type(key).__qualname__
    raise UnsupportedValueError(f"a key is a str of 1 to {m.MAX_KEY} characters, not {what}")


def check_allow_pickle(given: object) -> bool:
    """Return ``given`` if it is a bool: text that means no would be true.

    Raises:
        ConfigurationError: it is something else.
    """
    if not isinstance(given, bool):
        raise ConfigurationError(f"allow_pickle is a bool, or None, not {given!r}")
    return given


def check_version(version: int | None, *, rewind: object = False) -> int:
    """Return the version that the caller of a put or a get passed; 0 for None.

    Raises:
        ConfigurationError: it is not a valid version, or is missing from a put that goes back.
    """
    if rewind is not False and (rewind is not True or version is None):
        if rewind is True:
            raise ConfigurationError("rewind=True goes back to a version; say which (version=)")
        raise ConfigurationError(f"rewind is a bool, not {rewind!r}")
    if version is None:
        return 0
    if type(version) is not int or not 0 < version < 1 << 62:
        raise ConfigurationError(f"a version is an int above 0 and below 2**62, not {version!r}")
    return version
