"""Which processes a test has started, and those have started in turn."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes import fork_server

from torchstore_core.machine import processes

__all__ = ["mark", "started"]

_MARK = "CRASH_TEST_OF_SNAPSHOTS"
# By mark, all that were ever found, by pid and when they were started: a process that is ending has
# no environment any more.
_seen: dict[str, dict[tuple[int, int], str]] = {}


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What all processes of this test have in their environment; their sockets have a folder."""
    fork_server()  # is none of its processes
    name = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as runtime:
        monkeypatch.setenv(_MARK, name)
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        yield name


def started(mark: str) -> dict[str, list[int]]:
    """The writers and the servers of this test that are running, and its other processes."""
    seen = _seen.setdefault(mark, {})
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if f"{_MARK}={mark}".encode() in environment:
            kind = "writer" if b"torchstore_snapshot.background.writer" in command else "server"
            pid = int(entry.name)
            seen[pid, processes.started(pid)] = kind
    found: dict[str, list[int]] = {"writer": [], "server": []}
    for (pid, begun), kind in seen.items():
        state = "".join(processes.stat_fields(pid)[:1])
        if state not in ("", "Z", "X") and processes.started(pid) == begun:
            found[kind].append(pid)
    return found
