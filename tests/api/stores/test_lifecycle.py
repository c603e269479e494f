"""Stores come and go: by name, again after shutdown, joined from elsewhere; and without one."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import re
import socket
import tempfile
from pathlib import Path

import pytest
import torch
from tests.processes import Script, run_script
from tests.support import SMALL, running_store, server_children, until

import torchstore_core as ts

pytestmark = pytest.mark.local_only


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


OPERATIONS = {
    "put": lambda: ts.put("k", 1),
    "put_batch": lambda: ts.put_batch({"k": 1}),
    "get": lambda: ts.get("k"),
    "get ref": lambda: ts.get(ts.ObjectRef("k", 1)),
    "get_batch": lambda: ts.get_batch(["k"]),
    "delete": lambda: ts.delete("k"),
    "delete_batch": lambda: ts.delete_batch(["k"]),
    "exists": lambda: ts.exists("k"),
    "keys": lambda: ts.keys(),
    "wait": lambda: ts.wait("k", timeout=0.5),
    "stat": lambda: ts.stat("k"),
    "status": lambda: ts.status(),
    "explain": lambda: ts.explain(),
    "client": lambda: ts.client(),
    "address": lambda: ts.address(),
}


@pytest.mark.parametrize("name", OPERATIONS)
async def test_without_a_store_every_operation_says_what_to_do(name):
    with pytest.raises(ts.StoreClosedError) as caught:
        await OPERATIONS[name]()
    for word in ("'torchstore'", "initialize", "connect", "TORCHSTORE_ADDRESS"):
        assert word in str(caught.value)


async def test_the_same_after_shutdown_for_old_clients_too():
    async with running_store() as client:
        await ts.put("k", 1)
        made = await ts.client()
    for operation in OPERATIONS.values():
        with pytest.raises(ts.StoreClosedError, match=r"since its .*shutdown\(\).*initialize"):
            await operation()
    with pytest.raises(ts.StoreClosedError) as caught:
        await ts.get("k", store_name="never there")
    assert "since" not in str(caught.value)
    for old in (client, made):
        for call in (old.put("k", 1), old.get("k"), old.keys(), old.wait("k"), old.status()):
            with pytest.raises(ts.StoreClosedError):
                await call


async def test_shutdown_is_idempotent_and_leaves_nothing():
    await ts.shutdown()
    await ts.shutdown("never there")
    client = await ts.initialize(**SMALL)
    status = await ts.status()
    socket = Path(client.address.removeprefix("unix:"))
    assert socket.is_socket()
    assert socket.parent.stat().st_mode & 0o777 == 0o700
    assert server_children() == {status.keeper_pid}
    assert os.environ["TORCHSTORE_ADDRESS"] == client.address == await ts.address()
    for _ in range(3):
        await ts.shutdown()
        assert not _exists(status.controller_pid)
        assert not socket.parent.exists()
        assert "TORCHSTORE_ADDRESS" not in os.environ
    await asyncio.gather(ts.shutdown(), ts.shutdown())


async def test_initialize_again_after_shutdown():
    for round_ in range(3):
        async with running_store() as client:
            assert await ts.keys() == []
            await ts.put("k", torch.full((300_000,), round_))
            assert (await client.get("k") == round_).all()
    assert server_children() == set()


async def test_initialize_twice_is_an_error_that_harms_nobody(store):
    await ts.put("k", 1)
    before = server_children()
    with pytest.raises(ts.ConfigurationError, match=r"'torchstore' is initialized.*shutdown\(\)"):
        await ts.initialize(**SMALL)
    assert await ts.get("k") == 1
    assert await ts.address() == store.address
    assert server_children() == before


async def test_two_at_the_same_time_start_one_store():
    results = await asyncio.gather(
        *(ts.initialize(**SMALL) for _ in range(3)), return_exceptions=True
    )
    try:
        errors = [result for result in results if isinstance(result, Exception)]
        assert [type(error) for error in errors] == [ts.ConfigurationError] * 2
        assert all("at this moment" in str(error) for error in errors)
        await ts.put("k", 1)
        assert server_children() == {(await ts.status()).keeper_pid}
    finally:
        await ts.shutdown()
    assert server_children() == set()


BAD_ARGUMENTS = [
    {"num_storage_volumes": 0},
    {"num_storage_volumes": -1},
    {"store_name": ""},
    {"store_name": "a\x00"},
    {"store_name": "\ud800"},
    {"store_name": "ü" * 101},
    {"capacity": 0},
    {"capacity": -5},
    {"capacity": 4096, "num_storage_volumes": 2},
    {"prefault": -1},
    {"timeout": 0},
    {"timeout": -1.0},
    {"timeout": float("nan")},
]


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS, ids=ascii)
async def test_arguments_that_make_no_sense(arguments):
    with pytest.raises(ts.ConfigurationError):
        await ts.initialize(**{**SMALL, **arguments})
    assert server_children() == set()


@pytest.mark.parametrize("bits", [50, 63])
@pytest.mark.filterwarnings("ignore:a capacity of:RuntimeWarning")
async def test_a_capacity_that_no_process_can_map(bits):
    """Else the store would start, and no transport could reach it."""
    with pytest.raises(ts.StoreFullError, match=f"{1 << bits} bytes of shared memory"):
        await ts.initialize(**{**SMALL, "capacity": 1 << bits})
    assert server_children() == set()


async def test_a_mesh_that_the_runtime_does_not_take():
    """Else it would be left out without a word."""
    with pytest.raises(ts.ConfigurationError, match=r"'local' takes no mesh that is a list.*mesh="):
        await ts.initialize(**{**SMALL, "runtime": "local", "mesh": ["host"]})
    assert server_children() == set()
    async with running_store():  # the name is free
        assert await ts.keys() == []


@pytest.mark.parametrize("arguments", [{"runtime": "no-such"}, {"strategy": "no-such"}], ids=str)
async def test_plug_ins_that_are_not_there(arguments):
    with pytest.raises(ts.PluginError, match="no-such"):
        await ts.initialize(**SMALL, **arguments)
    assert server_children() == set()
    async with running_store():  # the name is free
        assert await ts.keys() == []


async def test_a_bad_environment_starts_nothing(monkeypatch):
    monkeypatch.setenv("TORCHSTORE_ALLOW_PICKLE", "maybe")
    with pytest.raises(ts.ConfigurationError, match="TORCHSTORE_ALLOW_PICKLE"):
        await ts.initialize(**SMALL)
    assert server_children() == set()


async def test_a_cancelled_start_leaves_nothing():
    for delay in (0, 0.001, 0.05, 0.1):
        task = asyncio.create_task(ts.initialize(**SMALL))
        await asyncio.wait([task], timeout=delay)
        if task.done():
            await ts.shutdown()
            continue
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            continue
        await ts.shutdown()  # the store was there before it could be cancelled
        assert delay > 0.01
    async with running_store():
        # By now, a server of a cancelled start would be up.
        pid = (await ts.status()).keeper_pid
        await until(lambda: server_children() == {pid})


# ---- by name ------------------------------------------------------------------------------


async def test_several_stores_by_name(store):
    async with (
        running_store(store_name="a") as first,
        running_store(store_name="b/ü") as second,
    ):
        assert (first.store_name, second.store_name) == ("a", "b/ü")
        assert len({store.address, first.address, second.address}) == 3
        for name in ("torchstore", "a", "b/ü"):
            await ts.put("k", torch.full((200_000,), len(name)), store_name=name)
            assert (await ts.status(store_name=name)).store_name == name
            assert await ts.address(name) == (await ts.client(name)).address
        assert int((await ts.get("k"))[0]) == 10
        assert int((await first.get("k"))[0]) == 1
        assert int((await second.get("k"))[0]) == 3
        await ts.delete("k", store_name="a")
        assert not await ts.exists("k", store_name="a")
        assert await ts.exists("k", store_name="b/ü")
        await ts.shutdown("a")
        with pytest.raises(ts.StoreClosedError, match="'a'"):
            await ts.keys(store_name="a")
        assert await ts.keys() == await ts.keys(store_name="b/ü") == ["k"]


async def test_a_client_that_is_pickled_says_what_to_pass_instead(store):
    for pickled in (pickle.dumps, copy.deepcopy):
        with pytest.raises(ts.UnsupportedValueError, match=f"await connect.'{store.address}'"):
            pickled(store)
    with pytest.raises(ts.UnsupportedValueError, match="belongs to its process"):
        await ts.put("k", [store])


@pytest.mark.thorough
@pytest.mark.parametrize("name", [None, 3, ["torchstore"], ""], ids=repr)
async def test_what_is_no_name_of_a_store_is_refused_by_every_call(store, name):
    for call in (
        ts.put("k", 1, store_name=name),
        ts.get("k", store_name=name),
        ts.keys(store_name=name),
        ts.connect(store.address, store_name=name),
        ts.connect_or_initialize(store_name=name),
        ts.address(name),
        ts.client(name),
        ts.reset_client(name),
        ts.shutdown(name),
    ):
        with pytest.raises(ts.ConfigurationError, match="store_name is a non-empty str"):
            await call
    assert await ts.keys() == []


async def test_children_find_all_stores_by_name():
    async with running_store() as default, running_store(store_name="other"):
        out = await run_script(
            """
            await ts.put("k", (1,))
            await ts.put("k", (2,), store_name="other")
            print((await ts.status()).store_name, (await ts.status(store_name="other")).store_name)
            """
        )
        assert out.split() == ["torchstore", "other"]
        assert await default.get("k") == (1,)
        assert await ts.get("k", store_name="other") == (2,)
        assert default.address in os.environ["TORCHSTORE_ADDRESS"]
    assert not [name for name in os.environ if name.startswith("TORCHSTORE_ADDRESS")]


async def test_connect_joins_under_any_name(store):
    await ts.put("k", 1)
    joined = await ts.connect(store.address, store_name="alias")
    try:
        assert await joined.get("k") == await ts.get("k", store_name="alias") == 1
        await joined.put("k", 2)
        assert await ts.get("k") == 2
        assert joined.store_name == "alias"
    finally:
        await ts.shutdown("alias")
    # Who has only joined leaves without ending the store.
    assert await ts.get("k") == 2
    with pytest.raises(ts.StoreClosedError):
        await joined.get("k")


async def test_connect_to_what_is_not_there(tmp_path, store):
    for address in (f"unix:{tmp_path}/none.sock", "tcp:1.2.3.4:5", "", "nonsense"):
        with pytest.raises(ts.StoreClosedError):
            await ts.connect(address, store_name="other", timeout=5)
    with pytest.raises(ts.StoreClosedError) as caught:
        await ts.connect(f"{tmp_path}/none.sock", store_name="other", timeout=5)
    # It said to call `connect(address)`.
    said = f"no store at unix:{tmp_path}/none.sock: .*No such file.*stores of this user.* at .*"
    assert re.match(said + re.escape(repr(store.address)), caught.value.message)
    assert "connect(" not in caught.value.message
    with pytest.raises(ts.StoreClosedError, match=r"that is a folder.*'control\.sock'"):
        await ts.connect(str(tmp_path), store_name="other", timeout=5)
    with pytest.raises(ts.ConfigurationError, match=r"'other'; a name is given as store_name="):
        await ts.initialize("other")
    for wrong in (None, 5):
        with pytest.raises(ts.ConfigurationError, match="an address is a str"):
            await ts.connect(wrong, store_name="other")
    with pytest.raises(ts.ConfigurationError, match="owns a store 'torchstore'"):
        await ts.connect(f"unix:{tmp_path}/none.sock")
    with pytest.raises(ts.StoreClosedError):
        await ts.keys(store_name="other")
    await ts.put("k", 1)


async def test_connect_where_no_store_runs(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as base, socket.socket(socket.AF_UNIX) as killed:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        folder = Path(base, "torchstore", "killed")
        folder.mkdir(parents=True)
        folder.parent.chmod(0o700)
        killed.bind(f"{folder}/control.sock")
        with pytest.raises(ts.StoreClosedError, match=r"No store of this user.*`torchstore serve`"):
            await ts.connect(f"{folder}/control.sock")


async def test_connecting_to_the_own_store_changes_nothing(store):
    await ts.put("k", 1)
    again = await ts.connect(store.address)
    assert await again.get("k") == await store.get("k") == 1
    await ts.shutdown()
    assert server_children() == set()


async def test_a_child_that_shuts_down_only_leaves(store):
    await ts.put("k", 1)
    out = await run_script(
        """
        assert await ts.get("k") == 1
        await ts.shutdown()
        await ts.put("k", 2)  # found through the environment again
        await ts.shutdown()
        print("left")
        """
    )
    assert out == "left\n"
    assert await ts.get("k") == 2


async def test_reset_client_makes_new_connections(store):
    await ts.put("k", torch.arange(300_000))
    sessions = {s.age_s for s in (await ts.status()).sessions}
    assert len(sessions) == 1
    await ts.reset_client()
    await ts.reset_client("never there")
    assert torch.equal(await ts.get("k"), torch.arange(300_000))
    assert await store.exists("k")

    async def one() -> bool:
        return len((await ts.status()).sessions) == 1

    await until(one)


@pytest.mark.thorough
async def test_the_store_ends_with_its_owner():
    with Script(
        fresh=True,
        body="""
        client = await ts.initialize(capacity=16 << 20, prefault=0)
        print((await ts.status()).controller_pid, client.address.removeprefix("unix:"))
        sys.stdout.flush()
        # No shutdown: the end of the process is enough.
        """,
    ) as script:
        pid, path = (await script.output()).split()
    await until(lambda: not _exists(int(pid)))
    await until(lambda: not os.path.exists(path))


async def test_connecting_again_changes_no_earlier_client():
    async with running_store(allow_pickle=False, timeout=30) as hardened:
        other = await ts.connect(hardened.address, timeout=1.5, allow_pickle=True)
        with pytest.raises(ts.UnsafeObjectError):
            await hardened.put("k", Path())
        await other.put("k", Path())
        with pytest.raises(ts.StoreTimeoutError, match=r"1\.5 s"):
            await other.wait("never")
        assert hardened._watch("get", None).timeout == 30


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_storage_volumes": "2"},
        {"num_storage_volumes": True},
        {"capacity": "1GB"},
        {"capacity": 1e9},
        {"prefault": 0.5},
        {"timeout": "x"},
        {"store_name": 3},
        {"runtime": None},
        {"prefer": "shm"},
        {"block": "shm"},
        {"prefer": ["shn"]},
        {"block": ["inlin"]},
    ],
    ids=repr,
)
async def test_arguments_of_a_wrong_type_are_refused_before_anything_starts(arguments):
    with pytest.raises(ts.ConfigurationError):
        await ts.initialize(**{**SMALL, **arguments})
    assert not server_children()
