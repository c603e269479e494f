"""The targets of a get: the checked entries of a reply, and the values made from them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import torch

from torchstore_core import boxes
from torchstore_core.boxes import Box
from torchstore_core.clients.values import overlaps
from torchstore_core.clients.values.codec import decode_object
from torchstore_core.clients.values.new_tensors import new_like, new_tensor, out_of_memory
from torchstore_core.clients.values.pieces import memory_of
from torchstore_core.clients.values.plain import look
from torchstore_core.clients.values.tensors import (
    address_of,
    byte_like,
    check_destination,
    check_storage,
    dtype_of,
    from_buffer,
    slice_box,
    strided_copy,
    were_written,
)
from torchstore_core.errors import (
    LayoutMismatchError,
    ProtocolError,
    UnsupportedValueError,
)
from torchstore_core.values import ObjectMeta, StateDictMeta, TensorMeta, TensorSlice, ValueMeta
from torchstore_core.wire import messages as m


class TargetPiece(msgspec.Struct, frozen=True, gc=False):
    """A part of a target: which stored value it comes from, and where in the target it belongs.

    Args:
        position: the position of the stored value in the lease.
        data, grant: the bytes of the stored value, or their location.
        shape: the shape of the stored value.
        box: the requested part of the stored value; None: all of it.
        into: the place of that part in the target; None: the part is the whole target.
        nbytes: size of the requested part.
    """

    position: int
    data: bytes | None
    grant: m.Grant | None
    shape: tuple[int, ...]
    box: Box | None
    into: Box | None
    nbytes: int


class Target(msgspec.Struct, frozen=True, gc=False):
    """The value that an entry is turned into: a tensor, or an object if there is a ``codec``.

    Args:
        at: position among the targets.
        dtype: the stored dtype. ``tensor`` may have another floating-point dtype, in which case the
            values are cast.
        tensor: the user's tensor to fill; None: create one.
        nbytes: number of bytes that are moved or mapped: the total of the pieces.
    """

    at: int
    key: str
    codec: ObjectMeta | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    tensor: torch.Tensor | None
    pieces: Sequence[TargetPiece]
    nbytes: int

    @property
    def position(self) -> int:
        """That of its first piece, see :class:`TargetPiece`."""
        return self.pieces[0].position

    def address(self, result: torch.Tensor) -> int:
        """The address of the tensor that the bytes are written to, if it has not changed since it
        was inspected.

        Raises:
            UnsupportedValueError: the tensor was resized, or its storage freed.
        """
        if self.tensor is None:  # it was created here
            return result.data_ptr()
        address = address_of(self.key, result)
        if result.shape != self.shape:
            raise UnsupportedValueError(
                f"{self.key!r}: the destination was resized while it was filled; leave it alone "
                "until the get has returned",
                key=self.key,
            )
        return address


class Plain(msgspec.Struct, frozen=True, gc=False):
    """A whole value that is copied unchanged from one place into one plain tensor (see
    ``values.plain``).

    Args:
        at, position, key, tensor: see :class:`Target` and :class:`TargetPiece`.
        entry: the entry of the reply; it has a grant.
        meta: describes both the entry and the tensor.
    """

    at: int
    position: int
    key: str
    entry: m.Entry
    meta: TensorMeta
    tensor: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the tensor."""
        return self.meta.shape

    @property
    def dtype(self) -> torch.dtype:
        """That of the tensor."""
        return dtype_of(self.meta, self.key)

    def target(self) -> Target:
        """The equivalent target, for when the tensor is no longer plain."""
        entry, meta, tensor = self.entry, self.meta, self.tensor
        nbytes, dtype = entry.nbytes, dtype_of(meta, self.key)
        piece = TargetPiece(self.position, None, entry.grant, meta.shape, None, None, nbytes)
        into = None if tensor is None else tensor.detach()
        return Target(self.at, self.key, None, dtype, meta.shape, into, (piece,), nbytes)


def plain_targets(
    keys: Sequence[str],
    entries: Sequence[m.Entry | None],
    starts: Sequence[int],
    tensors: list[Any],
    parts: Sequence[TensorSlice | None],
) -> list[Plain | None]:
    """The entries that are whole plain tensors, by position; None for those that need
    :func:`resolve`.

    Args:
        starts: positions of the entries' first values in the lease.
        tensors: destinations; None for new tensors. Any other object needs :func:`resolve`, too.
        parts: the requested parts of the entries; None: everything.
    """
    looked = look(tensors, memory=False)
    kinds: dict[ValueMeta, tuple[TensorMeta, torch.dtype, int]] = {}  # of new tensors
    found: list[Plain | None] = []
    add = found.append
    columns = zip(keys, entries, starts, tensors, parts, looked.metas, strict=True)
    for at, (key, entry, position, tensor, part, meta) in enumerate(columns):
        if entry is None or entry.grant is None or entry.parts is not None or part is not None:
            add(None)
        elif meta is not None:
            fits = entry.meta == meta and entry.nbytes == looked.sizes[at]
            add(Plain(at, position, key, entry, meta, tensor) if fits else None)
        elif tensor is None:
            kind = kinds.get(entry.meta)
            if kind is None:
                kind = kinds[entry.meta] = _new_kind(entry.meta)
            fits = entry.nbytes == kind[2]
            add(Plain(at, position, key, entry, kind[0], None) if fits else None)
        else:
            add(None)
    return found


