"""Threads that copy for long let others have their processor now and then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.copying.native import COMPILER, needs_native

pytestmark = [
    needs_native,
    pytest.mark.skipif(not COMPILER, reason="no compiler to count calls of the system with"),
]

_COUNTS = """
#include <time.h>
int turns, away_ms;
int sched_yield(void) {
    struct timespec away = {0, away_ms * 1000000L};
    turns++;
    if (away_ms) nanosleep(&away, NULL);
    return 0;
}
"""

_COPIES = """
import ctypes, sys, threading, time
from array import array
from torchstore_core import _native
system = ctypes.CDLL(None)
turns, away_ms = (ctypes.c_int.in_dll(system, name) for name in ("turns", "away_ms"))
NBYTES = 32 << 20
here, there = ((ctypes.c_char * (NBYTES + 64))() for _ in range(2))
to, of = map(ctypes.addressof, (here, there))

def rows(nbytes):
    return array("q", (to, of, nbytes, NBYTES // nbytes, nbytes, nbytes))

ways = {
    "runs": lambda: _native.copy_runs([(to, 0, NBYTES)], of, False, True),
    "columns": lambda: _native.copy_columns([to], [0], [NBYTES], of, False, True),
    "long rows": lambda: _native.copy_rows(rows(1 << 20), True),
    "short rows": lambda: _native.copy_rows(rows(256), True),
    "hashes": lambda: _native.hash_runs([(0, of, NBYTES)]),
    "hashed copies": lambda: _native.hash_runs([(to, of, NBYTES)]),
    "checksum": lambda: _native.checksum(there),
    "plain": lambda: _native.copy_runs([(to, 0, NBYTES)], of, False, False),
}
if _native.hash_runs([(0, of, NBYTES)]) is None:  # the processor has no AVX2
    del ways["hashes"], ways["hashed copies"]

def count(name):
    turns.value, begun = 0, time.monotonic()
    thread = threading.Thread(target=ways[name])  # which has not had a turn yet
    thread.start()
    thread.join()
    return turns.value, time.monotonic() - begun
"""


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that counts the turns of the program that is started with it."""
    folder = tmp_path_factory.mktemp("counts")
    (folder / "counts.c").write_text(_COUNTS)
    library = folder / "counts.so"
    command = [str(COMPILER), "-shared", "-fPIC", "-o", str(library), str(folder / "counts.c")]
    subprocess.run(command, check=True)
    return library


def run(counts: Path, body: str) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(counts)}
    subprocess.run([sys.executable, "-c", _COPIES + body], env=environment, check=True, timeout=200)


def test_all_that_takes_long_has_turns(counts: Path):
    body = "found = {name: count(name)[0] for name in ways}\nassert all(found.values()), found"
    run(counts, body)


def test_who_does_not_get_the_processor_back_soon_keeps_it_longer(counts: Path):
    """Beside a thread that never sleeps, one that yields all the time would get almost nothing."""
    body = """
away_ms.value = 3
ways["again and again"] = lambda: [ways["runs"]() for _ in range(20)]
found, seconds = count("again and again")
assert 1 <= found <= 1 + seconds / 0.048, (found, seconds)
"""
    run(counts, body)
