"""The fork server that most children of these tests come from."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver

import pytest
from tests.reliability import harness


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> Iterator[None]:
    """Started before any store is in the environment, and before any test counts processes."""
    harness.FAST.set_forkserver_preload(["torch", "torchstore_core.api"])
    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
