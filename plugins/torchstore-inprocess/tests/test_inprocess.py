"""The example transport ``inprocess``: a store in the test's own process, on its own thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from tests.integration.servers import ServerThread, connected
from tests.support import bits, free_port, running_store

import torchstore_core as ts
import torchstore_inprocess.transport as inprocess
from torchstore_core.contracts.transport import Copy


async def chosen(client: ts.Client, nbytes: int = 1 << 30) -> tuple[str | None, dict[str, str]]:
    """Who would move that many bytes, and who refused."""
    (volume,) = await client.explain(nbytes)
    return volume["chosen"], volume["refusals"]


# ---- the choice -----------------------------------------------------------------------------


async def test_it_bids_only_for_a_volume_of_this_process(server: ServerThread) -> None:
    async with connected(server.address) as client:
        name, refusals = await chosen(client)
        assert name == "inprocess"
        assert "inprocess" not in refusals
    async with running_store() as client:
        name, refusals = await chosen(client)
        assert name == "shm"
        assert refusals["inprocess"] == "the volume is in another process"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"block": ["shm"]}, "inprocess"),
        ({"prefer": ["inprocess"]}, "inprocess"),
        ({"prefer": ["inprocess"], "block": ["shm", "inline"]}, "inprocess"),
        ({"prefer": ["shm"]}, "shm"),
        ({"block": ["inprocess"]}, "shm"),
        ({"prefer": ["inprocess"], "block": ["inprocess"]}, "shm"),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["arguments", "environment"])
async def test_the_users_word_decides(
    server: ServerThread,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, list[str]],
    expected: str,
    how: str,
) -> None:
    if how == "environment":
        for name, value in arguments.items():
            monkeypatch.setenv(f"TORCHSTORE_{name.upper()}", ",".join(value))
        arguments = {}
    async with connected(server.address, **arguments) as client:
        assert (await chosen(client))[0] == expected
        await client.put("k", torch.arange(100_000))
        assert torch.equal(await client.get("k"), torch.arange(100_000))


async def test_names_that_nobody_has_are_refused_however_a_store_is_joined(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments, and the environment of a process that calls no ``connect``."""
    one = ts.SPMDEnv(0, 0, 1, 1, "127.0.0.1", free_port())
    for wrong in ({"prefer": ["shn"]}, {"block": ["shn"]}):
        with pytest.raises(ts.ConfigurationError, match=r"'shn'.*did you mean 'shm'"):
            await ts.connect(server.address, store_name="here", **wrong)
        with pytest.raises(ts.ConfigurationError, match=r"'shn'.*did you mean 'shm'"):
            await ts.initialize_spmd(env=one, **wrong)
    monkeypatch.setenv("TORCHSTORE_ADDRESS", server.address)
    for variable in ("TORCHSTORE_PREFER", "TORCHSTORE_BLOCK"):
        with monkeypatch.context() as environment:
            environment.setenv(variable, "shn")
            with pytest.raises(ts.ConfigurationError, match=f"{variable}.*'shn'"):
                await ts.put("k", 1)
            environment.setenv(variable, "inline")
            await ts.put("k", 1)
            await ts.shutdown()


async def test_a_server_does_not_mind_names_that_it_has_not_installed() -> None:
    """The client that says them may have them."""
    server = ServerThread(block=("of-the-client-alone", "inprocess"))
    try:
        async with connected(server.address) as client:
            assert (await chosen(client))[0] == "shm"
    finally:
        server.stop()


async def test_with_every_way_blocked_the_error_says_who_and_why(server: ServerThread) -> None:
    async with connected(server.address, block=["shm", "tcp", "inprocess", "inline"]) as client:
        with pytest.raises(ts.TransportUnavailableError) as caught:
            await client.put("k", torch.arange(100_000))
        assert {"shm", "inprocess", "inline"} <= {
            *caught.value.details["refusals"],
            *(n for n in ("shm", "inprocess", "inline") if n in caught.value.message),
        }
        assert not await client.exists("k")
        assert (await client.status()).volumes[0].used_bytes == 0


async def test_a_server_that_blocks_it_does_not_offer_it() -> None:
    server = ServerThread(block=("inprocess",))
    try:
        async with connected(server.address) as client:
            name, refusals = await chosen(client)
            assert name == "shm"
            assert "does not offer" in refusals["inprocess"]
    finally:
        server.stop()


# ---- the bytes ------------------------------------------------------------------------------


