"""The packed form of a state dict: one contiguous blob, and a header that says what lies where.

>>> import asyncio
>>> import torchstore_core as ts
>>> state_dict = {"layer": {"w": torch.arange(6.0).reshape(2, 3)}, "step": 7}
>>> packed = ts.TorchStoreStateDict.from_state_dict(state_dict)
>>> packed
<TorchStoreStateDict of 2 entries, 64 bytes>
>>> packed.to_state_dict()
{'layer': {'w': tensor([[0., 1., 2.],
        [3., 4., 5.]])}, 'step': 7}
>>> ts.TorchStoreStateDict.from_bytes(packed.to_bytes()).to_state_dict()["step"]
7
>>> async def main():
...     await ts.initialize(capacity=64 << 20)
...     await ts.put("model", packed)
...     print(await ts.get("model/layer.w", torch.zeros(2, 3)))
...     print(await ts.get("model"))
...     await ts.shutdown()
>>> asyncio.run(main())
tensor([[0., 1., 2.],
        [3., 4., 5.]])
<TorchStoreStateDict of 2 entries, 64 bytes>

**What a put of it is.** A version of a state dict whose entries are the references, as if by
``put_state_dict``: generations, resharding, tied weights and ``f"{key}/{name}"`` are those of any
other state dict, and ranks that each put their shards make one version together. The blob itself is
not a value of the store. It could be one, with the header beside it; but then a reader would have
to fetch every rank's header to know where a box lies, replicas would be stored many times, and a
version would be whole when its blobs are, not when they cover the tensors. Nothing is lost either:
the entries of one put lie together in the store, as they do in the blob.

``get(key)`` gives a packed form again, of whole tensors, at the price of a copy into its blob;
``get_state_dict(key)`` of the same key gives tensors without one.

**What it is for.** A snapshot: one copy, on the copy threads, and the model may go on training,
while the snapshot is put (also later, or into several stores), saved, or sent by other means.
A state dict that goes straight to the store is better put by ``put_state_dict``, which copies it
once instead of twice.
"""

from __future__ import annotations

import mmap as memory_maps
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from torchstore_core import boxes
from torchstore_core.clients.packed import header as packed_header
from torchstore_core.clients.packed import packing
from torchstore_core.clients.packed.header import Entry, Header, TensorReference
from torchstore_core.clients.packed.packing import ME, Layout, Pair
from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.codec import NoValue, decode_object
from torchstore_core.clients.values.memory import copy_tensors
from torchstore_core.clients.values.nesting import Leaf
from torchstore_core.clients.values.sharding import ShardList, TensorShard
from torchstore_core.clients.values.tensors import (
    check_destination,
    check_storage,
    dtype_of,
    slice_box,
)
from torchstore_core.errors import LayoutMismatchError, ProtocolError, UnsupportedValueError
from torchstore_core.values import ObjectMeta, TensorMeta

__all__ = ["TensorReference", "TorchStoreStateDict", "pack"]


