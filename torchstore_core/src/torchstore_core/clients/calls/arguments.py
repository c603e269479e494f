"""Checks of the keys and versions that callers pass. Torch-free."""

from __future__ import annotations

from torchstore_core.errors import ConfigurationError, UnsupportedValueError
from torchstore_core.wire import messages as m

__all__ = ["check_key", "check_version"]


def check_key(key: object) -> str:
    """Return ``key`` if it is a valid key.

    Raises:
        UnsupportedValueError: it is not a str, is empty, or is too long.
    """
    if isinstance(key, str) and 0 < len(key) <= m.MAX_KEY:
        return key
    what = f"{len(key)} characters" if isinstance(key, str) else type(key).__qualname__
    raise UnsupportedValueError(f"a key is a str of 1 to {m.MAX_KEY} characters, not {what}")


def check_version(version: int | None) -> int:
    """Return the version that the caller of a put or a get passed; 0 for None.

    Raises:
        ConfigurationError: it is not a valid version.
    """
    if version is None:
        return 0
    if type(version) is not int or not 0 < version < 1 << 62:
        raise ConfigurationError(f"a version is an int above 0 and below 2**62, not {version!r}")
    return version
