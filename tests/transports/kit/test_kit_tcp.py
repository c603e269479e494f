"""The public conformance kit for transports, on ``tcp``, between network namespaces too."""

from __future__ import annotations

from torchstore_core.testing import TransportTests


class TestTcp(TransportTests):
    """Its own sockets and threads."""

    name = "tcp"
