"""Commands of a measured process: a trainer that takes snapshots in the background."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed.checkpoint as dcp

import torchstore_core as ts
from torchstore_cli.bench import workload
from torchstore_cli.bench.measuring import timed, timed_call
from torchstore_snapshot import Snapshot, StateDict

_IDLE_STEPS = 20
_KEY = "state"
_PARTS = 25


class Trainer:
    """Commands on a model's weights in a store of this process's own.

    Args:
        run: runs a coroutine on the process's event loop.
    """

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run = run
        self._state: dict[str, torch.Tensor] = {}
        self._folder = Path()
        self._matrix = torch.ones(640, 640)

    def make(self, shapes: list[tuple[str, list[int]]], seed: int, folder: str) -> None:
        """Make the weights."""
        self._folder = Path(folder)
        self._state = workload.make({name: tuple(shape) for name, shape in shapes}, seed)

    def drop(self) -> None:
        """Give the weights back."""
        self._state = {}

    def round(self, turn: int) -> dict[str, Any]:
        """One round: a put of the weights, an ``async_take`` and a ``dcp.async_save`` of them: for
        how long each holds the trainer up, and what its steps take meanwhile and otherwise.
        """
        times: dict[str, float] = {}
        times["put"], _ = self._run(timed(ts.put_state_dict(self._state, _KEY)))
        self._run(ts.delete_batch(list(self._run(ts.keys(_KEY)))))
        remaining = iter(range(_IDLE_STEPS))
        times |= self._steps("alone", lambda: next(remaining, None) is None)
        path = self._folder / "async"
        start = time.perf_counter()
        pending = Snapshot.async_take(path, {"model": StateDict(**self._state)})
        times["async_take"] = time.perf_counter() - start
        times |= self._steps("writing", pending.done)
        snapshot = pending.wait()
        times["committed"] = time.perf_counter() - start
        wrong = [] if not snapshot.verify() else ["async_take"]
        shutil.rmtree(path)
        start = time.perf_counter()
        future: Any = dcp.async_save(self._state, checkpoint_id=path, no_dist=True)
        times["dcp.async_save"] = time.perf_counter() - start
        times |= self._steps("dcp writing", future.done)
        future.result()
        shutil.rmtree(path)
        return {"times": times, "wrong": wrong}

    def _steps(self, when: str, done: Callable[[], bool]) -> dict[str, float]:
        """Mean seconds of steps until ``done`` (at least one of each kind): of those on one thread,
        and of those on as many threads as there are processors, which alternate.
        """
        narrow, wide = [], []
        while not narrow or not done():
            with workload.one_thread():
                narrow.append(timed_call(self._step))
            wide.append(timed_call(self._step))
        means = sum(narrow) / len(narrow), sum(wide) / len(wide)
        return dict(zip((f"step, {when}", f"wide step, {when}"), means, strict=True))

    def _step(self) -> None:
        """One step of some milliseconds, of nothing but arithmetic."""
        for _ in range(4):
            torch.mm(self._matrix, self._matrix)

    def peak(self, budget: int) -> dict[str, Any]:
        """Bytes of memory that an ``async_take`` with a budget needs at most, in this process, the
        writer and the server of the store together, beyond what these need when nothing was staged
        yet; and what the two processes need in themselves.
        """
        path = self._folder / "budget"
        before = _memory()
        Snapshot.async_take(path, {"m": StateDict(a=torch.ones(4))}, memory_budget=budget).wait()
        shutil.rmtree(path)
        idle = highest = _memory()
        done = threading.Event()

        def watch() -> None:
            nonlocal highest
            while not done.wait(0.003):
                highest = max(highest, _memory())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            state = {"model": StateDict(**self._state)}
            snapshot = Snapshot.async_take(path, state, memory_budget=budget).wait()
        finally:
            done.set()
            watcher.join()
        wrong = [] if not snapshot.verify() else ["async_take with a budget"]
        shutil.rmtree(path)
        return {"nbytes": highest - idle, "processes": idle - before, "wrong": wrong}

    def incremental(self, share: float) -> dict[str, Any]:
        """Bytes that a take writes when a share of the tensors has changed since its base."""
        folder = self._folder / "series"
        parts = {
            f"{name}.{at}": part
            for name, tensor in self._state.items()
            for at, part in enumerate(tensor.view(-1).chunk(_PARTS))
        }
        state = {"model": StateDict(**parts)}
        Snapshot.take(folder / "0", state)
        changed = [*parts.values()][:: round(1 / share)]
        for part in changed:
            part.view(torch.int16)[-1] += 1
        seconds = timed_call(
            lambda: Snapshot.take(folder / "1", state, base=str(folder / "0"), fsync=False)
        )
        written = sum(path.stat().st_size for path in (folder / "1").iterdir())
        wrong = [] if not Snapshot(folder / "1").verify() else ["incremental take"]
        shutil.rmtree(folder)
        nbytes = sum(part.nbytes for part in parts.values())
        return {"written": written, "nbytes": nbytes, "seconds": seconds, "wrong": wrong}


def _memory() -> int:
    """Memory of this process and of those that it has started: private memory, and all that their
    shared memory has allocated, mapped or not. The page cache does not count.
    """
    me = psutil.Process(os.getpid())
    total = 0
    shared: dict[tuple[int, int], int] = {}
    for process in (me, *me.children(recursive=True)):
        folder = Path(f"/proc/{process.pid}")
        try:
            text = (folder / "smaps_rollup").read_text()
            files = [*(folder / "fd").iterdir()]
        except OSError:  # it has ended
            continue
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        total += int(fields["Pss_Anon"].split()[0]) << 10
        for file in files:
            try:
                if str(file.readlink()).startswith("/memfd:"):
                    stat = file.stat()
                    shared[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
            except OSError:  # it was closed
                continue
    return total + sum(shared.values())
