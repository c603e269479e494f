"""After a take was interrupted or cancelled, nothing is read and nothing is committed."""

from __future__ import annotations

import asyncio
import linecache
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.processes import run_script
from tests.support import turn, until

import torchstore_core as ts
from torchstore_snapshot import Snapshot, SnapshotNotFoundError, StateDict
from torchstore_snapshot.aio import Snapshot as AsyncSnapshot
from torchstore_snapshot.aio import gc
from torchstore_snapshot.background import process
from torchstore_snapshot.background.staging import PREFIX
from torchstore_snapshot.format.paths import MANIFEST

MIB = 1 << 20


_INTERRUPTED = """
import ctypes, mmap, os, signal, threading, time, traceback
from torchstore_snapshot import Snapshot, StateDict
from torchstore_snapshot.background import process
memory = mmap.mmap(-1, 64 << 20)
state = {{"m": StateDict(w=torch.frombuffer(memory, dtype=torch.uint8))}}
Snapshot.async_take({folder!r} + "/0", {{"m": StateDict(w=torch.ones(9))}}, fsync=False).wait(300)
writer = process.the_writer().pid

interrupted = threading.Event()

def interrupt(*_):
    if not interrupted.is_set():
        interrupted.set()
        raise KeyboardInterrupt

def when_it_waits(thread=threading.main_thread()):
    # Two batches are staged, and the third one has to wait for the writer, which stands still.
    while not process._current._jobs or sum("/" in key for key in staged()) != 2:
        time.sleep(0.01)
    while not interrupted.wait(0.1):  # one that comes just before it waits does not wake it
        signal.pthread_kill(thread.ident, signal.SIGUSR1)

def staged():
    call = asyncio.run_coroutine_threadsafe(keys(), loop)
    return call.result(60)

async def keys():
    if table.known(name) is None:
        return []
    return await (await ts.client(name)).keys(".torchstore-snapshot/")

from torchstore_core.clients.calls import thread_loops
from torchstore_core.clients.stores import table
from torchstore_snapshot.background.stores import bounded, bounded_name
loop, name = thread_loops.background(), bounded_name()
bounded.begin()  # the store stays, so that what is left in it would be seen
signal.signal(signal.SIGUSR1, interrupt)
os.kill(writer, signal.SIGSTOP)
threading.Thread(target=when_it_waits, daemon=True).start()
try:
    Snapshot.async_take({folder!r} + "/1", state, fsync=False, memory_budget=16 << 20)
except KeyboardInterrupt:
    print("interrupted")
libc = ctypes.CDLL(None)
address = state["m"]["w"].data_ptr()
assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(64 << 20), 0) == 0  # no access
os.kill(writer, signal.SIGCONT)
Snapshot.async_take({folder!r} + "/2", {{"m": StateDict(n=2)}}, fsync=False).wait(300)
assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(64 << 20), 3) == 0
assert not staged()
"""


async def test_an_interrupted_take_in_the_background(tmp_path: Path) -> None:
    said = await run_script(_INTERRUPTED.format(folder=str(tmp_path)))
    assert said == "interrupted\n"
    # The program has ended; its writer, which has seen that, is the last to go.
    await until(lambda: not (tmp_path / "1").exists(), 20)
    assert Snapshot(tmp_path / "2").read_object("m/n") == 2


_INTERRUPTED_AS_IT_SENDS = """
import os, select, signal, threading, time
from torchstore_snapshot import Snapshot, StateDict
from torchstore_snapshot.background import process
Snapshot.async_take({folder!r} + "/0", {{"m": StateDict(n=0)}}, fsync=False).wait(300)
writer = process.the_writer()
interrupted = threading.Event()

def interrupt(*_):
    if not interrupted.is_set():
        interrupted.set()
        raise KeyboardInterrupt

def when_it_sends(thread=threading.main_thread()):
    # What the writer, which stands still, is to know of so many tensors fills the socket.
    while select.select([], [writer._connection], [], 0)[1]:
        time.sleep(0.01)
    while not interrupted.wait(0.1):  # one that comes just before it waits does not wake it
        signal.pthread_kill(thread.ident, signal.SIGUSR1)
    os.kill(writer.pid, signal.SIGCONT)

signal.signal(signal.SIGUSR1, interrupt)
os.kill(writer.pid, signal.SIGSTOP)
threading.Thread(target=when_it_sends, daemon=True).start()
many = {{str(number): torch.ones(2) for number in range(4000)}}
try:
    Snapshot.async_take({folder!r} + "/1", {{"m": StateDict(many)}}, fsync=False)
except KeyboardInterrupt:
    print("interrupted")
Snapshot.async_take({folder!r} + "/2", {{"m": StateDict(n=2)}}, fsync=False).wait(60)
"""


async def test_a_take_that_is_interrupted_as_it_sends_does_not_stop_the_next(
    tmp_path: Path,
) -> None:
    """What it had not sent was taken from the messages of the next."""
    said = await run_script(_INTERRUPTED_AS_IT_SENDS.format(folder=str(tmp_path)))
    assert said == "interrupted\n"
    await until(lambda: not (tmp_path / "1").exists(), 20)
    assert Snapshot(tmp_path / "2").read_object("m/n") == 2


