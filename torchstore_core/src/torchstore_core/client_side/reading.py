"""Gets: from located entries to tensors and objects: mapped, copied, or written in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchstore_core import boxes, copying
from torchstore_core.client_side import cuda
from torchstore_core.client_side.codec import decode_object
from torchstore_core.client_side.session import Session
from torchstore_core.client_side.tensors import (
    byte_like,
    check_destination,
    dtype_of,
    from_buffer,
    slice_box,
    split_rows,
    tensor_at,
)
from torchstore_core.contracts.transport import Copy, Link, SupportsMap, SupportsWindow
from torchstore_core.errors import LayoutMismatchError, ProtocolError, TransportError
from torchstore_core.ranking import Candidate
from torchstore_core.values import TensorMeta, TensorSlice
from torchstore_core.wire import messages as m

__all__ = ["MAP_MIN", "Result", "Target", "from_message", "read", "resolve"]

#: Values from this size, in bytes, are mapped; smaller ones are copied out (a mapping costs about
#: as much as copying this much, and a process has some 65,000 of them).
MAP_MIN = 64 << 10
# Mappable values whose gap is at most this many bytes share one mapping and one lease.
_GROUP_GAP = 1 << 20


class Target(NamedTuple):
    """What one entry becomes.

    Args:
        at: position in the Locate.
        box: the part of the stored tensor that is wanted; None: all of it.
        tensor: the user's tensor to fill; None: make one.
        nbytes: bytes of the wanted part.
    """

    at: int
    key: str
    entry: m.Entry
    meta: TensorMeta | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: boxes.Box | None
    tensor: torch.Tensor | None
    nbytes: int


def resolve(
    at: int, key: str, entry: m.Entry, destination: torch.Tensor | None, wanted: TensorSlice | None
) -> Target:
    """Check an entry against what the reader wants, before anything is written.

    Raises:
        LayoutMismatchError: the destination or the slice does not fit.
        ProtocolError: the entry contradicts itself.
    """
    meta = entry.meta
    if not isinstance(meta, TensorMeta):
        if destination is not None or wanted is not None:
            what = "an inplace_tensor" if destination is not None else "a tensor slice"
            raise LayoutMismatchError(
                f"{key!r} is not a tensor, but {what} was given; nothing was written", key=key
            )
        return Target(at, key, entry, None, torch.uint8, (entry.nbytes,), None, None, entry.nbytes)
    dtype = dtype_of(meta, key)
    shape, box, nbytes = meta.shape, None, entry.nbytes
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != entry.nbytes:
        # Whoever put it is no client of ours: reading on would read what is not the value's.
        raise ProtocolError(
            f"{key!r} is described as {dtype} {list(shape)}, but has {entry.nbytes} bytes; "
            "it was put by a broken client, delete it",
            key=key,
        )
    if wanted is not None:
        box = slice_box(key, wanted, shape)
        if box.shape == shape:
            box = None
        else:
            shape = box.shape
            nbytes = box.numel * dtype.itemsize
    if destination is not None:
        destination = check_destination(key, destination, shape, dtype)
    return Target(at, key, entry, meta, dtype, shape, box, destination, nbytes)


class Result(NamedTuple):
    """What a read gave: values by position, positions that hold their part of the lease until
    their tensors die, and the names of the transports.
    """

    values: dict[int, Any]
    mapped: set[int]
    transport: str


async def read(
    session: Session, lease: int, targets: Sequence[Target], *, allow_pickle: bool
) -> Result:
    """Turn checked targets into values. The caller gives back what is not mapped."""
    values: dict[int, Any] = {}
    mapped: set[int] = set()
    names: set[str] = set()
    by_place: dict[tuple[int, int], list[Target]] = {}
    for target in targets:
        grant = target.entry.grant
        if grant is None:
            values[target.at] = from_message(target, allow_pickle)
        else:
            by_place.setdefault((grant.volume, grant.segment), []).append(target)
    for (volume, _), group in by_place.items():
        nbytes = sum(target.nbytes for target in group)

        async def action(
            link: Link, candidate: Candidate, group: list[Target] = group
        ) -> list[_Run]:
            names.add(candidate.spec.name)
            if any(target.tensor is not None and target.tensor.is_cuda for target in group):
                session.keep_memory()
            runs, rest = _map_runs(link, group)
            values.update(await _read_copies(link, rest, allow_pickle))
            return runs

        for owner, made in await session.volumes[volume].attempt(nbytes, action):
            values.update(made)
            mapped.update(made)
            session.hold(owner, lease, list(made))
    return Result(values, mapped, "+".join(sorted(names)))


def from_message(target: Target, allow_pickle: bool) -> Any:
    """The value of an entry whose bytes came with it."""
    data = target.entry.data or b""
    meta = target.entry.meta
    if not isinstance(meta, TensorMeta):
        return decode_object(target.key, meta, data, allow_pickle=allow_pickle)
    if target.box is None and target.tensor is None:
        return from_buffer(bytearray(data), 0, meta.shape, target.dtype)
    whole = from_buffer(bytearray(data), 0, meta.shape, target.dtype)
    part = whole if target.box is None else _narrow(whole, target.box)
    if target.tensor is None:
        return part.clone(memory_format=torch.contiguous_format)
    _fill(target.tensor, part)
    _written(target.tensor)
    return target.tensor


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bit for bit, for every dtype."""
    if target.numel():
        byte_like(target).copy_(byte_like(source))


