"""A server that is killed and started again at the same address has lost its memory: what belongs
to the store of before is gone, and says so.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.processes import fork_server
from tests.reliability import children
from tests.reliability.harness import Child
from tests.support import SMALL, running_store, until

import torchstore_core as ts
from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.calls.incarnations import check_incarnation


class Served:
    """A server that can be killed and started again at its address."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def start(self, **options: Any) -> None:
        given = {"directory": self._directory, "capacity": 64 << 20, "prefault": 0, **options}
        command = [sys.executable, "-m", "torchstore_core.server", json.dumps(given)]
        environment = {**os.environ, "TORCHSTORE_LOG_LEVEL": "ERROR"}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert self._process.stdout is not None
        self.address = json.loads(self._process.stdout.readline())["address"]

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def again(self, **options: Any) -> None:
        self.kill()
        self.start(**options)


@pytest.fixture
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="ts-") as directory:
        made = Served(directory)
        made.start()
        try:
            yield made
        finally:
            made.kill()


@pytest.fixture
async def joined(served: Served):
    yield await ts.connect(served.address)
    await ts.shutdown()


@pytest.fixture
async def other(served: Served):
    """Another client, of whose puts the first one is not told."""
    yield await ts.connect(served.address, store_name="other")
    await ts.shutdown("other")


async def retried(call: Any) -> Any:
    """The result of a call, which goes on over a restart, as the loops of users do."""

    async def once() -> Any:
        try:
            return [await call()]
        except ts.StoreClosedError:
            return []

    return (await until(once))[0]


async def refill() -> None:
    """Values with the very keys and versions of before, and more."""
    await retried(lambda: ts.put("other", 1))
    for number in (10, 20, 30):
        await retried(lambda n=number: ts.put("w", n))
        await ts.put("t", torch.full((1 << 18,), float(number)))
        await ts.put_state_dict({"a": number}, "d", keep=3)


async def test_a_ref_never_names_a_value_of_another_incarnation(served: Served, joined: Any):
    refs = {}
    for number in (1, 2):
        refs["w"] = await ts.put("w", number)
        refs["t"] = await ts.put("t", torch.full((1 << 18,), float(number)))
        refs["d"] = await ts.put_state_dict({"a": number}, "d", keep=3)
        refs |= await ts.put_batch({"b": number})
    refs |= await ts.wait(["d/a"])
    mapped = await ts.get(refs["t"])
    before = (await ts.status()).incarnation
    assert {ref.incarnation for ref in refs.values()} == {before}

    served.again()
    await refill()
    after = (await ts.status()).incarnation
    assert after not in (0, before)
    for ref in refs.values():
        for get in (ts.get(ref), ts.get_batch([ref]), ts.get_batch(["other", ref])):
            with pytest.raises(ts.VersionGoneError, match="of incarnation") as caught:
                await get
            assert caught.value.key == ref.key
            assert caught.value.details == {
                "incarnation": before,
                "current_incarnation": after,
            }
    mine = torch.zeros(1 << 18)
    part = ts.TensorSlice((0,), (5,), (1 << 18,))
    with pytest.raises(ts.VersionGoneError):
        await ts.get(refs["t"], mine)
    with pytest.raises(ts.VersionGoneError):
        await ts.get(refs["t"], tensor_slice_spec=part)
    assert not mine.any()
    assert mapped[0] == 2  # what is mapped stays
    assert await ts.get("w") == 30
    assert await ts.get(ts.ObjectRef("d", 2)) == {"a": 20}  # made by hand: a key and a number
    new = await ts.put("w", 40)
    assert new.incarnation == after
    assert await ts.get(new) == 40
    assert new != ts.ObjectRef("w", 4, before)
    assert new == ts.ObjectRef("w", 4)


async def test_a_number_of_before_is_not_waited_for(served: Served, joined: Any):
    """Whether the wait was under way when the server died, or began after it was back."""
    await ts.put_state_dict({"a": 1}, "policy", version=16)

    async def generator() -> list[ts.TorchStoreError]:
        """Waits as long as it takes, and goes on over restarts."""
        told: list[ts.TorchStoreError] = []
        while len(told) < 2 or isinstance(told[-1], ts.StoreClosedError):
            try:
                await ts.wait("policy", min_version=17, timeout=math.inf)
            except ts.StoreClosedError as error:
                told[0:] = [error]
                await asyncio.sleep(0.01)
            except ts.VersionGoneError as error:
                told.append(error)
        return told

    async def status() -> Any:
        return "Wait" in (await ts.status()).operations

    waiting = [asyncio.create_task(generator()) for _ in range(3)]
    await until(status)
    served.again()
    for task in waiting:
        closed, gone = await asyncio.wait_for(task, 50)
        assert isinstance(closed, ts.StoreClosedError)
        assert isinstance(gone, ts.VersionGoneError)
        assert gone.key == "policy"
        assert "started again without its memory" in gone.message

    served.again()  # and now nobody has a call under way
    await retried(lambda: ts.put("other", 1))
    for call in (
        lambda: ts.wait("policy", min_version=17, timeout=None),
        lambda: ts.wait(["other", "policy"], min_version=17, timeout=None),
        lambda: ts.get_state_dict("policy", min_version=17, timeout=None),
    ):
        with pytest.raises(ts.VersionGoneError):
            await asyncio.wait_for(call(), 50)


