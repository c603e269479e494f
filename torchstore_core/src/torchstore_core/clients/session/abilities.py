"""Which optional abilities a link has: those whose methods it has; see ``contracts.transport``.

``isinstance`` with a Protocol would say the same, but takes more than ten microseconds, which is a
tenth of the put of a small tensor.
"""

from __future__ import annotations

from typing import TypeGuard

from torchstore_core.contracts.transport import (
    SupportsMap,
    SupportsMapThrough,
    SupportsProgress,
    SupportsRegistration,
    SupportsWindow,
)


def has_window(link: object) -> TypeGuard[SupportsWindow]:
    """Whether the link's segments are memory of this process.

    >>> has_window(object())
    False
    """
    return _has(link, "window") and _has(link, "prepare")


def has_map(link: object) -> TypeGuard[SupportsMap]:
    """Whether the link maps private memory of a range."""
    return _has(link, "map")


def has_map_through(link: object) -> TypeGuard[SupportsMapThrough]:
    """Whether the link maps memory of a segment that is still to be written."""
    return _has(link, "map_through") and _has(link, "make_private")


def has_registration(link: object) -> TypeGuard[SupportsRegistration]:
    """Whether the link registers memory, and so wants to know whose it is."""
    return _has(link, "write_from") and _has(link, "read_into")


def has_progress(link: object) -> TypeGuard[SupportsProgress]:
    """Whether the link reports how far its transfers are."""
    return _has(link, "progress")


def _has(link: object, method: str) -> bool:
    return getattr(link, method, None) is not None
