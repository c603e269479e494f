"""State dicts of a store some of whose entries are sharded: the shards stay what they are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

import torchstore_core as ts
from torchstore_core.clients.moving.entries import entries_of
from torchstore_core.clients.moving.leasing import Leasing
from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.sharding import ShardList
from torchstore_core.clients.values.tensors import dtype_of
from torchstore_core.errors import TorchStoreError
from torchstore_core.values import ObjectRef, Request, TensorMeta, TensorSlice
from torchstore_core.wire import messages as m
from torchstore_snapshot.api.shards import shards_of
from torchstore_snapshot.format.manifest import Entry, TensorEntry

__all__ = ["state_dict_in", "with_shards"]

# Requests that are under way at a time.
_AT_ONCE = 256


class _Sharded(NamedTuple):
    """An entry that is stored as several shards."""

    meta: TensorMeta
    boxes: list[TensorSlice]

    def described(self) -> ShardList:
        """Its shards as tensors on the meta device."""
        dtype = dtype_of(self.meta, "")
        return ShardList(
            ts.TensorShard(torch.empty(box.local_shape, dtype=dtype, device="meta"), box)
            for box in self.boxes
        )

    def nothing(self) -> ts.TensorShard:
        """A destination for none of its elements."""
        extents = (0, *self.meta.shape[1:])
        part = TensorSlice((0,) * len(extents), extents, self.meta.shape)
        dtype = dtype_of(self.meta, "")
        return ts.TensorShard(torch.empty(extents, dtype=dtype, device="cpu"), part)


class _Listed(NamedTuple):
    """What a version of a state dict has.

    Args:
        names, paths: of its entries, by position; the paths only of those that are nested.
        sharded: the entries that are stored as several shards, by position.
        same_as: entries with the bytes of earlier ones, by position.
    """

    names: Sequence[str]
    paths: Mapping[int, bytes]
    sharded: Mapping[int, _Sharded]
    same_as: Mapping[int, int]


async def state_dict_in(
    client: ts.Client, key: str, version: int, held: list[ts.HeldRef]
) -> dict[str, Any]:
    """Return a version of a state dict: sharded entries as shards on the meta device, all others as
    values, large ones in the memory of the store.

    Args:
        held: if there are shards, which are read later, it gets a hold of the version.

    Raises:
        KeyNotFoundError, VersionGoneError: it is not there any more.
    """
    listed = await _list(client, key, version)
    if not listed.sharded or not await _found_by_name(client, key, version, listed):
        value = await client.get(Request(key, version))
        state: dict[str, Any] = value if isinstance(value, dict) else value.to_state_dict()
        return state
    held.append(await client.hold(ObjectRef(key, version)))
    wanted = {
        name: listed.sharded[at].nothing() if at in listed.sharded else None
        for at, name in enumerate(listed.names)
    }
    found = await client.get_state_dict(key, wanted, version=version)
    values: list[Any] = []
    for at, name in enumerate(listed.names):
        if at in listed.same_as:
            values.append(values[listed.same_as[at]])
        elif at in listed.sharded:
            values.append(listed.sharded[at].described())
        else:
            values.append(found[name])
    rows = enumerate(zip(listed.names, values, strict=True))
    return nesting.unflatten(key, ((n, listed.paths.get(at, b""), v) for at, (n, v) in rows))


def with_shards(state: dict[str, Any], key: str, entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Return a state dict that was read from a snapshot with the shards of those of its tensors
    that the store had as shards.

    Args:
        state: whole tensors; the shards are views of them.
        entries: what the snapshot says about its entries, by name.
    """
    sharded = {name: shards_of(entry) for name, entry in entries.items()}
    pieces = {name: _slices(entry) for name, entry in sharded.items() if entry is not None}
    if not pieces:
        return state
    leaves = nesting.flatten(key, state)

    def shards(name: str, value: Any) -> Any:
        if name not in pieces:
            return value
        return ShardList(ts.TensorShard(_view(value, part), part) for part in pieces[name])

    made: dict[str, Any] = nesting.replace(state, leaves, shards)
    return made


def _slices(entry: TensorEntry) -> list[TensorSlice]:
    return [TensorSlice(box.offset, box.shape, entry.shape) for box in entry.boxes()]


def _view(whole: torch.Tensor, part: TensorSlice) -> torch.Tensor:
    for dim, (start, extent) in enumerate(zip(part.offsets, part.local_shape, strict=True)):
        whole = whole.narrow(dim, start, extent)
    return whole


async def _list(client: ts.Client, key: str, version: int) -> _Listed:
    """Ask what a version has; no bytes are moved."""
    with client._watch("stat", None, key) as clock:
        session, channel = client._here(clock) or await client._join(clock)
        leasing = Leasing(session, channel, clock)
        with leasing:
            request = m.Fetch(channel.next_id(), leasing.lease, key, version, None, 0)
            reply = await channel.call(request, m.Fetched, clock.left())
            sharded: dict[int, _Sharded] = {}
            if reply.columns is None:
                leasing.granted(reply.entries, reply.leased)
                for at, entry in enumerate(reply.entries):
                    if entry is None or not entry.parts or not isinstance(entry.meta, TensorMeta):
                        continue
                    shape = entry.meta.shape
                    parts = sorted((part.offset, part.shape) for part in entry.parts)
                    found = [TensorSlice(offset, extent, shape) for offset, extent in parts]
                    sharded[at] = _Sharded(entry.meta, found)
            else:  # all of them are whole
                leasing.granted(entries_of(reply.columns), reply.leased)
    return _Listed(reply.names, reply.paths, sharded, dict(reply.same_as))


async def _found_by_name(client: ts.Client, key: str, version: int, listed: _Listed) -> bool:
    """Whether the shards can be read by the names of their entries: another key may have such a
    name, too.
    """
    rest = [(listed.names[at], entry.boxes) for at, entry in listed.sharded.items()]
    while rest:
        some, rest = rest[:_AT_ONCE], rest[_AT_ONCE:]
        asked = [client.stat(f"{key}/{name}", version=version) for name, _ in some]
        for found, (_, boxes) in zip(
            await asyncio.gather(*asked, return_exceptions=True), some, strict=True
        ):
            if isinstance(found, TorchStoreError):
                return False
            if isinstance(found, BaseException):
                raise found
            if found.shards != boxes:
                return False
    return True
