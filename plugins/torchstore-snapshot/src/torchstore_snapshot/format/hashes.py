"""The hash of a piece: fast, and computable by several threads at once.

A piece of at most :data:`BLOCK` bytes is hashed by XXH3 (128 bits). A larger one is cut into blocks
of that size, and its hash is the XXH3 of the hashes of its blocks, one after the other. Threads can
thus hash the blocks of one large tensor independently of each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import xxhash

__all__ = ["BLOCK", "block_hash", "blocks", "combined", "digest_of"]

#: Bytes of one block. Part of the format: the hash of a larger piece depends on it.
BLOCK = 16 << 20


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


def blocks(nbytes: int) -> Iterator[tuple[int, int]]:
    """Return the start and the end of each block of a piece. An empty piece has one empty block.

    >>> list(blocks(BLOCK + 5))
    [(0, 16777216), (16777216, 16777221)]
    """
    for start in range(0, max(nbytes, 1), BLOCK):
        yield start, min(start + BLOCK, nbytes)


def digest_of(data: Any) -> str:
    """Return the hash of a whole piece in memory, a contiguous buffer of bytes.

    >>> digest_of(b"abc") == combined([block_hash(b"abc")])
    True
    """
    view = memoryview(data)
    return combined(block_hash(view[start:end]) for start, end in blocks(view.nbytes))
