"""Who connects to UCX's ports without being the peer."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from tests.strangers import Strangers, listening
from tests.support import until

from .pairs import FABRICS, MB, Memory, needs_nixl, pair

pytestmark = needs_nixl
# UCX takes what begins so for a peer of its own, and crashes on what may follow.
_MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
_PAYLOADS = [b"", b"\xff" * 4096, _MAGIC]
_PAYLOADS += [_MAGIC + struct.pack("<BI", kind, 40) + b"\xa5" * 40 for kind in range(40)]


@pytest.mark.parametrize("fabric", FABRICS)
async def test_strangers_find_no_open_port(tmp_path: Path, fabric: str) -> None:
    others = listening(os.getpid())
    async with pair(tmp_path, fabric=fabric) as volume:
        link = await volume.link()
        memory = Memory(8 * MB, 1)
        await link.write([memory.copy()])
        await link.read([memory.copy()])
        strangers = Strangers(os.getpid(), volume.pid, besides=others)
        assert len(strangers.ports) >= 2, "not at both ends"
        assert strangers.let_in(_PAYLOADS, rounds=2) == 0
        memory.fill(2)
        await link.write([memory.copy()])
        memory.fill(0)
        await link.read([memory.copy()])
        assert memory.count(2) == 8 * MB
        await until(strangers.left_nothing)
        link.close()
