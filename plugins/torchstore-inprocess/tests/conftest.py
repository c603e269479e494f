"""A store in the process of the test."""

from __future__ import annotations

from tests.integration.servers import server

__all__ = ["server"]