def from_reply(
    entry: m.Entry, destination: object, wanted: TensorSlice | None
) -> torch.Tensor | None:
    """A new tensor of a whole small value whose bytes the reply has; None if it is none, or needs
    a closer look: see :func:`resolve`.
    """
    data = entry.data
    if data is None or destination is not None or wanted is not None:
        return None
    meta, dtype, nbytes = _new_kind(entry.meta)
    if not nbytes == entry.nbytes == len(data):
        return None
    return from_buffer(bytearray(data), 0, meta.shape, dtype)


@lru_cache(maxsize=4096)
def _new_kind(meta: ValueMeta) -> tuple[TensorMeta, torch.dtype, int]:
    """What a new tensor is, and its size; -1 if it would not be plain."""
    if isinstance(meta, TensorMeta) and min(meta.shape, default=1) > 0:
        with contextlib.suppress(UnsupportedValueError):
            dtype = dtype_of(meta, "")
            return meta, dtype, math.prod(meta.shape) * dtype.itemsize
    return TensorMeta("", ()), torch.uint8, -1


def resolve(
    at: int,
    position: int,
    key: str,
    entry: m.Entry,
    destination: torch.Tensor | None = None,
    wanted: TensorSlice | None = None,
    plain: TensorMeta | None = None,
    *,
    cast: bool = False,
) -> Target:
    """Check an entry against what the reader requested, before anything is written.

    Args:
        position: the position of the entry's first value in the lease.
        plain: what the destination is, if :func:`.plain.look` has found it to be a plain tensor
            with memory: then nothing else of it needs to be checked.

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
        if isinstance(meta, StateDictMeta):  # its entries are fetched separately
            return Target(at, key, None, torch.uint8, (0,), None, (), 0)
        only = (entry.nbytes,)
        piece = TargetPiece(position, entry.data, entry.grant, only, None, None, entry.nbytes)
        return Target(at, key, meta, torch.uint8, only, None, (piece,), entry.nbytes)
    dtype = dtype_of(meta, key)
    shape = meta.shape
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != entry.nbytes:
        # No client of ours can have put this: reading on would read beyond the value's bytes.
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
        if plain is not None and plain.dtype == meta.dtype and plain.shape == shape:
            destination = destination.detach()
        else:
            destination = check_destination(key, destination, shape, dtype, cast=cast)
    nbytes = entry.nbytes if box is None else box.numel * dtype.itemsize
    if entry.parts is None:
        pieces: Sequence[TargetPiece] = (
            TargetPiece(position, entry.data, entry.grant, meta.shape, box, None, nbytes),
        )
    else:
        target = box or boxes.whole(shape)
        pieces = [*_gather(position, key, entry.parts, target, dtype.itemsize)]
    return Target(at, key, None, dtype, shape, destination, pieces, nbytes)


def check_apart(targets: Iterable[Target], plain: Iterable[Plain]) -> dict[int, int]:
    """Check that no two destinations share a part of their memory, as both would be written at
    once. Tied weights, the same view given twice, may stand for values that are the same.

    Returns:
        Which targets have the same view as an earlier one, with the first of these, each by ``at``.

    Raises:
        LayoutMismatchError: names two of them.
        UnsupportedValueError: the storage of one of these was freed or shrunk.
    """
    whole = [(one, one.tensor, one.entry.nbytes) for one in plain if one.tensor is not None]
    others = [
        (target, target.tensor, overlaps.extent(target.tensor))
        for target in targets
        if target.tensor is not None and target.nbytes
    ]
    into: list[tuple[Plain | Target, torch.Tensor, int]] = [*whole, *others]
    if len(into) < 2:
        return {}
    of, tensors, extents = zip(*into, strict=True)
    again: dict[int, int] = {}
    found = overlaps.find_overlap(tensors, extents, again)
    if found is not None:
        for at in found:  # memory that a tensor has given back may be another's by now
            check_storage(of[at].key, tensors[at])
        raise overlaps.overlap_error(of[found[0]].key, of[found[1]].key)
    return {of[at].at: of[first].at for at, first in again.items()}


def _gather(
    position: int, key: str, parts: Sequence[m.Part], target: Box, itemsize: int
) -> Iterator[TargetPiece]:
    """Find the boxes of the shards that make up ``target``, each byte exactly once."""
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
        yield TargetPiece(at, part.data, part.grant, part.shape, inside, into, size * itemsize)


Cut = tuple[int, Box | None, Box | None, int]


@lru_cache(maxsize=4096)  # layers of a model repeat, and so do training steps
def _cuts(target: Box, sources: tuple[Box, ...]) -> tuple[list[Cut], int]:
    """The read plan: for each piece the source, the box in it (None: all of it), the place in the
    target (None: all of it) and the number of elements; and the total number of elements.
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


