"""Tensors that a store keeps as shards: shard by shard into a snapshot, and back into a store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import torch

import torchstore_core as ts
from torchstore_core import boxes
from torchstore_core.clients.calls import thread_loops
from torchstore_core.clients.values.sharding import ShardList
from torchstore_core.clients.values.tensors import dtype_of
from torchstore_core.values import ObjectRef, Request, TensorMeta, TensorSlice
from torchstore_snapshot.format.manifest import Entry, Manifest, Piece, StoredKey, TensorEntry
from torchstore_snapshot.restoring.files import Files
from torchstore_snapshot.restoring.reading import Read, execute, plan_reads
from torchstore_snapshot.storage.base import Storage
from torchstore_snapshot.taking.collecting import Item, LocalPiece
from torchstore_snapshot.taking.writing import Fetch

__all__ = ["STATE_DICT", "Reading", "described", "fetching", "put_shards", "shards_of"]

# Bytes of shards that are read from files before they are put.
_READ = 64 << 20
_ALIGNMENT = 64
#: What ``stat`` calls a state dict.
STATE_DICT = "state dict"


def described(found: ts.Found) -> ShardList:
    """Return the shards of a tensor in a store as tensors on the meta device."""
    meta = TensorMeta(found.dtype or "", found.shape or ())
    dtype = dtype_of(meta, found.key)
    return ShardList(
        ts.TensorShard(torch.empty(part.local_shape, dtype=dtype, device="meta"), part)
        for part in found.shards
    )


def fetching(client: ts.Client, stored: dict[str, StoredKey]) -> Fetch:
    """Return what gets shards from a store, for a thread that writes them to files.

    Called in the event loop of the client, which is then not to be blocked while it is used.

    Args:
        stored: what the keys of the snapshot are in the store.
    """
    loop = asyncio.get_running_loop()

    async def get(pieces: Sequence[tuple[Item, LocalPiece]]) -> list[torch.Tensor]:
        gets = []
        for item, piece in pieces:
            known = stored[item.key]
            key = known.key or item.key
            if known.kind == STATE_DICT:
                key += f"/{item.name}"
            gets.append(client.get(Request(key, known.version, piece.slice)))
        tensors: list[torch.Tensor] = await asyncio.gather(*gets)
        return tensors

    def fetch(pieces: Sequence[tuple[Item, LocalPiece]]) -> list[torch.Tensor]:
        return asyncio.run_coroutine_threadsafe(get(pieces), loop).result()

    return fetch


def shards_of(entry: Entry | None) -> TensorEntry | None:
    """Return a tensor of a snapshot of a store that was stored as shards; None if it is not one."""
    if not isinstance(entry, TensorEntry) or all(piece.slice is None for piece in entry.pieces):
        return None
    return entry


class Reading(NamedTuple):
    """How a tensor is read from a snapshot.

    Args:
        path: its name there.
        verify: compare hashes.
    """

    storage: Storage
    manifest: Manifest
    path: str
    verify: bool

    def read(
        self, entry: TensorEntry, pieces: Sequence[Piece], memory: torch.Tensor
    ) -> list[ts.TensorShard]:
        """Read some of its pieces into memory on the host that has room for them."""
        shards: list[ts.TensorShard] = []
        reads: list[Read] = []
        dtype = dtype_of(TensorMeta(entry.dtype, entry.shape), self.path)
        at = 0
        for piece in pieces:
            only = msgspec.structs.replace(entry, pieces=(piece,))
            (box,) = only.boxes()
            start, end = at, at + piece.nbytes
            at += _room(piece)
            target = memory[start:end].view(dtype).view(box.shape)
            reads += plan_reads(self.path, only, target, box)
            shards.append(ts.TensorShard(target, TensorSlice(box.offset, box.shape, entry.shape)))
        with Files(self.storage, self.manifest) as files:
            execute(files, reads, check="during" if self.verify else None)
        return shards


async def put_shards(
    client: ts.Client, key: str, version: int | None, entry: TensorEntry, reading: Reading
) -> ObjectRef:
    """Put a tensor as the shards that it consists of, so that the last one makes it visible.

    Args:
        version: which version they become; None: the next one.
    """
    batches = [*_batches(entry)]
    # The same memory for all batches: what one thread frees may be of no use to another one.
    most = max(sum(map(_room, pieces)) for pieces in batches)
    memory = torch.empty(most, dtype=torch.uint8, device="cpu")
    for pieces in batches:
        read = partial(reading.read, entry, pieces, memory)
        shards = await thread_loops.in_thread(read)
        ref = await client.put(key, ShardList(shards), version=version)
        version = ref.version
    return ref


def _room(piece: Piece) -> int:
    """The bytes of a piece, and those after it that are left out so that the next is aligned."""
    return -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT


def _batches(entry: TensorEntry) -> Iterator[list[Piece]]:
    """The pieces that are put one after the other. A version is whole as soon as it is covered, so
    those that overlap are put together.
    """
    if sum(box.numel for box in entry.boxes()) > boxes.whole(entry.shape).numel:
        yield [*entry.pieces]
        return
    batch: list[Piece] = []
    nbytes = 0
    for piece in entry.pieces:
        batch.append(piece)
        nbytes += piece.nbytes
        if nbytes >= _READ:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
