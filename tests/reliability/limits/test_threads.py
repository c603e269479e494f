"""A process that can have no more threads: what needs none works, the rest says so."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.processes import run_script
from tests.support import running_store

import torchstore_core as ts
import torchstore_core.blocking as blocking
from torchstore_core.clients.calls.thread_loops import in_thread
from torchstore_core.machine.copying import copy_threads


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """No thread gets a stack of 64 TB: to start one fails as it does beyond the limit."""
    before = threading.stack_size(1 << 60)
    try:
        yield
    finally:
        threading.stack_size(before)


def refused(call: Callable[[], object]) -> None:
    for _ in range(2):
        with pytest.raises(ts.TransportNotReadyError, match="can start no more threads"):
            call()


async def test_large_values_are_copied_without_copy_threads() -> None:
    async with running_store():
        await run_script(f"from {__name__} import copying\nawait copying()")


async def copying() -> None:
    value = torch.arange(1 << 20)
    await ts.keys()
    with no_threads():
        for at in range(3):
            await ts.put("w", value + at)
            mine = torch.zeros_like(value)
            await ts.get("w", mine)
            assert torch.equal(mine, value + at)
    before = threading.active_count()
    await ts.put("w", value)
    assert threading.active_count() == before + copy_threads()


async def test_what_finds_no_thread_is_done_once() -> None:
    done: list[int] = []
    with ThreadPoolExecutor(1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        with no_threads():
            await in_thread(lambda: done.append(1))
        await asyncio.to_thread(done.append, 2)  # by a thread that takes what waits in its turn
    assert done == [1, 2]


async def test_a_session_and_a_put_in_the_background_take_a_thread() -> None:
    async with running_store():
        await run_script(f"from {__name__} import using\nawait asyncio.to_thread(using)")


def using() -> None:
    with no_threads():
        refused(blocking.keys)
    assert blocking.keys() == []
    with no_threads():
        refused(lambda: blocking.put_state_dict({"w": 1}, "d", blocking=False))
    blocking.put_state_dict({"w": 1}, "d", blocking=False).result(60)
    assert blocking.get_state_dict("d") == {"w": 1}
