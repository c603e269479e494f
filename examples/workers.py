"""Shared by the examples with progress bars: starting child processes and following their progress.

Nothing here knows about the store.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

# Imported once, by the fork server, from which all workers are forked.
_HEAVY = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
]

TIMEOUT_S = 120.0  # another process must load its model first, or train
Report = Callable[[dict[str, Any]], None]
_interrupted, _interrupt = socket.socketpair()


@dataclass
class Worker:
    """A child process, our end of its pipe, and the reports it has sent."""

    name: str
    process: BaseProcess
    connection: Connection
    reports: list[dict[str, Any]] = field(default_factory=list)


def start(name: str, target: Callable[..., None], *arguments: Any) -> Worker:
    """Start a process that calls ``target(connection, *arguments)``. It sends reports, which are
    dicts with a ``"step"``, over the connection. Ctrl-C does not reach it, only this process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_HEAVY)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(theirs, *arguments), name=name)
    resource_tracker.ensure_running()  # starting it later would unblock the signal
    _defer_ctrl_c()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # a child inherits the mask
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return Worker(name, process, ours)


def _defer_ctrl_c() -> None:
    """From now on :func:`follow` waits for Ctrl-C. If it were raised as an exception at an
    arbitrary point, it could leave a lock taken.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _interrupt.setblocking(False)
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.set_wakeup_fd(_interrupt.fileno())


def stop() -> None:
    """End the workers that are still running."""
    processes = multiprocessing.active_children()
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(5)
        process.kill()
        process.join()


def follow(
    workers: Sequence[Worker],
    steps: int,
    console: Console,
    note: Callable[[Worker, dict[str, Any]], str],
) -> None:
    """Show progress until all workers have ended.

    Raises SystemExit as soon as one of them fails, and KeyboardInterrupt at Ctrl-C.

    Args:
        note: returns the text to show for a report, next to the worker's progress bar.
    """
    width = max(len(worker.name) for worker in workers)
    columns = (
        TextColumn(f"{{task.description:<{width}}}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    running: dict[Any, Worker] = {worker.connection: worker for worker in workers}
    with Progress(*columns, console=console) as progress:
        bars = {w.name: progress.add_task(w.name, total=steps, note="") for w in workers}
        while running:
            for connection in wait([*running, _interrupted]):
                if connection is _interrupted:
                    raise KeyboardInterrupt
                worker = running[connection]
                try:
                    report = worker.connection.recv()
                except EOFError:
                    del running[connection]
                    worker.process.join()
                    if code := worker.process.exitcode:
                        raise SystemExit(f"{worker.name} died, exit code {code}") from None
                    continue
                worker.reports.append(report)
                text = note(worker, report)
                progress.update(bars[worker.name], completed=report["step"], note=text)


def checksum(tensor: torch.Tensor) -> str:
    """Return the checksum of a tensor's bytes, whatever its dtype."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy()).hexdigest()


def copy_floor(nbytes: int) -> Callable[[], float]:
    """Return a function that copies ``nbytes`` of warm memory on all cores and times it."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    cores = os.cpu_count() or 1
    part = -(-nbytes // cores)
    pool = ThreadPoolExecutor(cores)

    def copy(at: int) -> None:  # memmove releases the GIL
        size = min(part, nbytes - at)
        ctypes.memmove(target.data_ptr() + at, source.data_ptr() + at, size)

    def measure() -> float:
        started = time.perf_counter()
        list(pool.map(copy, range(0, nbytes, part)))
        return time.perf_counter() - started

    return measure


def times(worker: Worker, nbytes: int, what: str = "seconds") -> dict[str, float]:
    """Return the median and maximum time of a worker's reports, and the rate at the median."""
    seconds = [report[what] for report in worker.reports]
    median = statistics.median(seconds)
    return {"median_s": median, "max_s": max(seconds), "gb_per_s": nbytes / median / 1e9}
