"""The requirements that every transport meets."""

from __future__ import annotations

from torchstore_core.testing import TransportTests


class TestGlooKit(TransportTests):
    """An isolated half, and pairs of processes."""

    name = "gloo"
    # What waits for its peer inside of the library ends with the time of the pair.
    gone_within = 25.0
