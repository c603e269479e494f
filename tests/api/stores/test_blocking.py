"""``torchstore_core.blocking``: the same calls without ``await``."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType, SimpleNamespace

import pytest
import torch
from tests.support import SMALL, loops_and_sockets, turn, until

import torchstore_core as ts
import torchstore_core.blocking as blocking
from torchstore_core.clients.calls import thread_loops

LARGE = torch.arange(300_000.0)


@pytest.fixture
def bare(module_store: None) -> Iterator[blocking.Client]:
    """The module's store, for tests without an event loop."""
    client = blocking.client()
    yield client
    client.delete_batch(client.keys())


def _calls(owner: object) -> dict[str, object]:
    return {
        name: call
        for name, call in inspect.getmembers(owner, inspect.iscoroutinefunction)
        if not name.startswith("_")
    }


def test_the_names_are_the_same() -> None:
    assert sorted(blocking.__all__) == sorted(ts.__all__)
    different = {"Client", "PendingPut", *_calls(ts)}
    for name in set(ts.__all__) - different:
        assert getattr(blocking, name) is getattr(ts, name)
    for name in ("__version__", *ts._STRATEGIES):
        assert getattr(blocking, name) is getattr(ts, name)
    for module in (blocking, ts):
        with pytest.raises(AttributeError, match="has no attribute 'none_such'"):
            module.none_such  # noqa: B018


@pytest.mark.parametrize(
    ("ours", "theirs"), [(blocking, ts), (blocking.Client, ts.Client)], ids=["module", "Client"]
)
def test_signatures_and_texts_are_the_same_without_the_coroutine(ours, theirs) -> None:
    calls = _calls(theirs)
    assert "put_state_dict" in calls
    for name, call in calls.items():
        mine = getattr(ours, name)
        assert not inspect.iscoroutinefunction(mine)
        assert inspect.signature(mine) == inspect.signature(call)
        assert mine.__doc__ == call.__doc__
        assert mine.__module__ == "torchstore_core.blocking"


def test_values_come_back(bare: blocking.Client, k: str) -> None:
    ref = blocking.put(k, LARGE)
    assert ref == ts.ObjectRef(k, 1)
    assert torch.equal(blocking.get(ref), LARGE)
    mine = torch.zeros(300_000)
    assert blocking.get(k, mine) is mine
    assert bare.put_batch({"a": 1, "b": (2,)}) == blocking.wait(["a", "b"])
    assert bare.get_batch(["a", "b"]) == {"a": 1, "b": (2,)}
    assert blocking.keys() == bare.keys() == ["a", "b", k]
    assert blocking.exists("a")
    blocking.delete("a")
    with pytest.raises(ts.KeyNotFoundError):
        bare.get("a")
    with pytest.raises(ts.StoreTimeoutError):
        blocking.wait("never", timeout=0.05)
    assert bare.address == blocking.address()
    assert "blocking Client of store 'torchstore'" in repr(bare)


def test_a_pending_put_commits_whether_or_not_anyone_waits(bare: blocking.Client, k: str) -> None:
    for number, put in enumerate((blocking.put_state_dict, bare.put_state_dict), 1):
        pending = put({"w": LARGE + number}, k, blocking=False)
        assert isinstance(pending, blocking.PendingPut)
        asyncio.run(until(pending.done))  # no call of the store: it goes on by itself
        assert pending.result() == ts.ObjectRef(k, number)
        assert torch.equal(blocking.get_state_dict(k)["w"], LARGE + number)
    ref = blocking.put_state_dict({"w": 1}, k)
    assert ref == ts.ObjectRef(k, 3)
    with pytest.raises(ts.UnsupportedValueError):
        blocking.put_state_dict({"w": torch.empty(2, device="meta")}, k, blocking=False)


async def test_inside_of_a_running_loop_it_says_what_to_do(shared: ts.Client) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"await ts\.put\("):
        blocking.put("k", 1)
    with pytest.raises(ts.ConfigurationError, match=r"await ts\.put_state_dict\("):
        blocking.put_state_dict({}, "k", blocking=False)
    await asyncio.to_thread(blocking.put, "k", 1)
    assert await shared.get("k") == 1


