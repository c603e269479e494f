"""A store runs already: what names it, who joins it, and who is told that there will be two."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import warnings
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.processes import run_script
from tests.support import SMALL, free_port, halt, running_store, server_children, until

import torchstore_core as ts
import torchstore_core.blocking as blocking
from torchstore_core.clients.stores import starting, table

pytestmark = [pytest.mark.local_only, pytest.mark.thorough]


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[ts.Client]:
    """A store that runs; this process knows it by this name alone."""
    client = asyncio.run(ts.initialize(store_name="elsewhere", **SMALL))
    del os.environ["TORCHSTORE_ADDRESSES"]
    asyncio.run(client.put("k", "there"))
    yield client
    asyncio.run(ts.shutdown("elsewhere"))


@pytest.fixture
def named(elsewhere: ts.Client, monkeypatch: pytest.MonkeyPatch) -> ts.Client:
    """The same, and the environment names it, as if another process had started it."""
    monkeypatch.setenv("TORCHSTORE_ADDRESS", elsewhere.address)
    return elsewhere


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No server that a test starts outlives it."""
    before = server_children()
    yield
    assert server_children() <= before


def _alone() -> ts.SPMDEnv:
    return ts.SPMDEnv(0, 0, 1, 1, "127.0.0.1", free_port())


STARTS = {
    "initialize": lambda name: ts.initialize(store_name=name, **SMALL),
    "initialize_spmd": lambda name: ts.initialize_spmd(store_name=name, env=_alone(), **SMALL),
}


@pytest.mark.parametrize(
    ("start", "name"),
    [("initialize", "torchstore"), ("initialize", "policy"), ("initialize_spmd", "torchstore")],
)
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


async def test_a_store_that_was_joined_by_hand_is_another_too(elsewhere: ts.Client) -> None:
    await ts.connect(elsewhere.address.removeprefix("unix:"))  # the path alone is enough
    try:
        with pytest.raises(RuntimeWarning, match="this process has joined a store") as caught:
            await ts.initialize(**SMALL)
        for part in (elsewhere.address, "connect_or_initialize", "`await shutdown()`"):
            assert part in str(caught.value)
        assert await ts.get("k") == "there"  # it is still joined
    finally:
        await ts.shutdown()
    async with running_store(store_name="gone") as client:
        await ts.connect(client.address)
    await starting.warn_of_another("torchstore")  # what has ended is none
    await ts.shutdown()


async def test_an_address_of_a_job_leads_nowhere_elsewhere() -> None:
    """To look it up would make this process the root of a job, and its stores those of that."""
    out = await run_script(
        f"""
        import os, warnings
        warnings.simplefilter("error")
        os.environ["TORCHSTORE_ADDRESS"] = "monarch:torchstore"
        for call in (ts.keys, lambda: ts.connect("monarch:torchstore"), lambda: ts.connect("no")):
            try:
                await call()
            except ts.StoreClosedError as error:
                said = str(error)
                print("only processes of that job" in said, "TORCHSTORE_ADDRESS" in said)
        print("monarch" in sys.modules)
        client = await ts.connect_or_initialize(**{SMALL!r})
        print(client.address.partition(":")[0])
        await ts.shutdown()
        """
    )
    assert out.split() == ["True", "True", "True", "True", "True", "False", "False", "unix"]


