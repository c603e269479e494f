"""Memory of a volume that a client page-locks for a device stays where it is."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from tests.support import halt, running_store

pytestmark = pytest.mark.quick


async def test_nothing_is_page_locked_before_the_server_knows_it() -> None:
    """Until then it may return the memory to the system; the device would keep the old pages."""
    async with running_store() as client:
        await client.put("a", 1)
        session = client._joined.session_here()
        assert session is not None
        server = (await client.status()).controller_pid
        await halt(server)
        keeping = asyncio.create_task(session.keep_memory())
        try:
            await asyncio.wait([keeping], timeout=0.2)
            assert not keeping.done()
        finally:
            os.kill(server, signal.SIGCONT)
        await keeping
        await session.keep_memory()
