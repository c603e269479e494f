"""The requirements that every transport meets."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from .pairs import needs_nixl

pytestmark = needs_nixl
_KIT = "torchstore_core.testing.transports"

if find_spec(_KIT) is None:
    pytest.skip("this torchstore-core has no requirements for transports", allow_module_level=True)

from torchstore_core.testing import TransportTests  # noqa: E402


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
