"""A store runs already: what names it, who joins it, and who is told that there will be two."""

from __future__ import annotations

import asyncio
import os
import signal
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support import SMALL, free_port, halt, run_script, running_store, server_children

import torchstore_core as ts
import torchstore_core.blocking as blocking

pytestmark = pytest.mark.local_only


@pytest.fixture
async def named() -> AsyncIterator[ts.Client]:
    """A store that the environment names, as if another process had started it."""
    async with running_store(store_name="elsewhere") as client:
        await client.put("k", "there")
        del os.environ["TORCHSTORE_ADDRESSES"]
        os.environ["TORCHSTORE_ADDRESS"] = client.address
        yield client
        del os.environ["TORCHSTORE_ADDRESS"]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No server outlives the test."""
    yield
    assert not server_children()


def _alone() -> ts.SPMDEnv:
    return ts.SPMDEnv(0, 0, 1, 1, "127.0.0.1", free_port())


STARTS = {
    "initialize": lambda name: ts.initialize(store_name=name, **SMALL),
    "initialize_spmd": lambda name: ts.initialize_spmd(store_name=name, env=_alone(), **SMALL),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", ["torchstore", "policy"])
async def test_a_second_store_is_started_with_a_warning(
    start: str, name: str, named: ts.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "TORCHSTORE_ADDRESS"
    if name != "torchstore":
        variable = "TORCHSTORE_ADDRESSES"
        monkeypatch.setenv(variable, f'{{"{name}": "{named.address}"}}')
    with pytest.warns(RuntimeWarning, match=f"{variable} names a store that is running") as caught:
        second = await STARTS[start](name)
    try:
        (warning,) = caught
        said = str(warning.message)
        for part in (named.address, str((await named.status()).controller_pid), variable):
            assert part in said
        assert "connect_or_initialize" in said
        assert warning.filename == __file__  # and not a line of ours
        assert second.address != named.address
        assert await second.keys() == []
    finally:
        await ts.shutdown(name)
    assert named.address in os.environ[variable]


@pytest.mark.parametrize("start", STARTS)
async def test_where_warnings_are_errors_nothing_is_started(
    start: str, nothing_left: None, named: ts.Client
) -> None:
    before = server_children()
    with pytest.raises(RuntimeWarning, match="connect_or_initialize"):
        await STARTS[start]("torchstore")
    assert server_children() == before
    assert await ts.get("k") == "there"  # found through the environment, as before
    await ts.shutdown()


async def test_a_store_that_hangs_runs_too(named: ts.Client) -> None:
    pid = (await named.status()).controller_pid
    await halt(pid)
    try:
        with pytest.raises(RuntimeWarning, match="no answer from"):
            await ts.initialize(**SMALL)
        with pytest.raises(ts.StoreTimeoutError):
            await ts.connect_or_initialize(timeout=0.2)
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_no_warning_of_what_is_gone_or_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own filter makes an error of it."""
    async with running_store() as client:
        gone = client.address
    async with running_store():  # again after shutdown
        pass
    for stale in (gone, "unix:/nowhere/control.sock", "nonsense"):
        monkeypatch.setenv("TORCHSTORE_ADDRESS", stale)
        async with running_store():
            assert os.environ["TORCHSTORE_ADDRESS"] != stale
            async with running_store(store_name="another one"):
                pass
        assert os.environ["TORCHSTORE_ADDRESS"] == stale
        async with _joined() as client:
            assert client.address != stale


@asynccontextmanager
async def _joined(**arguments: object) -> AsyncIterator[ts.Client]:
    """``connect_or_initialize``, and ``shutdown``."""
    try:
        yield await ts.connect_or_initialize(**{**SMALL, **arguments})
    finally:
        await ts.shutdown()


async def test_what_the_environment_names_is_joined(named: ts.Client) -> None:
    async with _joined(allow_pickle=False, timeout=7) as client:
        assert client.address == named.address
        assert await client.get("k") == await ts.get("k") == "there"
        with pytest.raises(ts.UnsafeObjectError):
            await ts.put("path", Path())
    assert await named.get("k") == "there"  # who only joined does not end it


