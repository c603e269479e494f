"""The layout of a data file: a safetensors file, whose header is complete before data is written.

safetensors allows no gaps between tensors. To align them nevertheless, those whose sizes are
multiples of the largest powers of two come first: every tensor then begins at a multiple of the
power of two that divides its own size (up to :data:`ALIGNMENT`), so always at a multiple of the
size of its elements, and weights at a multiple of 64. The header is padded with spaces, which
safetensors permits, so that the data begins at a multiple of :data:`ALIGNMENT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import msgspec

__all__ = ["ALIGNMENT", "DTYPES", "FILE_MAX", "Layout", "Stored", "group"]
__all__ += ["RESERVED", "lay_out"]

#: Bytes at a multiple of which the data of a file begins: a page.
ALIGNMENT = 4096
#: Bytes of data in one file, unless a single tensor is larger.
FILE_MAX = 2 << 30

#: No tensor has this name: it is that of the description of a file in its header.
RESERVED = "__metadata__"

#: What safetensors calls the dtypes that it has.
DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


class Stored(NamedTuple):
    """A tensor in a file: its name there, its dtype without ``torch.``, its shape and its size in
    bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Layout(NamedTuple):
    """A file before it is written.

    Args:
        header: its first bytes, up to the data.
        starts: where each tensor begins in the file, in the order that they were given in.
        nbytes: the size of the file.
    """

    header: bytes
    starts: list[int]
    nbytes: int


def lay_out(tensors: Sequence[Stored]) -> Layout:
    """Plan a file that contains ``tensors``, each with a name of its own, but not
    :data:`RESERVED`. A dtype that safetensors
    does not have is stored as its bytes.

    >>> layout = lay_out([Stored("a", "float32", (3,), 12), Stored("b", "float32", (16,), 64)])
    >>> len(layout.header), layout.starts, layout.nbytes
    (4096, [4160, 4096], 4172)
    """
    order = sorted(range(len(tensors)), key=lambda i: -_alignment(tensors[i].nbytes))
    described: dict[str, object] = {RESERVED: {"format": "pt"}}
    relative = [0] * len(tensors)
    position = 0
    for i in order:
        name, dtype, shape, nbytes = tensors[i]
        kind = DTYPES.get(dtype)
        if kind is None or nbytes % max(prod(shape), 1):
            kind, shape = "U8", (nbytes,)
        end = position + nbytes
        described[name] = {"dtype": kind, "shape": shape, "data_offsets": (position, end)}
        relative[i] = position
        position = end
    text = msgspec.json.encode(described)
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return Layout(header, [len(header) + at for at in relative], len(header) + position)


def group(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Distribute tensors over files in order. Returns, for each file, the indices of its tensors.

    >>> group([4, 4, 9, 1], limit=8)
    [[0, 1], [2], [3]]
    """
    files: list[list[int]] = []
    room = 0
    for index, nbytes in enumerate(sizes):
        if not files or nbytes > room:
            files.append([])
            room = limit
        files[-1].append(index)
        room -= nbytes
    return files


def _alignment(nbytes: int) -> int:
    """The largest power of two, up to :data:`ALIGNMENT`, that divides a size."""
    return min(nbytes & -nbytes, ALIGNMENT) if nbytes else 0
