"""The public conformance kit for transports, on those of the engine."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from tests.transports.kit.engine_store import StoreEndpoints
from tests.transports.kit.in_part import in_part

from torchstore_core.testing import TransportTests
from torchstore_core.testing.transports.ends.endpoints import Endpoints


@in_part
class TestRpcInPart(TransportTests):
    """``monarch-rpc``: both halves, and the agent of the host; only the engine is missing."""

    name = "monarch-rpc"
    hosting = "tests.transports.kit.engine_hosting:RpcHosting"
    stores = False  # plugins/torchstore-monarch/tests has them


@pytest.mark.soak
class TestRpc(TransportTests):
    """All of it."""

    name = "monarch-rpc"
    hosting = "tests.transports.kit.engine_hosting:RpcHosting"
    stores = False


@pytest.mark.filterwarnings("ignore:No ibverbs RDMA hardware detected")
class TestMonarchRdma(TransportTests):
    """``monarch-rdma``, with the volume of a store of the engine, of whose job this process is the
    root. Nothing that needs clients which are no part of the job.
    """

    name = "monarch-rdma"
    crosses_hosts = False
    store_arguments: ClassVar[dict[str, Any]] = {"runtime": "monarch"}

    @pytest.fixture(autouse=True)
    def _job(self) -> None:
        import monarch.actor  # noqa: F401

    def endpoints(self, place: str) -> Endpoints:
        if place == "here":
            pytest.skip("an actor of this process cannot be its own client")
        return StoreEndpoints(self.plugin())

    def test_two_client_processes(self) -> None:
        pytest.skip("other processes are not in the job: see plugins/torchstore-monarch/tests")

    def test_a_stopped_client_holds_nobody_up(self) -> None:
        pytest.skip("other processes are not in the job: see plugins/torchstore-monarch/tests")

    def test_a_killed_client_writes_no_more(self) -> None:
        pytest.skip("other processes are not in the job: see plugins/torchstore-monarch/tests")

    def test_killed_clients_leave_nothing_behind(self) -> None:
        pytest.skip("other processes are not in the job: see plugins/torchstore-monarch/tests")

    def test_volumes_of_one_process_do_not_mix(self) -> None:
        pytest.skip("the store has one volume in a process")
