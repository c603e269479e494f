"""Runs tasks that block, such as reads and writes, on several threads at once. Torch-free."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from torchstore_core.machine.copying import copy_threads
from torchstore_snapshot.stopping import Stop, Stopped, check, current, until

__all__ = ["interleaved", "run_tasks", "task_size"]

Task = Callable[[], None]

_SIZE_MIN, _SIZE_MAX = 1 << 20, 16 << 20


def run_tasks(tasks: Iterable[Task], threads: int | None = None) -> None:
    """Run all tasks, each once, and return when all of them have ended. The calling thread is one
    of the threads. After an error, no further task begins.

    Args:
        tasks: taken one by one, in order, when a thread is free.
        threads: how many threads; None: the number of copy threads.

    Raises:
        BaseException: what the first failed task raised, when all running tasks have ended.
        Stopped: the call that this is part of was stopped; see :mod:`.stopping`.

    >>> done = []
    >>> run_tasks([lambda: done.append(1), lambda: done.append(2)])
    >>> sorted(done)
    [1, 2]
    """
    queue = _Queue(iter(tasks))
    stop = Stop(current())
    count = copy_threads() if threads is None else threads
    helpers: list[threading.Thread] = []
    try:
        for i in range(count - 1):
            if queue.empty:
                break
            helper = threading.Thread(
                target=stop.run, args=(queue.work,), name=f"torchstore-snapshot-{i}"
            )
            helper.start()
            helpers.append(helper)
        stop.run(queue.work)
    except BaseException:  # an interrupt: the buffers of the tasks must not be in use afterwards
        stop.set()
        raise
    finally:
        for helper in helpers:
            until(helper.join)
    if queue.error is not None:
        raise queue.error


def task_size(left: int) -> int:
    """Return how many of the ``left`` bytes the next task should have. Tasks are large, because
    each needs the interpreter lock, but smaller towards the end, so that all threads end at about
    the same time.
    """
    return min(max(left // (2 * copy_threads()), _SIZE_MIN), _SIZE_MAX)


class _Queue:
    def __init__(self, tasks: Iterator[Task]) -> None:
        self._tasks = tasks
        self._lock = threading.Lock()
        self.empty = False
        self.error: BaseException | None = None

    def work(self) -> None:
        while True:
            try:
                check()
                with self._lock:
                    task = None if self.empty else next(self._tasks, None)
                    if task is None:
                        self.empty = True
                        return
                task()
            except (Exception, Stopped) as error:  # noqa: BLE001 - raised again by the caller
                with self._lock:
                    self.error = self.error or error
                self.empty = True
                return


class _Lane:
    def __init__(self, tasks: Iterator[Task]) -> None:
        self.tasks = tasks
        self.running = 0


def interleaved(lanes: Sequence[Iterator[Task]], width: int) -> Iterator[Task]:
    """Return the tasks of several lanes, for threads that should get in each other's way as little
    as possible: the next one is from the lane of which the fewest are running.

    Args:
        lanes: the tasks of each, which are in order.
        width: from how many lanes tasks are taken at a time.

    >>> a, b = (iter([functools.partial(print, name)] * 2) for name in "ab")
    >>> for task in interleaved([a, b], width=2):
    ...     task()
    a
    a
    b
    b
    """
    lock = threading.Lock()
    waiting = list(reversed(lanes))
    open_: list[_Lane] = []
    while True:
        while waiting and len(open_) < width:
            open_.append(_Lane(waiting.pop()))
        if not open_:
            return
        lane = min(open_, key=lambda lane: lane.running)
        task = next(lane.tasks, None)
        if task is None:
            open_.remove(lane)
            continue
        with lock:
            lane.running += 1
        yield functools.partial(_run_in, lane, lock, task)


def _run_in(lane: _Lane, lock: threading.Lock, task: Task) -> None:
    try:
        task()
    finally:
        with lock:
            lane.running -= 1
