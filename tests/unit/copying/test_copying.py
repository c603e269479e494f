"""The copy engine: every byte arrives, nothing else is touched, and it stops when told to."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support import until
from tests.unit.copying.native import needs_native

from torchstore_core.errors import ConfigurationError
from torchstore_core.machine import copying
from torchstore_core.machine.copying import Run


class Memory:
    """Some bytes at an address."""

    def __init__(self, content: bytes) -> None:
        self.nbytes = len(content)
        self._buffer = ctypes.create_string_buffer(content, max(self.nbytes, 1))
        self.address = ctypes.addressof(self._buffer)

    def content(self) -> bytes:
        return ctypes.string_at(self.address, self.nbytes)


def noise(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def without_native(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as it is where it was built without a compiler."""
    monkeypatch.setitem(sys.modules, "torchstore_core._native", None)
    spec = importlib.util.find_spec("torchstore_core.machine.copying")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not module.has_native()
    return module


@pytest.fixture(params=[pytest.param("native", marks=needs_native), "fallback"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param == "fallback":
        return without_native(monkeypatch)
    assert copying.has_native()
    return copying


# ---- plan -----------------------------------------------------------------------------------

Sizes = st.lists(st.integers(0, 300) | st.integers(0, 40), max_size=20)


@given(Sizes, st.integers(1, 200), st.randoms())
def test_a_plan_moves_the_same_bytes_in_chunks(sizes: list[int], chunk: int, rng: random.Random):
    """Byte for byte: each destination gets the source it had, once, in order."""
    pieces: list[Run] = []
    destination, source = 10_000, 90_000
    for size in sizes:
        pieces.append((destination, source, size))
        destination += size + rng.randrange(3)
        source += size + rng.randrange(100)
    chunks = copying.plan(pieces, chunk)
    wanted = [(d + i, s + i) for d, s, n in pieces for i in range(n)]
    got = [(d + i, s + i) for part in chunks for d, s, n in part for i in range(n)]
    assert got == wanted
    sums = [sum(n for _, _, n in part) for part in chunks]
    assert sums[:-1] == [chunk] * (len(sums) - 1)
    assert all(0 < n <= chunk for n in sums)
    assert all(n > 0 for part in chunks for _, _, n in part)


def test_a_plan_of_nothing_is_empty() -> None:
    assert copying.plan([]) == []
    assert copying.plan([(1, 2, 0)]) == []


# ---- copying --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
@given(
    sizes=st.lists(
        st.integers(0, 200)
        | st.integers(0, 70_000)
        | st.sampled_from([1, 63, 64, 65, 4095, 4096, 16383, 16384, 16385, 65536]),
        max_size=5,
    ),
    gaps=st.lists(st.integers(0, 130), min_size=12, max_size=12),
)
def test_exactly_the_pieces_are_copied(
    engine: ModuleType, stream: bool, sizes: list[int], gaps: list[int]
) -> None:
    """At any alignment of either side, whatever the size; and not one byte beside them."""
    room = sum(sizes) + sum(gaps) + 64
    source, before = noise(room, 1), noise(room, 2)
    here, there = Memory(source), Memory(before)
    expected = bytearray(before)
    pieces: list[Run] = []
    at, to = gaps[0], gaps[1]
    for size, gap, other in zip(sizes, gaps[2:], gaps[7:], strict=False):
        pieces.append((there.address + to, here.address + at, size))
        expected[to : to + size] = source[at : at + size]
        at, to = at + size + gap % 7, to + size + other % 11
    engine.copy_pieces(pieces, stream=stream)
    assert there.content() == expected
    assert here.content() == source


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 31, 63])
async def test_a_large_batch_arrives_whole(engine: ModuleType, stream: bool, shift: int) -> None:
    """Over the threads, in chunks that cut pieces anywhere."""
    sizes = [1, 5 << 20, 3, (9 << 20) + 17, 100, 0, 64]
    total = sum(sizes)
    source = noise(total + 64)
    here, there = Memory(source), Memory(bytes(total + 128))
    pieces: list[Run] = []
    at = 0
    for size in sizes:
        pieces.append((there.address + shift + at, here.address + at, size))
        at += size
    chunks = engine.plan(pieces)
    assert len(chunks) > 3
    await engine.run([lambda c=c: engine.copy_pieces(c, stream=stream) for c in chunks], total)
    content = there.content()
    assert content[shift : shift + total] == source[:total]
    assert not any(content[:shift])
    assert not any(content[shift + total :])


@needs_native
def test_the_native_copy_checks_what_it_is_given() -> None:
    from torchstore_core import _native as native

    for wrong in (b"", [(1, 2)], [[1, 2, 3]], [("1", 2, 3)], [(1, 2, 3.0)]):
        with pytest.raises(TypeError):
            native.copy_runs(wrong, 0, False, False)
    with pytest.raises(OverflowError):
        native.copy_runs([(1, 2, 1 << 64)], 0, False, False)
    native.copy_runs([], 0, True, True)


