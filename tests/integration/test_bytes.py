"""State dicts that are read as bytes, by processes without torch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from tests.integration.servers import ServerThread
from tests.integration.test_freed_storage import WAYS
from tests.support import emptied

import torchstore_core as ts
from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.moving.reading import read_bytes

LARGE = 100_000
TIED = torch.arange(LARGE)
MANY = {f"m{i}": torch.full((40,), i) for i in range(99)}
VALUES: dict[str, dict[str, Any]] = {
    "small": {"a": torch.arange(3), "none": torch.empty(0, 5), "row": torch.ones(4, 5)[:, 1]},
    "large": {"a": torch.rand(LARGE), "b": torch.rand(3, LARGE).t(), "c": torch.arange(7)},
    "tied": {"a": TIED, "b": TIED, "part": TIED[100:]},
    "many": MANY,
    "many with large": {**MANY, "large": torch.rand(LARGE)},
}


@pytest.fixture
async def client(request: pytest.FixtureRequest) -> AsyncIterator[ts.Client]:
    with ServerThread() as server:
        yield await ts.connect(server.address, store_name="bytes", block=WAYS[request.param])
        await ts.shutdown("bytes")


async def read(client: ts.Client, key: str) -> dict[str, memoryview]:
    session = await client._joined.session(20)
    with Clock(20) as clock:
        return await read_bytes(session, await session.channel(20), key, clock)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("client", WAYS, indirect=True)
async def test_entries_are_read_as_bytes(client: ts.Client) -> None:
    """Whatever sizes they have, in whatever way they come; and they are leased as long as they are
    referred to.
    """
    for key, values in VALUES.items():
        await client.put_state_dict(values, key)
        found = await read(client, key)
        assert list(found) == list(values)
        assert {name: bytes(data) for name, data in found.items()} == {
            name: bytes_of(tensor) for name, tensor in values.items()
        }
    kept = (await read(client, "large"))["a"]
    await client.put_state_dict({"a": torch.zeros(LARGE)}, "large")
    await client.put("another", torch.zeros(3 * LARGE))
    assert bytes(kept) == bytes_of(VALUES["large"]["a"])
    del kept, found
    await emptied(client)  # nothing is leased any more


@pytest.mark.parametrize("client", ["shm"], indirect=True)
async def test_shards_are_refused(client: ts.Client) -> None:
    for at in range(2):
        part = ts.TensorSlice((at * 5,), (5,), (10,), (2,), (at,))
        shard = ts.TensorShard(torch.arange(5), part)
        await client.put_state_dict({"a": shard}, "s", participants=2, participant=at)
    with pytest.raises(ts.UnsupportedValueError, match="in shards"):
        await read(client, "s")
    await emptied(client)


async def test_what_is_not_there_is_not_read() -> None:
    with ServerThread() as server:
        client = await ts.connect(server.address, store_name="bytes")
        with pytest.raises(ts.KeyNotFoundError):
            await read(client, "nothing")
        await ts.shutdown("bytes")