def test_a_call_within_another_says_so(bare: blocking.Client) -> None:
    """As of a signal handler or ``__del__``, where `await` would be no help."""

    class Asks:
        def __reduce__(self) -> tuple[type, tuple[int]]:
            with pytest.raises(ts.ConfigurationError, match="within another call of this thread"):
                blocking.exists("k")
            return int, (3,)

    blocking.put("k", Asks())
    assert blocking.get("k") == 3


@pytest.mark.thorough
def test_many_threads_at_once_and_none_leaves_a_connection(bare: blocking.Client) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for n in range(20):
                blocking.put(f"{number}", torch.full((2000,), n))
                assert int(blocking.get(f"{number}")[0]) == n
        except BaseException as error:
            errors.append(error)

    for _ in range(3):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for error in errors:
        raise error
    before = loops_and_sockets()
    for _ in range(10):  # threads one after the other: each ends before the next one begins
        thread = threading.Thread(target=work, args=(0,))
        thread.start()
        thread.join()
    assert loops_and_sockets() <= before
    assert not errors


@pytest.mark.local_only
def test_a_forked_child_has_a_loop_of_its_own(bare: blocking.Client) -> None:
    blocking.put("k", LARGE)
    pending = blocking.put_state_dict({"w": 1}, "of parent", blocking=False)
    assert isinstance(pending, blocking.PendingPut)
    pid = os.fork()
    if pid == 0:
        status = 1
        signal.alarm(30)
        try:
            ok = float(blocking.get("k")[-1]) == 299_999  # no threads of OpenMP: they are gone
            blocking.put("child", 1)
            made = blocking.put_state_dict({"w": 2}, "of child", blocking=False)
            assert isinstance(made, blocking.PendingPut)
            made.result(60)
            status = 0 if ok else 2
        finally:
            os._exit(status)
    for n in range(50):
        blocking.put("parent", n)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert blocking.get_batch(["child", "parent"]) == {"child": 1, "parent": 49}
    assert blocking.get("of child/w") == 2
    assert pending.result(60) == ts.ObjectRef("of parent", 1)


def _program(body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.thorough
@pytest.mark.local_only
def test_ctrl_c_cancels_the_operation_under_way(bare: blocking.Client) -> None:
    waits = blocking.status().operations.get("Wait", 0)
    process = _program(
        """
        import signal, torch, torchstore_core.blocking as ts
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ts.put("ready", 1)
        try:
            ts.wait("never")
        except KeyboardInterrupt:
            print("interrupted", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        ts.put("k", torch.ones(300_000))
        print(ts.get("k").sum())
        """
    )
    try:
        blocking.wait("ready", timeout=60)
        deadline = time.monotonic() + 60
        while blocking.status().operations.get("Wait", 0) < waits + 2:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
        process.wait()
    assert not err
    assert out == "interrupted True\ntensor(300000.)\n"


@pytest.fixture
def plain_ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def _done_when_it_comes(*signums: int) -> int:
    """The signals come after the task's end, and before its loop is told to stop."""
    for signum in signums:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signum)
    return 1


async def _one() -> int:
    await turn()
    return 1


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_at_the_end_of_a_call_does_not_reach_the_next(
    plain_ctrl_c: None, presses: int
) -> None:
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            thread_loops.run(_done_when_it_comes(*[signal.SIGINT] * presses), "get")
        assert thread_loops.run(_one(), "get") == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_a_handler_raises_at_the_end_of_a_call_does_not_reach_the_next() -> None:
    def refuse(signum: int, frame: object) -> None:
        raise SystemExit(3)

    before = signal.signal(signal.SIGUSR1, refuse)
    try:
        with pytest.raises(SystemExit):
            thread_loops.run(_done_when_it_comes(signal.SIGUSR1), "get")
        assert thread_loops.run(_one(), "get") == 1
    finally:
        signal.signal(signal.SIGUSR1, before)


