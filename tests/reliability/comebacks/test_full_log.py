"""A server that gets no more memory for its log serves what it can, and loses nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.processes import run_script
from tests.reliability.harness import MB, kill
from tests.support import running_store, until

import torchstore_core as ts


@pytest.fixture
async def store() -> AsyncIterator[ts.Client]:
    async with running_store(timeout=30, capacity=64 * MB) as client:
        yield client


@contextmanager
def no_longer_files(pid: int) -> Iterator[None]:
    """The system makes no file longer for that server, so its log stays at 1 MiB, and it cannot
    make another one.
    """
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (MB // 2, limits[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has been killed, and ends at this moment
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


async def put_until_refused() -> dict[str, bytes]:
    """Put until the log is full; what has been acknowledged."""
    there: dict[str, bytes] = {}
    why = ""
    for size in (5000, 500, 50, 1):  # up to the last byte that a put can have
        is_full = False
        while not is_full:
            key, value = f"k{len(there)}", bytes([len(there) % 251]) * size
            try:
                await ts.put(key, value)
            except ts.StoreFullError as error:
                is_full, why = True, error.details["reason"]
            else:
                there[key] = value
    assert why == "File too large"
    assert len(there) > 100
    with pytest.raises(ts.StoreFullError):
        await delete_until_refused()
    return there


async def delete_until_refused() -> None:
    """Until there is no room for the shortest request that can be refused."""
    while True:
        with contextlib.suppress(ts.KeyNotFoundError):
            await ts.delete("x")


async def check(there: dict[str, bytes]) -> None:
    assert sorted(key for key in await ts.keys() if key.startswith("k")) == sorted(there)
    for key, value in there.items():
        assert await ts.get(key) == value


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_log_that_cannot_grow_for_a_while(store: ts.Client, is_killed: bool) -> None:
    large = torch.arange(float(MB))
    await ts.put("large", large)
    mapped, ref = await ts.get("large"), await ts.put_object([1, 2])
    pid = (await ts.status()).controller_pid
    with no_longer_files(pid):
        there = await put_until_refused()
        for refused in (ts.get("large"), ts.delete("large"), ts.put_object(b"x"), ts.hold("large")):
            with pytest.raises(ts.StoreFullError, match="cannot grow"):
                await refused
        await check(there)
        assert await ts.get(ref) == [1, 2]
        assert torch.equal(mapped, large)
        del mapped, ref  # which has room, or waits
        gc.collect()
        await check(there)
        assert (await ts.status()).controller_pid == pid
        if is_killed:
            kill(pid)
    await check(there)
    assert torch.equal(await ts.get("large"), large)
    await ts.put("again", 1)
    assert await ts.get("again") == 1
    gc.collect()
    await until(lambda: leased_is_given_back())
    assert ((await ts.status()).controller_pid == pid) is not is_killed


async def leased_is_given_back() -> bool:
    return (await ts.status()).volumes[0].leased_bytes == 0


JOIN = """
try:
    await ts.connect({address!r})
    await ts.put("other", 1)
except ts.StoreFullError as error:
    print("refused:", error.details["reason"])
await ts.shutdown()
"""


async def join(address: str) -> str:
    """What another process says that joins the store, and puts something."""
    return (await run_script(JOIN.format(address=address))).strip()


async def test_another_client_is_refused_and_comes_later(store: ts.Client) -> None:
    pid = (await ts.status()).controller_pid
    with no_longer_files(pid):
        there = await put_until_refused()
        assert await join(store.address) == "refused: File too large"
        await check(there)
    assert await join(store.address) == ""
    assert await ts.get("other") == 1
    await check(there)


async def test_a_child_whose_session_is_refused_leaves_nothing(store: ts.Client) -> None:
    """It inherits no references, but what it would have had ends with those of its parent."""
    ref = await ts.put_object([1, 2])
    pid = (await ts.status()).controller_pid
    with no_longer_files(pid):
        await put_until_refused()
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        assert await ts.get(ref) == [1, 2]
    await ts.put("again", 1)
    del ref
    gc.collect()
    await until(no_refs)


async def no_refs() -> bool:
    return not await ts.refs()
