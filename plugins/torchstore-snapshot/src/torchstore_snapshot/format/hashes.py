"""The hashes of a piece: fast, and computable by several threads at once.

A piece of at most :data:`BLOCK` bytes is hashed by XXH3 (128 bits). A larger one is cut into blocks
of that size, and its hash is the XXH3 of the hashes of its blocks, one after the other. The hashes
of the blocks are stored as well, so that what a part of a large tensor is read from can be checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import xxhash

__all__ = ["BLOCK", "BLOCK_OF_V1", "HASH", "Digest", "block_hash", "blocks", "combined"]
__all__ += ["digest_of", "summed"]

#: Bytes of one block. Part of the format: the hash of a larger piece depends on it.
BLOCK = 4 << 20
#: Bytes of one block in files that version 1 of the format wrote.
BLOCK_OF_V1 = 16 << 20
#: Bytes of one hash.
HASH = 16


class Digest(NamedTuple):
    """What is stored about the bytes of a piece.

    Args:
        whole: the hash of the piece, in hexadecimal digits.
        blocks: the hashes of its blocks, one after the other; empty if there is only one block.
    """

    whole: str
    blocks: bytes = b""


def block_hash(data: Any) -> bytes:
    """Return the hash of one block, or of a piece that is no larger than one: 16 bytes. Releases
    the interpreter lock if ``data``, any contiguous buffer, is large.
    """
    return bytes(xxhash.xxh3_128_digest(data))


def combined(hashes: Iterable[bytes]) -> str:
    """Return the hash of a piece, in hexadecimal digits, from the hashes of its blocks in order.

    >>> combined([block_hash(b"")])
    '99aa06d3014798d86001c324468d497f'
    """
    found = list(hashes)
    return (found[0] if len(found) == 1 else block_hash(b"".join(found))).hex()


def summed(hashes: Iterable[bytes]) -> Digest:
    """Return what is stored about a piece, from the hashes of its blocks in order."""
    found = list(hashes)
    return Digest(combined(found), b"".join(found) if len(found) > 1 else b"")


def blocks(nbytes: int, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Return the start and the end of each block of a piece. An empty piece has one empty block.

    >>> list(blocks(BLOCK + 5))
    [(0, 4194304), (4194304, 4194309)]
    """
    for start in range(0, max(nbytes, 1), size):
        yield start, min(start + size, nbytes)


def digest_of(data: Any, size: int = BLOCK) -> str:
    """Return the hash of a whole piece in memory, a contiguous buffer of bytes.

    >>> digest_of(b"abc") == combined([block_hash(b"abc")])
    True
    """
    view = memoryview(data)
    return combined(block_hash(view[start:end]) for start, end in blocks(view.nbytes, size))