class _OutOfTimeError(Exception):
    """What the handler of an alarm raises."""


@pytest.fixture
def raises_out_of_time() -> Iterator[None]:
    def handle(signum: int, frame: object) -> None:
        raise _OutOfTimeError

    before = signal.signal(signal.SIGALRM, handle)
    yield
    assert signal.getsignal(signal.SIGALRM) is handle
    signal.signal(signal.SIGALRM, before)


def test_what_a_handler_raises_within_a_callback_ends_the_call(raises_out_of_time: None) -> None:
    """asyncio logged it and went on, until the call's time was over. Here it comes while a reply is
    handed over, between its arrival and the turn of the task: no cancellation reaches that task.
    """

    async def waits() -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def arrives() -> None:
            plain, loop.call_soon = loop.call_soon, interrupted  # type: ignore[method-assign]
            try:
                future.set_result(None)
            finally:
                loop.call_soon = plain  # type: ignore[method-assign]

        def interrupted(*args: object, context: object = None) -> asyncio.Handle:
            signal.raise_signal(signal.SIGALRM)
            return type(loop).call_soon(loop, *args, context=context)  # type: ignore[arg-type]

        loop.call_soon(arrives)
        await future
        await asyncio.sleep(60)

    with pytest.raises(_OutOfTimeError):
        thread_loops.run(waits(), "get")
    assert thread_loops.run(_one(), "get") == 1


def test_an_alarm_that_raises_ends_a_call(bare: blocking.Client, raises_out_of_time: None) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(_OutOfTimeError):
        blocking.wait("never")
    blocking.put("k", LARGE)
    assert torch.equal(blocking.get("k"), LARGE)


def test_what_a_handler_raises_keeps_nothing_of_the_call(raises_out_of_time: None) -> None:
    """Of a get, that was a lease of the memory."""
    kept: list[weakref.ref[torch.Tensor]] = []

    async def gets() -> torch.Tensor:
        tensor = torch.ones(3)
        kept.append(weakref.ref(tensor))
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGALRM)
        return tensor

    gc.disable()
    try:
        with contextlib.suppress(_OutOfTimeError):
            thread_loops.run(gets(), "get")
        assert kept[0]() is None
    finally:
        gc.enable()


def test_a_call_that_is_interrupted_as_it_begins_does_not_happen_within_the_next(
    raises_out_of_time: None,
) -> None:
    """At any of its lines: before the task was under way, its handlers not all in place, or some of
    them gone again.
    """
    ran: list[int] = []
    handlers = {one: signal.getsignal(one) for one in (signal.SIGALRM, signal.SIGINT)}

    async def note(number: int) -> None:
        ran.append(number)

    def at_line(which: int) -> Callable[[FrameType, str, object], object]:
        left = which

        def trace(frame: FrameType, event: str, _: object) -> object:
            nonlocal left
            if frame.f_code.co_filename != thread_loops.__file__:
                return None
            if event == "line":
                left -= 1
                if not left:
                    signal.raise_signal(signal.SIGALRM)
            return trace

        return trace

    raised = 0
    for line in itertools.count(1):
        call = note(line)
        sys.settrace(at_line(line))
        try:
            thread_loops.run(call, "get")
        except _OutOfTimeError:
            raised += 1
        else:
            break  # there are no more lines
        finally:
            sys.settrace(None)
            call.close()  # or Python warns of those that were not begun
        before = len(ran)
        thread_loops.run(note(-line), "get")
        assert ran[before:] == [-line]
        assert {one: signal.getsignal(one) for one in handlers} == handlers
    assert raised > 20


def test_a_handler_that_sets_another_one_within_a_call_is_obeyed() -> None:
    def last(signum: int, frame: object) -> None:
        return None

    def first(signum: int, frame: object) -> None:
        signal.signal(signal.SIGALRM, last)

    before = signal.signal(signal.SIGALRM, first)
    try:
        assert thread_loops.run(_done_when_it_comes(signal.SIGALRM), "get") == 1
        assert signal.getsignal(signal.SIGALRM) is last
    finally:
        signal.signal(signal.SIGALRM, before)


