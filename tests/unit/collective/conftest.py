"""What tests of versions that several puts make together have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.collective.ranks import a_store

from torchstore_core.server.controller import Controller


@pytest.fixture
def store() -> Iterator[Controller]:
    with a_store() as controller:
        yield controller
