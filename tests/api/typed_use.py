"""What type checkers know of the calls of users: ``make check`` checks it, nothing runs it."""

from __future__ import annotations

from typing import assert_type

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

import torchstore_core as ts
import torchstore_core.blocking as blocking_ts

Put = ts.ObjectRef | ts.PendingPut
BlockingPut = ts.ObjectRef | blocking_ts.PendingPut


async def puts_of_state_dicts(client: ts.Client, maybe: bool) -> None:
    """What is returned depends on ``blocking``, and so does its type."""
    weights = torch.nn.Linear(2, 2).state_dict()
    assert_type(await ts.put_state_dict(weights, "k", keep=2, store_name="s"), ts.ObjectRef)
    assert_type(await ts.put_state_dict(weights, "k", blocking=False), ts.PendingPut)
    assert_type(await ts.put_state_dict(weights, "k", blocking=maybe), Put)
    assert_type(await client.put_state_dict(weights, "k", version=3, rewind=True), ts.ObjectRef)
    assert_type(await client.put_state_dict(weights, "k", blocking=False), ts.PendingPut)
    assert_type(await client.put_state_dict(weights, "k", blocking=maybe), Put)


def blocking_puts_of_state_dicts(client: blocking_ts.Client, maybe: bool) -> None:
    weights = {"w": torch.ones(1)}
    cast = {"*": torch.bfloat16, "*.bias": None}
    assert_type(blocking_ts.put_state_dict(weights, "k", store_name="s"), ts.ObjectRef)
    pending = blocking_ts.put_state_dict(weights, "k", blocking=False, transfer_dtype=cast)
    assert_type(pending, blocking_ts.PendingPut)
    assert_type(blocking_ts.put_state_dict(weights, "k", blocking=maybe), BlockingPut)
    assert_type(ts.blocking.put_state_dict(weights, "k"), ts.ObjectRef)
    assert_type(client.put_state_dict(weights, "k", timeout=3), ts.ObjectRef)
    assert_type(client.put_state_dict(weights, "k", blocking=False), blocking_ts.PendingPut)
    assert_type(client.put_state_dict(weights, "k", blocking=maybe), BlockingPut)


async def destinations(client: ts.Client, shard: ts.TensorShard, old: ShardedTensor) -> None:
    """A get fills whatever is a tensor, or a part of one."""
    for destination in (torch.ones(1), shard, old, None):
        await ts.get("k", destination)
        await client.get("k", destination)
        blocking_ts.get("k", destination)
