"""What transports, users and dying servers do in the middle of a transfer."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import warnings
from typing import Any

import pytest
import torch
from tests.processes import run_script
from tests.support import running_store, until

import torchstore_core as ts
from torchstore_core.clients.session.volume_links import VolumeLinks
from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_transports.shm.link import ShmLink

MB = 1 << 20


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("what", ["put", "get"])
async def test_data_that_is_replaced_during_the_copy_harms_nobody(what: str, count: int) -> None:
    """``tensor.data = other`` frees the memory that is being copied, if nobody else holds it."""
    printed = await run_script(
        f"""
        import torch
        await ts.initialize(capacity=512 << 20, prefault=0)
        tensors = {{f"k{{i}}": torch.ones((160 << 20) // 4 // {count}) for i in range({count})}}
        await ts.put_batch(tensors)
        if {what!r} == "get":
            tensors = {{key: torch.zeros_like(value) for key, value in tensors.items()}}
        batch = ts.put_batch(tensors) if {what!r} == "put" else ts.get_batch(dict(tensors))
        task = asyncio.create_task(batch)
        while {what!r} == "get" and not task.done() and not any(t[0] for t in tensors.values()):
            await asyncio.sleep(0)  # until the copy has begun
        while not task.done():
            await asyncio.sleep(0.002)
            for tensor in tensors.values():
                tensor.data = torch.zeros(1)
        try:
            await task
        except ts.UnsupportedValueError:
            pass
        await ts.shutdown()
        print("alive")
        """
    )
    assert printed.split() == ["alive"]


@pytest.mark.parametrize("what", ["put", "get"])
async def test_a_server_that_dies_ends_a_transfer_that_would_never_end(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = asyncio.Event()

    async def never(*_: Any) -> None:
        hangs.set()
        await asyncio.Event().wait()

    async with running_store(keeper=False) as client:
        await client.put("k", torch.zeros(2 * MB))
        pid = (await client.status()).controller_pid
        await client.get("k", torch.empty(2 * MB))
        with monkeypatch.context() as patch:
            patch.setattr("torchstore_core.clients.moving.executor.by_window", never)
            call = (
                client.put("k", torch.ones(2 * MB))
                if what == "put"
                else client.get("k", torch.empty(2 * MB))
            )
            task = asyncio.create_task(call)
            await hangs.wait()
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ts.StoreClosedError):
                await asyncio.wait_for(task, 50)


async def test_a_transport_that_fails_with_its_store_is_not_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be the first that is gone, before the client hears of the server."""
    async with running_store(keeper=False, block=["inline", "tcp"]) as client:
        pid = (await client.status()).controller_pid

        async def fails(*_: Any) -> None:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            raise TransportError("the volume is gone")

        monkeypatch.setattr("torchstore_core.clients.moving.executor.by_window", fails)
        with pytest.warns(RuntimeWarning, match="is gone"), pytest.raises(ts.StoreClosedError):
            await client.put("k", torch.ones(4 * MB))


async def test_a_transport_that_raises_anything_does_not_keep_leases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is called by the thread that gives leases back, too."""

    def wrong(*_: Any, **__: Any) -> None:
        raise ValueError("a bug")

    async with running_store() as client:
        await client.put("k", torch.zeros(MB))
        got = await client.get("k")
        monkeypatch.setattr(ShmLink, "prepare", wrong)
        session = client._joined.session_here()
        assert session is not None
        session._warm = [(0, 0, 64 << 10)]
        session._reclaimer.wake()
        await until(lambda: not session._warm)
        assert any(t.name == "torchstore-reclaimer" for t in threading.enumerate())
        assert (await client.status()).volumes[0].leased_bytes > 0
        del got
        gc.collect()

        async def released() -> bool:
            return (await client.status()).volumes[0].leased_bytes == 0

        await until(released)


async def test_a_volume_that_is_lost_just_before_the_transfer_ends_it() -> None:
    async with running_store() as client:
        await client.put("k", 1)
        session = client._joined.session_here()
        assert session is not None
        links: VolumeLinks = session.volumes[0]
        with links.in_use():
            links.mark_lost("its host is gone")
            with pytest.raises(TransportUnavailableError, match="its host is gone"):
                await asyncio.wait_for(links.until_lost(asyncio.Event().wait(), 300), 50)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            await ts.shutdown()


async def test_a_new_client_does_not_need_a_volume_that_hangs_and_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It connects to all volumes at the same time."""
    async with running_store(num_storage_volumes=2, strategy="spread") as client:
        await client.put("first", torch.zeros(MB))
        await client.put("second", torch.ones(MB))
        connect, begun, both = VolumeLinks.connect, set[int](), asyncio.Event()

        async def connect_or_hang(links: VolumeLinks, candidate: Any) -> Any:
            begun.add(links.info.index)
            if len(begun) == 2:
                both.set()
            await both.wait()
            if links.info.index == 0:
                links.mark_lost("its host is gone")
                raise TransportError("nobody answers")
            return await connect(links, candidate)

        await ts.reset_client()
        monkeypatch.setattr(VolumeLinks, "connect", connect_or_hang)
        assert torch.equal(await client.get("second", timeout=50), torch.ones(MB))
        assert begun == {0, 1}
        with pytest.raises(TransportUnavailableError, match="its host is gone"):
            await client.get("first")
