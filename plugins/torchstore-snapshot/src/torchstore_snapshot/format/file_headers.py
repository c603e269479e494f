"""Whether the header of a data file is the one that was written. Pure.

Snapshots are read by their manifests, but other programs read a data file by its header alone: if
that is damaged, they get tensors under wrong names without noticing. The manifest has the hash of
each header. Snapshots of earlier versions of this package have none; there, what the header says
is compared with what the manifest says of the pieces in the file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import NamedTuple

import msgspec

from torchstore_snapshot.format.hashes import digest_of
from torchstore_snapshot.format.manifest import (
    Manifest,
    Piece,
    TensorEntry,
)
from torchstore_snapshot.format.paths import take_of
from torchstore_snapshot.format.safetensors_files import DTYPES, RESERVED

__all__ = ["Expected", "contradiction", "expected_in", "header_digest"]


class Expected(NamedTuple):
    """A tensor that a file contains, by the manifest.

    Args:
        start, nbytes: where it is in the file.
        names: the names that it may have there; empty if the snapshot that wrote the file gave it
            one, which nobody knows any more.
        dtype, shape: without ``torch.``; None where ``names`` is empty.
    """

    start: int
    nbytes: int
    names: tuple[str, ...] = ()
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


class _Described(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_headers = msgspec.json.Decoder(dict[str, msgspec.Raw])
_described = msgspec.json.Decoder(_Described)


def header_digest(header: bytes) -> str:
    """Return the hash of a header, with the eight bytes before it that say how long it is."""
    return digest_of(header)


def expected_in(manifest: Manifest) -> dict[int, list[Expected]]:
    """Return what a snapshot expects in each of its files, by the index of the file."""
    found: dict[int, dict[tuple[object, ...], Expected]] = {}

    def add(piece: Piece, names: Sequence[str], dtype: str, shape: tuple[int, ...]) -> None:
        file = manifest.files[piece.file]
        # Unchanged tensors are recognised by their bytes: in earlier files, they have other names.
        foreign = file.snapshot or (
            manifest.checkpoint is None and take_of(file.name) != manifest.take
        )
        place = piece.start, piece.nbytes
        mine = found.setdefault(piece.file, {})
        if foreign:
            mine.setdefault(place, Expected(*place))
            return
        # Tied tensors are in a file once, under one of their names; empty ones are nowhere.
        which = place if piece.nbytes else (*place, *names)
        before = mine.get(which)
        if before is not None:
            names = (*before.names, *names)
        mine[which] = Expected(*place, tuple(names), dtype, shape)

    for entries in (manifest.shared, *manifest.own):
        for key, named in entries.items():
            for name, entry in named.items():
                bases = name, key, f"{key}/{name}"  # those of stores share files with other keys
                if isinstance(entry, TensorEntry):
                    for piece in entry.pieces:
                        suffix, shape = "", entry.shape
                        if piece.slice is not None:
                            shape = piece.slice.local_shape
                            spans = zip(piece.slice.offsets, shape, strict=True)
                            suffix = "[" + ",".join(f"{at}:{at + n}" for at, n in spans) + "]"
                        add(piece, [base + suffix for base in bases], entry.dtype, tuple(shape))
                elif entry.piece is not None:
                    piece, names = entry.piece, [f"{base}[object]" for base in bases]
                    add(piece, names, "uint8", (piece.nbytes,))
    return {index: [*mine.values()] for index, mine in found.items()}


def contradiction(header: bytes, nbytes: int, expected: Collection[Expected]) -> str | None:
    """Say how a header contradicts what a file of ``nbytes`` bytes contains; None if it does not.

    >>> from torchstore_snapshot.format.safetensors_files import Stored, lay_out
    >>> file = lay_out([Stored("a", "float32", (2,), 8)])
    >>> contradiction(file.header, file.nbytes, [Expected(4096, 8, ("a",), "float32", (2,))])
    >>> contradiction(file.header, file.nbytes, [Expected(4096, 8, ("b",), "float32", (2,))])
    "has 'a' where 'b' was written"
    """
    try:
        raw = _headers.decode(header[8:])
        described = {n: _described.decode(data) for n, data in raw.items() if n != RESERVED}
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "has a header that cannot be read"
    at = 0
    placed: dict[tuple[int, int], list[str]] = {}
    for name, tensor in described.items():
        begin, end = tensor.data_offsets
        if begin != at or end < begin:
            return f"has gaps before {name!r}, or tensors that overlap"
        at = end
        placed.setdefault((begin + len(header), end - begin), []).append(name)
    if len(header) + at != nbytes:
        return "has another size than its header says"
    for each in expected:
        here = placed.get((each.start, each.nbytes), [])
        if not here:
            return f"has no tensor of {each.nbytes} bytes at {each.start} by its header"
        if not each.names:
            continue
        found = _one_of(here, each.names, described)
        if found is None:
            return f"has {here[0]!r} where {each.names[0]!r} was written"
        name = found
        tensor = described[name]
        kind = DTYPES.get(each.dtype or "")
        plain = tensor.dtype == "U8" and tensor.shape == (each.nbytes,)
        if not plain and (tensor.dtype != kind or tensor.shape != each.shape):
            return f"says that {name!r} is {tensor.dtype} {list(tensor.shape)}"
        if plain and kind not in (None, "U8") and each.nbytes % max(prod(each.shape or ()), 1) == 0:
            return f"says that {name!r} is plain bytes"
    return None


def _one_of(here: Sequence[str], names: Sequence[str], all_: Mapping[str, object]) -> str | None:
    """Return the name of the tensor at a position if it is one of those that it may have: one that
    another tensor of the file had already was given an apostrophe, or more.
    """
    for found in here:
        bare = found
        while bare not in names and bare.endswith("'"):
            bare = bare[:-1]
            if bare not in all_ and bare != RESERVED:
                break
        if bare in names:
            return found
    return None
