"""References in calls of actors: held from the reply on until the receiver drops them."""

from __future__ import annotations

import gc

import torch
from tests.monarch.jobs import Job
from tests.support import until

import torchstore_core as ts

_kept: list[ts.HeldRef] = []


async def _make(nbytes: int) -> ts.HeldRef:
    return await ts.put_object(torch.full((nbytes,), 7, dtype=torch.uint8))


async def _keep(ref: ts.HeldRef) -> None:
    _kept.append(ref)


async def _read() -> list[int]:
    return [int(value.sum()) for value in [await ts.get(ref) for ref in _kept]]


async def _drop() -> None:
    _kept.clear()
    gc.collect()


async def _free() -> None:
    of = (await ts.status()).incarnation
    await ts.free([ts.ObjectRef(ref.key, ref.version, of) for ref in await ts.refs()])


async def _held() -> list[tuple[int, list[str]]]:
    return [(ref.nbytes, [holder.state for holder in ref.holders]) for ref in await ts.refs()]


async def test_a_reference_goes_from_actor_to_actor(job_store: Job) -> None:
    """The root client receives it from one worker and passes it on to another one, which has not
    used the store before.
    """
    nbytes = 1 << 20
    ref = await job_store.at(0, _make, nbytes)
    await job_store.at(1, _keep, ref)
    del ref
    gc.collect()
    assert await job_store.at(1, _read) == [7 * nbytes]
    ((there, states),) = await job_store.root(_held)
    assert there == nbytes
    assert "held" in states
    await job_store.at(1, _drop)

    async def only_the_grace_is_left() -> bool:
        """The root client and this process hold nothing any more, either."""
        found = await job_store.root(_held)
        return not found or set(found[0][1]) == {"received"}

    await until(only_the_grace_is_left, 10.0)
    await job_store.root(_free)
    assert await job_store.root(_held) == []
