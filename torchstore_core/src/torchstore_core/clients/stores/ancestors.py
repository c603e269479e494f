"""Stores of the processes that this one descends from, for children whose environment is older.

A fork server, the default way of ``multiprocessing`` from Python 3.14 on, gives its children the
environment that it was started with, maybe before there was a store. So a process leaves a note of
what it has put into its environment beside the store's socket: nobody else can write there, and it
goes with the store. It is believed only of a living ancestor: a stranger's store is never found.
Torch-free.
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
from torchstore_core.machine.directories import CONTROL, runtime_directory

__all__ = ["found", "note", "parent"]

_PREFIX = "published-"
_FURTHEST = 64  # generations


class _Note(msgspec.Struct, frozen=True):
    """Of a process: what it has published. Pids are used again, and not unique over containers."""

    pid: int
    started: int
    pids: str
    host: str
    store_name: str
    address: str


def note(store_name: str, address: str | None) -> None:
    """Leave word that this process has published a store; None: that it has not, any more."""
    base = _base()
    if base is None:
        return
    if address is None:
        for path in base.glob(f"*/{_PREFIX}{os.getpid()}-{_hex(store_name)}"):
            path.unlink(missing_ok=True)
        return
    folder = Path(address.removeprefix("unix:")).parent
    started = topology.start_time(os.getpid())
    if folder.parent != base or started is None:
        return
    said = _Note(os.getpid(), started, _pids(), topology.probe().host_id, store_name, address)
    path = folder / f"{_PREFIX}{os.getpid()}-{_hex(store_name)}"
    draft = path.with_name(f".{path.name}")
    with contextlib.suppress(OSError):  # the store is ending, or the disk is full
        draft.write_bytes(msgspec.json.encode(said))
        draft.rename(path)


def found(store_name: str) -> str | None:
    """The address that the nearest ancestor has published, of those that live."""
    base = _base()
    notes: dict[int, str] = {}
    for path in [] if base is None else base.glob(f"*/{_PREFIX}*-{_hex(store_name)}"):
        said = _read(path)
        if said is not None and said.store_name == store_name and (path.parent / CONTROL).exists():
            notes[said.pid] = said.address
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
        said = msgspec.json.decode(path.read_bytes(), type=_Note)
    except (OSError, msgspec.DecodeError):  # it goes just now
        return None
    here = (topology.start_time(said.pid), _pids(), topology.probe().host_id)
    return said if here == (said.started, said.pids, said.host) else None


def _ancestors() -> list[int]:
    """Nearest first: those that ``multiprocessing`` knows, then those that the system knows, which
    is the fork server and who started it.
    """
    logical = parent()
    every = [] if logical is None else _line(logical)
    return [*every, *_line(os.getppid())]


def _line(pid: int) -> list[int]:
    line: list[int] = []
    while pid > 1 and len(line) < _FURTHEST:
        line.append(pid)
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        pid = int(status.rpartition(")")[2].split()[1])
    return line


def _base() -> Path | None:
    try:
        return runtime_directory()
    except (ConfigurationError, OSError):
        return None


def _pids() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _hex(store_name: str) -> str:
    """A name for files, of at most 32 characters."""
    return hashlib.sha256(store_name.encode(errors="surrogatepass")).hexdigest()[:32]
