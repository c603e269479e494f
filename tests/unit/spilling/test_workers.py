"""The threads that spill."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from torchstore_core.errors import TransportNotReadyError
from torchstore_core.server.spilling.threads import _why
from torchstore_core.server.spilling.workers import Workers


def never(error: Exception) -> None:
    raise AssertionError("a job failed") from error


def test_jobs_are_done_once_and_reported() -> None:
    done: list[int] = []
    all_done = threading.Event()

    def job(number: int) -> Callable[[], Callable[[], None]]:
        return lambda: lambda: (done.append(number), len(done) == 50 and all_done.set())  # type: ignore[func-returns-value]

    workers = Workers("test", 3, 5, lambda call: call())
    for number in range(50):
        workers.submit(job(number), never)
        if number % 10 == 0:
            workers.hurry()
    assert all_done.wait(60)
    workers.close()
    assert sorted(done) == list(range(50))


def test_others_help_when_somebody_waits() -> None:
    release, helped = threading.Event(), threading.Event()

    def stuck() -> Callable[[], None]:
        release.wait(60)
        return lambda: None

    workers = Workers("test", 1, 5, lambda call: call())
    workers.submit(stuck, never)
    workers.submit(lambda: helped.set, never)
    assert not helped.wait(0.05)
    workers.hurry()
    assert helped.wait(60)
    release.set()
    workers.close()


def test_they_come_after_what_clients_wait_for() -> None:
    """But not those that help when a client does wait for them."""
    release = threading.Event()
    both = threading.Barrier(3)
    found: list[int] = []

    def priority() -> Callable[[], None]:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        both.wait(60)
        release.wait(60)
        return lambda: None

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    workers = Workers("test", 1, 5, lambda call: call())
    for _ in range(2):
        workers.submit(priority, never)
    workers.hurry()
    both.wait(60)
    release.set()
    workers.close()
    assert sorted(found) == [own, min(own + 5, 19)]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError(), OSError(5, "a disk")])
def test_a_job_that_fails_ends_no_thread_and_says_so(error: Exception) -> None:
    done = threading.Event()
    failures: list[Exception] = []

    def fails() -> Callable[[], None]:
        raise error

    workers = Workers("test", 1, 0, lambda call: call())
    workers.submit(fails, failures.append)
    workers.submit(lambda: done.set, never)
    assert done.wait(60)
    workers.close()
    assert failures == [error]


def test_a_system_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would do the job; later there is a thread, and it does the next one."""
    done = threading.Event()
    failures: list[Exception] = []

    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers = Workers("test", 1, 5, lambda call: call())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        workers.submit(lambda: done.set, failures.append)
        workers.hurry()
    (error,) = failures
    assert isinstance(error, TransportNotReadyError)
    assert _why(error).startswith(f"process {os.getpid()} can start no more threads (can't start")
    assert not done.is_set()
    workers.submit(lambda: done.set, never)
    workers.hurry()
    assert done.wait(60)
    workers.close()


def test_close_leaves_what_waits() -> None:
    release, begun = threading.Event(), threading.Event()
    later: list[int] = []

    def stuck() -> Callable[[], None]:
        begun.set()
        release.wait(60)
        return lambda: None

    workers = Workers("test", 1, 0, lambda call: call())
    workers.submit(stuck, never)
    workers.submit(lambda: lambda: later.append(1), never)
    assert begun.wait(60)
    closing = threading.Thread(target=workers.close)
    closing.start()
    while not workers._closed:
        pass
    release.set()
    closing.join(60)
    assert not closing.is_alive()
    assert later == []
