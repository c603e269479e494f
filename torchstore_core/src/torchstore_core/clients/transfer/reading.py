"""Gets: from located entries to tensors and objects: mapped, copied, or written in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import torch

from torchstore_core import boxes
from torchstore_core.boxes import Box
from torchstore_core.clients.session.session import Session
from torchstore_core.clients.transfer.moving import Move, move
from torchstore_core.clients.values.codec import decode_object
from torchstore_core.clients.values.tensors import (
    address_of,
    byte_like,
    check_destination,
    dtype_of,
    from_buffer,
    slice_box,
    tensor_at,
)
from torchstore_core.contracts.transport import Copy, Link, SupportsMap, SupportsWindow
from torchstore_core.errors import (
    LayoutMismatchError,
    ProtocolError,
    TransportError,
    UnsupportedValueError,
)
from torchstore_core.machine import copying
from torchstore_core.plugins.ranking import Candidate
from torchstore_core.values import ObjectMeta, StateDictMeta, TensorMeta, TensorSlice
from torchstore_core.wire import messages as m

__all__ = ["MAP_MIN", "Piece", "Result", "Target", "from_message", "read", "resolve"]

#: Values from this size, in bytes, are mapped; smaller ones are copied out (a mapping costs about
#: as much as copying this much, and a process has some 65,000 of them).
MAP_MIN = 64 << 10
# Mappable values whose gap is at most this many bytes share one mapping and one lease.
_GROUP_GAP = 1 << 20


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Where some of a target comes from, and where in it it goes.

    Args:
        position: of the stored value in the lease.
        data, grant: its bytes, or where they lie.
        shape: its shape.
        box: the part of it that is wanted; None: all.
        into: the place of that part in the target; None: it is all of the target.
        nbytes: bytes of the wanted part.
    """

    position: int
    data: bytes | None
    grant: m.Grant | None
    shape: tuple[int, ...]
    box: Box | None
    into: Box | None
    nbytes: int


class Target(msgspec.Struct, frozen=True, gc=False):
    """What one entry becomes: a tensor, or an object (``codec``).

    Args:
        at: position among the targets.
        dtype: as stored. ``tensor`` may have another floating-point one: it is cast then.
        tensor: the user's tensor to fill; None: make one.
        nbytes: bytes that are moved, or mapped: those of the pieces.
    """

    at: int
    key: str
    codec: ObjectMeta | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    tensor: torch.Tensor | None
    pieces: Sequence[Piece]
    nbytes: int


def resolve(
    at: int,
    position: int,
    key: str,
    entry: m.Entry,
    destination: torch.Tensor | None = None,
    wanted: TensorSlice | None = None,
    *,
    cast: bool = False,
) -> Target:
    """Check an entry against what the reader wants, before anything is written.

    Args:
        position: of the entry's first value in the lease.

    Raises:
        LayoutMismatchError: the destination or the slice does not fit.
        ProtocolError: the entry contradicts itself.
    """
    meta = entry.meta
    if not isinstance(meta, TensorMeta):
        what = "a state dict" if isinstance(meta, StateDictMeta) else "not a tensor"
        if destination is not None or wanted is not None:
            given = "an inplace_tensor" if destination is not None else "a tensor slice"
            raise LayoutMismatchError(
                f"{key!r} is {what}, but {given} was given; nothing was written", key=key
            )
        if isinstance(meta, StateDictMeta):  # whose entries are fetched by themselves
            return Target(at, key, None, torch.uint8, (0,), None, (), 0)
        only = (entry.nbytes,)
        piece = Piece(position, entry.data, entry.grant, only, None, None, entry.nbytes)
        return Target(at, key, meta, torch.uint8, only, None, (piece,), entry.nbytes)
    dtype = dtype_of(meta, key)
    shape = meta.shape
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != entry.nbytes:
        # Whoever put it is no client of ours: reading on would read what is not the value's.
        raise ProtocolError(
            f"{key!r} is described as {dtype} {list(shape)}, but has {entry.nbytes} bytes; "
            "it was put by a broken client, delete it",
            key=key,
        )
    box: Box | None = None
    if wanted is not None:
        box = slice_box(key, wanted, shape)
        box = None if box.shape == shape else box
    if box is not None:
        shape = box.shape
    if destination is not None:
        destination = check_destination(key, destination, shape, dtype, cast=cast)
    nbytes = entry.nbytes if box is None else box.numel * dtype.itemsize
    if entry.parts is None:
        pieces: Sequence[Piece] = (
            Piece(position, entry.data, entry.grant, meta.shape, box, None, nbytes),
        )
    else:
        target = box or boxes.whole(shape)
        pieces = [*_gather(position, key, entry.parts, target, dtype.itemsize)]
    return Target(at, key, None, dtype, shape, destination, pieces, nbytes)


