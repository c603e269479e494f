"""The requirements that every transport meets, over the library that stands in for torchcomms'."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from torchstore_core.machine.topology import Topology
from torchstore_core.testing import TransportTests
from torchstore_core.testing.transports.ends.endpoints import Endpoints
from torchstore_core.testing.transports.ends.session import Session


class _WithDevices(Endpoints):
    """As if both hosts had the devices for which the transport bids."""

    def session(self) -> Session:
        made = super().session()
        client, volume = _with(made.context.client), _with(made.context.volume)
        made.context = msgspec.structs.replace(made.context, client=client, volume=volume)
        return made


def _with(place: Topology) -> Topology:
    return msgspec.structs.replace(place, rdma_devices=("mlx5_0",), cuda_devices=1)


@pytest.fixture(scope="class")
def slow(stand_in: Path) -> None:
    """Transfers take long enough to be stopped in the middle."""
    (stand_in / "slow").write_text("0.02")


@pytest.mark.usefixtures("slow")
@pytest.mark.soak  # every test of it starts processes with torch
class TestTorchCommsRdmaKit(TransportTests):
    """Both halves; a store would look for the devices itself."""

    name = "torchcomms-rdma"
    stores = False

    def endpoints(self, place: str) -> Endpoints:
        return _WithDevices(
            self.plugin(),
            here=place == "here",
            environment=self.environment,
            nbytes=self.segment_bytes,
        )
