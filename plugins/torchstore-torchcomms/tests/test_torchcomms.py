"""Everything that pairs do, over torchcomms."""

from __future__ import annotations

import pytest
from tests.transports.pairs.alone import check_an_end_that_is_alone
from tests.transports.pairs.pair_tests import PairTests

from torchstore_torchcomms.pair import make
from torchstore_torchcomms.plugin import torchstore_transport

_probe = torchstore_transport().probe
if _probe is not None and (reason := _probe()) is not None:
    pytest.skip(reason, allow_module_level=True)


class TestTorchComms(PairTests):
    name = "torchcomms"
    half = "torchstore_torchcomms.server"


def test_an_end_whose_peer_has_gone_gives_up_in_time() -> None:
    """gloo itself waits five times as long as it was told."""
    check_an_end_that_is_alone(make, counter="init_count")
