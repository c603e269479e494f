"""The values of a put, inspected once: their bytes are moved, or are sent inside the message."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable
from typing import Any

import msgspec
import torch

from torchstore_core.clients.calls.arguments import check_key
from torchstore_core.clients.session.held_ref import Lent, lending
from torchstore_core.clients.values.codec import NoValue, encode_pieces
from torchstore_core.clients.values.pieces import Pieces
from torchstore_core.clients.values.plain import MANY, look
from torchstore_core.clients.values.sharding import LocalPart, is_sharded, local_parts
from torchstore_core.clients.values.tensors import (
    LOWEST_ADDRESS,
    address_of,
    byte_like,
    check_cast,
    describe,
    dtype_name,
    storable,
    strided_copy,
)
from torchstore_core.errors import UnsupportedValueError
from torchstore_core.machine.copying import Run
from torchstore_core.values import TensorMeta, TensorSlice, ValueMeta


class Source(msgspec.Struct, frozen=True, gc=False):
    """One value to put: a tensor (detached, any strides), or the bytes of an object.

    ``meta`` describes the whole tensor in its stored dtype; ``tensor`` is the ``part`` of it that
    is put here. ``nbytes`` is the number of bytes that are stored. ``cast`` is the stored dtype if
    it differs from the dtype of ``tensor``. ``plain`` means that the tensor is plain (see
    ``values.plain``) and is the user's own object. ``lent`` are the references that an object has
    in it. For the other fields see ``messages.PutItem``.
    """

    key: str
    meta: ValueMeta
    nbytes: int
    tensor: torch.Tensor | None
    data: bytes | Pieces | None
    part: TensorSlice | None = None
    path: bytes = b""
    same_as: int = -1
    cast: torch.dtype | None = None
    plain: bool = False
    lent: Lent | None = None

    def runs(self, offset: int) -> list[Run]:
        """The contiguous runs of an object's bytes, if the first of them goes to ``offset``."""
        data = self.data or b""
        pieces = data if isinstance(data, Pieces) else Pieces([data])
        return pieces.runs(self.key, offset)

    def address(self, tensor: torch.Tensor) -> int:
        """The address of the first byte of the tensor, if it has not changed since it was
        inspected.

        Raises:
            UnsupportedValueError: the tensor was resized, or its storage freed.
        """
        address = address_of(self.key, tensor)
        nbytes = tensor.nbytes if self.cast is None else tensor.numel() * self.cast.itemsize
        if nbytes != self.nbytes:
            raise UnsupportedValueError(
                f"{self.key!r}: the tensor was resized while it was put; leave it alone until the "
                "put has returned",
                key=self.key,
            )
        return address


def prepare(
    key: str, value: Any, *, allow_pickle: bool, dtype: torch.dtype | None = None
) -> list[Source]:
    """Inspect a value once: what it is and how many bytes it has. Returns a source for each shard.

    Args:
        dtype: the dtype to store floating-point tensors in; None: their own.

    Raises:
        UnsupportedValueError, UnsafeObjectError, LayoutMismatchError: it cannot be stored.
    """
    key = check_key(key)
    if type(value) is torch.Tensor and dtype is None:  # the usual case, very often
        return [prepare_tensor(key, value)]
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
    if isinstance(value, NoValue):
        raise UnsupportedValueError(f"{key!r}: {value._refusal}", key=key)
    (codec, data), lent = lending(
        lambda: encode_pieces(key, value, allow_pickle=allow_pickle, aside=True)
    )
    return [Source(key, codec, len(data), None, data, lent=lent)]


def prepare_tensor(key: str, value: torch.Tensor, path: bytes = b"") -> Source:
    """:func:`prepare` for a tensor that is stored in its own dtype, under a key that was already
    checked. This is the usual case, and is called very often.
    """
    tensor = storable(key, value)
    return Source(key, describe(tensor), tensor.nbytes, tensor, None, None, path)


def plain_source(
    key: str, meta: TensorMeta, nbytes: int, value: torch.Tensor, path: bytes = b""
) -> Source:
    """:func:`prepare` for a tensor known to be plain, under a key that was already checked."""
    return Source(key, meta, nbytes, value, None, None, path, -1, None, True)


def prepare_all(
    keys: Iterable[str], values: Collection[Any], *, allow_pickle: bool
) -> tuple[list[Source], list[int] | None]:
    """:func:`prepare` for many values: all sources, and their number per value (None: one each)."""
    sources: list[Source] = []
    counts: list[int] = []
    one_each = True
    looked = look(list(values), memory=False) if len(values) >= MANY else None
    for at, (key, value) in enumerate(zip(keys, values, strict=True)):
        if looked is not None and (meta := looked.metas[at]) is not None:
            sources.append(plain_source(check_key(key), meta, looked.sizes[at], value))
            counts.append(1)
            continue
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
    """The value's bytes, in row-major order. The caller must have inspected the value since it last
    yielded to the event loop; see :func:`look_again`.
    """
    if source.data is not None:
        return source.data if isinstance(source.data, bytes) else source.data.joined()
    tensor = source.tensor
    if tensor is None or source.nbytes == 0:
        return b""
    if source.cast is None and tensor.is_cpu and tensor.is_contiguous():
        address = tensor.data_ptr()
        if address < LOWEST_ADDRESS:  # one of torch's zero tensors, which have no memory
            address = address_of(source.key, tensor)
        return ctypes.string_at(address, source.nbytes)
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    if source.cast is not None or not tensor.is_contiguous():
        given = tensor if source.cast is not None else byte_like(tensor)
        tensor = torch.empty(given.shape, dtype=source.cast or given.dtype, device="cpu")
        strided_copy(tensor, given, stream=False)()
    return ctypes.string_at(tensor.data_ptr(), source.nbytes)


def release(sources: Iterable[Source]) -> None:
    """Let the buffers of objects be resized again, since no bytes are being copied any more."""
    for source in sources:
        if isinstance(source.data, Pieces):
            source.data.release()


def look_again(sources: Iterable[Source]) -> None:
    """Check sources again after other tasks may have run since they were prepared.

    Raises:
        UnsupportedValueError: a tensor was resized, or its storage freed.
    """
    for source in sources:
        if source.tensor is not None:
            source.address(source.tensor)
        elif isinstance(source.data, Pieces):
            source.data.check(source.key)
