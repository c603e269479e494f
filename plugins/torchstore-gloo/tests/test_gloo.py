"""Everything that pairs do, over gloo."""

from __future__ import annotations

from tests.transports.pairs.pair_tests import PairTests


class TestGloo(PairTests):
    name = "gloo"
    half = "torchstore_gloo.server"
