"""How much the store may copy by itself, from the argument, the environment, or by default."""

from __future__ import annotations

import pytest

from torchstore_core.errors import ConfigurationError
from torchstore_core.reports.bandwidths import DEFAULT_BANDWIDTH, VARIABLE, repair_bandwidth


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (None, {}, DEFAULT_BANDWIDTH),
        (None, {VARIABLE: ""}, DEFAULT_BANDWIDTH),
        (None, {VARIABLE: "512MB"}, 512_000_000),
        (None, {VARIABLE: "0"}, 0),
        (0, {VARIABLE: "512MB"}, 0),
        (1 << 40, {VARIABLE: "nonsense"}, 1 << 40),
    ],
)
def test_the_argument_comes_first(
    given: object, environment: dict[str, str], expected: int
) -> None:
    assert repair_bandwidth(given, environment) == expected


@pytest.mark.parametrize(
    ("given", "environment", "says"),
    [
        (-1, {}, "repair_bandwidth is a whole number"),
        (1.5, {}, "not 1.5"),
        (True, {}, "not True"),
        (None, {VARIABLE: "fast"}, "TORCHSTORE_REPAIR_BANDWIDTH is bytes per second: 'fast'"),
    ],
)
def test_what_is_no_bandwidth_is_refused(
    given: object, environment: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        repair_bandwidth(given, environment)
