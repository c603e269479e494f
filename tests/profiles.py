"""How many examples the property tests try: ``pytest --hypothesis-profile=quick``, ``ci`` (the
default) or ``soak``. The numbers are here and nowhere else. And which of many sets of parameters a
test is tried with.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hypothesis import HealthCheck, settings

__all__ = ["each", "few", "half", "many", "one_of_each", "register"]

_EXAMPLES = {"quick": 10, "ci": 25, "soak": 2000}


def register() -> None:
    """Make the profiles known; an option of the command line may choose another than ``ci``."""
    for name, examples in _EXAMPLES.items():
        settings.register_profile(
            name,
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,  # a busy machine is no failure
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
    settings.load_profile("ci")


def many() -> settings:
    """For hostile bytes: an example takes next to nothing, and few of them get far."""
    return settings(max_examples=2 * settings().max_examples)


def _part(of: int) -> settings:
    """One of so many of the examples, but at least one."""
    return settings(max_examples=max(1, settings().max_examples // of))


def each() -> settings:
    """For what is repeated for every message, or every way of the bytes, through the same code."""
    return _part(4)


def half() -> settings:
    """For machines of the whole server, or of files: an example takes 50 ms."""
    return _part(2)


def few() -> settings:
    """For megabytes: an example takes a good part of a second."""
    return _part(20)


def one_of_each(sets: Sequence[Sequence[Hashable]]) -> set[int]:
    """Which sets of a product are enough to have every value of every parameter, by their numbers.
    What comes first of one parameter goes with what comes last of the next: of layouts to write
    and to read, say, few meet themselves.

    >>> sorted(one_of_each([(a, b) for a in "abc" for b in "xyz"]))
    [2, 4, 6]
    """
    columns = list(zip(*sets, strict=True))
    places = [{value: i for i, value in enumerate(dict.fromkeys(column))} for column in columns]
    if sum(len(place) > 1 for place in places) < 2:
        return {*range(len(sets))}

    def key(number: int) -> list[int]:
        at = [place[value] for place, value in zip(places, sets[number], strict=True)]
        return [-i if n % 2 else i for n, i in enumerate(at)]

    kept: set[int] = set()
    missing = {(n, value) for n, place in enumerate(places) for value in place}
    # First those that have something new in every place that still lacks something.
    for every in (True, False):
        for number in sorted(range(len(sets)), key=key):
            new = missing.intersection(enumerate(sets[number]))
            if new and (not every or {n for n, _ in new} == {n for n, _ in missing}):
                kept.add(number)
                missing -= new
    return kept