def _gather(
    position: int, key: str, parts: Sequence[m.Part], target: Box, itemsize: int
) -> Iterator[Piece]:
    """Which boxes of which shards make ``target``; each byte comes once."""
    sources = tuple([Box(part.offset, part.shape) for part in parts])
    cuts, numel = _cuts(target, sources)
    if numel != target.numel:
        raise ProtocolError(f"{key!r}: its shards do not cover what they should", key=key)
    for source, inside, into, size in cuts:
        part = parts[source]
        if math.prod(part.shape) * itemsize != part.nbytes:
            raise ProtocolError(
                f"{key!r}: a shard of {list(part.shape)} has {part.nbytes} bytes; it was put by a "
                "broken client, delete it",
                key=key,
            )
        at = position + source
        yield Piece(at, part.data, part.grant, part.shape, inside, into, size * itemsize)


Cut = tuple[int, Box | None, Box | None, int]


@lru_cache(maxsize=4096)  # layers repeat, and so do steps
def _cuts(target: Box, sources: tuple[Box, ...]) -> tuple[list[Cut], int]:
    """The read plan: source, box in it (None: all), place in the target (None: all of it) and
    number of elements of each piece; and of all.
    """
    if len(sources) == 1 and sources[0].contains(target):
        plan = [boxes.Piece(0, target)]
    else:
        plan = boxes.read_plan(target, sources)
    cuts: list[Cut] = [
        (
            source,
            None if box == sources[source] else boxes.relative(box, sources[source]),
            None if box == target else boxes.relative(box, target),
            box.numel,
        )
        for source, box in plan
    ]
    return cuts, sum(cut[3] for cut in cuts)


class Result(NamedTuple):
    """What a read gave: values by position of their target, positions in the lease that are held
    until their tensors die, and the names of the transports.
    """

    values: dict[int, Any]
    mapped: set[int]
    transport: str


Job = tuple[Target, Piece]


async def read(
    session: Session, lease: int, targets: Sequence[Target], *, allow_pickle: bool
) -> Result:
    """Turn checked targets into values. The caller gives back what is not mapped."""
    values: dict[int, Any] = {}
    mapped: set[int] = set()
    names: set[str] = set()
    by_place: dict[tuple[int, int], list[Job]] = {}
    buffers: dict[int, bytearray] = {}
    for target in targets:
        for piece in target.pieces:
            grant = piece.grant
            if grant is not None:
                by_place.setdefault((grant.volume, grant.segment), []).append((target, piece))
    for (volume, _), jobs in by_place.items():
        nbytes = sum([piece.nbytes for _, piece in jobs])

        async def action(link: Link, candidate: Candidate, jobs: list[Job] = jobs) -> list[_Run]:
            names.add(candidate.spec.name)
            if any(t.tensor is not None and t.tensor.is_cuda for t, _ in jobs):
                session.keep_memory()
            runs, rest = _map_runs(link, jobs)
            await _read_copies(link, rest, values, buffers)
            return runs

        for owner, made in await session.volumes[volume].attempt(nbytes, action):
            positions = [target.pieces[0].position for target, _ in made]
            values.update({target.at: tensor for target, tensor in made})
            mapped.update(positions)
            session.hold(owner, lease, positions)
    for target in targets:
        finish(target, values, buffers, allow_pickle=allow_pickle, again=True)
    return Result(values, mapped, "+".join(sorted(names)))


def from_message(targets: Sequence[Target], *, allow_pickle: bool) -> Result:
    """The values of entries whose bytes all came with the message."""
    values: dict[int, Any] = {}
    for target in targets:
        finish(target, values, {}, allow_pickle=allow_pickle)
    return Result(values, set(), "inline")


