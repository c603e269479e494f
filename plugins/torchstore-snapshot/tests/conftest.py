"""Tests of this package use processes of the repository's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests import processes


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> Iterator[None]:
    """Ends with the tests; it starts with the first that needs it."""
    yield
    processes.stop_fork_server()
