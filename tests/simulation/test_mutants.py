"""The simulator finds what it is for: each of these bugs, put into the store, in 10,000 seeds."""

from __future__ import annotations

import pytest
from tests.simulation.mutants import MUTANTS, RARE
from tests.simulation.shrinking import Finding, find, told

_MOST_SEEDS = 10_000
_MOST_LEFT = 8


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(one, marks=[pytest.mark.soak] if one in RARE else []) for one in MUTANTS],
)
def test_a_mutant_is_found_and_told_in_short(mutant: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[mutant](patch)
        found = first(_MOST_SEEDS)
        assert found is not None, f"a store that {mutant} is not found out"
        assert found.plan.size <= _MOST_LEFT
        story = told(found)
    assert str(found.violation) in story  # the same again
    assert find(found.seed) is None  # it was the bug, and not the simulator


def first(seeds: int) -> Finding | None:
    """The first finding."""
    return next((found for seed in range(seeds) if (found := find(seed)) is not None), None)
