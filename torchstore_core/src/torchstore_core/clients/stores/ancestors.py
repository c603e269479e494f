"""Stores of the processes that this one descends from, for children whose environment is older.

A fork server, the default of ``multiprocessing`` from Python 3.14 on, gives its children the
environment that it was started with, maybe before there was a store. So a process that publishes a
store in its environment also leaves a note beside the store's socket, where nobody else can write,
and which goes with the store. Only the note of a living ancestor is believed: a stranger's store
is never found. Torch-free.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from pathlib import Path

import msgspec

from torchstore_core.errors import ConfigurationError
from torchstore_core.machine import topology
from torchstore_core.machine.directories import CONTROL, find_files, runtime_directory
from torchstore_core.machine.processes import pid_namespace, stat_fields

_PREFIX = "published-"
_MOST_GENERATIONS = 64


class _Note(msgspec.Struct, frozen=True):
    """That a process has published a store. Pids are used again, and not unique over containers."""

    pid: int
    started: int
    pid_namespace: int
    host_id: str
    store_name: str
    address: str


def note(store_name: str, address: str | None) -> None:
    """Note that this process has published a store; None: that it no longer does."""
    base = _base()
    if base is None:
        return
    if address is None:
        for path in find_files(base, f"{_PREFIX}{os.getpid()}-{_hex(store_name)}"):
            path.unlink(missing_ok=True)
        return
    folder = Path(address.removeprefix("unix:")).parent
    started = topology.start_time(os.getpid())
    if folder.parent != base or started is None:
        return
    host_id = topology.probe().host_id
    noted = _Note(os.getpid(), started, pid_namespace(), host_id, store_name, address)
    path = folder / f"{_PREFIX}{os.getpid()}-{_hex(store_name)}"
    draft = path.with_name(f".{path.name}")
    with contextlib.suppress(OSError):  # the store is ending, or the disk is full
        draft.write_bytes(msgspec.json.encode(noted))
        draft.rename(path)


def find(store_name: str) -> str | None:
    """The address that the nearest ancestor has published, of those that live."""
    base = _base()
    notes: dict[int, str] = {}
    for path in [] if base is None else find_files(base, f"{_PREFIX}*-{_hex(store_name)}"):
        noted = _read(path)
        if noted is None or noted.store_name != store_name:
            continue
        if (path.parent / CONTROL).exists():
            notes[noted.pid] = noted.address
    if not notes:
        return None
    return next((notes[pid] for pid in _ancestors() if pid in notes), None)


def parent() -> int | None:
    """The pid of the process that made this one through ``multiprocessing``; None: none did."""
    # If it had, the module would be there.
    process = sys.modules.get("multiprocessing.process")
    made_by = None if process is None else process.parent_process()
    return None if made_by is None else int(made_by.pid)


def _read(path: Path) -> _Note | None:
    try:
        noted = msgspec.json.decode(path.read_bytes(), type=_Note)
    except (OSError, msgspec.DecodeError):  # it is being removed
        return None
    here = (topology.start_time(noted.pid), pid_namespace(), topology.probe().host_id)
    return noted if here == (noted.started, noted.pid_namespace, noted.host_id) else None


def _ancestors() -> list[int]:
    """Nearest first: those that ``multiprocessing`` knows, then those that the system knows, which
    is the fork server and who started it.
    """
    logical = parent()
    every = [] if logical is None else _lineage(logical)
    return [*every, *_lineage(os.getppid())]


def _lineage(pid: int) -> list[int]:
    line: list[int] = []
    while pid > 1 and len(line) < _MOST_GENERATIONS:
        line.append(pid)
        fields = stat_fields(pid)
        pid = int(fields[1]) if fields else 0
    return line


def _base() -> Path | None:
    try:
        return runtime_directory()
    except (ConfigurationError, OSError):
        return None


def _hex(store_name: str) -> str:
    """A name for files, of at most 32 characters."""
    return hashlib.sha256(store_name.encode(errors="surrogatepass")).hexdigest()[:32]
