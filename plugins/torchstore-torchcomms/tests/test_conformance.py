"""The requirements that every transport meets."""

from __future__ import annotations

import pytest

from torchstore_core.testing import TransportTests
from torchstore_torchcomms.plugin import torchstore_transport

_probe = torchstore_transport().probe
if _probe is not None and (reason := _probe()) is not None:
    pytest.skip(reason, allow_module_level=True)


@pytest.mark.soak  # every test of it starts processes with torch, as those of gloo do
class TestTorchCommsKit(TransportTests):
    """The same machinery as that of gloo's transport."""

    name = "torchcomms"
    # What waits for its peer inside of the library ends with the time of the pair.
    gone_within = 25.0