def finish(
    target: Target,
    values: dict[int, Any],
    buffers: dict[int, bytearray],
    *,
    allow_pickle: bool,
    again: bool = False,
) -> None:
    """Add what came inside the message, and make the value of the bytes. ``again``: others have had
    their turn since the target was looked at.
    """
    at = target.at
    if target.codec is not None:
        data = buffers[at] if at in buffers else target.pieces[0].data or b""
        values[at] = decode_object(target.key, target.codec, data, allow_pickle=allow_pickle)
        return
    for piece in target.pieces:
        if piece.grant is not None:
            continue
        source = from_buffer(bytearray(piece.data or b""), 0, piece.shape, target.dtype)
        if piece.box is not None:
            source = _narrow(source, piece.box)
        if piece.into is None and target.tensor is None and at not in values:
            if piece.box is not None:
                source = byte_like(source).clone().view(target.dtype)
            values[at] = source
        elif source.numel():
            result = _result(target, values, buffers)
            if again:
                _address(target, result)
            into = result if piece.into is None else _narrow(result, piece.into)
            if into.dtype is source.dtype:
                byte_like(into).copy_(byte_like(source))
            else:
                into.copy_(source)
    if at not in values:
        _result(target, values, buffers)
    if target.tensor is not None and not target.tensor.is_inference():
        # Tell autograd, which did not see the write.
        torch.autograd.graph.increment_version(target.tensor)


def _result(target: Target, values: dict[int, Any], buffers: dict[int, bytearray]) -> torch.Tensor:
    """The tensor that a target's bytes go into."""
    made: torch.Tensor | None = values.get(target.at)
    if made is None:
        if target.codec is not None:
            buffers[target.at] = buffer = bytearray(target.pieces[0].nbytes)
            made = torch.frombuffer(buffer, dtype=torch.uint8)
        elif target.tensor is not None:
            made = target.tensor
        else:
            made = torch.empty(target.shape, dtype=target.dtype, device="cpu")
        values[target.at] = made
    return made


def _narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, extent) in enumerate(zip(box.offset, box.shape, strict=True)):
        if extent != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, extent)
    return tensor


_Run = tuple[object, list[tuple[Target, torch.Tensor]]]  # the owner of a mapping, what lies on it


def _map_runs(link: Link, jobs: Sequence[Job]) -> tuple[list[_Run], list[Job]]:
    """Map what is large and contiguous, one mapping for neighbours: what was put together lies
    together. Returns the runs, and the jobs that are to be copied.
    """
    if not isinstance(link, SupportsMap):
        return [], list(jobs)
    rest: list[Job] = []
    mappable: list[tuple[int, int, Target]] = []
    for job in jobs:
        target, piece = job
        start = None
        if (
            target.tensor is None
            and target.codec is None
            and piece.into is None
            and piece.nbytes >= MAP_MIN
        ):
            start = _contiguous_start(piece, target.dtype.itemsize)
        if start is None or piece.grant is None:
            rest.append(job)
        else:
            mappable.append((piece.grant.segment, start, target))
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
            rest.extend((target, target.pieces[0]) for _, _, target in run)
            continue
        made = [
            (
                target,
                from_buffer(
                    mapping.owner, mapping.offset + start - first, target.shape, target.dtype
                ),
            )
            for _, start, target in run
        ]
        runs.append((mapping.owner, made))
    return runs, rest


def _contiguous_start(piece: Piece, itemsize: int) -> int | None:
    """Byte offset of the wanted part in its segment if it is one run there, else None."""
    if piece.grant is None:
        return None
    start = _first_if_run(piece.box, piece.shape)
    return None if start is None else piece.grant.offset + start * itemsize


@lru_cache(maxsize=4096)
def _first_if_run(box: Box | None, shape: tuple[int, ...]) -> int | None:
    """The first element of a box in a row-major tensor if the box is one run of it."""
    if box is None:
        return 0
    if box.is_empty or not boxes.is_contiguous(box, shape):
        return None
    return next(iter(boxes.contiguous_runs(box, shape)))[0]


async def _read_copies(
    link: Link,
    jobs: Sequence[Job],
    values: dict[int, Any],
    buffers: dict[int, bytearray],
) -> None:
    if not jobs:
        return
    results = [_result(target, values, buffers) for target, _ in jobs]
    if isinstance(link, SupportsWindow):
        await _copy_window(link, jobs, results)
    else:
        await _copy_link(link, jobs, results)


