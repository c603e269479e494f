"""Packs values into one blob: plans its layout, and copies the tensors."""

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
from torchstore_core.clients.packed.header import ALIGNMENT, Header, HeaderEntry, TensorReference
from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.codec import encode_object
from torchstore_core.clients.values.memory import copy_tensors
from torchstore_core.clients.values.new_tensors import new_tensor
from torchstore_core.clients.values.sharding import (
    is_distributed,
    is_sharded,
    local_parts,
    ranks_of,
    this_rank,
)
from torchstore_core.clients.values.tensors import (
    address_of,
    byte_like,
    dtype_name,
    storable,
)
from torchstore_core.errors import ConfigurationError
from torchstore_core.values import TensorSlice

#: The name of a packed state dict in errors, because it has no key yet.
SUBJECT = "state dict"
Pair = tuple[torch.Tensor, torch.Tensor]  # target, source: one shape, one dtype


class Layout(NamedTuple):
    """The header of a blob of ``nbytes``, and the tensors to copy, each with its place."""

    header: Header
    nbytes: int
    tensors: list[tuple[TensorReference, torch.Tensor]]


def lay_out(
    state_dict: Mapping[str, Any],
    participants: int | None,
    participant: str | int | None,
    allow_pickle: bool,
) -> Layout:
    """Assign a place in a blob to every tensor of a state dict; tied tensors share one.

    Raises:
        ConfigurationError, UnsupportedValueError, LayoutMismatchError, UnsafeObjectError
    """
    if participants is not None and (type(participants) is not int or participants < 1):
        raise ConfigurationError(f"participants is an int above 0, not {participants!r}")
    entries: list[HeaderEntry] = []
    tensors: list[tuple[TensorReference, torch.Tensor]] = []
    known: dict[object, TensorReference] = {}
    ranks: frozenset[int] = frozenset()
    mesh: tuple[int, ...] = ()
    coordinates: tuple[int, ...] = ()
    end = 0
    for leaf in nesting.flatten(SUBJECT, state_dict):
        name, value = leaf.name, leaf.value
        if not is_tensor(value):
            meta, data = encode_object(name, value, allow_pickle=allow_pickle)
            entries.append(HeaderEntry(name, leaf.path, (), meta.codec, data))
            continue
        if is_distributed(value):
            ranks |= ranks_of(value)
        parts: list[TensorReference] = []
        for local, part in parts_of(name, value):
            tensor = storable(name, local)
            memory = memory_key(tensor), part
            made = known.get(memory) if tensor.numel() else None
            if made is None:
                nbytes = tensor.nbytes
                dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
                made = known[memory] = TensorReference(end, nbytes, dtype, shape, part)
                tensors.append((made, tensor))
                end += -(-nbytes // ALIGNMENT) * ALIGNMENT
            parts.append(made)
            if part is not None and math.prod(part.mesh_shape) > math.prod(mesh):
                mesh, coordinates = part.mesh_shape, part.coordinates
        entries.append(HeaderEntry(name, leaf.path, tuple(parts)))
    if participants is None:
        participants = len(ranks) or math.prod(mesh)
    participant_name = "" if participant is None else str(participant)
    if participants > 1 and participant is None:
        participant_name = this_rank() or ",".join(map(str, coordinates))
    return Layout(Header(tuple(entries), participants, participant_name), end, tensors)


def parts_of(name: str, value: Any) -> list[tuple[torch.Tensor, TensorSlice | None]]:
    """Return the local parts of a tensor, each with its slice (None: it is the whole tensor).

    Raises:
        UnsupportedValueError, LayoutMismatchError: see ``sharding.local_parts``.
    """
    if not is_sharded(value):
        return [(value, None)]
    return [(local.tensor, _plain(local.part)) for local in local_parts(name, value)]


def _plain(part: TensorSlice) -> TensorSlice:
    """Return the same slice with plain ints, in place of whatever types the user has used."""
    fields = (part.offsets, part.local_shape, part.global_shape, part.mesh_shape, part.coordinates)
    return TensorSlice(*[tuple([int(n) for n in field]) for field in fields])


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor of any kind, including one of which only a part is here."""
    return isinstance(value, torch.Tensor) or is_sharded(value)


def box_of(part: TensorReference) -> Box:
    """Return the box of the whole tensor that this part covers."""
    if part.tensor_slice is None:
        return boxes.whole(part.shape)
    return Box(part.tensor_slice.offsets, part.shape)


def memory_key(tensor: torch.Tensor) -> object:
    """Return a key that is equal for tensors that consist of the same elements in memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def view_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of ``tensor`` that ``box`` describes."""
    return tensor[tuple([slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True)])]


def new_blob(nbytes: int) -> torch.Tensor:
    """Allocate the memory for a blob."""
    # A tensor created in inference mode could not be written to outside of that mode.
    with torch.inference_mode(False):
        return new_tensor((nbytes,), torch.uint8)


def bytes_of(blob: torch.Tensor) -> memoryview:
    """Return the memory of a blob, which the caller must keep alive.

    Raises:
        UnsupportedValueError: the memory has been freed.
    """
    if not blob.numel():
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * blob.numel()).from_address(address_of(SUBJECT, blob))).cast(
        "B"
    )


def copy_now(pairs: Sequence[Pair]) -> None:
    """Do all copies: on the copy threads, or in this thread if a device is involved."""
    on_host = [pair for pair in pairs if pair[0].is_cpu and pair[1].is_cpu]
    # Another thread waits for the copy threads, because this one may be running an event loop.
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(lambda: asyncio.run(copy_tensors(SUBJECT, on_host)))
        with torch.inference_mode():  # where tensors of that mode may be written to, too
            for target, source in pairs:  # in this thread, which has the user's current stream
                if not (target.is_cpu and source.is_cpu):
                    address_of(SUBJECT, target), address_of(SUBJECT, source)
                    byte_like(target).copy_(byte_like(source))
        done.result()