async def test_a_cell_that_runs_again(nothing_left: None) -> None:
    async with running_store() as client:
        await client.put("k", 1)
        with pytest.raises(ts.ConfigurationError) as caught:
            await ts.initialize(**SMALL)
        said = str(caught.value)
        assert said.startswith("store 'torchstore' is initialized in this process already")
        assert "`await shutdown()`" in said
        assert "connect_or_initialize" in said
        assert len(said) < 160
        async with running_store(store_name="other"):
            with pytest.raises(ts.ConfigurationError, match=r"`await shutdown\('other'\)`"):
                await ts.initialize(store_name="other", **SMALL)
        again = await ts.connect_or_initialize(**SMALL)
        assert again.address == client.address
        assert await again.get("k") == 1
        assert len(server_children()) == 1
    # It was this process's own all the time.


async def test_two_at_the_same_time_say_so() -> None:
    first, second = await asyncio.gather(
        ts.initialize(**SMALL), ts.initialize(**SMALL), return_exceptions=True
    )
    await ts.shutdown()
    assert isinstance(first, ts.Client)
    assert "at this moment" in str(second)


async def test_ones_own_store_that_died_is_started_again(nothing_left: None) -> None:
    first = await ts.initialize(**SMALL)
    await first.put("k", 1)
    os.kill((await first.status()).controller_pid, signal.SIGKILL)
    async with _joined() as second:
        assert second.address != first.address
        assert await second.keys() == []
    assert "TORCHSTORE_ADDRESS" not in os.environ


async def test_a_rank_does_not_start_one_in_the_place_of_all_ranks(nothing_left: None) -> None:
    client = await ts.initialize_spmd(env=_alone(), **SMALL)
    assert (await ts.connect_or_initialize(**SMALL)).address == client.address
    os.kill((await client.status()).controller_pid, signal.SIGKILL)
    with pytest.raises(ts.StoreClosedError, match="is gone"):
        await ts.connect_or_initialize(**SMALL)
    await ts.shutdown()


async def test_children_join_and_strangers_start() -> None:
    body = """
    import warnings
    warnings.simplefilter("error")
    client = await ts.connect_or_initialize(capacity=16 << 20, prefault=0)
    print(client.address, await client.keys())
    """
    async with running_store() as store:
        await store.put("k", 1)
        assert await run_script(body) == f"{store.address} ['k']\n"
        del os.environ["TORCHSTORE_ADDRESS"]
        address, keys = (await run_script(body)).split()
        assert (address != store.address, keys) == (True, "[]")


def test_it_blocks_too() -> None:
    client = blocking.connect_or_initialize(**SMALL)
    try:
        assert isinstance(client, blocking.Client)
        assert blocking.connect_or_initialize(**SMALL).address == client.address
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert client.address in {store.address for store in blocking.stores()}
        assert not caught
    finally:
        blocking.shutdown()


async def test_arguments_are_checked_before_anything_is_joined(named: ts.Client) -> None:
    with pytest.raises(ts.ConfigurationError, match="capacity"):
        await ts.connect_or_initialize(capacity=0)


# ---- stores -------------------------------------------------------------------------------


async def test_stores_finds_what_runs() -> None:
    before = {store.address for store in await ts.stores()}
    async with running_store(store_name="mine", num_storage_volumes=2) as mine:
        ranks = await ts.initialize_spmd(env=_alone(), store_name="ranks'", **SMALL)
        try:
            found = {s.address: s for s in await ts.stores() if s.address not in before}
            assert set(found) == {mine.address, ranks.address}
            one, other = found[mine.address], found[ranks.address]
            assert one == ts.RunningStore(
                address=mine.address,
                store_name="mine",
                pid=(await mine.status()).controller_pid,
                hostname=os.uname().nodename,
                owner_pid=os.getpid(),
                num_storage_volumes=2,
                capacity_bytes=256 << 20,
                error=None,
            )
            assert (other.store_name, other.owner_pid) == ("ranks'", None)  # it is nobody's
            with pytest.raises(AttributeError):
                one.pid = 1
            joined = await ts.connect(one.address, store_name="by what was found")
            assert await joined.keys() == []
            await ts.shutdown("by what was found")
            await halt(one.pid)
            try:
                (hangs,) = [s for s in await ts.stores(timeout=0.1) if s.address == mine.address]
                assert "0.1 s" in str(hangs.error)
            finally:
                os.kill(one.pid, signal.SIGCONT)
        finally:
            await ts.shutdown("ranks'")
    assert {store.address for store in await ts.stores()} <= before
