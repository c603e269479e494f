"""Puts: from values to bytes in the message, or in granted segments, with one copy."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from torchstore_core.clients.packed.packed import TorchStoreStateDict
from torchstore_core.clients.session.session import Session
from torchstore_core.clients.transfer.moving import Move, move
from torchstore_core.clients.values.codec import encode_object
from torchstore_core.clients.values.sharding import LocalPart, is_sharded, local_parts
from torchstore_core.clients.values.tensors import (
    LOWEST_ADDRESS,
    address_of,
    byte_like,
    check_cast,
    describe,
    dtype_name,
    rows_of,
    storable,
    tensor_at,
)
from torchstore_core.contracts.transport import Copy, Link, SupportsWindow
from torchstore_core.errors import TransportError, UnsupportedValueError
from torchstore_core.plugins.ranking import Candidate
from torchstore_core.values import TensorMeta, TensorSlice, ValueMeta
from torchstore_core.wire import messages as m

__all__ = ["Source", "check_key", "inline_bytes", "look_again", "prepare"]
__all__ += ["prepare_all", "prepare_tensor", "together", "write"]


class Source(msgspec.Struct, frozen=True, gc=False):
    """One value to put: a tensor (detached, any strides), or the bytes of an object.

    ``meta`` describes the whole tensor, in the dtype that it is stored in, of which ``tensor`` is
    ``part``; ``nbytes`` are those that are stored. ``cast``: the dtype that it is stored in, if
    that is not its own. For the rest see ``messages.PutItem``.
    """

    key: str
    meta: ValueMeta
    nbytes: int
    tensor: torch.Tensor | None
    data: bytes | None
    part: TensorSlice | None = None
    path: bytes = b""
    same_as: int = -1
    cast: torch.dtype | None = None

    def item(self, data: bytes | None) -> m.PutItem:
        """What the server is told."""
        return m.PutItem(self.key, self.meta, self.nbytes, data, self.part, self.path, self.same_as)


def check_key(key: object) -> str:
    """A usable key.

    Raises:
        UnsupportedValueError: not a str, empty, or too long.
    """
    if isinstance(key, str) and 0 < len(key) <= m.MAX_KEY:
        return key
    what = f"{len(key)} characters" if isinstance(key, str) else type(key).__qualname__
    raise UnsupportedValueError(f"a key is a str of 1 to {m.MAX_KEY} characters, not {what}")


def prepare(
    key: str, value: Any, *, allow_pickle: bool, dtype: torch.dtype | None = None
) -> list[Source]:
    """Look at a value once: what it is, how many bytes it has. One source for each shard.

    Args:
        dtype: store floating-point tensors in this one; None: in their own.

    Raises:
        UnsupportedValueError, UnsafeObjectError, LayoutMismatchError: it cannot be stored.
    """
    check_key(key)
    if type(value) is not torch.Tensor and is_sharded(value):
        return [_part(key, part, dtype) for part in local_parts(key, value)]
    if isinstance(value, torch.Tensor):
        if dtype is None or dtype is value.dtype or not value.is_floating_point():
            return [prepare_tensor(key, value)]
        tensor = storable(key, value)
        check_cast(key, tensor.dtype, dtype)
        meta = TensorMeta(dtype_name(dtype), tuple(tensor.shape))
        nbytes = tensor.numel() * dtype.itemsize
        return [Source(key, meta, nbytes, tensor, None, cast=dtype)]
    if isinstance(value, TorchStoreStateDict):
        raise UnsupportedValueError(
            f"{key!r}: a packed state dict is a version of its own; put it alone", key=key
        )
    codec, data = encode_object(key, value, allow_pickle=allow_pickle)
    return [Source(key, codec, len(data), None, data)]


def prepare_tensor(key: str, value: torch.Tensor, path: bytes = b"") -> Source:
    """:func:`prepare` of a tensor as it is, under a key that was checked: the usual case, many
    times.
    """
    tensor = storable(key, value)
    return Source(key, describe(tensor), tensor.nbytes, tensor, None, None, path)


def prepare_all(
    items: Iterable[tuple[str, Any]], *, allow_pickle: bool
) -> tuple[list[Source], list[int] | None]:
    """:func:`prepare` of many: all sources, and how many each value has; None if each has one."""
    sources: list[Source] = []
    counts: list[int] = []
    one_each = True
    for key, value in items:
        if type(value) is torch.Tensor:
            sources.append(prepare_tensor(check_key(key), value))
            counts.append(1)
            continue
        made = prepare(key, value, allow_pickle=allow_pickle)
        sources += made
        counts.append(len(made))
        one_each = one_each and len(made) == 1
    return sources, None if one_each else counts


def _part(key: str, local: LocalPart, dtype: torch.dtype | None) -> Source:
    tensor = storable(key, local.tensor)
    if dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    meta = TensorMeta(dtype_name(dtype), tuple(local.part.global_shape))
    nbytes = tensor.numel() * dtype.itemsize
    cast = None if dtype is tensor.dtype else dtype
    if cast is not None:
        check_cast(key, tensor.dtype, cast)
    return Source(key, meta, nbytes, tensor, None, local.part, cast=cast)


def inline_bytes(source: Source) -> bytes:
    """The value's bytes, row-major. For callers that have looked at it in this turn of the event
    loop, see :func:`look_again`.
    """
    if source.data is not None:
        return source.data
    tensor = source.tensor
    if tensor is None or source.nbytes == 0:
        return b""
    if source.cast is None and tensor.is_cpu and tensor.is_contiguous():
        address = tensor.data_ptr()
        if address < LOWEST_ADDRESS:  # one that is said to be zeros, without memory
            address = address_of(source.key, tensor)
        return ctypes.string_at(address, source.nbytes)
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    if source.cast is not None:
        tensor = tensor.to(source.cast)
    if not tensor.is_contiguous():
        tensor = byte_like(tensor).contiguous()
    return ctypes.string_at(tensor.data_ptr(), source.nbytes)


def look_again(sources: Iterable[Source]) -> None:
    """Others have had their turn since these were prepared.

    Raises:
        UnsupportedValueError: a tensor was resized, or its storage freed.
    """
    for source in sources:
        if source.tensor is not None:
            _address(source, source.tensor)


def _address(source: Source, tensor: torch.Tensor) -> int:
    """Where the source's tensor begins, if it still is what it was when it was looked at.

    Raises:
        UnsupportedValueError: it was resized, or its storage freed.
    """
    address = address_of(source.key, tensor)
    nbytes = tensor.nbytes if source.cast is None else tensor.numel() * source.cast.itemsize
    if nbytes != source.nbytes:
        raise UnsupportedValueError(
            f"{source.key!r}: the tensor was resized while it was put; leave it alone until the "
            "put has returned",
            key=source.key,
        )
    return address


async def write(session: Session, granted: Iterable[tuple[Source, m.Grant]]) -> str:
    """Move the sources into their granted places; the names of the transports that did.

    Volumes of other hosts are written to at the same time. One that is lost meanwhile is left out:
    the server knows what that means for the put.
    """
    by_place: dict[tuple[int, int], list[tuple[Source, m.Grant]]] = {}
    for source, grant in granted:
        by_place.setdefault((grant.volume, grant.segment), []).append((source, grant))
    names: set[str] = set()
    here = [place for place in by_place if session.volumes[place[0]].context.same_host]
    there = [place for place in by_place if place not in here]

    async def locally() -> None:
        for place in here:
            await _write_place(session, place, by_place[place], names)

    if not there:
        await locally()
    elif len(by_place) == 1:
        await _write_place(session, there[0], by_place[there[0]], names)
    else:
        work = [_write_place(session, place, by_place[place], names) for place in there]
        await together([locally(), *work])
    return "+".join(sorted(names))


async def _write_place(
    session: Session,
    place: tuple[int, int],
    items: Sequence[tuple[Source, m.Grant]],
    names: set[str],
) -> None:
    volume, segment = place
    nbytes = sum([source.nbytes for source, _ in items])

    async def action(link: Link, candidate: Candidate) -> None:
        names.add(candidate.spec.name)
        if any(source.tensor is not None and source.tensor.is_cuda for source, _ in items):
            session.keep_memory()
        if isinstance(link, SupportsWindow):
            await _write_window(link, segment, items, nbytes)
        else:
            await _write_copies(link, items)

    links = session.volumes[volume]
    try:
        await links.attempt(nbytes, action)
    except TransportError:
        if not links.lost:
            raise


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """At the same time; when one fails, or the caller is cancelled, all have stopped."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _write_window(
    link: SupportsWindow, segment: int, items: Sequence[tuple[Source, m.Grant]], nbytes: int
) -> None:
    """Copy straight into the segment: contiguous bytes in chunks, strided tensors by torch."""
    base, room = link.window(segment)

    def moves() -> Iterator[Move]:
        for source, grant in items:
            if not 0 <= grant.offset <= room - source.nbytes:
                raise TransportError(f"{source.key!r} would lie outside segment {segment}")
            address = base + grant.offset
            tensor = source.tensor
            if tensor is None:
                yield address, _address_of(source.data or b""), source.nbytes
                continue
            start = _address(source, tensor)
            same = source.cast is None
            if same and tensor.is_cpu and tensor.is_contiguous():
                yield address, start, source.nbytes
                continue
            to = _window_tensor(source, address)
            rows = rows_of(to, tensor)
            if rows is not None:
                yield from rows
            else:
                yield (byte_like(to), byte_like(tensor)) if same else (to, tensor)

    await move(link, segment, moves(), nbytes, into=True)


def _window_tensor(source: Source, address: int) -> torch.Tensor:
    """The place of a source's tensor in the segment, as a tensor."""
    tensor = source.tensor
    if tensor is None:
        raise UnsupportedValueError(f"{source.key!r} is not a tensor", key=source.key)
    dtype = source.cast or tensor.dtype
    return tensor_at(address, tuple(tensor.shape), dtype).view(dtype)


def _address_of(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


async def _write_copies(link: Link, items: Sequence[tuple[Source, m.Grant]]) -> None:
    """For links without a window: contiguous bytes only, so strided tensors are packed first."""
    copies: list[Copy] = []
    alive: list[torch.Tensor] = []
    for source, grant in items:
        if source.data is not None:
            address = _address_of(source.data)
        elif source.tensor is not None:
            _address(source, source.tensor)
            tensor = source.tensor.cpu().to(source.cast or source.tensor.dtype)
            tensor = byte_like(tensor).contiguous() if not tensor.is_contiguous() else tensor
            alive.append(tensor)
            address = address_of(source.key, tensor)
        copies.append(Copy(address, grant.segment, grant.offset, source.nbytes))
    await link.write(copies)