def test_ctrl_c_within_a_callback_cancels_after_it(plain_ctrl_c: None) -> None:
    """A reply that was just being handed over found its future cancelled."""
    ends: list[bool] = []

    async def waits() -> None:
        future = asyncio.get_running_loop().create_future()

        def arrives() -> None:
            if not future.done():
                signal.raise_signal(signal.SIGINT)
                future.set_result(None)
                ends.append(True)

        asyncio.get_running_loop().call_soon(arrives)
        await future
        ends.append(False)

    with pytest.raises(KeyboardInterrupt):
        thread_loops.run(waits(), "get")
    assert ends == [True]


def test_ctrl_c_counts_for_more_than_an_error_that_it_meets(plain_ctrl_c: None) -> None:
    async def fails() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ts.StoreClosedError("gone")

    with pytest.raises(KeyboardInterrupt) as caught:
        thread_loops.run(fails(), "get")
    assert isinstance(caught.value.__cause__, ts.StoreClosedError)


@pytest.mark.local_only
def test_a_script_needs_no_event_loop_and_leaves_nothing() -> None:
    process = _program(
        f"""
        import asyncio, atexit, os, torchstore_core as async_ts, torchstore_core.blocking as ts
        os.environ.pop("TORCHSTORE_ADDRESS", None)  # that of the module's store
        with_client = ts.initialize(**{SMALL!r})
        print(type(with_client).__module__, with_client.put("k", 1), ts.status().controller_pid)
        asyncio.run(async_ts.put("k", 2))  # the two can be mixed
        print(ts.get("k"))
        atexit.register(lambda: print(ts.get("k")))
        """
    )
    out, err = process.communicate(timeout=200)
    assert not err
    first, second, third = out.splitlines()
    assert first.startswith("torchstore_core.blocking ObjectRef(key='k', version=1)")
    assert (second, third) == ("2", "2")
    assert not os.path.exists(f"/proc/{first.split()[-1]}")


@pytest.mark.thorough
@pytest.mark.local_only
def test_everything_works_while_the_interpreter_ends() -> None:
    """Threads take no more work then. Also in a forked child, and when the store is shut down."""
    process = _program(
        f"""
        import atexit, os, sys, weakref, torch, torchstore_core.blocking as ts

        class Owner: ...

        os.environ.pop("TORCHSTORE_ADDRESS", None)  # of a store of other tests
        owner = Owner()
        where = ts.initialize(**{SMALL!r}).address
        weakref.finalize(owner, ts.shutdown)
        atexit.register(ts.shutdown)  # what ends it, and finds it ended
        atexit.register(ts.shutdown)

        def last() -> None:
            ts.put("k", torch.ones(1 << 20))
            late = ts.connect(where, store_name="late")
            print(int(late.get("k").sum()), flush=True)
            ts.shutdown("late")

        atexit.register(last)
        if not (child := os.fork()):
            sys.exit(0)
        print(os.waitpid(child, 0)[1], flush=True)
        """
    )
    out, err = process.communicate(timeout=200)
    assert not err
    assert out.splitlines() == [f"{1 << 20}", "0", f"{1 << 20}"]


@pytest.mark.thorough
@pytest.mark.local_only
def test_what_comes_too_late_at_the_exit_is_told_so() -> None:
    """It was told that the server, and its keeper, were gone, as if they had died."""
    process = _program(
        f"""
        import atexit, os, torchstore_core.blocking as ts
        os.environ.pop("TORCHSTORE_ADDRESS", None)

        def use() -> None:
            try:
                print(ts.keys())
            except ts.StoreClosedError as error:
                print(error)

        atexit.register(use)
        ts.initialize(**{SMALL!r})
        atexit.register(use)
        """
    )
    out, err = process.communicate(timeout=200)
    assert not err
    early, late = out.splitlines()
    assert early == "[]"
    assert "has ended with this process, which started it and is exiting" in late
    assert "after `initialize`" in late


