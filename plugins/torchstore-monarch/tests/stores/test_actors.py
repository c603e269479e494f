"""The store inside actors of one host: no set-up, several stores, from beginning to end."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monarch import acts, dtensors
from tests.monarch.jobs import Job
from tests.support import until

import torchstore_core as ts


def _tree() -> dict[str, Any]:
    return {"layers": [{"w": torch.arange(40_000.0)}, {"w": torch.ones(3)}], "step": 7}


async def _put_tree(key: str) -> int:
    ref = await ts.put_state_dict(_tree(), key)
    return ref.version


async def _tree_is_right(key: str) -> bool:
    got = await ts.get_state_dict(key)
    pairs = zip(got["layers"], _tree()["layers"], strict=True)
    return got["step"] == 7 and all(torch.equal(a["w"], b["w"]) for a, b in pairs)


async def _ring(neighbour: int) -> list[int]:
    got = await ts.get(f"ring/{neighbour}")
    return got.tolist()


@pytest.mark.quick
async def test_a_put_in_one_actor_is_a_get_in_all_others(job_store: Job) -> None:
    await asyncio.gather(
        *(job_store.at(i, acts.put, f"ring/{i}", torch.tensor([i, i])) for i in (0, 1)),
        job_store.root(acts.put, "ring/2", torch.tensor([2, 2])),
    )
    assert await job_store.at(0, _ring, 1) == [1, 1]
    assert await job_store.at(1, _ring, 2) == [2, 2]
    assert await job_store.root(_ring, 0) == [0, 0]


async def test_large_tensors_are_zero_copy_between_actors(job_store: Job) -> None:
    await job_store.at(0, acts.put_ones, "large", 8 << 20, 3)
    assert await job_store.at(1, acts.get_shape, "large") == ((8 << 20,), [3])
    assert await job_store.at(1, acts.zero_copy, "large")
    assert await job_store.root(acts.zero_copy, "large")


async def test_objects_and_errors_cross_as_they_are(job_store: Job) -> None:
    await job_store.at(0, acts.put, "object", {"a": [1, (2, 3)]})
    assert await job_store.at(1, acts.get, "object") == {"a": [1, (2, 3)]}
    with pytest.raises(ts.KeyNotFoundError, match="nothing"):
        await job_store.at(1, acts.get, "nothing")


async def test_state_dicts(job_store: Job) -> None:
    assert await job_store.at(0, _put_tree, "model") == 1
    assert await job_store.at(1, _tree_is_right, "model")
    assert await job_store.root(_put_tree, "model") == 2
    assert await job_store.at(0, _tree_is_right, "model")


async def test_dtensors_between_actors(job_store: Job, tmp_path: Path) -> None:
    group = str(tmp_path / "group")
    await asyncio.gather(*(job_store.at(i, dtensors.join_group, i, 2, group) for i in (0, 1)))
    try:
        await asyncio.gather(*(job_store.at(i, dtensors.put_dtensor, "dt", 0) for i in (0, 1)))
        for dim in (1, None):
            got = await asyncio.gather(
                *(job_store.at(i, dtensors.get_dtensor, "dt", dim) for i in (0, 1))
            )
            assert got == [True, True]
        assert torch.equal(await job_store.root(acts.get, "dt"), dtensors.whole())
    finally:
        await asyncio.gather(*(job_store.at(i, dtensors.leave_group) for i in (0, 1)))


async def _in_a_thread(key: str) -> Any:
    """A put and a get in a plain thread with an event loop of its own."""

    async def work() -> Any:
        await ts.put(key, 5)
        return await ts.get(key)

    return await asyncio.to_thread(lambda: asyncio.run(work()))


async def test_a_plain_thread_of_an_actor(job_store: Job) -> None:
    assert await job_store.at(0, _in_a_thread, "threaded") == 5


async def _in_a_child() -> str:
    """What a child process of this one, which is no actor, finds through the environment."""
    import subprocess
    import sys

    script = (
        "import asyncio, sys, torchstore_core as ts\n"
        "print(asyncio.run(ts.get('for-children')), 'monarch' in sys.modules)"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


async def test_children_of_the_initialising_process_join_without_monarch(job_store: Job) -> None:
    await job_store.at(0, acts.put, "for-children", 11)
    assert await job_store.root(_in_a_child) == "11 False\n"


async def test_the_status_and_the_choice_of_transport(job_store: Job) -> None:
    await job_store.at(0, acts.put, "known", 1)
    await job_store.at(1, acts.get, "known")
    status = await job_store.at(0, acts.status)
    pids = {await job_store.at(i, acts.pid) for i in (0, 1)} | {job_store.pid}
    assert pids <= {session.pid for session in status.sessions}
    assert status.controller_pid not in pids
    assert status.volumes[0].pid in job_store.processes() - pids - {status.controller_pid}
    assert set(status.volumes[0].transports) >= {"shm", "monarch-rpc"}
    assert await job_store.at(1, acts.transports) == {"torchstore-0": "shm"}


async def test_a_second_initialise_of_a_name_is_refused_wherever_it_is(job_store: Job) -> None:
    for call in (job_store.at(0, acts.initialize), job_store.root(acts.initialize)):
        with pytest.raises(ts.ConfigurationError, match="already"):
            await call
    await job_store.at(1, acts.put, "still there", 1)


# ---- several stores, and one after the other ---------------------------------------------


async def test_several_stores_by_name(job_store: Job) -> None:
    """One of them is begun in an actor, and ended by another."""
    await job_store.at(0, acts.initialize, {"store_name": "other"})
    try:
        await job_store.at(0, acts.put, "k", "default")
        await job_store.at(0, acts.put, "k", "other", "other")
        assert await job_store.at(1, acts.get, "k") == "default"
        assert await job_store.at(1, acts.get, "k", "other") == "other"
        assert await job_store.root(acts.get, "k", "other") == "other"
        assert (await job_store.at(1, acts.status, "other")).store_name == "other"
    finally:
        await job_store.at(1, acts.shutdown, "other")
    for worker in (0, 1):
        with pytest.raises(ts.StoreClosedError):
            await job_store.at(worker, acts.get, "k", "other")
    assert await job_store.at(0, acts.get, "k") == "default"


async def test_initialise_again_after_shutdown(job: Job) -> None:
    again = {"store_name": "again"}
    before = set(job.directories())
    processes = job.processes()
    await job.root(acts.initialize, again)
    for worker in (0, 1):
        await job.at(worker, acts.put, f"old{worker}", 1, "again")
    held = await job.at(0, acts.put_ones_and_hold, "large", "again")
    await job.at(1, acts.shutdown, "again")
    with pytest.raises(ts.StoreClosedError):
        await job.at(0, acts.keys, "again")
    await job.root(acts.initialize, again)
    # Nobody has been told: those who used the old store go on with the new one.
    assert await job.at(0, acts.keys, "again") == []
    await job.at(1, acts.put, "new", 2, "again")
    assert await job.at(0, acts.get, "new", "again") == 2
    assert await job.root(acts.get, "new", "again") == 2
    assert await job.at(0, acts.held_sum, held) == 1 << 20
    await job.root(acts.shutdown, "again")
    assert set(job.directories()) == before
    await until(lambda: job.processes() == processes)


@pytest.mark.soak
async def test_initialise_again_without_a_call_in_between(job: Job) -> None:
    again = {"store_name": "quick"}
    await job.root(acts.initialize, again)
    await job.at(0, acts.put, "k", 1, "quick")
    await job.at(1, acts.shutdown, "quick")
    await job.at(1, acts.initialize, again)
    await job.at(0, acts.put, "k", 2, "quick")
    assert await job.root(acts.get, "k", "quick") == 2
    await job.at(0, acts.shutdown, "quick")


async def test_shutdown_of_what_is_not_there_does_nothing(job: Job) -> None:
    before = job.directories()
    await job.at(0, acts.shutdown, "never")
    await job.root(acts.shutdown, "never")
    assert job.directories() == before


async def test_without_a_store_the_error_says_what_to_do(job: Job) -> None:
    with pytest.raises(ts.StoreClosedError, match="initialize"):
        await job.at(0, acts.get, "k", "never")


# ---- references in calls of actors --------------------------------------------------------

REFERENCES = "references"
_kept: list[ts.HeldRef] = []


async def _make(nbytes: int) -> ts.HeldRef:
    value = torch.full((nbytes,), 7, dtype=torch.uint8)
    return await ts.put_object(value, store_name=REFERENCES)


async def _keep(ref: ts.HeldRef) -> None:
    _kept.append(ref)


async def _read() -> list[int]:
    return [int((await ts.get(ref, store_name=REFERENCES)).sum()) for ref in _kept]


async def _drop() -> None:
    _kept.clear()
    gc.collect()


async def _free() -> None:
    of = (await ts.status(store_name=REFERENCES)).incarnation
    refs = await ts.refs(store_name=REFERENCES)
    await ts.free([ts.ObjectRef(ref.key, ref.version, of) for ref in refs], store_name=REFERENCES)


async def _held() -> list[tuple[int, list[str]]]:
    refs = await ts.refs(store_name=REFERENCES)
    return [(ref.nbytes, [holder.state for holder in ref.holders]) for ref in refs]


async def test_a_reference_goes_from_actor_to_actor(job: Job) -> None:
    """Held from the reply on until the receiver drops it. The root client receives it from one
    worker and passes it on to another one, which has not used the store before.
    """
    nbytes = 1 << 20
    await job.root(acts.initialize, {"store_name": REFERENCES})
    ref = await job.at(0, _make, nbytes)
    await job.at(1, _keep, ref)
    del ref
    gc.collect()
    assert await job.at(1, _read) == [7 * nbytes]
    ((there, states),) = await job.root(_held)
    assert there == nbytes
    assert "held" in states
    await job.at(1, _drop)

    async def only_the_grace_is_left() -> bool:
        """The root client and this process hold nothing any more, either."""
        found = await job.root(_held)
        return not found or set(found[0][1]) == {"received"}

    await until(only_the_grace_is_left, 10.0)
    await job.root(_free)
    assert await job.root(_held) == []
    await job.root(acts.shutdown, REFERENCES)
