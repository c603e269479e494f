"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.servers import ServerThread


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with ServerThread() as made:
        yield made
