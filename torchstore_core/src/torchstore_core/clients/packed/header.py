"""The header of a packed state dict, and the file around it. Reads nothing that it has not checked.

A file, or as many bytes, is::

    8 s  magic                  4 u  version of this format      4 u  CRC-32 of what follows, and
    8 u  bytes of the header    8 u  bytes of the blob                of the header; little-endian
    the header (msgpack)
    zeros up to a multiple of 64
    the blob

The blob has no checksum: one would take longer than everything else.
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

__all__ = ["ALIGNMENT", "MEMORY_ALIGNMENT", "PREFIX", "Entry", "Header", "Place"]
__all__ += ["TensorReference", "decode", "encode", "find", "prelude"]

#: Tensors, and the blob in a file, begin at multiples of this many bytes.
ALIGNMENT = 64
#: The blob's own address is a multiple of this: enough for every dtype.
MEMORY_ALIGNMENT = 16

_MAGIC = b"\x89tsdict\n"
_VERSION = 1
_START = struct.Struct("<8sII")
_LENGTHS = struct.Struct("<QQ")
#: Bytes before the header.
PREFIX = _START.size + _LENGTHS.size
_MAX_DIMS = 64
_LARGEST = (1 << 63) - 1


class TensorReference(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where in the blob a tensor lies.

    Args:
        offset, nbytes: in the blob.
        dtype: its name without ``torch.`` (``"bfloat16"``).
        shape: of what is in the blob.
        tensor_slice: which part of a larger tensor it is; None: it is all of it.
    """

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    tensor_slice: TensorSlice | None = None


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One entry of the state dict: a tensor in one or more parts, or an object (``codec``).

    ``path``: its place in the nested dict, see ``client_side.nesting``.
    """

    name: str
    path: bytes
    parts: tuple[TensorReference, ...] = ()
    codec: str = ""
    data: bytes = b""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """All entries; how many participants put a version, and which of them this is."""

    entries: tuple[Entry, ...]
    participants: int
    participant: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


# ---- the file -----------------------------------------------------------------------------


class Place(NamedTuple):
    """Where header and blob are, in bytes from the start."""

    header_end: int
    blob_start: int
    blob_nbytes: int
    crc: int
    lengths: bytes

    def check(self, header: bytes | memoryview) -> bytes:
        """The header, if it is what was written.

        Raises:
            ProtocolError: it is not.
        """
        if len(header) != self.header_end - PREFIX:
            raise ProtocolError("a packed state dict became shorter while it was read")
        if zlib.crc32(header, zlib.crc32(self.lengths)) != self.crc:
            raise ProtocolError("the header of a packed state dict is damaged (its CRC is wrong)")
        return bytes(header)


def prelude(header: bytes, blob_nbytes: int) -> list[bytes]:
    """What comes before the blob."""
    lengths = _LENGTHS.pack(len(header), blob_nbytes)
    crc = zlib.crc32(header, zlib.crc32(lengths))
    padding = bytes(-(PREFIX + len(header)) % ALIGNMENT)
    return [_START.pack(_MAGIC, _VERSION, crc), lengths, header, padding]


def find(prefix: bytes | memoryview, size: int) -> Place:
    """Where header and blob are in ``size`` bytes that begin with ``prefix``.

    Raises:
        ProtocolError: no packed form, or not all of one.
    """
    if len(prefix) < PREFIX or bytes(prefix[: len(_MAGIC)]) != _MAGIC:
        raise ProtocolError("this is no packed state dict (it does not begin like one)")
    _, version, crc = _START.unpack_from(prefix)
    if version != _VERSION:
        raise ProtocolError(f"a packed state dict of version {version}; this is {_VERSION}")
    header_nbytes, blob_nbytes = _LENGTHS.unpack_from(prefix, _START.size)
    header_end = PREFIX + header_nbytes
    blob_start = -(-header_end // ALIGNMENT) * ALIGNMENT
    if blob_start + blob_nbytes != size:
        raise ProtocolError(
            f"a packed state dict of {blob_start + blob_nbytes} bytes is here with {size}: "
            "it is truncated, or something follows it"
        )
    lengths = bytes(prefix[_START.size : PREFIX])
    return Place(header_end, blob_start, blob_nbytes, crc, lengths)


# ---- the header ---------------------------------------------------------------------------


def encode(header: Header) -> bytes:
    """As msgpack."""
    return _encoder.encode(header)


def decode(data: bytes, blob_nbytes: int) -> Header:
    """The header of a blob of ``blob_nbytes``, every number in it checked.

    Raises:
        ProtocolError: it is damaged, or says what the blob cannot hold.
        UnsupportedValueError: a dtype that this torch does not know, or that is not stored.
    """
    try:
        header = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"the header of a packed state dict is unreadable: {error}") from error
    if blob_nbytes % ALIGNMENT:
        raise ProtocolError(f"the blob has {blob_nbytes} bytes, no multiple of {ALIGNMENT}")
    if not 0 < header.participants <= _LARGEST:
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
        nesting.unflatten("state dict", _hollow(header))
    except LayoutMismatchError as error:
        raise ProtocolError(f"the entries of a packed state dict contradict: {error}") from error
    return header


def _hollow(header: Header) -> Iterator[tuple[str, bytes, Entry]]:
    return ((entry.name, entry.path, entry) for entry in header.entries)


def _check_entry(entry: Entry) -> None:
    if entry.codec:
        if entry.parts:
            raise ProtocolError(f"{entry.name!r} is an object and a tensor")
        return
    if len(entry.parts) == 1:
        return
    # Parts of one tensor.
    kinds = {(p.dtype, p.tensor_slice and p.tensor_slice.global_shape) for p in entry.parts}
    if len(kinds) > 1 or any(part.tensor_slice is None for part in entry.parts):
        raise ProtocolError(f"the parts of {entry.name!r} are not of one tensor")


def _check_part(name: str, part: TensorReference, blob_nbytes: int) -> None:
    dtype = dtype_of(TensorMeta(part.dtype, part.shape), name)
    sound = (
        len(part.shape) <= _MAX_DIMS
        and all(n >= 0 for n in part.shape)
        and math.prod([n for n in part.shape if n]) * dtype.itemsize <= _LARGEST
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
        and all(0 <= at <= n <= _LARGEST for at, n in zip(place.offsets, whole, strict=True))
        and all(at + n <= g for at, n, g in zip(place.offsets, part.shape, whole, strict=True))
        and all(0 <= at < n <= _LARGEST for at, n in zip(place.coordinates, mesh, strict=True))
    )
    if not sound:
        raise ProtocolError(f"{name!r} of {list(part.shape)} is not the slice {place}")
