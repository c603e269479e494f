"""The requirements that every transport meets."""

from __future__ import annotations

import pytest

from torchstore_core.testing import TransportTests


class TestGlooKit(TransportTests):
    """An isolated half, and pairs of processes."""

    name = "gloo"
    # What waits for its peer inside of the library ends with the time of the pair.
    gone_within = 25.0

    @pytest.mark.xfail(
        strict=False, reason="now and then some descriptors of a pair that was not made stay open"
    )
    def test_a_cancelled_connect_leaves_nothing_behind(self) -> None:
        super().test_a_cancelled_connect_leaves_nothing_behind()
