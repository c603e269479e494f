"""Hashes of memory that may be copied on the way, against those of the ``xxhash`` package."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.copying.native import needs_native

from torchstore_core.machine import copying
from torchstore_core.machine.copying import HASH_MIN, hash_runs

_CPUINFO = Path("/proc/cpuinfo")
_HAS_AVX2 = _CPUINFO.exists() and " avx2 " in _CPUINFO.read_text()
needs_avx2 = pytest.mark.skipif(not _HAS_AVX2, reason="a processor without AVX2")
_EDGES = [HASH_MIN, 256, 1023, 1024, 1025, 1088, 1089, 2048, 2049]


class Memory:
    """Some bytes at an address."""

    def __init__(self, content: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(content, len(content))
        self.address = ctypes.addressof(self._buffer)

    def content(self) -> bytes:
        return self._buffer.raw


@needs_native
@needs_avx2
@given(
    st.lists(
        st.tuples(
            st.sampled_from(_EDGES) | st.integers(HASH_MIN, 9000) | st.integers(HASH_MIN, 70_000),
            st.integers(0, 70),  # bytes before it, in the source
            st.integers(0, 70),  # and in the destination
            st.booleans(),
        ),
        max_size=9,
    )
)
def test_hashes_are_those_of_xxhash_and_exactly_the_runs_are_copied(
    wanted: list[tuple[int, int, int, bool]],
) -> None:
    """Any number of runs, of any length and alignment, of which some are copied."""
    source = random.Random(len(wanted)).randbytes(sum(n + a for n, a, _, _ in wanted) + 64)
    before = random.Random(7).randbytes(sum(n + b for n, _, b, _ in wanted) + 64)
    here, there = Memory(source), Memory(before)
    expected, hashes, runs = bytearray(before), [], []
    at = to = 0
    for nbytes, gap, other, copied in wanted:
        at, to = at + gap, to + other
        runs.append((there.address + to if copied else 0, here.address + at, nbytes))
        part = source[at : at + nbytes]
        hashes.append(xxhash.xxh3_128_digest(part))
        if copied:
            expected[to : to + nbytes] = part
        at, to = at + nbytes, to + nbytes
    assert hash_runs(runs) == hashes
    assert there.content() == expected
    assert here.content() == source


@needs_native
@needs_avx2
def test_what_is_no_run_is_refused_and_nothing_is_copied() -> None:
    here, there = Memory(b"a" * 500), Memory(bytes(500))
    with pytest.raises(ValueError, match="fewer than"):
        hash_runs([(there.address, here.address, 500), (0, here.address, HASH_MIN - 1)])
    with pytest.raises(TypeError):
        hash_runs([(there.address, here.address, 500), (1, 2)])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        hash_runs([(0, here.address, "500")])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        hash_runs(())  # type: ignore[arg-type]
    assert there.content() == bytes(500)
    assert hash_runs([]) == []


def test_without_the_compiled_module_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_hash_runs", None)
    assert hash_runs([(0, 0, 1000)]) is None