def test_runs_are_copied_from_a_base_and_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled copy and without."""
    memory = Memory(bytes(range(200)))
    for engine in (copying, without_native(monkeypatch)):
        here, there = Memory(bytes(10)), Memory(bytes(10))
        runs = [(here.address, 100, 3), (here.address + 5, 50, 4)]
        engine.copy_runs(runs, memory.address, into=False, stream=False)
        assert here.content() == bytes([100, 101, 102, 0, 0, 50, 51, 52, 53, 0])
        runs = [(here.address, 2, 3), (here.address + 5, 6, 4)]
        engine.copy_runs(runs, there.address, into=True, stream=True)
        assert there.content() == bytes([0, 0, 100, 101, 102, 0, 50, 51, 52, 53])


@needs_native
def test_the_native_copy_lets_other_threads_run() -> None:
    """One call may take a good while. (The machine may hold up the other thread during some.)"""
    half = 32 << 20
    memory = Memory(bytes(2 * half))
    ended = threading.Event()
    counted = most = 0

    def copy() -> None:
        nonlocal most
        for _ in range(20):
            before = counted
            copying.copy_pieces([(memory.address, memory.address + half, half)] * 40, stream=True)
            most = max(most, counted - before)
            if most >= 5:
                break
        ended.set()

    thread = threading.Thread(target=copy)
    thread.start()
    while not ended.wait(1e-4):
        counted += 1
    thread.join()
    assert most >= 5  # it would be one at most


# ---- running --------------------------------------------------------------------------------

SHARED = copying.DIRECT_MAX + 1
LARGE = copying.SHARED_MAX + 1


class Gate:
    """Tasks that begin, wait to be let through, and end; counted."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun = 0
        self.ended = 0
        self._lock = threading.Lock()

    def task(self) -> None:
        with self._lock:
            self.begun += 1
        assert self.open.wait(60)
        with self._lock:
            self.ended += 1

    @property
    def running(self) -> int:
        return self.begun - self.ended


async def test_small_batches_are_copied_by_the_caller() -> None:
    threads: list[int] = []
    tasks = [lambda: threads.append(threading.get_ident())] * 3
    await copying.run(tasks, copying.DIRECT_MAX)
    assert threads == [threading.get_ident()] * 3
    await copying.run(tasks, LARGE)
    assert len(threads) == 6
    assert threading.get_ident() not in threads[3:]


async def test_the_caller_copies_beside_the_threads() -> None:
    """It would take as long to be woken by them."""
    both = threading.Barrier(2)
    threads: set[int] = set()

    def task() -> None:
        both.wait(60)
        threads.add(threading.get_ident())

    await copying.run([task, task], SHARED)
    assert len(threads) == 2
    assert threading.get_ident() in threads


async def test_the_caller_waits_for_the_threads_beside_it() -> None:
    """Whether its own task is the last one, or one of theirs."""
    for _ in range(50):
        gate = Gate()
        threading.Timer(0.002, gate.open.set).start()
        caller = threading.get_ident()

        def task(gate: Gate = gate, caller: int = caller) -> None:
            if threading.get_ident() != caller:
                gate.task()

        await copying.run([task] * 4, SHARED)
        assert gate.running == 0


@pytest.mark.parametrize("nbytes", [0, SHARED, LARGE])
async def test_no_task_at_all_is_done_at_once(nbytes: int) -> None:
    """A batch of which another engine moves every byte, say."""
    async with asyncio.timeout(60):
        await copying.run([], nbytes)


@pytest.mark.parametrize("nbytes", [1, SHARED, LARGE])
async def test_the_error_of_a_task_is_the_callers(nbytes: int) -> None:
    ran: list[int] = []

    def fail() -> None:
        raise OSError("bus")

    def last() -> None:  # so long that all of them take longer than it takes to hear of the error
        ran.append(1)
        time.sleep(0.002)

    tasks: list[Callable[[], None]] = [lambda: ran.append(1), fail]
    tasks += [last] * 1000
    with pytest.raises(OSError, match="bus"):
        await copying.run(tasks, nbytes)
    count = len(ran)
    assert count < 1000  # the rest is not begun
    await copying.run([lambda: ran.append(2)], LARGE)  # the threads live on
    assert ran[count:] == [2]


async def test_an_error_waits_for_the_task_beside_the_caller() -> None:
    """Whichever of the two threads fails."""
    for _ in range(20):
        gate = Gate()

        def fail(gate: Gate = gate) -> None:
            while not gate.begun:
                pass
            threading.Timer(0.002, gate.open.set).start()
            raise OSError("bus")

        with pytest.raises(OSError, match="bus"):
            await copying.run([gate.task, fail], SHARED)
        assert gate.begun == gate.ended == 1


async def test_an_error_waits_for_the_tasks_that_run() -> None:
    gate = Gate()
    done = asyncio.Event()
    failed = threading.Event()

    def fail() -> None:
        while not gate.begun:
            pass
        failed.set()
        raise OSError("bus")

    async def attempt() -> None:
        try:
            with pytest.raises(OSError, match="bus"):
                await copying.run([gate.task, fail], LARGE)
        finally:
            done.set()

    if copying.copy_threads() < 2:
        pytest.skip("needs two copy threads")
    running = asyncio.create_task(attempt())
    await until(failed.is_set)
    assert not done.is_set()
    gate.open.set()
    await running
    assert gate.running == 0


