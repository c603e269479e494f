"""The public conformance kit for transports, on those of the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from tests.transports.kit.engine_store import StoreEndpoints

from torchstore_core.testing import TransportTests
from torchstore_core.testing.transports.ends.endpoints import Endpoints


class TestRpc(TransportTests):
    """``monarch-rpc``: both halves, and the agent of the host; only the engine is missing."""

    name = "monarch-rpc"
    hosting = "tests.transports.kit.engine_hosting:RpcHosting"
    stores = False  # plugins/torchstore-monarch/tests has them


@pytest.mark.filterwarnings("ignore:No ibverbs RDMA hardware detected")
class TestMonarchRdma(TransportTests):
    """``monarch-rdma``, with the volume of a store of the engine, of whose job this process is the
    root. Nothing that would end the job, or needs clients that are no part of it.
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

    @contextlib.contextmanager
    def fresh(self) -> Iterator[Endpoints]:
        pytest.skip("whoever kills an actor ends the job: see plugins/torchstore-monarch/tests")
        yield self.anywhere()

    def test_two_client_processes(self) -> None:
        pytest.skip("other processes are not in the job: see plugins/torchstore-monarch/tests")

    def test_a_killed_client_writes_no_more(self) -> None:
        pytest.skip("other processes are not in the job: see plugins/torchstore-monarch/tests")
