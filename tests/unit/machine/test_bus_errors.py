"""Mapped files that become shorter while they are read end nobody's process."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchstore_core.machine.bus_errors import Guard
from torchstore_core.machine.virtual_memory import allocate, map_private

_PAGE = mmap.PAGESIZE
_SETUP = """
import ctypes, os, resource, sys
from torchstore_core.machine.bus_errors import Guard
from torchstore_core.machine.virtual_memory import map_private

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

def mapped(path, nbytes=4096):
    open(path, "wb").write(bytes(nbytes))
    file = os.open(path, os.O_RDONLY)
    address, _, block = map_private(file, 0, nbytes)
    os.close(file)
    return address, nbytes, block
"""


def mapped(path: Path, pages: int) -> tuple[int, int, object]:
    """Address, size and owner of the mapping of a new file of ones."""
    path.write_bytes(b"\1" * pages * _PAGE)
    with path.open("rb") as file:
        address, _, block = map_private(file.fileno(), 0, pages * _PAGE)
    return address, pages * _PAGE, block


def ended_by(body: str, *arguments: str) -> tuple[int, str]:
    """The exit status of a program, and what it wrote to its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", _SETUP + body, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stderr


def test_what_is_gone_reads_as_zeros_and_the_guard_says_so(tmp_path: Path) -> None:
    address, nbytes, block = mapped(tmp_path / "data", 8)
    other, _, other_block = mapped(tmp_path / "other", 8)
    guard, other_guard = Guard(address, nbytes, block), Guard(other, nbytes, other_block)
    os.truncate(tmp_path / "data", 2 * _PAGE)
    assert ctypes.string_at(address, 2 * _PAGE) == b"\1" * 2 * _PAGE
    assert not guard.lost
    assert ctypes.string_at(address, nbytes) == b"\1" * 2 * _PAGE + bytes(6 * _PAGE)
    assert guard.lost
    assert ctypes.string_at(other, nbytes) == b"\1" * nbytes
    assert not other_guard.lost


def test_several_threads_lose_the_same_file(tmp_path: Path) -> None:
    address, nbytes, block = mapped(tmp_path / "data", 256)
    guard = Guard(address, nbytes, block)
    os.truncate(tmp_path / "data", 0)

    def read(page: int) -> tuple[bytes, bool]:
        return ctypes.string_at(address + page * _PAGE, _PAGE), guard.lost

    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(read, reversed(range(256)))]
    assert found == [(bytes(_PAGE), True)] * 256


def test_a_new_guard_has_lost_nothing(tmp_path: Path) -> None:
    address, nbytes, block = mapped(tmp_path / "data", 1)
    guard = Guard(address, nbytes, block)
    os.truncate(tmp_path / "data", 0)
    ctypes.string_at(address, nbytes)
    assert guard.lost
    del block
    gc.collect()
    address, nbytes, block = mapped(tmp_path / "data", 1)
    assert not Guard(address, nbytes, block).lost


def test_what_a_signal_handler_raises_ends_no_guard_too_late(tmp_path: Path) -> None:
    """Between two bytecodes of a finalizer, it was lost, and other memory was guarded for ever."""
    address, nbytes, block = mapped(tmp_path / "data", 1)
    guards = [Guard(address, nbytes, block)]
    place, buffer = allocate(64)
    ctypes.memset(place, 1, 64)
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: event == "call" and calls.append(frame.f_code.co_name))
    del block, buffer
    sys.setprofile(None)
    assert not calls
    known = guards[0]._number
    address, nbytes, block = mapped(tmp_path / "data", 1)
    assert Guard(address, nbytes, block)._number == known  # which had ended


def test_a_range_begins_with_a_page(tmp_path: Path) -> None:
    address, nbytes, block = mapped(tmp_path / "data", 1)
    for range_ in ((address + 1, nbytes), (address, 0)):
        with pytest.raises(ValueError, match="begins with a page"):
            Guard(*range_, block)


_OTHER = """
address, nbytes, block = mapped(sys.argv[1])
guarded, _, owner = mapped(sys.argv[2])
guard = Guard(guarded, nbytes, owner)
{before}
os.truncate(sys.argv[1], 0)
ctypes.string_at(address, nbytes)
print("alive")
"""


@pytest.mark.parametrize(
    "before",
    ["", "del owner", "import faulthandler; faulthandler.enable()"],
    ids=["guarded", "guard ended", "handler installed later"],
)
def test_what_is_not_guarded_ends_the_process_as_before(tmp_path: Path, before: str) -> None:
    body = _OTHER.format(before=before)
    ended, said = ended_by(body, str(tmp_path / "a"), str(tmp_path / "b"))
    assert ended == -7, said
    assert ("Fatal Python error: Bus error" in said) == ("faulthandler" in before)


def test_a_handler_that_was_there_before_is_called_and_comes_back(tmp_path: Path) -> None:
    enable = "import faulthandler; faulthandler.enable()"
    body = enable + _OTHER.format(before="")
    ended, said = ended_by(body, str(tmp_path / "a"), str(tmp_path / "b"))
    assert (ended, "Fatal Python error: Bus error" in said) == (-7, True)
    body = enable + _OTHER.format(before="del owner")
    ended, said = ended_by(body, str(tmp_path / "a"), str(tmp_path / "b"))
    assert (ended, "Fatal Python error: Bus error" in said) == (-7, True)


@pytest.mark.parametrize("before", ["", "import faulthandler; faulthandler.enable()"])
def test_a_handler_that_was_installed_between_two_guards_ends_the_process(
    tmp_path: Path, before: str
) -> None:
    """It restores the one that it replaced, which is ours, and raises the signal again."""
    body = _OTHER.format(
        before="import faulthandler; faulthandler.enable(); del owner\n"
        "guarded, _, owner = mapped(sys.argv[2]); guard = Guard(guarded, nbytes, owner)"
    )
    ended, said = ended_by(before + body, str(tmp_path / "a"), str(tmp_path / "b"))
    assert (ended, "Fatal Python error: Bus error" in said) == (-7, True)


def test_a_signal_that_somebody_sends_ends_the_process(tmp_path: Path) -> None:
    body = _OTHER.format(before="import signal; os.kill(os.getpid(), signal.SIGBUS)")
    ended, said = ended_by(body, str(tmp_path / "a"), str(tmp_path / "b"))
    assert ended == -7, said
