"""The example plug-in ``inprocess``: server and client in one process, by a transport that is
neither shared memory nor in the message.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from tests.support import bits, running_store

import torchstore_core as ts
from torchstore_core import topology
from torchstore_core.contracts.transport import Copy, LinkContext, SupportsMap, SupportsWindow
from torchstore_core.server.app import Server, ServerOptions
from torchstore_inprocess.transport import InProcessLink, InProcessServer

MB = 1 << 20
CAPACITY = 64 * MB
NAME = "here"


class ServerThread:
    """A server in a thread of this process, on an event loop of its own."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._error: BaseException | None = None
        self.address = ""
        self.offer = b""

    async def _main(self) -> None:
        try:
            server = Server(ServerOptions(store_name=NAME, capacity=CAPACITY, prefault=0))
            self.address = await server.start()
            self.offer = server.controller.volumes[0].info.offers["inprocess"]
            self._loop, self._server = asyncio.get_running_loop(), server
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._ready.set()
        try:
            await server.serve()
        finally:
            await server.close()

    async def start(self) -> None:
        self._thread.start()
        await asyncio.to_thread(self._ready.wait, 10)
        if self._error is not None:
            raise self._error

    async def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._server.stop_soon)
            await asyncio.to_thread(self._thread.join, 10)
        assert not self._thread.is_alive()


@pytest.fixture
async def server() -> AsyncIterator[ServerThread]:
    thread = ServerThread()
    await thread.start()
    try:
        yield thread
    finally:
        await thread.stop()


@pytest.fixture
async def client(server: ServerThread) -> AsyncIterator[ts.Client]:
    made = await ts.connect(server.address, store_name=NAME, block=["shm"], timeout=10)
    try:
        yield made
    finally:
        await ts.shutdown(NAME)


def context() -> LinkContext:
    here = topology.probe()
    return LinkContext(here, here, same_host=True, offered=True)


async def test_it_is_chosen(client: ts.Client):
    (told,) = await client.explain(MB)
    assert told["chosen"] == "inprocess"
    (bid,) = [bid for bid in told["bids"] if bid["transport"] == "inprocess"]
    assert bid["reason"] == "the volume is in this very process"
    # The smallest values still ride in the message; all others take it.
    assert 0 <= told["inline_up_to"] < MB
    assert "shm" not in [bid["transport"] for bid in told["bids"]]


async def test_it_refuses_a_volume_in_another_process():
    async with running_store(store_name="elsewhere") as client:
        (told,) = await client.explain(MB)
    assert told["refusals"]["inprocess"] == "the volume is in another process"
    assert told["chosen"] == "shm"


TENSORS = {
    "contiguous": torch.arange(300_000, dtype=torch.float32),
    "bf16": torch.arange(200_000).to(torch.bfloat16).reshape(400, 500),
    "transposed": torch.arange(250_000, dtype=torch.int32).reshape(500, 500).t(),
    "every third": torch.arange(900_000, dtype=torch.int16)[::3],
    "narrowed": torch.arange(400_000, dtype=torch.float64).reshape(400, 1000)[:, 100:900],
    "expanded": torch.arange(1000).expand(500, 1000),
    "offset": torch.arange(300_000, dtype=torch.uint8)[1:],
}


@pytest.mark.parametrize("name", TENSORS)
async def test_bytes_are_right_both_ways(client: ts.Client, name: str):
    value = TENSORS[name]
    ref = await client.put("t", value)
    got = await client.get(ref)
    assert (got.dtype, got.shape) == (value.dtype, value.shape)
    assert torch.equal(bits(got), bits(value))
    got.zero_()  # it is the reader's own
    assert torch.equal(bits(await client.get(ref)), bits(value))

    frame = torch.full((2 * value.shape[0], *value.shape[1:]), 7, dtype=value.dtype)
    view = frame[::2]
    assert await client.get(ref, view) is view
    assert torch.equal(bits(view), bits(value))
    assert bool((frame[1::2] == 7).all())


async def test_slices(client: ts.Client):
    value = torch.arange(600 * 700, dtype=torch.int32).reshape(600, 700)
    await client.put("t", value)
    for offsets, shape in [((0, 0), (600, 700)), ((100, 0), (200, 700)), ((37, 41), (500, 601))]:
        part = ts.TensorSlice(offsets=offsets, local_shape=shape, global_shape=(600, 700))
        (row, column), (rows, columns) = offsets, shape
        expected = value[row : row + rows, column : column + columns]
        assert torch.equal(await client.get("t", tensor_slice_spec=part), expected)
        into = torch.zeros(columns, rows, dtype=torch.int32).t()
        await client.get("t", into, part)
        assert torch.equal(into, expected)


