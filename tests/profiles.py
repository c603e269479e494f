"""How many examples the property tests try: ``pytest --hypothesis-profile=quick``, ``ci`` (the
default) or ``soak``. The numbers are here and nowhere else.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

__all__ = ["each", "few", "half", "many", "register"]

_EXAMPLES = {"quick": 50, "ci": 100, "soak": 2000}


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
    return settings(max_examples=4 * settings().max_examples)


def each() -> settings:
    """For what is repeated for every message, or every way of the bytes, through the same code."""
    return settings(max_examples=settings().max_examples // 4)


def half() -> settings:
    """For machines of the whole server, or of files: an example takes 50 ms."""
    return settings(max_examples=settings().max_examples // 2)


def few() -> settings:
    """For megabytes: an example takes a good part of a second."""
    return settings(max_examples=settings().max_examples // 20)
