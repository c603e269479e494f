"""The public conformance kit for transports, on those of the engine."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from torchstore_core.testing import TransportTests
from torchstore_core.testing.transports.ends.endpoints import Endpoints


class TestRpc(TransportTests):
    """``monarch-rpc``: both halves, and the agent of the host; only the engine is missing."""

    name = "monarch-rpc"
    hosting = "tests.transports.engine_hosting:RpcHosting"
    stores = False  # tests/monarch has them

    @pytest.mark.xfail(
        strict=True, reason="a cancelled write waits for what its agent has asked, up to 20 s"
    )
    def test_a_stopped_half_holds_nobody_up(self) -> None:
        super().test_a_stopped_half_holds_nobody_up()


@pytest.mark.filterwarnings("ignore:No ibverbs RDMA hardware detected")
class TestMonarchRdma(TransportTests):
    """``monarch-rdma``, in a store of the engine, of whose job this process is the root. A half of
    it alone cannot be started: tests/monarch/transports has what kills and cancels.
    """

    name = "monarch-rdma"
    store_arguments: ClassVar[dict[str, Any]] = {"runtime": "monarch"}

    @pytest.fixture(autouse=True)
    def _job(self) -> None:
        import monarch.actor  # noqa: F401

    def endpoints(self, place: str) -> Endpoints:
        pytest.skip("its halves are actors of an engine: tested through stores alone")
