"""Local memory for transfers, bytes to fill it with, and what a process gives back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
from array import array

from torchstore_core.contracts.transport import Copy

__all__ = ["Memory", "give_back", "kinds", "pattern"]

_GUARD = 64
_POISON = b"\xa5"
_BLOCK = (1 << 16) + 1


def pattern(seed: int, nbytes: int) -> bytes:
    """Return bytes that depend on the seed, and that differ from place to place."""
    block = random.Random(seed).randbytes(min(nbytes, _BLOCK))  # noqa: S311
    whole, rest = divmod(nbytes, _BLOCK)
    return b"".join([*[block] * whole, block[:rest]])


def kinds(nbytes: int) -> dict[str, bytes]:
    """Return bytes as tensors have them, by what they are: those that a transport may compress, or
    may find to be the same in many places, and those that become such in the middle.
    """
    shuffled = random.Random(nbytes)  # noqa: S311
    some = range(1 << 14)
    made = {
        "zeros": bytes(1),
        "all bits": b"\xff",
        "a few bytes again and again": b"torch",
        "small integers": array("i", [shuffled.randrange(100) for _ in some]).tobytes(),
        "float32": array("f", [shuffled.gauss(0, 1) for _ in some]).tobytes(),
        "float64 of float32": array("d", array("f", [shuffled.random() for _ in some])).tobytes(),
        "noise": shuffled.randbytes(1 << 16),
    }
    # bfloat16: the upper half of each float32
    made["bfloat16"] = bytes(byte for at, byte in enumerate(made["float32"]) if at % 4 >= 2)
    found = {what: (data * (nbytes // len(data) + 1))[:nbytes] for what, data in made.items()}
    half = nbytes // 2
    found["zeros, then noise"] = found["zeros"][:half] + found["noise"][half:]
    found["noise, then zeros"] = found["noise"][:half] + found["zeros"][half:]
    return found


def give_back() -> None:
    """Have this process give free memory back to the system: what it has then is what it uses."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # not every C library can
        ctypes.CDLL(None).malloc_trim(0)


class Memory:
    """Local memory with guards on both sides, to detect writes outside of it.

    Args:
        data: the initial contents, or the size in bytes.
    """

    def __init__(self, data: bytes | int) -> None:
        self.nbytes = data if isinstance(data, int) else len(data)
        self._all = bytearray(self.nbytes + 2 * _GUARD)
        self._all[:_GUARD] = self._all[_GUARD + self.nbytes :] = _POISON * _GUARD
        if isinstance(data, bytes):
            self._all[_GUARD : _GUARD + self.nbytes] = data
        self._array = (ctypes.c_char * len(self._all)).from_buffer(self._all)
        self.address = ctypes.addressof(self._array) + _GUARD

    def data(self) -> bytes:
        """Return the bytes between the guards."""
        return bytes(memoryview(self._all)[_GUARD:-_GUARD])

    def fill(self, byte: int) -> None:
        """Overwrite the bytes between the guards."""
        ctypes.memset(self.address, byte, self.nbytes)

    def is_intact(self) -> bool:
        """Return whether the guards are unchanged."""
        guard = _POISON * _GUARD
        return self._all[:_GUARD] == guard and self._all[-_GUARD:] == guard

    def copy(self, offset: int, nbytes: int | None = None) -> Copy:
        """Return a copy of the first ``nbytes`` bytes (default: all) to or from segment 0."""
        return Copy(self.address, 0, offset, self.nbytes if nbytes is None else nbytes)
