"""A store for tests, and that nothing of one module's snapshots is left for the next."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import wait

import pytest
from tests.support import SMALL

import torchstore_core as ts
from torchstore_core import blocking
from torchstore_snapshot.api import pending
from torchstore_snapshot.background import process, stores


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays() -> Iterator[None]:
    """The tests of a module share a writer process and the store that snapshots have started for
    this process. Other tests count the servers that are its children. What is not finished, this
    process would wait for when it ends, and with it all tests.
    """
    yield
    if process._current is not None:
        process._current.close()
    blocking.shutdown(stores.own_name())
    blocking.shutdown(stores.bounded_name())
    assert not wait({*pending._unfinished}, 60).not_done


@pytest.fixture
async def store() -> AsyncIterator[ts.Client]:
    client = await ts.initialize(**SMALL)
    yield client
    await ts.shutdown()
