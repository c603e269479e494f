"""What a timeout may be: the same in every call that takes one."""

from __future__ import annotations

import inspect
from fractions import Fraction
from typing import Any

import pytest
from tests.support import SMALL

import torchstore_core as ts
import torchstore_core.blocking as blocking

BAD = ["5", b"5", True, False, -1, -0.5, -(10**400), float("nan"), float("-inf"), [], 1j]
GOOD = [10**400, 1e300, float("inf"), 30, 30.0, Fraction(61, 2)]

# What each call takes besides.
ARGUMENTS: dict[str, list[Any]] = {
    "connect": ["unix:/nobody"],
    "put": ["a", 1],
    "drain": ["torchstore-0"],
    "put_object": [1],
    "empty": [3],
    "hold": ["a"],
    "wait_any": [[]],
    "free": [[]],
    "put_batch": [{"a": 1}],
    "get": ["a"],
    "get_batch": [["a"]],
    "put_state_dict": [{"w": 1}, "d"],
    "get_state_dict": ["d"],
    "versions": ["a"],
    "latest_version": ["a"],
    "delete": ["b"],
    "delete_batch": [["b"]],
    "exists": ["a"],
    "wait": ["a"],
    "stat": ["a"],
}
# What those that read find.
READ: dict[str, Any] = {"get": 1, "get_state_dict": {"w": 1}, "exists": True}


def _calls() -> list[str]:
    every = [name for name in ts.__all__ if inspect.iscoroutinefunction(getattr(ts, name, None))]
    return [name for name in every if "timeout" in inspect.signature(getattr(ts, name)).parameters]


async def _refused(name: str, timeout: Any) -> None:
    with pytest.raises(ts.ConfigurationError, match="timeout is seconds"):
        await getattr(ts, name)(*ARGUMENTS.get(name, []), timeout=timeout)


@pytest.mark.local_only
async def test_every_call_refuses_what_is_no_time(shared):
    calls = _calls()
    assert {"initialize", "initialize_spmd", "connect", "shutdown", "wait", "put"} <= {*calls}
    env = ts.SPMDEnv(0, 0, 1, 1, "127.0.0.1", 1)
    for timeout in BAD:
        for name in calls:
            if name == "initialize_spmd":
                with pytest.raises(ts.ConfigurationError, match="timeout is seconds"):
                    await ts.initialize_spmd(env=env, timeout=timeout)
            else:
                await _refused(name, timeout)
    await shared.put("a", 1)  # nobody has shut it down


@pytest.mark.local_only
async def test_long_times_are_taken(shared):
    await ts.put("a", 1)
    await ts.put_state_dict({"w": 1}, "d")
    for timeout in GOOD:
        for name in ("put", "put_state_dict", "get", "get_state_dict", "wait", "exists", "client"):
            found = await getattr(ts, name)(*ARGUMENTS.get(name, []), timeout=timeout)
            assert name not in READ or found == READ[name], name
        await ts.connect(shared.address, store_name="other", timeout=timeout)
        await ts.reset_client("other", timeout=timeout)
        await ts.shutdown("other", timeout=timeout)


@pytest.mark.local_only
def test_the_calls_without_await_take_the_same(module_store: None):
    made = blocking.put_state_dict({"w": 1}, "blocking", blocking=False)
    assert isinstance(made, blocking.PendingPut)
    for timeout in BAD:
        for call in (lambda t: blocking.get("d", timeout=t), lambda t: made.result(t)):
            with pytest.raises(ts.ConfigurationError, match="timeout is seconds"):
                call(timeout)
    for timeout in GOOD:
        assert made.result(timeout).key == "blocking"
    blocking.reset_client()
    client = blocking.initialize(store_name="long", timeout=10**400, **SMALL)
    client.put("a", 1, timeout=10**400)
    blocking.shutdown("long", timeout=10**400)
