"""The simulator finds what it is for: each of these bugs, put into the store, in 10,000 seeds."""

from __future__ import annotations

import itertools

import pytest
from tests.simulation.mutants import MUTANTS
from tests.simulation.plans import CHOKED, SEALED
from tests.simulation.shrinking import Finding, find, told

_MOST_SEEDS = 10_000
_MOST_LEFT = 8
# Tried first: seeds that find what hundreds of others do not, or whose finding is soon reduced.
# They are only a short cut: where the simulator has changed, all seeds are tried.
_SHORT_CUTS = {
    "answers what its log has no room for": CHOKED + 19,
    "believes what its life before was told": 290,
    "counts a reference in flight late": 1570,
    "does not tell one rewind from the next": 128,
    "does what its log has no room for": CHOKED + 46,
    "drops from memory what is being read": 1391,
    "evicts what is being read": 227,
    "flips a batch in two steps": 213,
    "forgets a fork whose child is read first": 82,
    "forgets in a new log what it could not answer yet": 6352,
    "forgets the leases of a lost relay": 462,
    "forgets who holds a state dict": SEALED + 42,
    "forgets the puts of a session that resumes": 212,
    "forgets the versions of a key that is evicted": 198,
    "forgets what is on its disk when it comes back": 667,
    "forgets what it has read from its disk when it comes back": 42809,
    "forgets what its disk could not write": 48,
    "forgets what waits for room in its log": CHOKED + 38,
    "forgets what was recorded while its log was written anew": 1667,
    "frees memory that may still be written": 2077,
    "frees memory that the dead may still write": 9035360,
    "hears twice the last words of a client that has left": 51273,
    "hears twice what it had recorded when it was killed": 298,
    "ignores what a dead process has received": 1100,
    "keeps no reference in flight when its sender is gone": 3881,
    "reads a version that has the number of one that is gone": 5769,
    "seals what its client keeps without a lease": SEALED + 39,
    "settles a partial version before its base": 2755,
    "takes out of the kernel's buffer what is not in its log": CHOKED + 1426,
    "tells late what is free at a URL": 101019,
    "uses pages of its disk again that are in use": 423,
}
# These take longest to be reduced.
_SLOW = {
    "believes what its life before was told",
    "forgets the leases of a lost relay",
    "forgets the versions of a key that is evicted",
    "forgets what is on its disk when it comes back",
    "forgets what it has read from its disk when it comes back",
    "frees memory that the dead may still write",
    "hears twice the last words of a client that has left",
    "tells late what is free at a URL",
}


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(name, marks=pytest.mark.soak if name in _SLOW else ()) for name in MUTANTS],
)
def test_a_mutant_is_found_and_told_in_short(mutant: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[mutant](patch)
        found = first(mutant)
        assert found is not None, f"a store that {mutant} is not found out"
        assert found.plan.size <= _MOST_LEFT
        story = told(found)
    assert str(found.violation) in story  # the same again
    assert find(found.seed) is None  # it was the bug, and not the simulator


def first(mutant: str) -> Finding | None:
    """The first finding."""
    likely = _SHORT_CUTS.get(mutant, 0)
    begin = max(kind for kind in (0, CHOKED, SEALED) if kind <= likely)  # seeds of the same kind
    seeds = itertools.chain([likely], range(begin, begin + _MOST_SEEDS))
    return next((found for seed in seeds if (found := find(seed)) is not None), None)


def test_the_short_cuts_are_to_mutants() -> None:
    assert MUTANTS.keys() >= _SHORT_CUTS.keys() | _SLOW
