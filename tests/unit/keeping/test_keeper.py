"""When a keeper gives up its server: programs that do what a server says, and die."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Of each life of its server: it says that it is ready, or not; and dies, or ends well in the last.
PROGRAM = """
import os, signal, sys
from torchstore_core.server.keeping.keeper import Keeper

told, always_ready, last = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3])

def serve(keeper):
    with open(told, "a") as file:
        file.write("x")
    if keeper.life == 1 or always_ready:
        keeper.ready()
    if keeper.life < last:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0

sys.exit(Keeper(serve, print).run())
"""


def lives(tmp_path: Path, *, ready: bool, last: int) -> tuple[int, int]:
    """How many lives a keeper has made, and its exit status."""
    told = tmp_path / "lives"
    quiet = {**os.environ, "TORCHSTORE_LOG_LEVEL": "ERROR"}
    keeper = [sys.executable, "-c", PROGRAM, str(told), str(ready), str(last)]
    ended = subprocess.run(keeper, env=quiet, timeout=60, stdout=subprocess.DEVNULL, check=False)
    return len(told.read_text()), ended.returncode


def test_a_server_that_always_comes_up_is_started_again(tmp_path: Path) -> None:
    assert lives(tmp_path, ready=True, last=70) == (70, 0)


def test_one_that_does_not_come_up_is_given_up(tmp_path: Path) -> None:
    made, status = lives(tmp_path, ready=False, last=200)
    assert 30 <= made < 200
    assert status == 1


@pytest.mark.soak
def test_one_that_comes_up_faster_than_any_server_can_is_given_up(tmp_path: Path) -> None:
    made, status = lives(tmp_path, ready=True, last=5000)
    assert 100 < made < 5000
    assert status == 1
