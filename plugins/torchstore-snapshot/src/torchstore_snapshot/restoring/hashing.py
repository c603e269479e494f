"""Hashes ranges of mapped files, and copies them on the way. Torch-free."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import xxhash

from torchstore_core.machine import copying

__all__ = ["hashes_of"]

# Bytes that are copied and then hashed at a time: what was copied is still in the cache of the
# processor's own when it is hashed, so that memory is read once for both.
_STEP = 256 << 10


def hashes_of(runs: Sequence[copying.Run]) -> list[bytes]:
    """Return the hash (as :func:`.hashes.block_hash`) of each ``(destination address or 0, source
    address, nbytes)``. Runs with a destination are copied.
    """
    long = [run for run in runs if run[2] >= copying.HASH_MIN]
    hashes = copying.hash_runs(long)
    if hashes is None:
        return [_hash_of(*run) for run in runs]
    found = iter(hashes)
    return [next(found) if run[2] >= copying.HASH_MIN else _hash_of(*run) for run in runs]


def _hash_of(to: int, of: int, nbytes: int) -> bytes:
    hasher = xxhash.xxh3_128()
    for at in range(0, nbytes, _STEP):
        size = min(_STEP, nbytes - at)
        if to:
            copying.copy_pieces([(to + at, of + at, size)], stream=True)
        hasher.update((ctypes.c_char * size).from_address(of + at))
    return hasher.digest()
