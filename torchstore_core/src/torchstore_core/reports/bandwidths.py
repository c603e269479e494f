"""How much of a network the store may use to replace copies that were lost."""

from __future__ import annotations

from collections.abc import Mapping

from torchstore_core.errors import ConfigurationError
from torchstore_core.reports.units import parse_bytes

#: The environment variable that sets it where no argument does.
VARIABLE = "TORCHSTORE_REPAIR_BANDWIDTH"
#: Most bytes to copy per second, if nothing else is said.
DEFAULT_BANDWIDTH = 256 << 20


def repair_bandwidth(given: object, environment: Mapping[str, str]) -> int:
    """Return the most bytes to copy per second; 0: no limit.

    Args:
        given: a number; None: that of the environment, a size such as ``512MB``, or the default.

    Raises:
        ConfigurationError: it is no number of bytes that is at least 0.

    >>> repair_bandwidth(None, {}), repair_bandwidth(None, {VARIABLE: "1KiB"})
    (268435456, 1024)
    """
    if given is None:
        text = environment.get(VARIABLE, "")
        if not text:
            return DEFAULT_BANDWIDTH
        try:
            return parse_bytes(text)
        except ValueError as error:
            raise ConfigurationError(f"{VARIABLE} is bytes per second: {error}") from error
    if type(given) is not int or given < 0:
        raise ConfigurationError(
            f"repair_bandwidth is a whole number of bytes per second, 0 for no limit, not {given!r}"
        )
    return given
