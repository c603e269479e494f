"""Runs the public conformance kit, and tests what is specific to this strategy."""

from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts
from torchstore_core.testing import StrategyConformance
from torchstore_pinned import PinnedStrategy

PINS = (("optimizer/", 1), ("weights/", 2))


class TestPinned(StrategyConformance):
    def make(self) -> Strategy:
        return PinnedStrategy(pins=PINS)


def test_a_prefix_has_its_volume():
    me = ClientFacts(pid=1, host_id="h", hostname="h")
    three = [VolumeFacts(f"v{i}", i, "h", 1000, 1000 - i) for i in range(3)]
    place = PinnedStrategy(pins=PINS).place
    assert place(me, three, 10, ["optimizer/state"]) == [1, 0, 2]
    assert place(me, three, 10, ["weights/0"]) == [2, 0, 1]
    assert place(me, three, 10, ["other"]) == [0, 1, 2]