def test_a_small_put_costs_little_more_than_an_awaited_one(bare: blocking.Client) -> None:
    """No hand-over between threads, which alone would take longer than this allows."""
    before = threading.active_count()
    value = torch.ones(8)
    blocking.put("k", value)
    for _ in range(100):
        blocking.put("k", value)
    assert threading.active_count() <= before


def test_greenlets_of_one_thread_are_told_to_take_others(bare: blocking.Client) -> None:
    """What a greenlet has of its own, a thread has here: it is in the loop of another one's call,
    as greenlets are in that of their thread. They were told to await, which they cannot.
    """
    others: list[asyncio.AbstractEventLoop] = []

    def call() -> None:
        bare.put("k", 1)
        assert thread_loops._local.loop is not None
        others.append(thread_loops._local.loop.loop)
        ready.set()
        assert over.wait(100)

    async def inside() -> None:
        with pytest.raises(ts.ConfigurationError, match=r"threadpool\.apply\(ts\.blocking\.get,"):
            blocking.get("k")

    ready, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=call)
    thread.start()
    assert ready.wait(100)
    others[0].run_until_complete(inside())
    over.set()
    thread.join()


def test_threads_of_gevent_start_no_servers_and_leave_no_threads(
    bare: blocking.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gevent watches children in its main thread alone; elsewhere ``initialize`` ended with its
    TypeError. What patched threads leave is a greenlet of a thread that runs no others: programs
    did not end. A stand-in says here what gevent says.
    """

    def hub() -> SimpleNamespace:
        is_main = threading.current_thread() is threading.main_thread()
        return SimpleNamespace(loop=SimpleNamespace(default=is_main))

    patched = SimpleNamespace(is_module_patched=lambda name: True)
    monkeypatch.setitem(sys.modules, "gevent", SimpleNamespace(get_hub=hub))
    monkeypatch.setitem(sys.modules, "gevent.monkey", patched)

    def used(name: str) -> int:
        bare.put(name, torch.ones(1000))
        return thread_loops.run(thread_loops.in_thread(threading.get_native_id), "used")

    def in_other_thread() -> None:
        with pytest.raises(ts.ConfigurationError, match="main thread alone: call initialize there"):
            blocking.initialize(runtime="local", store_name="another", **SMALL)
        assert used("k") == threading.get_native_id()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(in_other_thread).result(100)
    assert used("l") != threading.get_native_id()  # there, greenlets take turns
    assert bare.keys() == ["k", "l"]


@pytest.mark.local_only
def test_a_child_that_is_forked_in_a_running_loop_is_told_what_works(bare: blocking.Client) -> None:
    """asyncio does not regard the loop of the parent as running there."""

    async def in_parent() -> int:
        pid = os.fork()
        if pid == 0:
            status = 1
            signal.alarm(30)
            try:
                with pytest.raises(ts.ConfigurationError, match=r"forked .* call `asyncio\.run`"):
                    await ts.put("k", 1)
                asyncio.run(ts.put("k", 1))
                blocking.put("l", 2)
                status = 0
            finally:
                os._exit(status)
        return (await asyncio.to_thread(os.waitpid, pid, 0))[1]

    assert os.waitstatus_to_exitcode(asyncio.run(in_parent())) == 0
    assert bare.get_batch(["k", "l"]) == {"k": 1, "l": 2}


def test_a_call_that_asyncio_does_not_run_says_so(bare: blocking.Client) -> None:
    """Under trio, say: it was a RuntimeError about an event loop, and in ``stores`` trio's own."""
    calls = [
        ts.put("k", 1),
        ts.get("k"),
        ts.get_state_dict("k"),
        ts.wait("k"),
        ts.keys(),
        ts.stores(),
        ts.connect(bare.address, store_name="another"),
        ts.initialize(store_name="another"),
        ts.connect_or_initialize(store_name="another"),
        ts.shutdown("another"),
    ]
    for call in calls:
        with pytest.raises(ts.ConfigurationError, match="needs an asyncio event loop"):
            call.send(None)
    assert bare.keys() == []
