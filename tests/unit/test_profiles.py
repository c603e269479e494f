"""Which of many sets of parameters a test is tried with."""

from __future__ import annotations

import doctest
import itertools

from tests import profiles


def test_every_value_is_in_one_of_those_that_are_kept() -> None:
    assert doctest.testmod(profiles).failed == 0
    for axes in (["abcde", "xy"], ["xy", "abcde"], ["abc", "xy", "uvw"]):
        sets = [*itertools.product(*axes)]
        kept = [sets[number] for number in profiles.one_of_each(sets)]
        assert [{*values} for values in zip(*kept, strict=True)] == [{*axis} for axis in axes]
        assert len(kept) == max(map(len, axes))


def test_what_is_no_product_is_kept_whole() -> None:
    """Sets of one parameter; and what lacks pairs keeps those that it needs."""
    assert profiles.one_of_each([("a",), ("b",)]) == {0, 1}
    assert profiles.one_of_each([("a", "x"), ("b", "x"), ("c", "x")]) == {0, 1, 2}
    sets = [("a", "x"), ("a", "y"), ("a", "z"), ("b", "x")]
    assert profiles.one_of_each(sets) == {1, 2, 3}
