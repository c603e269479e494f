"""Runs the public conformance kit, and tests what is specific to this transport."""

from torchstore_core.contracts.transport import LinkContext, Refusal
from torchstore_core.machine.topology import probe
from torchstore_core.testing import TransportTests
from torchstore_files.plugin import torchstore_transport


class TestFiles(TransportTests):
    name = "files"


def test_it_stays_on_one_host():
    here = probe()
    bid = torchstore_transport().bid(LinkContext(here, here, same_host=False, offered=True))
    assert bid == Refusal("the volume is on another host")
