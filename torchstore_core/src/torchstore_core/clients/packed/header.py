"""The header of a packed state dict, and its file format. Everything that is read is checked.

The format of a file, and of the bytes in memory, is::

    8 s  magic                  4 u  version of this format      4 u  CRC-32 of what follows, and
    8 u  bytes of the header    8 u  bytes of the blob                of the header; little-endian
    the header (msgpack)
    zeros up to a multiple of 64
    the blob

The blob has no checksum, because computing it would take longer than everything else.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import msgspec

from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.tensors import dtype_of
from torchstore_core.errors import LayoutMismatchError, ProtocolError
from torchstore_core.values import TensorMeta, TensorSlice

#: Tensors in the blob, and the blob in a file, start at multiples of this many bytes.
ALIGNMENT = 64
#: The memory address of a blob is a multiple of this, which suffices for every dtype.
MEMORY_ALIGNMENT = 16

_MAGIC = b"\x89tsdict\n"
_VERSION = 1
_MAGIC_AND_CRC = struct.Struct("<8sII")
_LENGTHS = struct.Struct("<QQ")
#: The number of bytes before the header.
PREFIX = _MAGIC_AND_CRC.size + _LENGTHS.size
_MAX_DIMS = 64
_MAX_INT = (1 << 63) - 1


class TensorReference(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of a tensor in the blob.

    Args:
        offset, nbytes: its range in the blob, in bytes.
        dtype: the dtype without ``torch.`` (``"bfloat16"``).
        shape: the shape of the tensor in the blob.
        tensor_slice: the part of a larger tensor that it is; None: it is a whole tensor.
    """

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    tensor_slice: TensorSlice | None = None


class HeaderEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One entry of the state dict: a tensor in one or more parts, or an object (with ``codec``).

    ``path``: its position in the nested dict, see ``clients.values.nesting``.
    """

    name: str
    path: bytes
    parts: tuple[TensorReference, ...] = ()
    codec: str = ""
    data: bytes = b""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """All entries, the number of participants that put a version, and which of them this is."""

    entries: tuple[HeaderEntry, ...]
    participants: int
    participant: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


# ---- the file -----------------------------------------------------------------------------


class FileLayout(NamedTuple):
    """The positions of header and blob, in bytes from the start of the file."""

    header_end: int
    blob_start: int
    blob_nbytes: int
    crc: int
    lengths: bytes

    def check(self, header: bytes | memoryview) -> bytes:
        """Check the header against its CRC and return it.

        Raises:
            ProtocolError: the header is truncated or damaged.
        """
        if len(header) != self.header_end - PREFIX:
            raise ProtocolError("a packed state dict became shorter while it was read")
        if zlib.crc32(header, zlib.crc32(self.lengths)) != self.crc:
            raise ProtocolError("the header of a packed state dict is damaged (its CRC is wrong)")
        return bytes(header)


def prelude(header: bytes, blob_nbytes: int) -> list[bytes]:
    """Return everything that precedes the blob in a file."""
    lengths = _LENGTHS.pack(len(header), blob_nbytes)
    crc = zlib.crc32(header, zlib.crc32(lengths))
    padding = bytes(-(PREFIX + len(header)) % ALIGNMENT)
    return [_MAGIC_AND_CRC.pack(_MAGIC, _VERSION, crc), lengths, header, padding]


def read_prefix(prefix: bytes | memoryview, size: int) -> FileLayout:
    """Find the header and the blob in ``size`` bytes that start with ``prefix``.

    Raises:
        ProtocolError: it is not a packed state dict, or is truncated.
    """
    if len(prefix) < PREFIX or bytes(prefix[: len(_MAGIC)]) != _MAGIC:
        raise ProtocolError("this is no packed state dict (it does not begin like one)")
    _, version, crc = _MAGIC_AND_CRC.unpack_from(prefix)
    if version != _VERSION:
        raise ProtocolError(f"a packed state dict of version {version}; this is {_VERSION}")
    header_nbytes, blob_nbytes = _LENGTHS.unpack_from(prefix, _MAGIC_AND_CRC.size)
    header_end = PREFIX + header_nbytes
    blob_start = -(-header_end // ALIGNMENT) * ALIGNMENT
    if blob_start + blob_nbytes != size:
        raise ProtocolError(
            f"a packed state dict of {blob_start + blob_nbytes} bytes is here with {size}: "
            "it is truncated, or something follows it"
        )
    lengths = bytes(prefix[_MAGIC_AND_CRC.size : PREFIX])
    return FileLayout(header_end, blob_start, blob_nbytes, crc, lengths)


# ---- the header ---------------------------------------------------------------------------


def encode(header: Header) -> bytes:
    """Encode a header as msgpack."""
    return _encoder.encode(header)


def decode(data: bytes, blob_nbytes: int) -> Header:
    """Decode the header of a blob of ``blob_nbytes`` bytes, and check every number in it.

    Raises:
        ProtocolError: it is damaged, or describes what the blob cannot hold.
        UnsupportedValueError: it has a dtype that this torch lacks, or that cannot be stored.
    """
    try:
        header = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"the header of a packed state dict is unreadable: {error}") from error
    if blob_nbytes % ALIGNMENT:
        raise ProtocolError(f"the blob has {blob_nbytes} bytes, no multiple of {ALIGNMENT}")
    if not 0 < header.participants <= _MAX_INT:
        raise ProtocolError(f"a version has at least 1 participant, not {header.participants}")
    names = {entry.name for entry in header.entries}
    if len(names) < len(header.entries) or "" in names:
        raise ProtocolError("entries of a packed state dict have no names, or the same")
    places: set[TensorReference] = set()
    for entry in header.entries:
        _check_entry(entry)
        for part in entry.parts:
            _check_part(entry.name, part, blob_nbytes)
            if part.nbytes:
                places.add(part)
    for one, other in pairwise(sorted(places, key=lambda part: part.offset)):
        if one.offset + one.nbytes > other.offset:
            raise ProtocolError(f"two tensors lie at {other.offset} of a packed state dict")
    try:
        nesting.unflatten("state dict", _leaves(header))
    except LayoutMismatchError as error:
        raise ProtocolError(f"the entries of a packed state dict contradict: {error}") from error
    return header


def _leaves(header: Header) -> Iterator[tuple[str, bytes, HeaderEntry]]:
    return ((entry.name, entry.path, entry) for entry in header.entries)


def _check_entry(entry: HeaderEntry) -> None:
    if entry.codec:
        if entry.parts:
            raise ProtocolError(f"{entry.name!r} is an object and a tensor")
        return
    if len(entry.parts) == 1:
        return
    # An entry with several parts, or with none: they must be parts of one tensor.
    kinds = {(p.dtype, p.tensor_slice and p.tensor_slice.global_shape) for p in entry.parts}
    if len(kinds) > 1 or any(part.tensor_slice is None for part in entry.parts):
        raise ProtocolError(f"the parts of {entry.name!r} are not of one tensor")


def _check_part(name: str, part: TensorReference, blob_nbytes: int) -> None:
    dtype = dtype_of(TensorMeta(part.dtype, part.shape), name)
    sound = (
        len(part.shape) <= _MAX_DIMS
        and all(n >= 0 for n in part.shape)
        and math.prod([n for n in part.shape if n]) * dtype.itemsize <= _MAX_INT
        and math.prod(part.shape) * dtype.itemsize == part.nbytes
    )
    if not sound:
        raise ProtocolError(f"{name!r}: {part.dtype} {list(part.shape)} in {part.nbytes} bytes")
    if part.offset % ALIGNMENT or not 0 <= part.offset <= blob_nbytes - part.nbytes:
        raise ProtocolError(
            f"{name!r}: {part.nbytes} bytes at {part.offset} do not lie in a blob of {blob_nbytes}"
        )
    if part.tensor_slice is not None:
        _check_slice(name, part, part.tensor_slice)


def _check_slice(name: str, part: TensorReference, place: TensorSlice) -> None:
    whole, mesh = place.global_shape, place.mesh_shape
    sound = (
        place.local_shape == part.shape
        and len(place.offsets) == len(part.shape) == len(whole)
        and len(mesh) == len(place.coordinates) <= _MAX_DIMS
        and all(0 <= at <= n <= _MAX_INT for at, n in zip(place.offsets, whole, strict=True))
        and all(at + n <= g for at, n, g in zip(place.offsets, part.shape, whole, strict=True))
        and all(0 <= at < n <= _MAX_INT for at, n in zip(place.coordinates, mesh, strict=True))
    )
    if not sound:
        raise ProtocolError(f"{name!r} of {list(part.shape)} is not the slice {place}")
