"""The requirements that every transport meets."""

from __future__ import annotations

import pytest
from tests.transports.kit.in_part import in_part

from torchstore_core.testing import TransportTests


@in_part
class TestGlooInPart(TransportTests):
    """An isolated half, and pairs of processes."""

    name = "gloo"
    # What waits for its peer inside of the library ends with the time of the pair.
    gone_within = 25.0


@pytest.mark.soak
class TestGloo(TransportTests):
    """All of it."""

    name = "gloo"
    gone_within = 25.0