async def test_no_warning_of_what_is_gone_or_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own filter makes an error of it."""
    async with running_store() as client:
        gone = client.address
    monkeypatch.setenv("TORCHSTORE_ADDRESS", gone)
    async with running_store() as client:  # again after shutdown
        assert os.environ["TORCHSTORE_ADDRESS"] == client.address
    assert os.environ["TORCHSTORE_ADDRESS"] == gone
    async with _joined() as client:
        assert client.address != gone
    for stale in ("unix:/nowhere/control.sock", "nonsense", "monarch:other"):
        monkeypatch.setenv("TORCHSTORE_ADDRESS", stale)
        await starting.warn_of_another("torchstore")


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
    # It was this process's own all the time, and ended with it.


async def test_ones_own_store_that_died_is_started_again(nothing_left: None) -> None:
    first = await ts.initialize(**SMALL, keeper=False)
    await first.put("k", 1)
    os.kill((await first.status()).controller_pid, signal.SIGKILL)
    async with _joined() as second:
        assert second.address != first.address
        assert await second.keys() == []
    assert "TORCHSTORE_ADDRESS" not in os.environ


@pytest.mark.parametrize("way", ["initialize", "initialize_spmd"])
async def test_a_store_that_died_is_not_initialized_already(nothing_left: None, way: str) -> None:
    """What the errors of its calls say works, and so does to initialize it once more."""
    arguments = {"keeper": False, **SMALL}
    if way == "initialize_spmd":
        arguments["env"] = _alone()
    first = await getattr(ts, way)(**arguments)
    pid = (await first.status()).controller_pid
    await halt(pid)
    with pytest.raises(ts.ConfigurationError, match="already"):  # it hangs, and may go on
        await getattr(ts, way)(**arguments)
    os.kill(pid, signal.SIGKILL)
    says = (
        r"connect_or_initialize\(\)`" if way == "initialize" else r"initialize_spmd\(\)`, in every"
    )
    for _ in range(2):
        with pytest.raises(ts.StoreClosedError, match=says):
            await first.keys()
    second = await getattr(ts, way)(**arguments)
    assert second.address != first.address
    assert await second.keys() == []
    assert not os.path.exists(os.path.dirname(first.address.removeprefix("unix:")))
    await ts.shutdown()
    assert "TORCHSTORE_ADDRESS" not in os.environ


async def test_a_rank_does_not_start_one_in_the_place_of_all_ranks(nothing_left: None) -> None:
    client = await ts.initialize_spmd(env=_alone(), **SMALL, keeper=False)
    assert (await ts.connect_or_initialize(**SMALL)).address == client.address
    os.kill((await client.status()).controller_pid, signal.SIGKILL)
    with pytest.raises(ts.StoreClosedError, match="is gone"):
        await ts.connect_or_initialize(**SMALL)
    await ts.shutdown()


async def test_children_join(nothing_left: None) -> None:
    async with running_store() as store:
        await store.put("k", 1)
        out = await run_script(
            """
            import warnings
            warnings.simplefilter("error")
            client = await ts.connect_or_initialize()
            print(client.address, await client.keys())
            """
        )
        assert out == f"{store.address} ['k']\n"


def test_a_forked_child_that_ends_its_own_store_finds_the_parents_again() -> None:
    parents = blocking.initialize(**SMALL).address
    try:
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            status = 1
            try:
                warnings.simplefilter("ignore")
                mine = blocking.initialize(**SMALL).address
                blocking.shutdown()
                status = 0 if mine != parents == blocking.address() else 2
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        blocking.shutdown()


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


# ---- at the same moment -------------------------------------------------------------------


async def test_tasks_that_ask_at_once_get_one_store(nothing_left: None) -> None:
    """A new one; one that has died in the meantime; one that is only joined."""
    first = await _at_once()
    await first.put("k", 1)
    assert (await (await _at_once()).get("k")) == 1
    os.kill((await first.status()).controller_pid, signal.SIGKILL)
    assert (await _at_once()).address != first.address
    await ts.shutdown()


async def test_tasks_that_join_at_once_all_stay(named: ts.Client) -> None:
    assert (await _at_once()).address == named.address
    await ts.shutdown()


async def _at_once() -> ts.Client:
    clients = await asyncio.gather(
        *(ts.connect_or_initialize(**SMALL, keeper=False) for _ in range(3))
    )
    assert len({client.address for client in clients}) == 1
    pids = {(await client.status()).controller_pid for client in clients}  # none is closed
    assert len(pids) == 1
    return clients[0]


def test_threads_that_ask_at_once_get_one_store(nothing_left: None) -> None:
    with futures.ThreadPoolExecutor(3) as threads:
        made = [threads.submit(blocking.connect_or_initialize, **SMALL) for _ in range(3)]
        clients = [one.result(60) for one in made]
    pids = {client.status().controller_pid for client in clients}
    blocking.shutdown()
    assert len(pids) == 1


async def test_who_waits_for_a_start_that_fails_starts_it(nothing_left: None) -> None:
    failing, *others = (asyncio.ensure_future(ts.connect_or_initialize(**SMALL)) for _ in range(3))
    await until(lambda: server_children())
    failing.cancel()
    clients = await asyncio.gather(failing, *others, return_exceptions=True)
    assert isinstance(clients[0], asyncio.CancelledError)
    assert clients[1].address == clients[2].address
    await ts.shutdown()


def test_a_forked_child_does_not_wait_for_what_its_parent_starts() -> None:
    with table.reserve("torchstore"):
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            status = 1
            try:
                with table.reserve("torchstore"):
                    status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0


async def test_a_start_that_takes_too_long_is_not_waited_for() -> None:
    with table.reserve("torchstore"):
        with pytest.raises(ts.StoreTimeoutError, match="another thread or task of this process"):
            await ts.connect_or_initialize(timeout=0.01)
        with pytest.raises(ts.ConfigurationError, match="at this moment"):
            await ts.initialize(**SMALL)


# ---- stores -------------------------------------------------------------------------------


async def test_stores_finds_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="ts-") as directory:  # a socket's path is short
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        assert await ts.stores() == []
        await _find_stores()
        assert await ts.stores() == []


async def _find_stores() -> None:
    async with running_store(store_name="mine", num_storage_volumes=2) as mine:
        ranks = await ts.initialize_spmd(env=_alone(), store_name="ranks'", **SMALL)
        try:
            found = {store.address: store for store in await ts.stores()}
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


async def test_a_program_that_replaces_itself_is_told_of_the_store_that_it_had() -> None:
    """It keeps the process, to which the store belongs, and loses all knowledge of it."""
    out = await run_script(
        fresh=True,
        body="""
    import os, warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await ts.initialize(capacity=16 << 20, prefault=0)
    if "AGAIN" not in os.environ:
        assert not caught
        os.environ["AGAIN"] = await ts.address()
        os.execv(sys.executable, sys.orig_argv)
    assert os.environ["AGAIN"] != await ts.address()
    print(caught[0].message)
    await ts.shutdown()
    """,
    )
    assert "before it replaced its program" in out
    assert "call shutdown before the program is replaced" in out