async def _copy_window(
    link: SupportsWindow, jobs: Sequence[Job], results: Sequence[torch.Tensor]
) -> None:
    """Copy out of the window: runs in chunks over the copy threads, the rest by torch."""
    grant = jobs[0][1].grant
    segment = 0 if grant is None else grant.segment
    window = link.window(segment)
    room = window.nbytes

    def moves() -> Iterator[Move]:
        for (target, piece), result in zip(jobs, results, strict=True):
            grant, nbytes, itemsize = piece.grant, piece.nbytes, target.dtype.itemsize
            if grant is None or not nbytes:
                continue
            stored = nbytes if piece.box is None else math.prod(piece.shape) * itemsize
            if not 0 <= grant.offset <= room - stored:
                raise TransportError(f"{target.key!r} lies outside segment {segment}")
            to = _address(target, result)
            same = result.dtype is target.dtype
            if same and result.is_cpu:
                if result.is_contiguous():
                    start = _contiguous_start(piece, itemsize)
                    first = None if start is None else _first_if_run(piece.into, target.shape)
                    if start is not None and first is not None:
                        yield to + first * itemsize, window.address + start, nbytes
                        continue
                at = window.address + grant.offset
                rows = _rows(piece, to, result.stride(), at, itemsize)
                if rows is not None:
                    yield from rows
                    continue
            source = tensor_at(window.address + grant.offset, piece.shape, target.dtype)
            if piece.box is not None:
                source = _narrow(source, piece.box)
            into = result if piece.into is None else _narrow(result, piece.into)
            yield (byte_like(into), source) if same else (into, source.view(target.dtype))

    await move(link, segment, moves(), sum([piece.nbytes for _, piece in jobs]), into=False)


@lru_cache(maxsize=4096)
def _row_major(shape: tuple[int, ...], box: Box | None) -> tuple[int, list[int]]:
    """The first element of a box (None: of all) in a row-major tensor, and its strides."""
    steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    if box is None:
        return 0, steps
    return sum([o * step for o, step in zip(box.offset, steps, strict=True)]), steps


def _address(target: Target, result: torch.Tensor) -> int:
    """Where the tensor begins that a target's bytes go into, if it still is what it was when it
    was looked at.

    Raises:
        UnsupportedValueError: it was resized, or its storage freed.
    """
    if target.tensor is None:  # it was made here
        return result.data_ptr()
    address = address_of(target.key, result)
    if result.shape != target.shape:
        raise UnsupportedValueError(
            f"{target.key!r}: the destination was resized while it was filled; leave it alone "
            "until the get has returned",
            key=target.key,
        )
    return address


def _rows(
    piece: Piece, to: int, steps: Sequence[int], address: int, itemsize: int
) -> list[copying.Grid] | None:
    """How to copy a piece into its place, in a result at ``to``, by rows. In plain numbers: an
    operation of torch lets go of the interpreter lock, and while copy threads run it takes long
    to get it back.
    """
    if piece.into is not None:
        to += sum([o * step for o, step in zip(piece.into.offset, steps, strict=True)]) * itemsize
    start, of_steps = _row_major(piece.shape, piece.box)
    shape = piece.shape if piece.box is None else piece.box.shape
    return copying.grids(shape, itemsize, to, steps, address + start * itemsize, of_steps)


async def _copy_link(link: Link, jobs: Sequence[Job], results: Sequence[torch.Tensor]) -> None:
    """For links without a window: read runs into contiguous memory, then spread if need be."""
    copies: list[Copy] = []
    spread: list[tuple[Target, torch.Tensor, torch.Tensor]] = []
    for (target, piece), result in zip(jobs, results, strict=True):
        grant = piece.grant
        if grant is None or not piece.nbytes:
            continue
        _address(target, result)
        into = result if piece.into is None else _narrow(result, piece.into)
        packed = into
        if into.device.type != "cpu" or not into.is_contiguous() or into.dtype is not target.dtype:
            packed = torch.empty(tuple(into.shape), dtype=target.dtype, device="cpu")
            spread.append((target, into, packed))
        address = address_of(target.key, packed)
        itemsize = target.dtype.itemsize
        if piece.box is None:
            copies.append(Copy(address, grant.segment, grant.offset, piece.nbytes))
            continue
        for start, length in boxes.contiguous_runs(piece.box, piece.shape):
            place = grant.offset + start * itemsize
            copies.append(Copy(address, grant.segment, place, length * itemsize))
            address += length * itemsize
    await link.read(copies)
    for target, into, packed in spread:
        address_of(target.key, into)  # it may have changed meanwhile
        if into.dtype is packed.dtype:
            byte_like(into).copy_(byte_like(packed))
        else:
            into.copy_(packed)
