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
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        # One token for each job. A thread of either kind takes a token of its kind, and then the
        # next job, unless there is none left because a thread of the other kind has taken it.
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._urgent: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._urgent_threads: list[threading.Thread] = []
        self._open = 0  # jobs that have not ended
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, job: _Job) -> None:
        """Do a job in one of the threads. What it returns is then called by the event loop."""
        self._jobs.put(job)
        with self._lock:
            self._open += 1
            if self._open > len(self._threads) < self._count:
                self._start(self._threads, self._tokens, self._nice)
        self._tokens.put(True)

    def hurry(self) -> None:
        """Somebody waits for the jobs: as many threads of normal priority help with them."""
        if not self._nice:
            return
        while len(self._urgent_threads) < self._count:
            self._start(self._urgent_threads, self._urgent, 0)
        for _ in range(self._jobs.qsize() - self._urgent.qsize()):
            self._urgent.put(True)

    def close(self) -> None:
        """End the threads, each after the job that it is doing. Jobs that wait are not done."""
        self._closed = True
        for threads, tokens in (
            (self._threads, self._tokens),
            (self._urgent_threads, self._urgent),
        ):
            for _ in threads:
                tokens.put(False)
            for thread in threads:
                thread.join()

    def _start(
        self, threads: list[threading.Thread], tokens: queue.SimpleQueue[bool], nice: int
    ) -> None:
        arguments = (tokens, nice)
        thread = threading.Thread(target=self._run, args=arguments, name=self._name, daemon=True)
        threads.append(thread)
        thread.start()

    def _run(self, tokens: queue.SimpleQueue[bool], nice: int) -> None:
        if nice:
            try:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
            except OSError:  # not permitted here: it only runs less politely
                log.debug("thread %s keeps its priority", self._name)
        while tokens.get():
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                continue
            if self._closed:
                continue
            try:
                self._soon(job())
            except Exception:
                log.exception("thread %s failed", self._name)
            with self._lock:
                self._open -= 1
            del job
