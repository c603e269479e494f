"""Fixtures of the integration tests."""

from __future__ import annotations

from tests.integration.servers import server

__all__ = ["server"]