class Results:
    """The values of the targets. Each is created when its first byte is about to be moved."""

    def __init__(self, *, allow_pickle: bool) -> None:
        self.values: dict[int, Any] = {}  # by the position of the target
        self._allow_pickle = allow_pickle
        self._decoded: set[int] = set()  # the positions of objects
        self.waited = False  # whether other tasks may have run since the targets were checked

    def tensor(self, target: Target) -> torch.Tensor:
        """The tensor that a target's bytes are written to."""
        made: torch.Tensor | None = self.values.get(target.at)
        if made is None:
            if target.codec is not None:
                made = new_tensor((target.pieces[0].nbytes,), torch.uint8)
            elif target.tensor is not None:
                made = target.tensor
            else:
                made = new_tensor(target.shape, target.dtype)
            self.values[target.at] = made
        return made

    def tensors(self, plain: Sequence[Plain]) -> list[torch.Tensor]:
        """Create the new tensors."""
        if plain and plain[0].at in self.values:  # a retry over another link
            return [self.values[one.at] for one in plain]
        found: list[torch.Tensor] = []
        add = found.append
        makers: dict[TensorMeta, Callable[[], torch.Tensor]] = {}
        meta: TensorMeta | None = None
        make: Callable[[], torch.Tensor] | None = None
        for one in plain:
            if make is None or one.meta is not meta:
                meta = one.meta
                make = makers.get(meta)
                if make is None:
                    first = new_tensor(meta.shape, dtype_of(meta, one.key))
                    make = makers[meta] = new_like(first)
                    add(first)
                    continue
            try:
                add(make())
            except RuntimeError as error:
                raise out_of_memory(one.entry.nbytes, error) from error
        self.values.update(zip([one.at for one in plain], found, strict=True))
        return found

    def filled(self, plain: Iterable[Plain]) -> None:
        """Record that the destinations among these have been written to."""
        tensors = [one.tensor for one in plain if one.tensor is not None]
        places = [one.at for one in plain if one.tensor is not None]
        self.values.update(zip(places, tensors, strict=True))  # no pair stays: nothing to collect
        were_written(tensors)

    def decode(
        self, target: Target, codec: ObjectMeta, data: bytes | bytearray | memoryview
    ) -> None:
        """Decode an object from its bytes, which are not needed after that."""
        self.values[target.at] = decode_object(
            target.key, codec, data, allow_pickle=self._allow_pickle
        )
        self._decoded.add(target.at)

    def finish(self, targets: Iterable[Target]) -> dict[int, Any]:
        """All values, once everything has been moved: adds the bytes that the reply contained, and
        decodes objects.
        """
        for target in targets:
            if target.codec is None:
                self._complete(target)
                continue
            if target.at in self._decoded:
                continue
            arrived: torch.Tensor | None = self.values.get(target.at)
            if arrived is None:
                self.decode(target, target.codec, target.pieces[0].data or b"")
            else:
                address = address_of(target.key, arrived)
                self.decode(target, target.codec, memory_of(arrived, address, arrived.nbytes))
        return self.values

    def _complete(self, target: Target) -> None:
        """Add the pieces of a tensor that the reply contained."""
        at, tensor = target.at, target.tensor
        for piece in target.pieces:
            if piece.grant is not None:
                continue
            source = from_buffer(bytearray(piece.data or b""), 0, piece.shape, target.dtype)
            if piece.box is not None:
                source = narrow(source, piece.box)
            if piece.into is None and tensor is None and at not in self.values:
                if piece.box is not None:
                    part = new_tensor(tuple(source.shape), target.dtype)
                    strided_copy(byte_like(part), byte_like(source), stream=False)()
                    source = part
                self.values[at] = source
            elif source.numel():
                result = self.tensor(target)
                if self.waited:
                    target.address(result)
                into = result if piece.into is None else narrow(result, piece.into)
                if into.dtype is source.dtype:
                    into, source = byte_like(into), byte_like(source)
                strided_copy(into, source, stream=False)()
        if at not in self.values:
            self.tensor(target)
        if tensor is not None and not tensor.is_inference():
            # Tell autograd, which did not see the write.
            torch.autograd.graph.increment_version(tensor)


def narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A view of the part that ``box`` describes."""
    for dim, (start, extent) in enumerate(zip(box.offset, box.shape, strict=True)):
        if extent != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, extent)
    return tensor