async def test_objects_and_batches(client: ts.Client):
    items: dict[str, Any] = {
        "large": {"text": "ü" * MB, "tuple": (1, {2, 3}), "bytes": bytes(range(256)) * 8192},
        "small": 5,
        "tensor": torch.arange(100_000),
        "empty": torch.empty(0, 3),
    }
    refs = await client.put_batch(items)
    got = await client.get_batch(list(refs.values()))
    assert got["large"] == items["large"]
    assert type(got["large"]["tuple"]) is tuple
    assert got["small"] == 5
    assert torch.equal(got["tensor"], items["tensor"])
    assert got["empty"].shape == (0, 3)
    await client.put("large", "now small")
    assert await client.get("large") == "now small"
    (volume,) = (await client.status()).volumes
    assert volume.leased_bytes == volume.unfinished_bytes == 0


async def test_it_is_what_moves_the_bytes(client: ts.Client, monkeypatch: pytest.MonkeyPatch):
    moved = {"write": 0, "read": 0}

    def counting(name: str) -> None:
        original = getattr(InProcessLink, name)

        async def method(self: InProcessLink, copies: list[Copy]) -> None:
            await original(self, copies)
            moved[name] += sum(copy.nbytes for copy in copies)

        monkeypatch.setattr(InProcessLink, name, method)

    counting("write")
    counting("read")
    value = torch.arange(MB, dtype=torch.uint8)
    await client.put("t", value)
    assert moved == {"write": MB, "read": 0}
    assert torch.equal(await client.get("t"), value)
    assert moved == {"write": MB, "read": MB}


# ---- the link itself ----------------------------------------------------------------------


async def test_only_what_the_segment_has_is_copied(server: ServerThread):
    link = await InProcessLink.connect(server.offer, context())
    assert not isinstance(link, (SupportsWindow, SupportsMap))
    page = ctypes.create_string_buffer(bytes(range(256)) * 16, 4096)
    back = ctypes.create_string_buffer(4096)
    here, there = ctypes.addressof(page), ctypes.addressof(back)

    await link.write([Copy(here, 0, CAPACITY - 4096, 4096)])  # the very end
    await link.read([Copy(there, 0, CAPACITY - 4096, 4096)])
    assert back.raw == page.raw
    await link.write([Copy(here, 0, CAPACITY, 0)])

    outside = [
        Copy(there, 0, CAPACITY - 4095, 4096),
        Copy(there, 0, CAPACITY, 1),
        Copy(there, 0, -1, 1),
        Copy(there, 0, -4096, 4096),
        Copy(there, 0, 0, CAPACITY + 1),
        Copy(there, 0, 10, -5),
        Copy(there, 0, 2**63, 1),
        Copy(there, 1, 0, 1),
        Copy(there, -1, 0, 1),
    ]
    for copy in outside:
        with pytest.raises(ts.TransportError):
            await link.read([copy])
        with pytest.raises(ts.TransportError):
            await link.write([copy])
    assert back.raw == page.raw
    link.close()
    link.close()
    with pytest.raises(ts.TransportError):
        await link.read([Copy(there, 0, 0, 1)])


async def test_an_offer_of_nobody_is_no_link(server: ServerThread):
    for offer in (b"", bytes(16), server.offer[:-1]):
        with pytest.raises(ts.TransportUnavailableError):
            await InProcessLink.connect(offer, context())


async def test_a_closed_server_is_a_typed_error(server: ServerThread):
    client = await ts.connect(server.address, store_name=NAME, block=["shm"], timeout=10)
    try:
        await client.put("t", torch.ones(MB))
        held = await client.get("t")
        link = await InProcessLink.connect(server.offer, context())
        waiting = asyncio.create_task(client.wait("never"))
        await client.exists("t")
        await server.stop()
        memory = ctypes.create_string_buffer(16)
        for move in (link.read, link.write):
            with pytest.raises(ts.TransportError, match="not served in this process any more"):
                await move([Copy(ctypes.addressof(memory), 0, 0, 16)])
        with pytest.raises(ts.TransportUnavailableError):
            await InProcessLink.connect(server.offer, context())
        for work in (waiting, client.put("t", torch.ones(MB)), client.get("t")):
            with pytest.raises(ts.StoreClosedError):
                await work
        assert bool((held == 1).all())  # what was read is the reader's
    finally:
        await ts.shutdown(NAME)


async def test_closing_the_server_half_twice_is_closing_it_once():
    half = InProcessServer()
    await half.close()
    await half.close()
