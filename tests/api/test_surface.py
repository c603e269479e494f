"""The shape of the API: names, keywords, timeouts that hold, the same methods on a Client."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import time

import msgspec
import pytest
import torch
from tests.support import halt, running_store

import torchstore_core as ts
from torchstore_core.testing.timers import ends_within, within

FUNCTIONS = [
    "initialize",
    "initialize_spmd",
    "connect",
    "connect_or_initialize",
    "address",
    "shutdown",
    "client",
    "reset_client",
    "put",
    "get",
    "put_batch",
    "get_batch",
    "put_state_dict",
    "get_state_dict",
    "versions",
    "latest_version",
    "delete",
    "delete_batch",
    "exists",
    "keys",
    "wait",
    "stat",
    "status",
    "explain",
    "put_object",
    "empty",
    "hold",
    "wait_any",
    "free",
    "refs",
    "drain",
]
ON_A_CLIENT = FUNCTIONS[8:]
OF_NO_STORE = ["stores"]


def _parameters(function: object) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def test_everything_is_exported():
    assert {*FUNCTIONS, *OF_NO_STORE} <= set(ts.__all__)
    values = ["Client", "HeldRef", "ObjectRef", "Request", "TensorSlice", "TorchStoreError"]
    values += ["PendingPut", "RunningStore", "StateDictReport", "TensorShard"]
    assert set(values) <= set(ts.__all__)
    for name in ts.__all__:
        assert getattr(ts, name) is not None
        assert name in dir(ts)
    assert set(ts.__all__) == {*FUNCTIONS, *OF_NO_STORE} | {
        name for name in ts.__all__ if isinstance(getattr(ts, name), type)
    }
    with pytest.raises(AttributeError, match="no_such_thing"):
        ts.no_such_thing  # noqa: B018 - the access is the test


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_async_and_take_the_common_keywords(name):
    function = getattr(ts, name)
    assert inspect.iscoroutinefunction(function)
    parameters = _parameters(function)
    assert parameters["store_name"].default == "torchstore"
    assert "timeout" in parameters
    assert function.__doc__


@pytest.mark.parametrize("name", ON_A_CLIENT)
def test_a_client_has_the_same_methods(name):
    method = getattr(ts.Client, name)
    assert inspect.iscoroutinefunction(method)
    of_method, of_function = _parameters(method), _parameters(getattr(ts, name))
    del of_method["self"], of_function["store_name"]
    assert list(of_method) == list(of_function)
    for key, parameter in of_method.items():
        assert parameter.kind == of_function[key].kind, key
        assert parameter.default == of_function[key].default, key
    assert method.__doc__


def test_a_call_of_no_store_takes_no_name():
    assert inspect.iscoroutinefunction(ts.stores)
    (timeout,) = _parameters(ts.stores).values()
    assert (timeout.name, timeout.kind) == ("timeout", inspect.Parameter.KEYWORD_ONLY)


def test_signatures_are_as_promised():
    assert _parameters(ts.connect_or_initialize) == _parameters(ts.initialize)
    start = list(_parameters(ts.initialize))
    assert start[:4] == ["num_storage_volumes", "strategy", "store_name", "mesh"]
    keywords = _parameters(ts.initialize)
    assert keywords["runtime"].default == "auto"
    assert keywords["capacity"].default is None
    assert keywords["num_storage_volumes"].default == 1
    get = list(_parameters(ts.get))
    assert get[:3] == ["key_or_ref", "inplace_tensor", "tensor_slice_spec"]
    assert list(_parameters(ts.put))[:3] == ["key", "value", "tensor_slice_spec"]
    assert list(_parameters(ts.put_state_dict))[:2] == ["state_dict", "key"]
    assert list(_parameters(ts.get_state_dict))[:3] == ["key", "user_state_dict", "strict"]
    for function, defaults in (
        (
            ts.put_state_dict,
            {
                "version": None,
                "participants": None,
                "participant": None,
                "transfer_dtype": None,
                "partial": False,
                "keep": None,
                "blocking": True,
            },
        ),
        (
            ts.get_state_dict,
            {"version": None, "min_version": None, "cast": False, "report": None},
        ),
        (ts.put, {"version": None}),
        (ts.put_batch, {"version": None}),
    ):
        for name, default in defaults.items():
            parameter = _parameters(function)[name]
            assert parameter.default == default, name
            assert parameter.kind == inspect.Parameter.KEYWORD_ONLY, name
    assert _parameters(ts.get_state_dict)["strict"].default is True
    wait = _parameters(ts.wait)
    assert wait["min_version"].default is None
    assert wait["min_version"].kind == inspect.Parameter.KEYWORD_ONLY


async def test_every_operation_by_store_name_and_on_a_client():
    """Once through all of them, on a store that is not the default one."""
    async with running_store(store_name="other") as client:
        tensor = torch.arange(300_000)
        for door in ({"store_name": "other", "timeout": 20}, None):

            def do(name: str, *args: object, door=door, **kwargs: object):
                if door is None:
                    return getattr(client, name)(*args, timeout=20, **kwargs)
                return getattr(ts, name)(*args, **door, **kwargs)

            ref = await do("put", "t", tensor)
            refs = await do("put_batch", {"o": (1,), "u": tensor[:5]})
            assert torch.equal(await do("get", "t"), tensor)
            assert torch.equal(await do("get", ref), tensor)
            mine = torch.zeros_like(tensor)
            assert await do("get", "t", inplace_tensor=mine) is mine
            part = ts.TensorSlice((5,), (3,), (300_000,))
            got = await do("get", "t", tensor_slice_spec=part)
            assert torch.equal(got, tensor[5:8])
            assert (await do("get_batch", ["o", refs["u"]]))["o"] == (1,)
            assert await do("exists", "t") is True
            assert await do("keys") == ["o", "t", "u"]
            assert await do("keys", "t") == await do("keys", prefix="t") == ["t"]
            assert await do("wait", ["t"], min_version=ref.version) == {"t": ref}
            assert (await do("stat", "t")).nbytes == 2_400_000
            assert (await do("status")).keys == 3
            model = {"w": tensor, "step": 1}
            published = await do("put_state_dict", model, "m", keep=2)
            assert await do("versions", "m") == [published.version]
            assert await do("latest_version", "m") == published.version
            filled = {"w": torch.zeros_like(tensor), "step": 0}
            assert await do("get_state_dict", "m", filled, min_version=1) is filled
            assert filled["step"] == 1
            assert torch.equal((await do("get_state_dict", "m"))["w"], tensor)
            await do("delete", "m")
            assert (await do("explain", 1 << 20))[0]["chosen"] == "shm"
            held, made = await do("hold", "t"), await do("put_object", [1, 2])
            assert held.ref == ref
            assert await do("get", made) == [1, 2]
            blank = await do("empty", (3, 5), dtype=torch.int16)
            assert (tuple(blank.shape), blank.dtype) == ((3, 5), torch.int16)
            assert await do("wait_any", ["later", made]) == ([made], ["later"])
            assert len(await do("refs")) == 2
            assert await do("free", [made, held]) == 2
            await do("delete", "t")
            assert await do("delete_batch", ["o", "u", "gone"]) == 2
            assert await do("keys") == []
        assert (await ts.client("other", timeout=20)).address == client.address
        assert await ts.address("other", timeout=20) == client.address
        assert client.address in repr(client)
        assert "'other'" in repr(client)
        await ts.reset_client("other", timeout=20)
        await ts.shutdown("other", timeout=20)
        with pytest.raises(ts.StoreClosedError):
            await client.keys()


async def test_connect_or_initialize_gives_what_is_there(shared, k):
    await shared.put(k, 1)
    again = await ts.connect_or_initialize(capacity=16 << 20)
    assert again.address == shared.address
    assert await again.get(k) == 1


async def test_status_tells_what_is_going_on(shared, runtime):
    await ts.put_batch({"t": torch.ones(300_000), "o": 1})
    status = await ts.status()
    assert status.store_name == "torchstore"
    assert status.keys == 2
    (volume,) = status.volumes
    assert volume.capacity_bytes == 256 << 20
    assert 1_200_000 <= volume.used_bytes < 1_300_000
    assert volume.free_bytes == volume.capacity_bytes - volume.used_bytes
    assert "shm" in volume.transports
    (session,) = status.sessions
    assert session.pid == os.getpid()
    assert status.plugin_errors == {}
    assert sum(status.operations.values()) >= 1
    assert status.uptime_s > 0
    assert os.getpid() not in (status.controller_pid, volume.pid)
    assert (status.controller_pid == volume.pid) is (runtime != "monarch")  # an actor each
    assert status.keeper_pid  # by default
    assert status.keeper_pid not in (os.getpid(), status.controller_pid)
    assert "no keeper: " not in str(status)
    assert msgspec.json.encode(status)  # it is plain data


async def test_stat_tells_about_a_key(shared, k):
    before = time.time()
    await ts.put(k, torch.ones(300, 1000, dtype=torch.bfloat16).t())
    found = await ts.stat(k)
    assert (found.meta.dtype, found.meta.shape) == ("bfloat16", (1000, 300))
    assert found.nbytes == 600_000
    assert found.version == 1
    assert found.creator.pid == os.getpid()
    assert before - 1 <= found.created <= time.time() + 1


async def test_explain_names_bids_and_refusals():
    async with running_store(store_name="other", block=["inline"]) as client:
        (volume,) = await client.explain()
        assert volume["chosen"] == "shm"
        assert {bid["transport"] for bid in volume["bids"]} >= {"shm"}
        assert "blocked" in volume["refusals"].get("inline", "blocked")
        await client.put("k", (1,))  # a blocked transport is not missed
        assert await client.get("k") == (1,)
        assert (await client.stat("k")).segment >= 0


@pytest.mark.parametrize("nbytes", ["a key", None, 1.5, -1])
async def test_explain_takes_a_number_of_bytes(shared, nbytes):
    with pytest.raises(ts.UnsupportedValueError, match=r"explain takes a number of bytes"):
        await ts.explain(nbytes)


# ---- timeouts -----------------------------------------------------------------------------


async def test_timeouts_hold_when_the_server_hangs(shared, k):
    """A stopped server answers nobody: every operation ends with a typed error, in time."""
    tensor = torch.ones(300_000)
    t, o = f"{k}/t", f"{k}/o"
    await ts.put_batch({t: tensor, o: 1})
    held = await ts.get(t)
    pid = (await ts.status()).controller_pid
    await halt(pid)
    try:
        calls = asyncio.gather(
            *(
                call
                for door in (ts, shared)
                for call in (
                    door.put(o, 2, timeout=0.3),
                    door.put(t, tensor, timeout=0.3),
                    door.put_batch({t: tensor, o: 2}, timeout=0.3),
                    door.get(o, timeout=0.3),
                    door.get(t, timeout=0.3),
                    door.get(t, torch.zeros(300_000), timeout=0.3),
                    door.get_batch([t, o], timeout=0.3),
                    door.put_state_dict({"w": tensor}, k, timeout=0.3),
                    door.put_state_dict({"w": tensor}, k, blocking=False, timeout=0.3),
                    door.get_state_dict(k, timeout=0.3),
                    door.get_state_dict(k, {"w": tensor}, min_version=1, timeout=0.3),
                    door.versions(o, timeout=0.3),
                    door.latest_version(o, timeout=0.3),
                    door.delete(o, timeout=0.3),
                    door.delete_batch([o], timeout=0.3),
                    door.exists(o, timeout=0.3),
                    door.keys(timeout=0.3),
                    door.wait(o, timeout=0.3),
                    door.stat(o, timeout=0.3),
                    door.status(timeout=0.3),
                )
            ),
            ts.connect(shared.address, store_name="late", timeout=0.3),
            return_exceptions=True,
        )
        assert await ends_within(calls, 5)
        results = await calls
        assert [type(result) for result in results] == [ts.StoreTimeoutError] * len(results)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert held.all()
    await ts.put(o, 3)
    assert await ts.get(o) == 3
    assert torch.equal(await ts.get(t), tensor)
    assert (await ts.status()).volumes[0].unfinished_bytes == 0


async def test_the_default_timeout_is_the_one_of_initialize():
    async with running_store(store_name="other", timeout=5.0) as client:
        quick = await ts.connect(client.address, store_name="quick", timeout=1.5)
        pid = (await client.status()).controller_pid
        await halt(pid)
        try:
            start = time.monotonic()
            async with within(4.5):
                with pytest.raises(ts.StoreTimeoutError):
                    await asyncio.wait_for(quick.get("k"), 50)
            assert time.monotonic() - start > 1.4
            with pytest.raises(ts.StoreTimeoutError):
                await asyncio.wait_for(client.get("k", timeout=0.1), 50)
        finally:
            os.kill(pid, signal.SIGCONT)
        await ts.shutdown("quick")


async def test_timeouts_that_make_no_sense(shared, k):
    await ts.put(k, 1)
    for timeout in (-1, -0.001, float("nan")):
        with pytest.raises(ts.ConfigurationError, match="timeout"):
            await ts.get(k, timeout=timeout)
    assert await ts.get(k, timeout=float("inf")) == 1
    assert await ts.get(k, timeout=10**6) == 1


def test_help_explains_every_call() -> None:
    """In notebooks, too. That of the calls of a client said no more than where to look."""
    for name in ts.__all__:
        call = getattr(ts, name)
        if inspect.iscoroutinefunction(call):
            explained = inspect.getdoc(call) or ""
            assert "See :meth:" not in explained.split("\n", 1)[0], name
            assert inspect.getdoc(getattr(ts.blocking, name)) == explained
            if name in vars(ts.Client) or name == "wait":
                method = inspect.getdoc(getattr(ts.Client, name)) or ""
                assert explained.startswith(method)
