"""The check of ``timeout=`` arguments. Torch-free."""

from __future__ import annotations

from numbers import Real
from typing import Any

from torchstore_core.errors import ConfigurationError

__all__ = ["check_timeout"]

_LONGEST_S = 1e9  # 31 years; with longer time-outs clocks and locks overflow


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
