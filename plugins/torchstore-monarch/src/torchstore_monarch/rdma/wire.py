"""What both halves of ``monarch-rdma`` know."""

from __future__ import annotations

#: The client's handshake, with the version of this protocol.
GREETING = b"monarch-rdma 3"