async def test_a_cancelled_take_in_the_background(store: ts.Client, tmp_path: Path) -> None:
    tensor = torch.ones(64 * MIB, dtype=torch.uint8)
    writer = process.the_writer()
    os.kill(writer.pid, signal.SIGSTOP)
    try:
        take = asyncio.ensure_future(
            AsyncSnapshot.async_take(
                tmp_path / "s", {"m": StateDict(w=tensor)}, memory_budget=16 * MIB, fsync=False
            )
        )

        async def two_batches() -> bool:
            return len(await ts.keys(PREFIX)) == 4  # state dicts of one entry each

        await until(two_batches, 30)
        take.cancel()
        with pytest.raises(asyncio.CancelledError):
            await take
    finally:
        os.kill(writer.pid, signal.SIGCONT)
    await (await AsyncSnapshot.async_take(tmp_path / "t", {"m": StateDict(w=tensor)}, fsync=False))
    assert not await ts.keys(PREFIX)
    # The writer removes what it has of the first take while it takes the second.
    await until(lambda: not (tmp_path / "s").exists(), 20)


async def test_a_cancelled_take(tmp_path: Path) -> None:
    before = StateDict(w=torch.zeros(9))
    await AsyncSnapshot.take(tmp_path / "s", {"m": before}, fsync=False)
    loop, written, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def advance(done: int, total: int) -> None:
        loop.call_soon_threadsafe(written.set)
        assert go_on.wait(300)

    take = asyncio.ensure_future(
        AsyncSnapshot.take(
            tmp_path / "s",
            {"m": StateDict(w=torch.ones(32 * MIB, dtype=torch.uint8), n=1)},
            overwrite=True,
            fsync=False,
            progress=advance,
        )
    )
    await written.wait()
    take.cancel()
    await turn()
    assert not take.done()  # it is still reading
    loop.call_later(0.01, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await take
    snapshot = AsyncSnapshot(tmp_path / "s")
    assert (await snapshot.read_object("m/w")).tolist() == [0.0] * 9
    assert (await snapshot.verify()) == {}
    assert (await gc(tmp_path / "s", grace=0)).files == ()
    with pytest.raises(SnapshotNotFoundError):
        await snapshot.read_object("m/n")


async def test_a_cancelled_restore_writes_nothing_more(tmp_path: Path) -> None:
    state = {"m": StateDict(w=torch.ones(64 * MIB, dtype=torch.uint8))}
    snapshot = await AsyncSnapshot.take(tmp_path / "s", state, fsync=False)
    loop, read, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def advance(done: int, total: int) -> None:
        loop.call_soon_threadsafe(read.set)
        assert go_on.wait(300)

    target = torch.zeros(64 * MIB, dtype=torch.uint8)
    restore = asyncio.ensure_future(
        snapshot.restore({"m": StateDict(w=target)}, verify=False, progress=advance)
    )
    await read.wait()
    restore.cancel()
    loop.call_soon(go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await restore
    found = int(target.sum())
    assert 0 < found < target.numel()
    target.zero_()
    await snapshot.restore({"m": StateDict(n=0)}, strict=False)
    assert int(target.sum()) == 0


class _Interrupt:
    """Raises KeyboardInterrupt where a function of the package is about to run its line number
    ``number``, as a signal may.
    """

    def __init__(self, number: int) -> None:
        self._left = number

    def __enter__(self) -> _Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        where = Path(frame.f_code.co_filename).name, frame.f_code.co_name
        return self._line if where in _BEGINNING else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).split()
        # Where a block begins or ends, there is nothing that a signal could come after.
        if event == "line" and code[0] not in ("try:", "with"):
            self._left -= 1
            if not self._left:
                raise KeyboardInterrupt(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return self._line


# What makes the claim of a take, and what can be stopped.
_BEGINNING = {
    ("claims.py", "begin"),
    ("claims.py", "__init__"),
    ("claims.py", "_start"),
    ("local.py", "publish"),
    ("preparing.py", "agree"),
    ("stopping.py", "made"),
    ("stopping.py", "run"),
}


def test_an_interrupt_at_any_moment_of_the_beginning_leaves_nothing(tmp_path: Path) -> None:
    state = {"m": StateDict(w=torch.ones(9), n=1)}
    number = interrupted = 0
    while True:
        number += 1
        folder, where = tmp_path / str(number), ""
        with _Interrupt(number) as interrupt:
            try:
                Snapshot.take(folder, state, fsync=False)
            except KeyboardInterrupt as error:
                where = str(error)
        if interrupt._left > 0:
            break
        interrupted += bool(where)
        # When it comes too late, the snapshot is there.
        left = os.listdir(folder) if folder.exists() else [MANIFEST]
        assert MANIFEST in left, where
        assert not [name for name in left if name.startswith(".")], where
    assert interrupted > 30
    assert Snapshot(tmp_path / str(number)).verify() == {}
