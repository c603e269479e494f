"""The threads that write to and read from the spill file."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable

__all__ = ["Workers"]

log = logging.getLogger(__name__)

_Job = Callable[[], Callable[[], None]]


class Workers:
    """A few threads, which are started when there is work for them.

    Args:
        name: of the threads.
        count: how many threads there are at most.
        nice: how much lower than the server's their priority is.
        soon: calls something in the thread of the event loop; it may be called in any thread.
    """

    def __init__(
        self, name: str, count: int, nice: int, soon: Callable[[Callable[[], None]], None]
    ) -> None:
        self._name = name
        self._count = count
        self._nice = nice
        self._soon = soon
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open = 0  # jobs that have not ended
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, job: _Job) -> None:
        """Do a job in one of the threads. What it returns is then called by the event loop."""
        with self._lock:
            self._open += 1
            if self._open > len(self._threads) < self._count:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """End the threads, each after the job that it is doing. Jobs that wait are not done."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        if self._nice:
            try:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
            except OSError:  # not permitted here: it only runs less politely
                log.debug("thread %s keeps its priority", self._name)
        while (job := self._jobs.get()) is not None:
            if self._closed:
                continue
            try:
                self._soon(job())
            except Exception:
                log.exception("thread %s failed", self._name)
            with self._lock:
                self._open -= 1
            del job
