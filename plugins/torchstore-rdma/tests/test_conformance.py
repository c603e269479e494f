"""The requirements that every transport meets."""

from __future__ import annotations

import pytest
from tests.transports.kit.in_part import in_part

from torchstore_core.testing import TransportTests
from torchstore_rdma import fabric

from .pairs import needs_nixl

pytestmark = needs_nixl


@in_part
class TestRdmaInPart(TransportTests):
    """Over what UCX chooses on one host."""

    name = "rdma"
    chooses_address = True


@pytest.mark.soak
class TestRdma(TransportTests):
    """All of it, between network namespaces, too."""

    name = "rdma"
    chooses_address = True


@pytest.mark.soak
class TestRdmaOverTcp(TransportTests):
    """As between hosts without RDMA devices."""

    name = "rdma"
    chooses_address = True
    environment = {"UCX_TLS": "tcp"}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.mark.soak
class TestRdmaWhereMemoryIsPinned(TransportTests):
    """Clients register what they move, and keep it registered, as with devices that pin it."""

    name = "rdma"
    chooses_address = True

    @pytest.fixture(autouse=True)
    def _pins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fabric, "pins", lambda *_: True)