class TorchStoreStateDict(NoValue):
    """A state dict in one contiguous blob; of sharded tensors the local part. See the module.

    Made by :meth:`from_state_dict`, :meth:`from_bytes` and :meth:`load`; or of its two parts,
    however they came here.

    Args:
        header: as :attr:`header` gave it; every number in it is checked.
        blob: uint8, one-dimensional, contiguous, on the CPU.
        allow_pickle: whether pickled objects may be rebuilt. The header never says so itself.

    Attributes:
        blob: the tensors' bytes, row-major, each at a multiple of 64 bytes. Shared with what
            :meth:`to_state_dict` gives: a write to one is seen in the other.

    Raises:
        ProtocolError: the header is damaged, or says what the blob cannot hold.
        UnsupportedValueError: a dtype that this torch does not know or that is not stored, or
            another kind of blob.

    >>> TorchStoreStateDict.from_state_dict({"w": torch.ones(2), "step": 7}).to_state_dict()
    {'w': tensor([1., 1.]), 'step': 7}
    """

    __slots__ = ("_allow_pickle", "_header", "_typed", "blob")
    _refusal = "a packed state dict is a version of its own; put it alone"

    def __init__(self, header: bytes, blob: torch.Tensor, *, allow_pickle: bool = False) -> None:
        if (
            type(blob) is not torch.Tensor
            or (blob.dtype, blob.dim(), blob.device.type) != (torch.uint8, 1, "cpu")
            or not blob.is_contiguous()
            or (blob.data_ptr() | int(blob.storage_offset())) % packed_header.MEMORY_ALIGNMENT
        ):
            raise UnsupportedValueError(
                "a blob is a contiguous one-dimensional uint8 tensor on the CPU, aligned to "
                f"{packed_header.MEMORY_ALIGNMENT} bytes"
            )
        check_storage(ME, blob)
        self._set(packed_header.decode(header, blob.numel()), blob, allow_pickle)

    def _set(self, header: Header, blob: torch.Tensor, allow_pickle: bool) -> None:
        self.blob = blob
        self._header = header
        self._allow_pickle = allow_pickle
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"<TorchStoreStateDict of {len(self._header.entries)} entries, {self.nbytes} bytes>"

    def __len__(self) -> int:
        return len(self._header.entries)

    @property
    def nbytes(self) -> int:
        """Size of the blob."""
        return self.blob.numel()

    @property
    def header(self) -> bytes:
        """What the blob holds, as msgpack."""
        return packed_header.encode(self._header)

    @property
    def participants(self) -> int:
        """How many such puts make a version."""
        return self._header.participants

    @property
    def participant(self) -> str:
        """Which of them this is; empty if nobody has said so."""
        return self._header.participant

    @property
    def references(self) -> dict[str, tuple[TensorReference, ...]]:
        """Where each tensor lies: mostly one place; none if nothing of it is here."""
        return {entry.name: entry.parts for entry in self._header.entries if not entry.codec}

    # ---- from and to a state dict ---------------------------------------------------------

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, Any],
        *,
        participants: int | None = None,
        participant: str | int | None = None,
        allow_pickle: bool = False,
    ) -> TorchStoreStateDict:
        """Copy a state dict into one blob. The values may be changed afterwards.

        Args:
            state_dict: nested dicts and lists of tensors (CPU or CUDA, any strides), DTensors,
                :class:`TensorShard`, and other values. Tied weights are stored once.
            participants: how many such puts make a version; None: as many as there are ranks in
                the meshes of the shards. Ranks that hold different entries must say it.
            participant: which of them this is; None: the rank, or its place in the mesh.
            allow_pickle: values that msgpack does not keep exactly may be pickled.

        Raises:
            UnsupportedValueError: no state dict, or a value that cannot be stored.
            UnsafeObjectError: a value needs pickle, which is not allowed.
            LayoutMismatchError: a shard that does not fit its slice or placements.
        """
        layout = packing.lay_out(state_dict, participants, participant, allow_pickle)
        made, pairs = _place(layout, allow_pickle)
        packing.copy_now(pairs)
        return made

    def to_state_dict(self, user_state_dict: Any = None) -> Any:
        """The state dict, or fill one in place.

        New: ordinary tensors, views of the blob. A shard comes as a :class:`TensorShard` (several
        interleaved ones as a list of them), not as a DTensor: the mesh is one of live processes,
        which need not be these. What is not here at all is left out.

        Args:
            user_state_dict: filled and returned: tensors, DTensors and TensorShards of any layout
                that the blob covers. None in the place of a tensor becomes a view, and other values
                are replaced.

        Raises:
            LayoutMismatchError: names the entries that are missing, unexpected, or do not fit or
                are not covered; nothing was written. From the store, all ranks' shards can be got.
            UnsafeObjectError, UnsupportedValueError: an object cannot be rebuilt here.
            ProtocolError: entries lie inside of each other.
        """
        if user_state_dict is not None:
            return self._fill(user_state_dict)
        found = ((leaf.name, leaf.path, leaf.value) for leaf in self.leaves())
        return nesting.unflatten(ME, found)

    def leaves(self) -> list[Leaf]:
        """The entries of which something is here, flat."""
        seen: dict[int, torch.Tensor] = {}
        return [
            Leaf(entry.name, entry.path, self._value(entry, seen))
            for entry in self._header.entries
            if entry.codec or entry.parts
        ]

    def _value(self, entry: Entry, seen: dict[int, torch.Tensor]) -> Any:
        """``seen``: by offset, so that tied weights are one tensor again."""
        if entry.codec:
            codec = ObjectMeta(entry.codec)
            return decode_object(entry.name, codec, entry.data, allow_pickle=self._allow_pickle)
        shards = ShardList()
        for part in entry.parts:
            tensor = seen.get(part.offset) if part.nbytes else None
            if tensor is None:
                tensor = self._view(part)
                if part.nbytes:
                    seen[part.offset] = tensor
            if part.tensor_slice is None:
                return tensor
            shards.append(TensorShard(tensor, part.tensor_slice))
        return shards[0] if len(shards) == 1 else shards

    def _view(self, part: TensorReference) -> torch.Tensor:
        dtype = dtype_of(TensorMeta(part.dtype, part.shape), ME)
        check_storage(ME, self.blob)
        typed = self._typed.get(dtype)
        if typed is None:
            with torch.inference_mode(False):  # see packing.new_blob
                typed = self._typed[dtype] = self.blob.view(dtype)
        size = dtype.itemsize
        return typed.narrow(0, part.offset // size, part.nbytes // size).view(part.shape)

    def _fill(self, user_state_dict: Any) -> Any:
        leaves = nesting.flatten(ME, user_state_dict)
        entries = {entry.name: entry for entry in self._header.entries}
        pairs: list[Pair] = []
        new: dict[str, Any] = {}
        filled: dict[object, torch.Tensor] = {}
        missing: list[str] = []
        mismatched: dict[str, str] = {}
        for leaf in leaves:
            name, value = leaf.name, leaf.value
            entry = entries.pop(name, None)
            if entry is None:
                missing.append(name)
            elif value is None or (entry.codec and not packing.is_tensor(value)):
                new[name] = self._value(entry, {})
            else:
                try:
                    pairs += self._pairs(entry, value, filled)
                except (LayoutMismatchError, UnsupportedValueError) as error:
                    mismatched[name] = error.message
        unexpected = [entry.name for entry in entries.values() if entry.codec or entry.parts]
        if missing or unexpected or mismatched:
            raise packing.unlike(missing, unexpected, mismatched)
        packing.copy_now(pairs)
        for tensor in filled.values():
            if not tensor.is_inference():  # autograd did not see the write
                torch.autograd.graph.increment_version(tensor)
        return nesting.replace(user_state_dict, leaves, new.get)

    def _pairs(
        self, entry: Entry, value: Any, filled: dict[object, torch.Tensor]
    ) -> Iterator[Pair]:
        """What to copy to fill one destination; memory that is ``filled`` already is left out."""
        name = entry.name
        if entry.codec or not packing.is_tensor(value):
            what = "no tensor" if entry.codec else "a tensor"
            raise LayoutMismatchError(
                f"{name!r} is {what}, the destination is a {type(value).__qualname__}", key=name
            )
        wanted = packing.parts_of(name, value)
        if not entry.parts:
            if wanted:
                raise LayoutMismatchError(f"{name!r}: nothing of it is here", key=name)
            return
        first = entry.parts[0]
        dtype = dtype_of(TensorMeta(first.dtype, first.shape), name)
        shape = first.shape if first.tensor_slice is None else first.tensor_slice.global_shape
        sources = [packing.box_of(part) for part in entry.parts]
        for tensor, part_slice in wanted:
            box = boxes.whole(shape) if part_slice is None else slice_box(name, part_slice, shape)
            target = check_destination(name, tensor, box.shape, dtype, cast=False)
            mark = packing.memory_of(target)
            if mark in filled:
                continue
            filled[mark] = tensor
            plan = boxes.read_plan(box, sources)
            if sum(piece.box.numel for piece in plan) != box.numel:
                lacks = boxes.missing(box, sources)[0]
                raise LayoutMismatchError(
                    f"{name!r}: {list(lacks.shape)} at {list(lacks.offset)} is not here; put all "
                    "ranks' packed forms, and get it from the store",
                    key=name,
                )
            for source, piece in plan:
                view = self._view(entry.parts[source])
                yield (
                    packing.cut(target, boxes.relative(piece, box)),
                    packing.cut(view, boxes.relative(piece, sources[source])),
                )

    # ---- from and to bytes ----------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """All of it, as :meth:`from_bytes` takes it: one copy."""
        return b"".join(
            [*packed_header.prelude(self.header, self.nbytes), packing.bytes_of(self.blob)]
        )

    @classmethod
    def from_bytes(cls, data: Any, *, allow_pickle: bool = False) -> TorchStoreStateDict:
        """The packed form that ``data`` holds.

        Args:
            data: bytes, bytearray, memoryview, mmap: whatever has a buffer. If that can be written
                to, the blob lies in it (which it keeps alive); else it is copied.
            allow_pickle: whether pickled objects may be rebuilt.

        Raises:
            ProtocolError: not a packed form, or one that is truncated or damaged.
            UnsupportedValueError: no buffer, or a dtype that this torch does not know.
        """
        try:
            view = memoryview(data).cast("B")
        except (TypeError, ValueError) as error:
            raise UnsupportedValueError(
                f"a packed form is read from bytes, not a {type(data).__qualname__}: {error}"
            ) from error
        where = packed_header.find(view[: packed_header.PREFIX], view.nbytes)
        header = where.check(view[packed_header.PREFIX : where.header_end])
        if view.readonly or not where.blob_nbytes:
            blob = packing.new_blob(where.blob_nbytes)
            packing.bytes_of(blob)[:] = view[where.blob_start :]
        else:
            with torch.inference_mode(False):
                blob = torch.frombuffer(view, dtype=torch.uint8, offset=where.blob_start)
                if blob.data_ptr() % packed_header.MEMORY_ALIGNMENT:
                    blob = blob.clone()
        return cls(header, blob, allow_pickle=allow_pickle)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, which is there whole or not at all."""
        beside = Path(f"{os.fspath(path)}.{os.getpid()}.part")
        try:
            with beside.open("wb") as file:
                file.writelines(packed_header.prelude(self.header, self.nbytes))
                file.write(packing.bytes_of(self.blob))
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, mmap: bool = False, allow_pickle: bool = False
    ) -> TorchStoreStateDict:
        """Read a file.

        Args:
            mmap: read only what is used, when it is used. Writes stay in this process. The file
                must not be overwritten in place meanwhile (:meth:`save` replaces it).
            allow_pickle: whether pickled objects may be rebuilt.

        Raises:
            ProtocolError, UnsupportedValueError: as :meth:`from_bytes`.
            OSError: it cannot be read.
        """
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            where = packed_header.find(file.read(packed_header.PREFIX), size)
            if mmap:
                mapped = memory_maps.mmap(file.fileno(), 0, access=memory_maps.ACCESS_COPY)
                return cls.from_bytes(mapped, allow_pickle=allow_pickle)
            header = where.check(file.read(where.header_end - packed_header.PREFIX))
            file.seek(where.blob_start)
            blob = packing.new_blob(where.blob_nbytes)
            rest = packing.bytes_of(blob)
            while rest:
                count = file.readinto(rest)
                if not count:
                    raise ProtocolError(f"{str(path)!r} became shorter while it was read")
                rest = rest[count:]
        return cls(header, blob, allow_pickle=allow_pickle)


async def pack(state_dict: Mapping[str, Any], *, allow_pickle: bool) -> TorchStoreStateDict:
    """:meth:`TorchStoreStateDict.from_state_dict` of CPU tensors, while the event loop goes on."""
    made, pairs = _place(packing.lay_out(state_dict, None, None, allow_pickle), allow_pickle)
    await copy_tensors(ME, pairs)
    return made


def _place(layout: Layout, allow_pickle: bool) -> tuple[TorchStoreStateDict, list[Pair]]:
    """The packed form, and what is still to be copied into it."""
    packed = TorchStoreStateDict.__new__(TorchStoreStateDict)
    packed._set(layout.header, packing.new_blob(layout.nbytes), allow_pickle)
    return packed, [(packed._view(at), tensor) for at, tensor in layout.tensors if at.nbytes]