async def test_who_starts_over_may_use_numbers_again(served: Served, joined: Any, other: Any):
    await ts.put_state_dict({"a": 1}, "policy", version=16)
    served.again()
    with pytest.raises(ts.VersionGoneError):
        await retried(lambda: ts.wait("policy", min_version=17))
    for key, start_over in {
        "waits": lambda: ts.wait("waits"),
        "waits for the first": lambda: ts.wait("waits for the first", min_version=1),
        "gets": lambda: ts.get_state_dict("gets", min_version=1),
        "asks": lambda: ts.latest_version("asks"),
        "lists": lambda: ts.versions("lists"),
    }.items():
        await retried(lambda k=key: other.put_state_dict({"a": 2}, k))
        with pytest.raises(ts.VersionGoneError):
            await ts.wait(key, min_version=2)
        assert await start_over()
        waiting = asyncio.create_task(ts.wait(key, min_version=2, timeout=None))
        ref = await other.put_state_dict({"a": 3}, key)
        assert (await asyncio.wait_for(waiting, 50))[key] == ref


async def test_what_this_process_has_put_is_a_number_of_now(
    served: Served, joined: Any, other: Any
):
    """A trainer that waits until all have taken what it has put."""
    served.again()
    with pytest.raises(ts.VersionGoneError):
        await retried(lambda: ts.wait("taken/0", min_version=51))
    for how in ({"version": 51}, {"version": 52, "blocking": False}, {}):
        ref = await ts.put_state_dict({"a": 1}, "policy", **how)
        ref = await ref if isinstance(ref, ts.PendingPut) else ref
        taken = f"taken/{ref.version}"
        waiting = asyncio.create_task(ts.wait(taken, min_version=ref.version, timeout=None))
        await retried(lambda k=taken, v=ref.version: other.put(k, 1, version=v))
        assert (await asyncio.wait_for(waiting, 50))[taken].version == ref.version
    with pytest.raises(ts.VersionGoneError):
        await ts.wait("taken/0", min_version=60)


async def test_to_follow_a_ref_is_exact(served: Served, joined: Any):
    ref = await ts.put("w", 1)
    waiting = asyncio.create_task(ts.wait("w", after=ref))
    newer = await ts.put("w", 2)
    assert await asyncio.wait_for(waiting, 50) == {"w": newer}
    served.again()
    await refill()
    await ts.wait("w", min_version=3)  # numbers are known again, and do not help an old ref
    for call in (
        lambda: ts.wait("w", after=newer),
        lambda: ts.wait("w", after=ref),
        lambda: ts.get_state_dict("d", after=ts.ObjectRef("d", 1, ref.incarnation)),
    ):
        with pytest.raises(ts.VersionGoneError, match="of incarnation"):
            await asyncio.wait_for(call(), 50)


async def test_a_new_ref_is_good_in_a_process_that_has_not_noticed_the_restart(
    served: Served, joined: Any
):
    """Its session is that of the store of before: that is gone, and not the ref."""
    with fork_server().Pool(1) as pool:
        for number in range(3):
            await retried(lambda n=number: ts.put("w", n))
            served.again()
            ref = pool.apply(_put, (served.address, number))
            assert await retried(lambda r=ref: ts.get(r)) == number


def _put(address: str, number: int) -> ts.ObjectRef:
    async def put() -> ts.ObjectRef:
        await ts.connect(address, store_name=f"number {number}")
        try:
            return await ts.put("w", number, store_name=f"number {number}")
        finally:
            await ts.shutdown(f"number {number}")

    return asyncio.run(put())


async def test_it_may_be_the_session_that_is_of_before(served: Served, joined: Any):
    """A ref of another incarnation is only gone if the store that says so is there."""
    await ts.put("w", 1)
    clock = Clock(5.0, "get")
    with clock:
        here = joined._here(clock)
        assert here is not None
        served.kill()  # and nobody has noticed
        with pytest.raises(ts.StoreClosedError):
            await check_incarnation(*here, clock, "w", 1, 4711)


async def test_the_incarnation_is_that_of_the_memory(served: Served, joined: Any):
    """A server that is given the memory of another one is the same store to its clients."""
    ref = await ts.put("w", 1)
    served.again(incarnation=ref.incarnation)
    assert (await retried(ts.status)).incarnation == ref.incarnation
    assert await ts.put("w", 1) == ref  # it has not, here: only what it says is tested
    assert await ts.get(ref) == 1
    with pytest.raises(ts.StoreTimeoutError):  # numbers are still good
        await ts.wait("w", min_version=2, timeout=0.05)
    seen = {ref.incarnation}
    for _ in itertools.repeat(None, 2):
        served.again()
        seen.add((await retried(ts.status)).incarnation)
    assert len(seen) == 3


@pytest.mark.parametrize("start", ["fork", "spawn", "fast"])
async def test_a_worker_goes_on_with_its_parents_next_store(start: str):
    """It looked for the store at the address of the first one for ever."""
    async with running_store():
        ref = await ts.put("w", 1)
        if start == "fork":
            await asyncio.to_thread(ts.blocking.get, "w")
        worker = Child(children.work_for, start=start)
        with worker:
            for what, expected in (("w", 1), (ref, 1)):
                worker.tell(what)
                assert await worker.said(180) == expected
            await ts.shutdown()
            worker.tell("w")
            code, message = await worker.said()
            assert code == "store-closed", message
            await ts.initialize(**SMALL)
            await ts.put("w", 2)
            worker.tell("w")
            assert await worker.said() == 2
            worker.tell(ref)
            code, message = await worker.said()
            assert (code, "of incarnation" in message) == ("version-gone", True)
            worker.tell(None)
            await worker.ended()
