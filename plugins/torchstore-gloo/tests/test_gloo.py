"""Everything that pairs do, over gloo."""

from __future__ import annotations

from tests.transports.pairs.alone import check_an_end_that_is_alone
from tests.transports.pairs.pair_tests import PairTests

from torchstore_gloo.pair import make


class TestGloo(PairTests):
    name = "gloo"
    half = "torchstore_gloo.server"


def test_an_end_whose_peer_has_gone_gives_up_in_time() -> None:
    """gloo itself waits five times as long as it was told."""
    check_an_end_that_is_alone(make)
