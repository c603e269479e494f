"""Checks of what callers pass: keys, versions, sizes and times. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, TypeVar

from torchstore_core.errors import ConfigurationError, UnsupportedValueError, VersionGoneError
from torchstore_core.wire import messages as m

_LONGEST_S = 1e9  # 31 years; with longer time-outs clocks and locks overflow
T = TypeVar("T")
_SURROGATES = re.compile("[\ud800-\udfff]")


def check_key(key: object) -> str:
    """Return ``key`` as a plain str, if it is a valid key. (Messages and refs have no other kind,
    such as the strings of numpy.)

    Raises:
        UnsupportedValueError: it is not a str, is empty or too long, or has half a character.
    """
    if isinstance(key, str) and 0 < len(key) <= m.MAX_KEY:
        if key.isascii() or not _SURROGATES.search(key):
            return key if type(key) is str else str.__str__(key)
        raise UnsupportedValueError(
            f"a key is Unicode text, and {key!r} has half a character, a surrogate"
        )
    what = f"{len(key)} characters" if isinstance(key, str) else type(key).__qualname__
    instead = ""
    if isinstance(key, list | tuple | set):
        instead = "; for several keys there are get_batch, put_batch and delete_batch"
    elif isinstance(key, Mapping):
        instead = "; a state dict is the first argument of put_state_dict, its key the second"
    elif isinstance(key, os.PathLike):
        instead = "; str() makes one of a path"
    raise UnsupportedValueError(
        f"a key is a str of 1 to {m.MAX_KEY} characters, not {what}{instead}"
    )


def listed(given: Iterable[T], needed: str) -> list[T]:
    """Return all items of an iterable, which a tensor without dimensions is in name only.

    Raises:
        UnsupportedValueError: it cannot be iterated over; the text begins with what is ``needed``.
    """
    try:
        items = iter(given)
    except TypeError as error:
        raise UnsupportedValueError(f"{needed}, not {given!r}") from error
    return list(items)


def check_store_name(name: object) -> str:
    """Return the name of a store if it can be one.

    Raises:
        ConfigurationError: it is no str, or is empty.
    """
    if isinstance(name, str) and name:
        return name
    raise ConfigurationError(f"store_name is a non-empty str, not {name!r}")


def check_bools(**given: object) -> None:
    """Check arguments, by name, that are either True or False: text that means no would be true.

    Raises:
        ConfigurationError: one is something else.
    """
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name} is a bool, not {value!r}")


def check_version(version: int | None, *, rewind: object = False) -> int:
    """Return the version that the caller of a put or a get passed; 0 for None.

    Raises:
        ConfigurationError: it is not a valid version, or is missing from a put that goes back.
    """
    if type(rewind) is not bool:
        check_bools(rewind=rewind)
    if rewind and version is None:
        raise ConfigurationError("rewind=True goes back to a version; say which (version=)")
    if version is None:
        return 0
    if type(version) is not int or not 0 < version < 1 << 62:
        raise ConfigurationError(f"a version is an int above 0 and below 2**62, not {version!r}")
    return version


def check_exact(key: str, version: int) -> int:
    """Check an explicit version: to the server, 0 would mean the newest one."""
    if type(version) is not int:
        raise UnsupportedValueError(f"a version is an int, not a {type(version).__qualname__}")
    if not 0 < version < 1 << 63:
        raise VersionGoneError(f"there never was a version {version} of {key!r}", key=key)
    return version


def check_size(nbytes: object) -> None:
    """Raise UnsupportedValueError unless ``nbytes`` is a number of bytes."""
    if not isinstance(nbytes, int) or nbytes < 0:
        raise UnsupportedValueError(
            f"explain takes a number of bytes, an int of 0 or more, not {nbytes!r}"
        )


def check_min_version(version: object) -> None:
    """Raise UnsupportedValueError unless ``version`` is one that can be waited for, or None."""
    if version is None or (type(version) is int and -(1 << 63) <= version < 1 << 63):
        return
    raise UnsupportedValueError(f"min_version is an int or None, not {version!r}")


def check_timeout(timeout: object, *, above_zero: bool = False) -> float | None:
    """Return the seconds as a float; None, also for infinity, means no limit. The longest time-out
    is 31 years.

    Raises:
        ConfigurationError: it is not a number, is NaN or negative, or is 0 with ``above_zero``.
    """
    if timeout is None:
        return None
    # Numbers of numpy and fractions are accepted, but not a str, which float() would accept.
    if not isinstance(timeout, bool) and isinstance(timeout, Real):
        number: Any = timeout
        if number == float("inf"):
            return None
        if number > 0 or (number == 0 and not above_zero):
            return float(number) if number < _LONGEST_S else _LONGEST_S
    least = "above 0" if above_zero else "at least 0"
    raise ConfigurationError(f"timeout is seconds, {least}, or None, not {_shown(timeout)}")


def _shown(given: object) -> str:
    """Return the argument as text for the error; an int of thousands of digits has no str()."""
    if isinstance(given, int) and abs(given) > _LONGEST_S:
        return "so large a negative number"
    return repr(given)[:100]
