"""A server half that has nothing to do leaves the processor to others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.support import until

from .pairs import FABRICS, MB, Memory, needs_nixl, pair

pytestmark = needs_nixl

_WINDOW_S, _MOST = 0.5, 0.05


def _processor_time(pid: int) -> float:
    """Of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rests(pid: int) -> bool:
    used, now = _processor_time(pid), time.monotonic()
    time.sleep(_WINDOW_S)
    return _processor_time(pid) - used < _MOST * (time.monotonic() - now)


@pytest.mark.parametrize("fabric", FABRICS)
async def test_after_a_transfer_it_rests(tmp_path: Path, fabric: str) -> None:
    async with pair(tmp_path, fabric=fabric) as volume:
        link = await volume.link()
        data = Memory(4 * MB, 7)
        await link.write([data.copy()])
        assert volume.count(7) == data.nbytes
        await until(lambda: _rests(volume.pid), 20)
        await link.read([data.copy(8 * MB)])  # and is there when it is needed
        assert data.count(0) == data.nbytes
        link.close()
