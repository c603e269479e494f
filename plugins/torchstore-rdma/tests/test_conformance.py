"""The requirements that every transport meets."""

from __future__ import annotations

import pytest

from torchstore_core.testing import TransportTests

from .pairs import needs_nixl

pytestmark = needs_nixl


class TestRdma(TransportTests):
    """Over what UCX chooses on one host, and between network namespaces."""

    name = "rdma"


@pytest.mark.soak
class TestRdmaOverTcp(TransportTests):
    """As between hosts without RDMA devices."""

    name = "rdma"
    environment = {"UCX_TLS": "tcp"}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp")
