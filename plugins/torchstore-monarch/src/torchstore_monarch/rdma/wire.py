"""What both halves of ``monarch-rdma`` know."""

from __future__ import annotations

__all__ = ["GREETING"]

#: The client's handshake, with the version of this protocol.
GREETING = b"monarch-rdma 3"
