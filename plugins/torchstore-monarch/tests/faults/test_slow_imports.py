"""While a process imports torch, no message of the engine's leaves it, or is read there."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tests.monarch import acts, slow_torch
from tests.monarch.jobs import Job

from torchstore_core.server.remote.relay_server import EXPIRE_S

MB = 1 << 20


async def test_volumes_of_a_process_that_imports_torch_for_long_are_kept(tmp_path: Path) -> None:
    """For longer than a relay may be silent."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with Job(workers=1, hosts=1, fresh=True) as job:
        await job.root(acts.initialize_on_workers)
        await job.root(acts.put_ones, "k", MB, 7)
        importing = asyncio.ensure_future(job.at(0, slow_torch.import_slowly, str(gate)))
        with await asyncio.to_thread(open, gate, "wb"):
            await asyncio.sleep(EXPIRE_S + 5.0)  # what is tried is this time
            assert [one.lost for one in (await job.root(acts.status)).volumes] == [""]
            assert not importing.done()
        assert await importing
        assert await job.root(acts.get_shape, "k") == ((MB,), [7])
        assert await job.at(0, acts.get_shape, "k") == ((MB,), [7])
        assert job.ended() is None
