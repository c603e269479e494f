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
        writer and the store together, beyond what they need after a tiny one.
        """
        path = self._folder / "budget"
        Snapshot.async_take(path, {"m": StateDict(a=torch.ones(4))}, memory_budget=budget).wait()
        shutil.rmtree(path)
        before = _memory()
        highest = before
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
        return {"nbytes": highest - before, "wrong": wrong}


def _memory() -> int:
    """Memory of this process and of those that it has started; shared pages count once, and the
    page cache does not.
    """
    me = psutil.Process(os.getpid())
    total = 0
    for process in (me, *me.children(recursive=True)):
        try:
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        for name in ("Pss_Anon", "Pss_Shmem"):
            total += int(fields[name].split()[0]) << 10
    return total
