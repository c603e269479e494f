"""When a keeper gives up its server: programs that do what a server says, and die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchstore_core.server.keeping.link import KEEPER

# Of its life: it says that it is ready, or not; and dies, or ends well in the last one.
SERVER = """
import json, os, signal, socket, sys
with open(int(sys.argv[-1]), "rb", closefd=False) as paper:
    paper.seek(0)
    given = json.load(paper)
lives, ready, last = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
with open(lives, "a") as file:
    file.write("x")
if given["life"] == 1 or ready:
    socket.socket(fileno=given["connection"]).send(b'{"ready": true}')
os._exit(0) if given["life"] == last else os.kill(os.getpid(), signal.SIGKILL)
"""


def lives(tmp_path: Path, *, ready: bool, last: int) -> tuple[int, int]:
    """Of how many lives a keeper has made, and its exit status."""
    told = tmp_path / "lives"
    server = [sys.executable, "-ISc", SERVER, str(told), json.dumps(ready), str(last)]
    order = json.dumps({"command": server, "owner": os.getpid()})
    quiet = {**os.environ, "TORCHSTORE_LOG_LEVEL": "ERROR"}
    keeper = [sys.executable, "-IS", KEEPER, order]
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
    made, status = lives(tmp_path, ready=True, last=2000)
    assert 100 < made < 2000
    assert status == 1
