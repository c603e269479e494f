"""Streaming copies between addresses that the processor takes for the same ones at first."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable

import pytest
from tests.unit.copying.native import needs_native
from tests.unit.copying.test_copying import noise

from torchstore_core.machine import copying

_PAGE = 4096
_NBYTES = 8 << 20


class Memory:
    """Memory that has all its pages, and begins with one."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        self._memory.write(noise(_PAGE) * (nbytes // _PAGE))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


@pytest.fixture(scope="module")
def memories() -> tuple[Memory, Memory]:
    return Memory(_NBYTES + 2 * _PAGE), Memory(_NBYTES + 2 * _PAGE)


def _rows(to: int, of: int) -> None:
    copying.copy_grids([(to, of, _PAGE, _NBYTES // _PAGE // 2, _PAGE, 2 * _PAGE)], stream=True)


def _one_run(to: int, of: int) -> None:
    copying.copy_pieces([(to, of, _NBYTES)], stream=True)


@needs_native
@pytest.mark.parametrize("copy", [_one_run, _rows])
@pytest.mark.parametrize("ahead", [0, 64])
def test_no_alignment_is_slow(
    memories: tuple[Memory, Memory], copy: Callable[[int, int], None], ahead: int
) -> None:
    """Like that of values that begin with a page, got into tensors that begin with one, or a cache
    line later. The copy that takes turns with several pages takes four times as long for these.
    """
    to, of = memories[0].address, memories[1].address

    def seconds(ahead: int) -> float:
        begun = time.thread_time()
        copy(to + ahead, of)
        return time.thread_time() - begun

    pairs = [(seconds(ahead), seconds(_PAGE // 2)) for _ in range(15)]
    assert min(one for one, _ in pairs) < 2.2 * min(other for _, other in pairs)


@needs_native
@pytest.mark.parametrize("ahead", [0, 1, 63, 64, 130, 448, 449, 600, 4033, 4095])
@pytest.mark.parametrize("nbytes", [300, 4097, 16383, 70_001])
def test_every_byte_arrives(ahead: int, nbytes: int) -> None:
    """And not one beside them, in one run and in rows, of which every other one is copied."""
    count = 11
    source = noise(2 * count * nbytes + _PAGE)
    here = ctypes.create_string_buffer(source, len(source))
    there = ctypes.create_string_buffer(len(source) + 2 * _PAGE)
    of = ctypes.addressof(here)
    to = ctypes.addressof(there)
    start = (of - to) % _PAGE + ahead
    copying.copy_pieces([(to + start, of, count * nbytes)], stream=True)
    assert there.raw[: start + count * nbytes] == bytes(start) + source[: count * nbytes]
    assert not any(there.raw[start + count * nbytes :])
    ctypes.memset(to, 0, len(there))
    copying.copy_grids([(to + start, of, nbytes, count, nbytes, 2 * nbytes)], stream=True)
    rows = [source[2 * row * nbytes :][:nbytes] for row in range(count)]
    assert there.raw[: start + count * nbytes] == bytes(start) + b"".join(rows)
    assert not any(there.raw[start + count * nbytes :])
