"""Everything that pairs do, over torchcomms."""

from __future__ import annotations

import pytest
from tests.transports.pairs.pair_tests import PairTests

from torchstore_torchcomms.plugin import torchstore_transport

_probe = torchstore_transport().probe
if _probe is not None and (reason := _probe()) is not None:
    pytest.skip(reason, allow_module_level=True)


class TestTorchComms(PairTests):
    name = "torchcomms"
    half = "torchstore_torchcomms.server"
