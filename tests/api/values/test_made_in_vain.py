"""What becomes of tensors in the memory of the store when putting them fails, or their process."""

from __future__ import annotations

import _thread
import asyncio
import ctypes
import gc
import os
import signal
import threading

import pytest
import torch
from tests.api.values.test_made_in_place import NUMEL, made, unfinished
from tests.api.values.test_zero_copy import CtrlC
from tests.processes import run_script
from tests.support import at_rest, halt, resume, running_store, turn, used

import torchstore_core as ts
from torchstore_core.clients.session.allocation import Allocation, is_allocated
from torchstore_core.contracts.transport import Mapping
from torchstore_core.values import TensorMeta


async def test_a_put_that_fails_leaves_the_tensor_its_bytes():
    """Its memory is given back, and what is written to it later is nobody else's."""
    async with running_store(timeout=30) as client:
        tensor = await made(5)
        pid = (await ts.status()).controller_pid
        await halt(pid)
        try:
            with pytest.raises(ts.StoreTimeoutError):
                await ts.put("t", tensor, timeout=0.3)
        finally:
            resume(pid)
        assert (tensor == 5).all()
        await at_rest(client)
        there = await ts.exists("t")
        await ts.put("t", torch.zeros(NUMEL))
        tensor.fill_(6)
        assert (await ts.get("t") == 0).all(), there
        assert (await ts.get(await ts.put("again", tensor)) == 6).all()


async def test_a_cancelled_put_leaves_the_tensor_its_bytes():
    async with running_store(timeout=30) as client:
        for turns in range(6):
            tensor = await made(turns)
            putting = asyncio.ensure_future(ts.put("t", tensor))
            for _ in range(turns):
                await turn()
            putting.cancel()
            await asyncio.gather(putting, return_exceptions=True)
            await ts.put("u", torch.full((NUMEL,), -1.0))
            assert (tensor == turns).all()
            tensor.fill_(-2)
            assert (await ts.get("u") == -1).all()
            if await ts.exists("t"):
                assert (await ts.get("t") == turns).all()
                await ts.delete("t")
        del tensor
        gc.collect()
        await at_rest(client)


async def test_with_several_copies_it_is_an_ordinary_tensor():
    strategy = ts.ReplicatedStrategy(copies=2)
    async with running_store(strategy=strategy, num_storage_volumes=2):
        tensor = await ts.empty(NUMEL)
        assert not await unfinished()
        await ts.put("t", tensor.fill_(4))
        assert (await ts.get("t") == 4).all()


async def test_a_process_that_is_killed_leaves_nothing():
    async with running_store() as client:
        script = f"""
            import os, signal
            client = await ts.connect({await ts.address()!r})
            kept = await client.empty(1 << 20)
            put = await client.empty(1 << 20)
            await client.put("t", put.fill_(7))
            os.kill(os.getpid(), signal.SIGKILL)
        """
        with pytest.raises(AssertionError):
            await run_script(script)
        await at_rest(client)
        assert await used() == 4 << 20
        assert (await ts.get("t") == 7).all()


async def test_two_threads_that_put_it_at_once_put_what_it_was():
    """One of them commits it where it is, and the other copies it."""
    async with running_store(timeout=30) as client:
        for turn in range(10):
            tensor = await made(turn)
            refs = await asyncio.gather(
                *[asyncio.to_thread(ts.blocking.put, f"t{at}", tensor) for at in range(4)]
            )
            tensor.fill_(-1)
            for ref in refs:
                assert (await ts.get(ref) == turn).all()
            # The window of this process still is the store's memory, and what it writes arrives.
            await ts.put("other", torch.full((4 * NUMEL,), float(turn)))
            script = f"""
                client = await ts.connect({await ts.address()!r})
                print((await client.get("other") == {turn}).all().item())
            """
            if turn in (0, 9):
                assert (await run_script(script)).split()[-1] == "True"
        del tensor
        gc.collect()
        await at_rest(client)


async def test_a_session_that_has_ended_leaves_what_was_not_put():
    """The memory is somebody else's then, and the tensor still has its bytes."""
    async with running_store(keeper=False):
        tensor = await made(3)
        pid = (await ts.status()).controller_pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ts.TorchStoreError):
            await _until_it_fails()
        assert (tensor == 3).all()
        tensor.fill_(4)
        assert (tensor == 4).all()
    async with running_store():
        assert (await ts.get(await ts.put("t", tensor)) == 4).all()


async def _until_it_fails() -> None:
    while True:
        await ts.put("t", 1)


async def test_ctrl_c_as_one_dies_that_was_not_put_is_not_lost_nor_is_the_memory():
    """It was raised in the finalizer, from where nobody gets it: the put was never undone."""
    async with running_store() as client:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            dying = [await made(1), threading.Event()]  # the last one dies first
            ctrl_c = CtrlC(dying[1], _thread.interrupt_main)
            assert await unfinished()
            with pytest.raises(KeyboardInterrupt):
                dying.clear()
            assert ctrl_c() is None
        finally:
            signal.signal(signal.SIGINT, before)
        await at_rest(client)
        assert await used() == 0


def test_where_one_was_that_has_died_nothing_is_mapped():
    """There may be other memory by now; that it has died is known a moment later."""
    mapped: list[object] = []

    class Link:
        def make_private(self, *what: object) -> None:
            mapped.append(what)

    owner = (ctypes.c_char * 4096)()
    address = ctypes.addressof(owner)
    meta, mapping = TensorMeta("uint8", (4096,)), Mapping(address, 0, 4096, owner)
    known = Allocation(1, meta, (0, 0, 0), Link(), mapping)
    assert is_allocated(address)
    del owner, mapping
    assert not is_allocated(address)
    known.leave()
    known.leave_in_child()
    assert mapped == []
