"""The threads that write to and read from the spill file."""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
from collections.abc import Callable

from torchstore_core.errors import TransportNotReadyError
from torchstore_core.machine.threads import start_thread

log = logging.getLogger(__name__)

_Job = Callable[[], Callable[[], None]]
_Failed = Callable[[Exception], None]


class Workers:
    """A few threads, which are started when there is work for them.

    Args:
        name: of the threads.
        count: how many threads there are at most.
        nice: how much lower than the server's their priority is.
        soon: calls something in the thread of the event loop; it may be called in any thread.
    """

    def __init__(
        self, name: str, count: int, nice: int, soon: Callable[[Callable[[], None]], object]
    ) -> None:
        self._name = name
        self._count = count
        self._nice = nice
        self._soon = soon
        self._jobs: queue.SimpleQueue[tuple[_Job, _Failed]] = queue.SimpleQueue()
        # One token for each job. A thread of either kind takes a token of its kind, and then the
        # next job, unless there is none left because a thread of the other kind has taken it.
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._urgent: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._urgent_threads: list[threading.Thread] = []
        self._open = 0  # jobs that have not ended
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, job: _Job, failed: _Failed) -> None:
        """Do a job in one of the threads. What it returns is then called by the event loop; or, if
        it raises or no thread can be started, ``failed``, with why.
        """
        with self._lock:
            self._open += 1
            if self._open > len(self._threads) < self._count:
                error = self._start(self._threads, self._tokens, self._nice)
                if error is not None and not self._threads:
                    self._open -= 1
                    self._soon(functools.partial(failed, error))
                    return
        self._jobs.put((job, failed))
        self._tokens.put(True)

    def hurry(self) -> None:
        """Somebody waits for the jobs: as many threads of normal priority help with them."""
        if not self._nice:
            return
        while len(self._urgent_threads) < self._count:
            if self._start(self._urgent_threads, self._urgent, 0) is not None:
                break
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
    ) -> Exception | None:
        """Start one more thread; why that is not possible, if it is not."""
        try:
            threads.append(start_thread(functools.partial(self._run, tokens, nice), self._name))
        except TransportNotReadyError as error:
            log.warning("%s", error)
            return error
        return None

    def _run(self, tokens: queue.SimpleQueue[bool], nice: int) -> None:
        if nice:
            try:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
            except OSError:  # not permitted here: it only runs less politely
                log.debug("thread %s keeps its priority", self._name)
        while tokens.get():
            try:
                job, failed = self._jobs.get_nowait()
            except queue.Empty:
                continue
            if self._closed:
                continue
            try:
                done = job()
            except Exception as error:
                if not isinstance(error, OSError):  # which disks are expected to raise
                    log.exception("thread %s: a job failed", self._name)
                done = functools.partial(failed, error)
            self._soon(done)
            with self._lock:
                self._open -= 1
            del job, failed, done
