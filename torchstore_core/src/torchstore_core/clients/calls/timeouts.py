"""What a ``timeout=`` may be, in every call. Torch-free."""

from __future__ import annotations

from numbers import Real
from typing import Any

from torchstore_core.errors import ConfigurationError

__all__ = ["check_timeout"]

_LONGEST_S = 1e9  # 31 years: beyond it clocks and locks overflow


def check_timeout(timeout: object, *, above_zero: bool = False) -> float | None:
    """Seconds as a float; None waits for ever, as infinity does. More than 31 years are 31 years.

    Raises:
        ConfigurationError: it is no number, NaN, or negative; or 0, if it is to be ``above_zero``.
    """
    if timeout is None:
        return None
    # A number of numpy or a fraction, too, but no str, which float() would take.
    if not isinstance(timeout, bool) and isinstance(timeout, Real):
        number: Any = timeout
        if number == float("inf"):
            return None
        if number > 0 or (number == 0 and not above_zero):
            return float(number) if number < _LONGEST_S else _LONGEST_S
    least = "above 0" if above_zero else "at least 0"
    raise ConfigurationError(f"timeout is seconds, {least}, or None, not {_shown(timeout)}")


def _shown(given: object) -> str:
    """For an error, which a number of thousands of digits is nothing for (nor can it be a str)."""
    if isinstance(given, int) and abs(given) > _LONGEST_S:
        return "so large a negative number"
    return repr(given)[:100]
