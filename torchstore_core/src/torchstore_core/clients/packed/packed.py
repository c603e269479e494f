"""The packed form of a state dict: one contiguous blob, and a header that describes its contents.

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

**What a put does.** Putting a packed form creates a version of a state dict whose entries are the
references, as ``put_state_dict`` does. Generations, resharding, tied weights and
``f"{key}/{name}"`` work as for any other state dict, and ranks that each put their shards make one
version together.
The blob itself is not a value of the store. It could be one, with the header next to it; but then a
reader would have to fetch the headers of all ranks to find a box, replicas would be stored many
times, and a version would be complete as soon as its blobs are there, rather than when they cover
the tensors. Nothing is lost by that either: the entries of one put are adjacent in the store, as
they are in the blob.

``get(key)`` returns a packed form again, with whole tensors, at the cost of a copy into its blob;
``get_state_dict(key)`` with the same key returns the tensors without that copy.

**What it is for.** A packed form is a snapshot. After one copy, on the copy threads, the model may
continue to train while the snapshot is put (even later, or into several stores), saved, or sent by
other means. If a state dict only goes to the store, ``put_state_dict`` is better, because it copies
the tensors once instead of twice.
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
from torchstore_core.clients.packed.header import Header, HeaderEntry, TensorReference
from torchstore_core.clients.packed.packing import SUBJECT, Layout, Pair
from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.codec import NoValue, decode_object
from torchstore_core.clients.values.differences import StateDictReport, mismatch_error
from torchstore_core.clients.values.memory import copy_tensors
from torchstore_core.clients.values.nesting import Leaf
from torchstore_core.clients.values.sharding import ShardList, TensorShard
from torchstore_core.clients.values.tensors import (
    check_destination,
    check_storage,
    dtype_of,
    slice_box,
    were_written,
)
from torchstore_core.errors import LayoutMismatchError, ProtocolError, UnsupportedValueError
from torchstore_core.values import ObjectMeta, TensorMeta

__all__ = ["TensorReference", "TorchStoreStateDict", "pack"]


class TorchStoreStateDict(NoValue):
    """A state dict in one contiguous blob, with only the local part of sharded tensors.

    It is created by :meth:`from_state_dict`, :meth:`from_bytes` and :meth:`load`; or from a header
    and a blob that were transferred by other means. See also the docstring of this module.

    Args:
        header: the value of :attr:`header`; every number in it is checked.
        blob: a contiguous one-dimensional uint8 tensor on the CPU.
        allow_pickle: whether pickled objects may be rebuilt. The header cannot allow it.

    Attributes:
        blob: the bytes of the tensors, row-major, each tensor at a multiple of 64 bytes. It shares
            memory with the result of :meth:`to_state_dict`: a write to one changes the other.

    Raises:
        ProtocolError: the header is damaged, or describes what the blob cannot hold.
        UnsupportedValueError: a dtype is one that this torch lacks or that cannot be stored, or
            ``blob`` is not as described above.

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
        check_storage(SUBJECT, blob)
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
        """The size of the blob in bytes."""
        return self.blob.numel()

    @property
    def header(self) -> bytes:
        """The description of the blob's contents, as msgpack."""
        return packed_header.encode(self._header)

    @property
    def participants(self) -> int:
        """The number of participants whose puts make a version."""
        return self._header.participants

    @property
    def participant(self) -> str:
        """The name of this participant; empty if none was given."""
        return self._header.participant

    @property
    def references(self) -> dict[str, tuple[TensorReference, ...]]:
        """The places of each tensor: usually one; none if no part of the tensor is here."""
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
        """Copy a state dict into one blob. The original values may be changed afterwards.

        Args:
            state_dict: nested dicts and lists of tensors (CPU or CUDA, any strides), DTensors,
                :class:`TensorShard`, and other values. Tied weights are stored once.
            participants: the number of participants whose puts make a version; None: the number of
                ranks in the meshes of the shards. Must be given if ranks hold different entries.
            participant: the name of this participant; None: the rank, or its coordinates in the
                mesh.
            allow_pickle: whether values that msgpack cannot represent exactly may be pickled.

        Raises:
            UnsupportedValueError: it is not a state dict, or has a value that cannot be stored.
            UnsafeObjectError: a value needs pickle, which is not allowed.
            LayoutMismatchError: a shard does not match its slice or placements.
        """
        layout = packing.lay_out(state_dict, participants, participant, allow_pickle)
        made, pairs = _allocate(layout, allow_pickle)
        packing.copy_now(pairs)
        return made

    def to_state_dict(self, user_state_dict: Any = None) -> Any:
        """Return the state dict, or fill an existing one in place.

        The tensors of a new state dict are ordinary tensors, which are views of the blob. A shard
        becomes a :class:`TensorShard` (several interleaved ones a list of them) and not a DTensor,
        because a mesh consists of live processes, which may be others now. A tensor of which no
        part is here is left out.

        Args:
            user_state_dict: the state dict to fill and return. It may hold tensors, DTensors and
                TensorShards of any layout that the blob covers. None in place of a tensor is
                replaced by a view, and values that are not tensors are replaced.

        Raises:
            LayoutMismatchError: names the entries that are missing, unexpected, do not match or are
                not covered; nothing was written. The store can return the shards of all ranks.
            UnsafeObjectError, UnsupportedValueError: an object cannot be rebuilt here.
            ProtocolError: one entry lies inside of another.
        """
        if user_state_dict is not None:
            return self._fill(user_state_dict)
        found = ((leaf.name, leaf.path, leaf.value) for leaf in self.leaves())
        return nesting.unflatten(SUBJECT, found)

    def leaves(self) -> list[Leaf]:
        """Return the entries of which at least a part is here, as a flat list."""
        seen: dict[int, torch.Tensor] = {}
        return [
            Leaf(entry.name, entry.path, self._value(entry, seen))
            for entry in self._header.entries
            if entry.codec or entry.parts
        ]

    def _value(self, entry: HeaderEntry, seen: dict[int, torch.Tensor]) -> Any:
        """``seen``: tensors by offset, so that tied weights become one tensor again."""
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
        dtype = dtype_of(TensorMeta(part.dtype, part.shape), SUBJECT)
        check_storage(SUBJECT, self.blob)
        typed = self._typed.get(dtype)
        if typed is None:
            with torch.inference_mode(False):  # see packing.new_blob
                typed = self._typed[dtype] = self.blob.view(dtype)
        size = dtype.itemsize
        return typed.narrow(0, part.offset // size, part.nbytes // size).view(part.shape)

    def _fill(self, user_state_dict: Any) -> Any:
        leaves = nesting.flatten(SUBJECT, user_state_dict)
        entries = {entry.name: entry for entry in self._header.entries}
        pairs: list[Pair] = []
        new: dict[str, Any] = {}
        filled: dict[object, torch.Tensor] = {}
        report = StateDictReport()
        for leaf in leaves:
            name, value = leaf.name, leaf.value
            entry = entries.pop(name, None)
            if entry is None:
                report.missing.append(name)
            elif value is None or (entry.codec and not packing.is_tensor(value)):
                new[name] = self._value(entry, {})
            else:
                try:
                    pairs += self._pairs(entry, value, filled)
                except (LayoutMismatchError, UnsupportedValueError) as error:
                    report.mismatched[name] = error.message
        report.unexpected = [e.name for e in entries.values() if e.codec or e.parts]
        if report:
            raise mismatch_error("the packed state dict", report)
        packing.copy_now(pairs)
        were_written(filled.values())
        return nesting.replace(user_state_dict, leaves, new.get)

    def _pairs(
        self, entry: HeaderEntry, value: Any, filled: dict[object, torch.Tensor]
    ) -> Iterator[Pair]:
        """Yield what to copy to fill one destination. Skips memory that is ``filled`` already."""
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
            memory = packing.memory_key(target)
            if memory in filled:
                continue
            filled[memory] = tensor
            plan = boxes.read_plan(box, sources)
            if sum(piece.box.numel for piece in plan) != box.numel:
                gap = boxes.missing(box, sources)[0]
                raise LayoutMismatchError(
                    f"{name!r}: {list(gap.shape)} at {list(gap.offset)} is not here; put all "
                    "ranks' packed forms, and get it from the store",
                    key=name,
                )
            for source, piece in plan:
                view = self._view(entry.parts[source])
                yield (
                    packing.view_of(target, boxes.relative(piece, box)),
                    packing.view_of(view, boxes.relative(piece, sources[source])),
                )

    # ---- from and to bytes ----------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Return everything as bytes, for :meth:`from_bytes`. Copies the blob once."""
        return b"".join(
            [*packed_header.prelude(self.header, self.nbytes), packing.bytes_of(self.blob)]
        )

    @classmethod
    def from_bytes(cls, data: Any, *, allow_pickle: bool = False) -> TorchStoreStateDict:
        """Create a packed form from bytes.

        Args:
            data: an object with a buffer, such as bytes, bytearray, memoryview or mmap. If the
                buffer is writable, the blob shares its memory and keeps it alive; otherwise the
                blob is a copy.
            allow_pickle: whether pickled objects may be rebuilt.

        Raises:
            ProtocolError: it is not a packed form, or is truncated or damaged.
            UnsupportedValueError: ``data`` has no buffer, or a dtype is one that this torch lacks.
        """
        try:
            view = memoryview(data).cast("B")
        except (TypeError, ValueError) as error:
            raise UnsupportedValueError(
                f"a packed form is read from bytes, not a {type(data).__qualname__}: {error}"
            ) from error
        where = packed_header.read_prefix(view[: packed_header.PREFIX], view.nbytes)
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
        """Write the packed form to a file, atomically: the file is complete or does not exist."""
        partial = Path(f"{os.fspath(path)}.{os.getpid()}.part")
        try:
            with partial.open("wb") as file:
                file.writelines(packed_header.prelude(self.header, self.nbytes))
                file.write(packing.bytes_of(self.blob))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, mmap: bool = False, allow_pickle: bool = False
    ) -> TorchStoreStateDict:
        """Read a packed form from a file.

        Args:
            path: the file.
            mmap: whether to map the file, so that only what is used is read, at that time. Writes
                stay in this process. The file must not be overwritten in place while it is mapped
                (:meth:`save` replaces the file).
            allow_pickle: whether pickled objects may be rebuilt.

        Raises:
            ProtocolError, UnsupportedValueError: as in :meth:`from_bytes`.
            OSError: the file cannot be read.
        """
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            where = packed_header.read_prefix(file.read(packed_header.PREFIX), size)
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
    """Do :meth:`TorchStoreStateDict.from_state_dict` of CPU tensors without blocking the loop."""
    made, pairs = _allocate(packing.lay_out(state_dict, None, None, allow_pickle), allow_pickle)
    await copy_tensors(SUBJECT, pairs)
    return made


def _allocate(layout: Layout, allow_pickle: bool) -> tuple[TorchStoreStateDict, list[Pair]]:
    """Allocate the packed form. Returns it, and the copies that will fill it."""
    packed = TorchStoreStateDict.__new__(TorchStoreStateDict)
    packed._set(layout.header, packing.new_blob(layout.nbytes), allow_pickle)
    return packed, [(packed._view(at), tensor) for at, tensor in layout.tensors if at.nbytes]
