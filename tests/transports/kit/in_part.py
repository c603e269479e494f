"""A part of the transports' kit, for those whose halves start slowly and whose packages have tests
of their own: the whole kit takes them minutes, and is in ``make soak``.
"""

from __future__ import annotations

from torchstore_core.testing import TransportTests

__all__ = ["in_part"]

# Bytes of every kind both ways; what is refused, cancelled, killed and left; what it says it is.
_PART = (
    *("every_size", "rows", "every_kind", "pieces", "there_now"),
    *("garbage", "out_of_range", "told_honestly", "max_bytes"),
    *("cancelled_write", "cancelled_read", "killed_half", "links_leave"),
    *("bids", "probe", "halves", "torch"),
)


def in_part(kit: type[TransportTests]) -> type[TransportTests]:
    """Leave out what is in none of the parts."""
    for name in dir(kit):
        if name.startswith("test_") and not any(part in name for part in _PART):
            setattr(kit, name, None)
    return kit