@pytest.mark.quick
async def test_bytes_are_right_both_ways(server: ServerThread) -> None:
    """Without a window or a map: packed, moved, spread; every layout and kind."""
    big = torch.randn(300, 400)
    values = {
        "contiguous": big,
        "transposed": big.t(),
        "strided": big[::3, 5:300:7],
        "expanded": torch.arange(400).expand(200, 400),
        "bfloat16": big.bfloat16(),
        "bool": big > 0,
        "complex": torch.complex(big, -big),
        "float8": big.to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 5),
        "grad": torch.randn(200, 300, requires_grad=True),
    }
    payload = {"text": "x" * 100_000, "parts": (1, {2}, b"3")}
    async with connected(server.address, block=["shm", "inline"]) as client:
        refs = await client.put_batch({**values, "object": payload})
        got = await client.get_batch(list(refs))
        assert got.pop("object") == payload
        for name, value in values.items():
            assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape)
            assert torch.equal(bits(got[name]), bits(value))
        await in_place_and_slices(client, big)


async def in_place_and_slices(client: ts.Client, big: torch.Tensor) -> None:
    """What a reader may ask for of the key ``contiguous``."""
    room = torch.zeros(400, 600)
    target = room.t()[::2, ::1][:300, :400]
    assert not target.is_contiguous()
    assert await client.get("contiguous", target) is target
    assert torch.equal(target, big)
    room[:400, :600:2] = 0
    assert not room.any()  # nothing beside the destination was written
    for offsets, shape in (((10, 20), (30, 40)), ((0, 0), (5, 400)), ((299, 0), (1, 400))):
        part = ts.TensorSlice(offsets, shape, (300, 400))
        wanted = big[offsets[0] :, offsets[1] :][: shape[0], : shape[1]]
        assert torch.equal(await client.get("contiguous", tensor_slice_spec=part), wanted)
        into = torch.zeros(shape[1], shape[0]).t()
        assert torch.equal(await client.get("contiguous", into, part), wanted)
    with pytest.raises(ts.LayoutMismatchError):
        await client.get("contiguous", torch.empty(400, 300))


async def test_what_was_got_is_the_readers_own(server: ServerThread) -> None:
    async with connected(server.address, block=["shm", "inline"]) as client:
        await client.put("k", torch.zeros(100_000))
        first = await client.get("k")
        first.fill_(7)
        assert not (await client.get("k")).any()
        await client.put("k", torch.ones(100_000))
        assert (first == 7).all()
        status = await client.status()
        assert status.volumes[0].leased_bytes == 0  # nothing is mapped, nothing stays leased


async def test_it_ends_with_its_server_and_leaves_nothing(server: ServerThread) -> None:
    async with connected(server.address, block=["shm", "inline"]) as client:
        await client.put("k", torch.zeros(100_000))
        assert len(inprocess._served) == 1
        server.stop()
        assert inprocess._served == {}
        with pytest.raises(ts.StoreClosedError):
            await client.put("k", torch.zeros(100_000))


# ---- several volumes ------------------------------------------------------------------------


@pytest.mark.quick
async def test_several_volumes_are_written_and_read_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over a link without a window, whose transfers are let go on when four are under way."""
    everyone: list[asyncio.Barrier] = []

    class Together(inprocess.InProcessLink):
        async def write(self, copies: Sequence[Copy]) -> None:
            await everyone[0].wait()
            await super().write(copies)

        async def read(self, copies: Sequence[Copy]) -> None:
            await everyone[0].wait()
            await super().read(copies)

    monkeypatch.setattr(inprocess, "InProcessLink", Together)
    values = {f"k{i}": torch.full((100_000 + i,), float(i)) for i in range(4)}
    with ServerThread(num_storage_volumes=4, strategy="spread") as server:
        async with connected(server.address, block=["shm"]) as client:
            everyone.append(asyncio.Barrier(1))
            for key, value in values.items():
                await client.put(key, value)
            assert len({(await client.stat(key)).volume for key in values}) == 4
            everyone[0] = asyncio.Barrier(4)
            got = await asyncio.wait_for(client.get_batch(list(values)), 30)
            assert all(torch.equal(got[key], value) for key, value in values.items())
            into = {key: torch.zeros_like(value) for key, value in values.items()}
            await asyncio.wait_for(client.get_batch(into), 30)
            assert all(torch.equal(into[key], value) for key, value in values.items())
