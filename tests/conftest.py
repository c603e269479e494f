"""Fixtures of all tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.support import SMALL, running_store

import torchstore_core as ts

# What a developer's shell says about stores is not about the tests.
for _name in [name for name in os.environ if name.startswith("TORCHSTORE_")]:
    del os.environ[_name]


@pytest.fixture
async def store() -> AsyncIterator[ts.Client]:
    """The default store, initialised with little memory; shut down after the test."""
    async with running_store() as client:
        yield client


@pytest.fixture(scope="module")
def module_store() -> Iterator[None]:
    """The default store for all tests of a module, each of which has an event loop of its own."""
    asyncio.run(ts.initialize(**SMALL))
    try:
        yield
    finally:
        asyncio.run(ts.shutdown())


@pytest.fixture
async def shared(module_store: None) -> AsyncIterator[ts.Client]:
    """The module's store, empty: for many short tests that are not about starting one."""
    client = await ts.client()
    yield client
    await client.delete_batch(await client.keys())
