"""From values to one blob: what lies where in it, and the copies."""

from __future__ import annotations

import asyncio
import ctypes
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from torchstore_core import boxes
from torchstore_core.boxes import Box
from torchstore_core.clients.packed.header import ALIGNMENT, Entry, Header, TensorReference
from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.codec import encode_object
from torchstore_core.clients.values.memory import copy_tensors
from torchstore_core.clients.values.sharding import (
    is_dtensor,
    is_sharded,
    local_parts,
    mesh_ranks,
    this_rank,
)
from torchstore_core.clients.values.tensors import (
    address_of,
    byte_like,
    dtype_name,
    storable,
)
from torchstore_core.errors import ConfigurationError, LayoutMismatchError
from torchstore_core.values import TensorSlice

__all__ = ["ME", "Layout", "Pair", "box_of", "bytes_of", "copy_now", "cut", "is_tensor"]
__all__ += ["lay_out", "memory_of", "new_blob", "parts_of", "unlike"]

#: What errors call a packed state dict, which has no key yet.
ME = "state dict"
Pair = tuple[torch.Tensor, torch.Tensor]  # target, source: one shape, one dtype


class Layout(NamedTuple):
    """The header of a blob of ``nbytes``, and the tensors that go where it says."""

    header: Header
    nbytes: int
    tensors: list[tuple[TensorReference, torch.Tensor]]


def lay_out(
    state_dict: Mapping[str, Any],
    participants: int | None,
    participant: str | int | None,
    allow_pickle: bool,
) -> Layout:
    """Give every tensor of a state dict its place in a blob; the same memory once.

    Raises:
        ConfigurationError, UnsupportedValueError, LayoutMismatchError, UnsafeObjectError
    """
    if participants is not None and (type(participants) is not int or participants < 1):
        raise ConfigurationError(f"participants is an int above 0, not {participants!r}")
    entries: list[Entry] = []
    tensors: list[tuple[TensorReference, torch.Tensor]] = []
    known: dict[object, TensorReference] = {}
    ranks: frozenset[int] = frozenset()
    mesh: tuple[int, ...] = ()
    coordinates: tuple[int, ...] = ()
    end = 0
    for leaf in nesting.flatten(ME, state_dict):
        name, value = leaf.name, leaf.value
        if not is_tensor(value):
            meta, data = encode_object(name, value, allow_pickle=allow_pickle)
            entries.append(Entry(name, leaf.path, (), meta.codec, data))
            continue
        if is_dtensor(value):
            ranks |= mesh_ranks(value)
        parts: list[TensorReference] = []
        for local, part in parts_of(name, value):
            tensor = storable(name, local)
            mark = memory_of(tensor), part
            made = known.get(mark) if tensor.numel() else None
            if made is None:
                nbytes = tensor.nbytes
                dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
                made = known[mark] = TensorReference(end, nbytes, dtype, shape, part)
                tensors.append((made, tensor))
                end += -(-nbytes // ALIGNMENT) * ALIGNMENT
            parts.append(made)
            if part is not None and math.prod(part.mesh_shape) > math.prod(mesh):
                mesh, coordinates = part.mesh_shape, part.coordinates
        entries.append(Entry(name, leaf.path, tuple(parts)))
    if participants is None:
        participants = len(ranks) or math.prod(mesh)
    who = "" if participant is None else str(participant)
    if participants > 1 and participant is None:
        who = this_rank() or ",".join(map(str, coordinates))
    return Layout(Header(tuple(entries), participants, who), end, tensors)


def parts_of(name: str, value: Any) -> list[tuple[torch.Tensor, TensorSlice | None]]:
    """What of a tensor is here, and which part of it that is; None: all.

    Raises:
        UnsupportedValueError, LayoutMismatchError: see ``sharding.local_parts``.
    """
    if not is_sharded(value):
        return [(value, None)]
    return [(local.tensor, _plain(local.part)) for local in local_parts(name, value)]


def _plain(part: TensorSlice) -> TensorSlice:
    """Of plain ints, whatever the user made it of."""
    fields = (part.offsets, part.local_shape, part.global_shape, part.mesh_shape, part.coordinates)
    return TensorSlice(*[tuple([int(n) for n in field]) for field in fields])


def is_tensor(value: Any) -> bool:
    """Of whatever kind, also one of which only part is here."""
    return isinstance(value, torch.Tensor) or is_sharded(value)


def box_of(part: TensorReference) -> Box:
    """Which part of the tensor it is."""
    if part.tensor_slice is None:
        return boxes.whole(part.shape)
    return Box(part.tensor_slice.offsets, part.shape)


def unlike(
    missing: list[str], unexpected: list[str], mismatched: dict[str, str]
) -> LayoutMismatchError:
    """What is wrong with a destination, all of it."""
    listed = (("missing", missing), ("unexpected", unexpected))
    said = [f"{len(n)} {what}: {', '.join(map(repr, n))}" for what, n in listed if n]
    if mismatched:
        said.append(f"{len(mismatched)} mismatched: {'; '.join(mismatched.values())}")
    return LayoutMismatchError(
        f"the packed state dict does not match; nothing was written. {'; '.join(said)}",
        details={"missing": missing, "unexpected": unexpected, "mismatched": mismatched},
    )


def memory_of(tensor: torch.Tensor) -> object:
    """The same for tensors that are the same elements in memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A view of a part."""
    return tensor[tuple([slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True)])]


def new_blob(nbytes: int) -> torch.Tensor:
    """Memory for a blob."""
    # In inference mode it would be a tensor that cannot be written to outside of it.
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def bytes_of(blob: torch.Tensor) -> memoryview:
    """Its memory, which the caller keeps alive.

    Raises:
        UnsupportedValueError: it has been freed.
    """
    if not blob.numel():
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * blob.numel()).from_address(address_of(ME, blob))).cast("B")


def copy_now(pairs: Sequence[Pair]) -> None:
    """Copy all, on the copy threads; to and from devices here."""
    on_host = [pair for pair in pairs if pair[0].is_cpu and pair[1].is_cpu]
    # A thread waits for the copy threads, as this one may run an event loop.
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(lambda: asyncio.run(copy_tensors(ME, on_host)))
        for target, source in pairs:  # where the user's current stream is the current one
            if not (target.is_cpu and source.is_cpu):
                address_of(ME, target), address_of(ME, source)
                byte_like(target).copy_(byte_like(source))
        done.result()
