"""Links of other packages that raise what their contract does not allow.

The next transport moves the bytes, and where there is none, the error is one of the store.
"""

from __future__ import annotations

import asyncio
import operator
import os
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.support import SMALL, running_store, turn, until
from tests.transports import foreign
from tests.transports.asking import ask, nothing_unfinished
from tests.transports.mailbox import Letter

import torchstore_core as ts

MB = 1 << 20
METHODS = ("connect", "write", "read")
OTHERS = ["tcp", "mailbox", "mailbox-apart"]
VALUES = {f"k{i}": torch.arange(i, MB // 8 + i) for i in range(4)}


@pytest.fixture(scope="module")
def addresses(installed_first: None) -> Iterator[dict[str, str]]:
    """Of two stores: one that prefers ``foreign``, and one that has no other transport."""

    async def start() -> dict[str, str]:
        first = await ts.initialize(store_name="first", prefer=["foreign"], block=OTHERS, **SMALL)
        strategy = ts.SingletonStrategy(transport="foreign")
        only = await ts.initialize(store_name="only", strategy=strategy, **SMALL)
        return {"first": first.address, "only": only.address}

    async def end() -> None:
        await ts.shutdown("first")
        await ts.shutdown("only")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(foreign.FAULTY, "mailbox")
        found = asyncio.run(start())
    yield found
    asyncio.run(end())


@asynccontextmanager
async def joined(address: str, **how: Any) -> AsyncIterator[ts.Client]:
    """A client of its own, with links of its own, of a store that is empty then and afterwards."""
    client = await ts.connect(address, store_name="joined", **how)
    try:
        yield client
        await client.delete_batch(await client.keys())
    finally:
        await ts.shutdown("joined")


@pytest.fixture(params=["mailbox"])
def faulty(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], None]:
    """Makes the links fail: the method, and what it raises."""
    monkeypatch.setenv(foreign.FAULTY, str(request.param))

    def fail(method: str, fault: str) -> None:
        changed = {"method": method, "fault": fault, "failed": 0, "closed": 0, "looked": False}
        for name, value in changed.items():
            monkeypatch.setitem(foreign.state, name, value)

    fail("", "")
    return fail


async def _all_is_right(client: ts.Client) -> None:
    """A put and both kinds of get."""
    await client.put_batch(VALUES)
    into = {name: torch.zeros_like(value) for name, value in VALUES.items()}
    await client.get_batch(into)
    for got in (into, await client.get_batch(list(VALUES))):
        for name, value in VALUES.items():
            assert torch.equal(got[name], value)


@pytest.mark.parametrize("fault", foreign.FAULTS)
@pytest.mark.parametrize("method", METHODS)
async def test_the_next_transport_moves_the_bytes(
    addresses: dict[str, str],
    faulty: Callable[[str, str], None],
    method: str,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However busy the machine is, the first one is not tried again meanwhile.
    monkeypatch.setattr("torchstore_core.clients.session.volume_links._FIRST_BACKOFF_S", 60.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if method == "connect":  # which the client does as soon as there is a store
            faulty(method, fault)
        async with joined(addresses["first"], prefer=["foreign"], block=OTHERS) as client:
            faulty(method, fault)
            await asyncio.wait_for(_all_is_right(client), 50)
            assert method == "connect" or foreign.state["failed"] == 1
            await until(lambda: nothing_unfinished(client), 10)
    assert len([one for one in caught if "'foreign'" in str(one.message)]) == 1


@pytest.mark.parametrize("fault", ["OSError", "CancelledError", "StoreTimeoutError"])
@pytest.mark.parametrize("method", METHODS)
async def test_without_another_one_there_is_a_typed_error(
    addresses: dict[str, str], faulty: Callable[[str, str], None], method: str, fault: str
) -> None:
    """And the memory is given back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if method == "connect":
            faulty(method, fault)
        async with joined(addresses["only"]) as client:
            if method == "read":
                await client.put_batch(VALUES)
            faulty(method, fault)
            with pytest.raises(ts.TransportError):
                await asyncio.wait_for(_all_is_right(client), 50)
            await until(lambda: nothing_unfinished(client), 10)
            if method != "connect" or fault != "OSError":
                faulty("", "")
                await until(lambda: _works(client), 20)


async def test_what_connects_to_nothing(faulty: Callable[[str, str], None]) -> None:
    faulty("connect gives", "")
    with pytest.warns(RuntimeWarning, match="'foreign'.*NoneType, which is no Link"):
        async with running_store(prefer=["foreign"], block=OTHERS, **SMALL) as client:
            await _all_is_right(client)


async def test_a_link_that_does_not_close(faulty: Callable[[str, str], None]) -> None:
    async with running_store(prefer=["foreign"], block=OTHERS, **SMALL) as client:
        await _all_is_right(client)
        faulty("close", "OSError")
    await until(lambda: foreign.state["failed"], 10)


@pytest.mark.parametrize("faulty", ["window"], indirect=True)
@pytest.mark.parametrize("method", ["window", "prepare", "map"])
@pytest.mark.parametrize("fault", ["OSError", "CancelledError"])
async def test_abilities_that_fail(
    faulty: Callable[[str, str], None], method: str, fault: str
) -> None:
    """``prepare`` on the copy threads, which go on to serve others."""
    large = torch.arange(4 * MB)
    async with running_store(prefer=["foreign"], block=OTHERS, **SMALL) as client:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            faulty(method, fault)
            await asyncio.wait_for(client.put("t", large), 50)
            into = torch.zeros_like(large)
            await asyncio.wait_for(client.get("t", into), 50)
            assert torch.equal(into, large)
            assert torch.equal(await asyncio.wait_for(client.get("t"), 50), large)
        assert foreign.state["failed"]
        await until(lambda: nothing_unfinished(client), 10)


@pytest.mark.parametrize("method", ["progress", "progress again"])
@pytest.mark.parametrize("fault", ["OSError", "CancelledError"])
async def test_progress_that_fails(
    addresses: dict[str, str], faulty: Callable[[str, str], None], method: str, fault: str
) -> None:
    """As a transfer to another host begins, and while it waits for its peer."""
    async with joined(addresses["first"], prefer=["foreign"], block=OTHERS, timeout=20) as client:
        await client.put_batch(VALUES)
        await ask(client, Letter("slow"), "foreign")
        (volume,) = (await client._joined.session(10)).volumes
        volume.context = msgspec.structs.replace(volume.context, same_host=False)
        faulty(method, fault)
        with pytest.warns(RuntimeWarning, match="'foreign'.*its link"):
            got = await client.get_batch(list(VALUES))
        assert foreign.state["failed"] == 1
        for name, value in VALUES.items():
            assert torch.equal(got[name], value)


async def test_links_that_fail_again_and_again_leave_nothing(
    faulty: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchstore_core.clients.session.volume_links._FIRST_BACKOFF_S", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        async with running_store(prefer=["foreign"], block=OTHERS, **SMALL) as client:
            faulty("write", "OSError")
            await _all_is_right(client)
            before = _open()
            for _ in range(20):
                await _all_is_right(client)
                await turn()
            assert foreign.state["failed"] > 5
            await until(lambda: foreign.state["closed"] >= foreign.state["failed"], 10)
            await until(lambda: all(map(operator.le, _open(), before)))


def _open() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(list(Path(f"/proc/{os.getpid()}/fd").iterdir())), threading.active_count()


async def _works(client: ts.Client) -> bool:
    try:
        await _all_is_right(client)
    except ts.TransportError:
        return False
    return True
