"""Publishes and their readers that are interrupted, have no room, lose the server, or end early."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tests.reliability import children, publishers
from tests.reliability.harness import MB, Account, Child, account, fds, kill, maps, settled
from tests.reliability.publishers import (
    KEY,
    KINDS,
    RANKS,
    Columns,
    Publisher,
    pending,
    publish_all,
    published,
)
from tests.reliability.ranks import Rank, run_of
from tests.reliability.test_cancellation import WAYS, Way, moments
from tests.reliability.test_steady import Sample, nothing_is_held
from tests.support import running_store, until

import torchstore_core as ts

AT_ONCE_S = 1.0
CAPACITY = 128 * MB


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with running_store(capacity=CAPACITY) as client:
        yield client.address


# ---- interrupted --------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "in the background"])
async def test_a_publish_that_is_interrupted_is_seen_whole_or_not_at_all(
    address: str, way: Way, blocking: bool
):
    mine = [Publisher("state dict", rank) for rank in range(RANKS)]
    numbers = current = 0

    async def publish(**how: float) -> int:
        nonlocal numbers
        numbers += 1
        for publisher in mine:
            version = await publisher.put(numbers, 10 * numbers, blocking=blocking, **how)
        return version
