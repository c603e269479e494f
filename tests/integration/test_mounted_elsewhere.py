"""A store whose directory its clients know by another path."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from tests.integration.servers import ServerThread, connected


async def test_memory_is_mapped_by_clients_that_know_the_directory_by_another_path() -> None:
    """As in containers, into which the directory of a store is mounted at another place."""
    with tempfile.TemporaryDirectory(prefix="ts-") as base:
        known, mounted = Path(base, "known"), Path(base, "mounted")
        known.mkdir(mode=0o700)
        with ServerThread(directory=str(known)):
            known.rename(mounted)
            async with connected(f"unix:{mounted}/control.sock", block=["inprocess"]) as client:
                value = torch.arange(1 << 18)
                await client.put("w", value)
                got = await client.get("w")
                assert torch.equal(got, value)
                (volume,) = (await client.status()).volumes
                assert volume.leased_bytes == value.nbytes
                (found,) = await client.explain(1 << 20)
                assert found["chosen"] == "shm"
                del got
            mounted.rename(known)