async def test_when_it_is_cancelled_no_task_runs_any_more() -> None:
    """The memory may be somebody else's by the next line."""
    for _ in range(20):
        gate = Gate()
        running = asyncio.create_task(copying.run([gate.task] * 50, LARGE))
        await until(lambda gate=gate: gate.begun > 0)
        # Cancelling blocks until the running tasks have ended, so somebody else opens the gate.
        threading.Timer(0.002, gate.open.set).start()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert gate.running == 0
        begun = gate.begun
        await copying.run([lambda: None] * 50, LARGE)
        assert gate.begun == begun


async def test_stopping_before_anything_ran_begins_nothing() -> None:
    ran: list[int] = []
    job = copying.CopyJob([lambda: ran.append(1)], asyncio.get_running_loop())
    job.stop()
    job.work()
    assert not ran
    job.stop()


async def test_a_job_is_done_exactly_when_its_last_task_is() -> None:
    gate = Gate()
    job = copying.CopyJob([gate.task] * 3, asyncio.get_running_loop())
    workers = [threading.Thread(target=job.work) for _ in range(3)]
    for worker in workers:
        worker.start()
    await until(lambda: gate.running == 3)
    assert not job.future.done()
    gate.open.set()
    await asyncio.wait_for(job.future, 50)
    assert gate.running == 0
    for worker in workers:
        worker.join()


async def test_many_jobs_at_once() -> None:
    counts = [0] * 40
    lock = threading.Lock()

    def task(at: int) -> None:
        with lock:
            counts[at] += 1

    await asyncio.gather(
        *(copying.run([lambda at=at: task(at)] * (at + 1), LARGE) for at in range(40))
    )
    assert counts == list(range(1, 41))


def test_a_loop_that_closed_meanwhile_is_not_woken() -> None:
    gate = Gate()
    loop = asyncio.new_event_loop()
    job = copying.CopyJob([gate.task], loop)
    worker = threading.Thread(target=job.work)
    worker.start()
    loop.close()
    gate.open.set()
    worker.join(60)
    assert not worker.is_alive()
    assert gate.ended == 1


def test_a_forked_child_copies_with_threads_of_its_own() -> None:
    asyncio.run(copying.run([lambda: None] * 4, LARGE))  # the parent's pool exists
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ran: list[int] = []
            asyncio.run(asyncio.wait_for(copying.run([lambda: ran.append(1)] * 4, LARGE), 50))
            os.write(write, b"ok" if len(ran) == 4 else b"not all ran")
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        assert said.read() == b"ok"
    os.waitpid(pid, 0)


# ---- how many threads -----------------------------------------------------------------------


def test_how_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHSTORE_COPY_THREADS", raising=False)
    assert copying.copy_threads() == min(len(os.sched_getaffinity(0)), 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert copying.copy_threads() == min(len(os.sched_getaffinity(0)), 8)
    monkeypatch.setenv("TORCHSTORE_COPY_THREADS", "3")
    assert copying.copy_threads() == 3
    for wrong in ("0", "-1", "many", "1.5", "²"):
        monkeypatch.setenv("TORCHSTORE_COPY_THREADS", wrong)
        with pytest.raises(ConfigurationError, match="TORCHSTORE_COPY_THREADS"):
            copying.copy_threads()


def test_the_variable_decides_how_many_run_at_once() -> None:
    body = f"""
import asyncio, threading
from torchstore_core.machine import copying
names = set()
barrier = threading.Barrier(3)
def task():
    barrier.wait(60)
    names.add(threading.current_thread().name)
asyncio.run(copying.run([task] * 3, {LARGE}))
print(len(names))
"""
    done = subprocess.run(
        [sys.executable, "-c", body],
        env={**os.environ, "TORCHSTORE_COPY_THREADS": "3"},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert done.stdout == "3\n"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 40_000), min_size=1, max_size=12),
    into=st.booleans(),
    stream=st.booleans(),
)
def test_columns(engine: ModuleType, lengths: list[int], into: bool, stream: bool) -> None:
    """Each run goes to its own place, in either direction, and nothing lies between them."""
    total = sum(lengths) + 8 * len(lengths)
    content = noise(total)
    here, there = Memory(content if into else bytes(total)), Memory(bytes(total))
    if not into:
        there = Memory(content)
    starts = [sum(lengths[:at]) + 8 * at for at in range(len(lengths))]
    addresses = [here.address + start for start in starts]
    engine.copy_columns(addresses, starts, lengths, there.address, into=into, stream=stream)
    expected = bytearray(total)
    for start, length in zip(starts, lengths, strict=True):
        expected[start : start + length] = content[start : start + length]
    assert (there if into else here).content() == expected


@needs_native
def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        copying.copy_columns([1, 2], [1, 2], [0], 0, into=True, stream=False)
    with pytest.raises(TypeError):
        copying.copy_columns([1], ["2"], [0], 0, into=True, stream=False)  # type: ignore[list-item]
