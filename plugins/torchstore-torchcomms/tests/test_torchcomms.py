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


class TestTorchCommsInPart(PairTests):
    """Its bytes, and the end of its half; what is between them is gloo's machinery, too."""

    name = "torchcomms"
    half = "torchstore_torchcomms.server"


for _name in [name for name in dir(PairTests) if name.startswith("test_")]:
    if not any(word in _name for word in ("every_byte", "strides", "killed_in_the_middle")):
        setattr(TestTorchCommsInPart, _name, None)


@pytest.mark.soak
class TestTorchComms(PairTests):
    name = "torchcomms"
    half = "torchstore_torchcomms.server"


def test_an_end_whose_peer_has_gone_gives_up_in_time() -> None:
    """gloo itself waits five times as long as it was told."""
    check_an_end_that_is_alone(make, counter="init_count")