def _written(tensor: torch.Tensor) -> None:
    """Tell autograd, which did not see the write."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def _narrow(tensor: torch.Tensor, box: boxes.Box) -> torch.Tensor:
    for dim, (start, extent) in enumerate(zip(box.offset, box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, extent)
    return tensor


_Run = tuple[object, dict[int, torch.Tensor]]  # the owner of a mapping, tensors by position


def _map_runs(link: Link, group: Sequence[Target]) -> tuple[list[_Run], list[Target]]:
    """Map what is large and contiguous, one mapping for neighbours: what was put together lies
    together. Returns the runs, and the targets that are to be copied.
    """
    if not isinstance(link, SupportsMap):
        return [], list(group)
    rest: list[Target] = []
    mappable: list[tuple[int, int, Target]] = []
    for target in group:
        start = None
        if target.tensor is None and target.meta is not None and target.nbytes >= MAP_MIN:
            start = _contiguous_start(target)
        if start is None:
            rest.append(target)
        else:
            mappable.append((_segment(target), start, target))
    mappable.sort(key=lambda item: item[:2])
    runs: list[_Run] = []
    begin = 0
    for i in range(1, len(mappable) + 1):
        if i < len(mappable):
            segment, start, _ = mappable[i]
            before_segment, before, previous = mappable[i - 1]
            if segment == before_segment and start - (before + previous.nbytes) <= _GROUP_GAP:
                continue
        run = mappable[begin:i]
        begin = i
        segment, first, _ = run[0]
        end = max(start + target.nbytes for _, start, target in run)
        try:
            mapping = link.map(segment, first, end - first)
        except TransportError:  # out of mappings (vm.max_map_count): copying always works
            rest.extend(target for _, _, target in run)
            continue
        made = {
            target.at: from_buffer(
                mapping.owner, mapping.offset + start - first, target.shape, target.dtype
            )
            for _, start, target in run
        }
        runs.append((mapping.owner, made))
    return runs, rest


def _contiguous_start(target: Target) -> int | None:
    """Byte offset of the wanted part in its segment if it is one run there, else None."""
    grant = target.entry.grant
    if grant is None:
        return None
    if target.box is None or target.meta is None:
        return grant.offset
    if not boxes.is_contiguous(target.box, target.meta.shape) or target.box.is_empty:
        return None
    run = next(iter(boxes.contiguous_runs(target.box, target.meta.shape)))
    return grant.offset + run[0] * target.dtype.itemsize


def _segment(target: Target) -> int:
    grant = target.entry.grant
    return -1 if grant is None else grant.segment


async def _read_copies(link: Link, targets: Sequence[Target], allow_pickle: bool) -> dict[int, Any]:
    if not targets:
        return {}
    objects: dict[int, bytearray] = {}
    results: dict[int, torch.Tensor] = {}
    for target in targets:
        if target.meta is None:
            objects[target.at] = data = bytearray(target.entry.nbytes)
            results[target.at] = torch.frombuffer(data, dtype=torch.uint8)
        elif target.tensor is not None:
            results[target.at] = target.tensor
        else:
            results[target.at] = torch.empty(target.shape, dtype=target.dtype, device="cpu")
    if isinstance(link, SupportsWindow):
        await _copy_window(link, targets, results)
    else:
        await _copy_link(link, targets, results)
    values: dict[int, Any] = {}
    for target in targets:
        meta = target.entry.meta
        if isinstance(meta, TensorMeta):
            if target.tensor is not None:
                _written(target.tensor)
            values[target.at] = results[target.at]
        else:
            values[target.at] = decode_object(
                target.key, meta, objects[target.at], allow_pickle=allow_pickle
            )
    return values


async def _copy_window(
    link: SupportsWindow, targets: Sequence[Target], results: dict[int, torch.Tensor]
) -> None:
    """Copy out of the window: runs in chunks over the copy threads, the rest by torch."""
    pieces: list[copying.Piece] = []
    tasks: list[copying.Task] = []
    device: list[tuple[torch.Tensor, torch.Tensor]] = []
    total = 0
    segment = _segment(targets[0])
    window = link.window(segment)
    for target in targets:
        grant = target.entry.grant
        if grant is None:
            continue
        if grant.offset + target.entry.nbytes > window.nbytes:
            raise TransportError(f"{target.key!r} lies outside segment {segment}")
        result = results[target.at]
        nbytes = target.nbytes
        total += nbytes
        start = _contiguous_start(target)
        if result.device.type == "cpu" and start is not None and result.is_contiguous():
            pieces.append((result.data_ptr(), window.address + start, nbytes))
        elif nbytes:
            meta = target.meta or TensorMeta("uint8", (nbytes,))
            whole = tensor_at(window.address + grant.offset, meta, target.dtype)
            part = whole if target.box is None else _narrow(byte_like(whole), target.box)
            if result.device.type != "cpu":
                device.append((byte_like(result), byte_like(part)))
                continue
            for to, of in split_rows(byte_like(result), byte_like(part), copying.CHUNK):
                tasks.append(_strided(to, of))
    stream = total >= copying.STREAM_MIN
    chunks = copying.plan(pieces, copying.chunk_size(total))
    tasks.extend(_chunk(link, segment, window.address, chunk, stream) for chunk in chunks)
    await copying.run(tasks, total)
    if device:
        await cuda.transfer(device, window)


def _strided(target: torch.Tensor, source: torch.Tensor) -> copying.Task:
    def task() -> None:
        target.copy_(source)

    return task


def _chunk(
    link: SupportsWindow, segment: int, base: int, chunk: list[copying.Piece], stream: bool
) -> copying.Task:
    low = min(piece[1] for piece in chunk) - base
    high = max(piece[1] + piece[2] for piece in chunk) - base
    size = sum(piece[2] for piece in chunk)

    def task() -> None:
        if 0 < high - low <= size + size // 2:
            link.prepare(segment, low, high - low, fresh=False)
        copying.copy_pieces(chunk, stream=stream)

    return task


async def _copy_link(
    link: Link, targets: Sequence[Target], results: dict[int, torch.Tensor]
) -> None:
    """For links without a window: read runs into contiguous memory, then spread if need be."""
    copies: list[Copy] = []
    spread: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target in targets:
        grant = target.entry.grant
        result = results[target.at]
        if grant is None or not target.nbytes:
            continue
        packed = result
        if result.device.type != "cpu" or not result.is_contiguous():
            packed = torch.empty(target.shape, dtype=target.dtype, device="cpu")
            spread.append((result, packed))
        address = packed.data_ptr()
        itemsize = target.dtype.itemsize
        if target.box is None or target.meta is None:
            copies.append(Copy(address, grant.segment, grant.offset, target.nbytes))
            continue
        for start, length in boxes.contiguous_runs(target.box, target.meta.shape):
            place = grant.offset + start * itemsize
            copies.append(Copy(address, grant.segment, place, length * itemsize))
            address += length * itemsize
    await link.read(copies)
    for result, packed in spread:
        _fill(result, packed)
