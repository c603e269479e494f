"""Links that go on although they are cancelled, which the contract forbids."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import torch
from tests.support import SMALL, running_store, until
from tests.transports.kit.broken.simple import Plugin, Simple, SimpleLink, named

import torchstore_core as ts
from torchstore_core.contracts.transport import Copy, Link, LinkContext

VALUE = torch.arange(1 << 20)
_go_on = asyncio.Event()
_opened: list[SimpleLink] = []


async def _hang() -> None:
    while not _go_on.is_set():
        try:
            await _go_on.wait()
        except asyncio.CancelledError:
            continue


class DeafConnect(SimpleLink):
    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> Link:
        await _hang()
        made = await super().connect(offer, context)
        if isinstance(made, SimpleLink):
            _opened.append(made)
        return made


class DeafRead(SimpleLink):
    async def read(self, copies: Sequence[Copy]) -> None:
        await _hang()
        await super().read(copies)


def __getattr__(name: str) -> Plugin:
    """``plugin_X``: the plug-in with the half ``X``."""
    plugin = named(name, {"DeafConnect": DeafConnect, "DeafRead": DeafRead, "Simple": Simple})
    plugin.name = "deaf"
    return plugin


@pytest.fixture(autouse=True)
def _anew() -> None:
    global _go_on
    _go_on = asyncio.Event()
    _opened.clear()


@contextlib.asynccontextmanager
async def _client(timeout: float, block: Sequence[str] = ()) -> AsyncIterator[ts.Client]:
    """A client with that time for each operation, which uses the transport."""
    async with running_store(prefer=["shm"], **SMALL):
        address = await ts.address()
        joining = ts.connect(
            address, store_name="far", prefer=["deaf"], block=block, timeout=timeout
        )
        yield await asyncio.wait_for(joining, timeout + 20)
        await ts.shutdown("far")


async def test_a_connect_that_cannot_be_cancelled_holds_nobody_up(
    install: Callable[[dict[str, str]], None], caplog: pytest.LogCaptureFixture
) -> None:
    install({"deaf": f"{__name__}:plugin_DeafConnect"})
    async with contextlib.AsyncExitStack() as stack:
        with pytest.warns(RuntimeWarning, match="'deaf' .* is not ready"):
            client = await stack.enter_async_context(_client(1.0))
        assert "'deaf' does not end its connect" in caplog.text
        await client.put("t", VALUE)
        assert torch.equal(await client.get("t"), VALUE)
        _go_on.set()
        await until(lambda: bool(_opened) and _opened[0].closed)


@pytest.mark.parametrize(
    "block", [(), pytest.param(("shm", "inline", "tcp"), marks=pytest.mark.soak)]
)
async def test_a_read_that_cannot_be_cancelled_is_named(
    install: Callable[[dict[str, str]], None],
    caplog: pytest.LogCaptureFixture,
    block: Sequence[str],
) -> None:
    """Its call waits: the link may still write to the memory of the destination."""
    install({"deaf": f"{__name__}:plugin_DeafRead"})
    async with _client(3.0, block) as client:
        await client.put("t", VALUE, timeout=30)
        getting = asyncio.ensure_future(client.get("t", torch.zeros_like(VALUE)))
        await until(lambda: "'deaf' goes on with a transfer" in caplog.text, 20)
        assert not getting.done()
        _go_on.set()
        with contextlib.suppress(ts.StoreTimeoutError):  # or it ends well, though late
            await getting
