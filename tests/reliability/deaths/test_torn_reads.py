"""One writer overwrites a large tensor as fast as it can; nobody ever sees half of a version."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from tests.reliability import children
from tests.reliability.harness import MB, Child
from tests.support import until

import torchstore_core as ts

ELEMENTS = 2 * MB  # int32: 8 MB
SECONDS = 2.5
# Far below what two slow cores do, far above what a stuck reader does.
MIN_READS = 10


@pytest.mark.quick
async def test_readers_see_whole_versions_in_order():
    # Six versions are alive: the newest, one being written, one leased by each reader; on a busy
    # machine also those that a zero-copy reader has let go without the server knowing it yet.
    await ts.initialize(capacity=50 * 4 * ELEMENTS, prefault=0)
    address = await ts.address()
    try:
        with ExitStack() as stack:
            writer = stack.enter_context(Child(children.overwrite, address, ELEMENTS))
            readers = [
                stack.enter_context(Child(function, address, ELEMENTS, SECONDS, MIN_READS))
                for function in (children.read_in_place, children.read_zero_copy)
                for _ in range(2)
            ]
            for reader in readers:
                reads, versions = await reader.said(SECONDS + 120)
                assert reads >= MIN_READS
                assert versions >= MIN_READS // 2
            writer.tell("stop")
            assert await writer.said() > MIN_READS // 2

        async def one_version_left() -> bool:
            status = await ts.status()
            volume = status.volumes[0]
            return (
                volume.used_bytes == 4 * ELEMENTS
                and volume.leased_bytes == volume.unfinished_bytes == 0
                and len(status.sessions) == 1
            )

        await until(one_version_left, 10)
    finally:
        await ts.shutdown()
