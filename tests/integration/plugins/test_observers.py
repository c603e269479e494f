"""Observers: plug-ins that are told about every operation, found through real entry points."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from tests.integration.servers import ServerThread, connected
from tests.processes import run_script
from tests.support import before_commits, running_store, stop, turn, until
from tests.unit.plugins.test_plugins import OBSERVERS, Site

import torchstore_core as ts
import torchstore_core.blocking as blocking_ts
from torchstore_core.contracts.observer import Operation

WATCH = """
operations = []

@hookimpl
def torchstore_operation(operation):
    operations.append(operation)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield made
    for module in made.modules:
        sys.modules.pop(module, None)


def seen(distribution: str = "watcher", name: str = "w") -> list[Operation]:
    return list(sys.modules[f"site_{distribution}_{name}"].operations)


BIG = torch.zeros(1 << 18)
NBYTES = BIG.nbytes
HALF = ts.TensorSlice((0,), (1 << 17,), (1 << 18,))
PLACE = ("torchstore-0",)


class Exits:
    """A value of which an attempt to pickle it ends the process."""

    def __reduce__(self) -> str:
        raise SystemExit(3)  # its .code is 3


class Call(NamedTuple):
    """One call, and what observers are told: key, version, entries, bytes (-1: some, inside of the
    message), error.
    """

    name: str
    arguments: tuple[Any, ...]
    key: str
    version: int
    entries: int = 1
    nbytes: int = 0
    error: str = ""
    keywords: Mapping[str, Any] = MappingProxyType({})


#: One after the other, on an empty store.
CALLS = [
    Call("put", ("a", BIG), "a", 1, nbytes=NBYTES),
    Call("put", ("a", 5), "a", 2, nbytes=-1),
    Call("get", ("a",), "a", 2, nbytes=-1),
    Call("put_batch", ({"b": BIG, "c": BIG[:7]},), "b", 1, 2, NBYTES + 28),
    Call("put_batch", ({},), "", 0, 0),
    Call("get", ("b",), "b", 1, nbytes=NBYTES),
    Call("get", (ts.ObjectRef("b", 1), torch.empty(1 << 18)), "b", 1, nbytes=NBYTES),
    Call("get", ("b", None, HALF), "b", 1, nbytes=NBYTES // 2),
    Call("get_batch", ({"b": HALF, "c": None},), "b", 1, 2, NBYTES // 2 + 28),
    Call("get_batch", ([],), "", 0, 0),
    Call("put_state_dict", ({"w": BIG, "tied": BIG, "v": BIG[:7]}, "m"), "m", 1, 3, NBYTES + 28),
    Call("put_state_dict", ({"v": BIG[:7]}, "s"), "s", 1, 1, -1, keywords={"blocking": False}),
    Call("get_state_dict", ("m",), "m", 1, 2, NBYTES + 28),
    Call("get_state_dict", ("m", {"w": BIG.clone()}, False), "m", 1, 1, NBYTES),
    Call("get", ("m",), "m", 1, nbytes=NBYTES + 28),
    Call("get_batch", (["m", "b"],), "m", 1, 2, 2 * NBYTES + 28),
    Call("put", ("p", ts.TorchStoreStateDict.from_state_dict({"w": BIG})), "p", 1, nbytes=NBYTES),
    Call("get", ("p",), "p", 1, nbytes=NBYTES),
    Call("get_state_dict", ("p",), "p", 1, 1, NBYTES),
    Call("wait", (["m", "b"],), "m", 1, 2),
    Call("wait", ([],), "", 0, 0),
    Call("exists", ("b",), "b", 0),
    Call("keys", ("m",), "", 0),
    Call("versions", ("a",), "a", 2),
    Call("latest_version", ("a",), "a", 2),
    Call("latest_version", ("none",), "none", 0),
    Call("stat", ("a",), "a", 2),
    Call("status", (), "", 0),
    Call("put_object", (BIG,), "", 0, nbytes=NBYTES),
    Call("empty", (9,), "", 0),
    Call("hold", ("a",), "a", 2),
    Call("wait_any", ([ts.ObjectRef("a", 2)],), "a", 0),
    Call("refs", (), "", 0),
    Call("free", ([ts.ObjectRef("a", 2)],), "", 0),
    Call("explain", (), "", 0),
    Call("drain", ("none",), "", 0, error="configuration"),
    Call("get", ("none",), "none", 0, error="key-not-found"),
    Call("get", (ts.ObjectRef("a", 1),), "a", 1, error="version-gone"),
    Call("put", ("a", 1), "a", 1, error="version-gone", keywords={"version": 1}),
    Call("put", ("a", Exits()), "a", 0, error="SystemExit"),
    Call("put", (5, 1), "", 0, error="unsupported-value"),
    Call("put_batch", ([],), "", 0, error="unsupported-value"),
    Call("get", (5,), "", 0, error="unsupported-value"),
    Call("get_batch", ("a",), "", 0, error="unsupported-value"),
    Call("put_state_dict", ([], "m"), "m", 0, error="unsupported-value"),
    Call("get_state_dict", ("m", {"w": torch.empty(1)}), "m", 0, error="layout-mismatch"),
    Call("get_state_dict", ("m",), "m", 9, error="version-gone", keywords={"version": 9}),
    Call("exists", ("",), "", 0, error="unsupported-value"),
    Call("keys", (5,), "", 0, error="unsupported-value"),
    Call("versions", (None,), "", 0, error="unsupported-value"),
    Call("stat", ("none",), "none", 0, error="key-not-found"),
    Call("wait", ("m",), "m", 7, error="timeout", keywords={"min_version": 7, "timeout": 0.01}),
    Call("delete", ("none",), "none", 0, error="key-not-found"),
    Call("delete", ("a",), "a", 0),
    Call("delete_batch", (["b", "none"],), "b", 0, 2),
    Call("delete_batch", ([],), "", 0, 0),
]


def test_the_calls_above_are_all_there_are() -> None:
    methods = {n for n, f in inspect.getmembers(ts.Client, inspect.iscoroutinefunction)}
    assert {call.name for call in CALLS} == {n for n in methods if not n.startswith("_")}


@pytest.mark.quick
@pytest.mark.parametrize("way", ["method", "function", "blocking"])
async def test_every_call_is_told_of_by_its_own_name(
    site: Site, server: ServerThread, way: str
) -> None:
    site.install("watcher", OBSERVERS, w=WATCH)
    async with connected(server.address, block=["inprocess"]) as client:

        async def ask(call: Call) -> None:
            if way == "blocking":
                method = getattr(blocking_ts.Client(client), call.name)
                await asyncio.to_thread(method, *call.arguments, **call.keywords)
            elif way == "function":
                method = getattr(ts, call.name)
                await method(*call.arguments, store_name="here", **call.keywords)
            else:
                await getattr(client, call.name)(*call.arguments, **call.keywords)

        for call in CALLS:
            before = len(seen())
            fails = pytest.raises((ts.TorchStoreError, SystemExit))
            with fails if call.error else contextlib.nullcontext():
                await ask(call)
            (told,) = seen()[before:]
            assert (told.name, told.key, told.error) == (call.name, call.key, call.error)
            assert told.store_name == "here"
            assert (told.version, told.entries) == (call.version, call.entries), told
            if call.nbytes < 0:
                assert 0 < told.nbytes < 100, told
                assert (told.transport, told.volumes) == ("inline", ()), told
            else:
                assert told.nbytes == call.nbytes, told
                moved = ("shm", PLACE) if call.nbytes else ("", ())
                assert (told.transport, told.volumes) == moved, told
            assert 0 <= sum(told.phases.values()) <= told.seconds < 20


async def test_phases_are_those_of_the_operation(site: Site, server: ServerThread) -> None:
    site.install("watcher", OBSERVERS, w=WATCH)
    async with connected(server.address) as client:
        await client.put("k", 1)
        await client.put("k", BIG)
        await client.get("k", torch.empty(1 << 18))
        pending = await client.put_state_dict({"w": BIG}, "m", blocking=False)
        assert isinstance(pending, ts.PendingPut)
        await pending
        await client.exists("k")
    phases = [set(told.phases) for told in seen()]
    moving = {"plan", "copy"}
    assert phases == [{"plan"}, {*moving, "commit"}, moving, {*moving, "commit"}, set()]
    assert min(seen()[1].phases.values()) > 0


async def test_bytes_are_those_that_were_moved(site: Site) -> None:
    """To every copy; by each rank its own; none where another has put the same."""
    site.install("watcher", OBSERVERS, w=WATCH)
    server = ServerThread(num_storage_volumes=2, strategy="replicated")
    both = ("torchstore-0", "torchstore-1")
    try:
        async with connected(server.address) as client:
            await client.put("k", BIG)
            await client.get("k")
            put, get = seen()
            assert (put.nbytes, put.volumes) == (2 * NBYTES, both)
            assert (get.nbytes, len(get.volumes)) == (NBYTES, 1)
            shape = (1 << 18,)
            for replica in range(2):
                part = ts.TensorSlice((0,), shape, shape, (2,), (replica,))
                await client.put("replicated", BIG, part)
            first, second = seen()[2:]
            assert (first.nbytes, first.volumes, first.version) == (2 * NBYTES, both, 1)
            assert (second.nbytes, second.transport, second.volumes) == (0, "", ())
            assert (second.version, second.error) == (1, "")
            half = (1 << 17,)
            for rank in range(2):
                part = ts.TensorSlice((rank << 17,), half, shape, (2,), (rank,))
                await client.put("sharded", BIG[: 1 << 17], part)
                assert seen()[-1].nbytes == NBYTES  # half of it, twice
            await client.get("sharded")
            assert seen()[-1].nbytes == NBYTES
    finally:
        server.stop()


async def test_a_commit_that_goes_on_is_told_of_once_when_it_ends(site: Site) -> None:
    """However it ends. The server is stopped, so that it does not end before."""
    site.install("watcher", OBSERVERS, w=WATCH)
    state_dict = {"w": BIG}

    async def begun(client: ts.Client, timeout: float | None = None) -> ts.PendingPut:
        with before_commits(lambda: stop(server)):
            made = await client.put_state_dict(state_dict, "m", blocking=False, timeout=timeout)
        assert isinstance(made, ts.PendingPut)
        await turn()
        assert not [told for told in seen()[told_before:] if told.name == "put_state_dict"]
        return made

    def told() -> list[tuple[str, str, int, int]]:
        new = [one for one in seen()[told_before:] if one.name == "put_state_dict"]
        return [(one.key, one.error, one.version, one.nbytes) for one in new]

    async with running_store(keeper=False) as client:
        server = (await client.status()).controller_pid
        told_before = len(seen())
        pending = await begun(client)
        os.kill(server, signal.SIGCONT)
        version = (await pending).version
        assert told() == [("m", "", version, NBYTES)]

        told_before = len(seen())
        pending = await begun(client, timeout=2)
        with pytest.raises(ts.StoreTimeoutError):
            await pending
        assert told() == [("m", "timeout", 0, NBYTES)]
        os.kill(server, signal.SIGCONT)

        told_before = len(seen())
        await asyncio.to_thread(asyncio.run, begun(client))
        os.kill(server, signal.SIGCONT)
        assert [(key, error) for key, error, *_ in told()] == [("m", "CancelledError")]

        told_before = len(seen())
        pending = await begun(client)
        os.kill(server, signal.SIGKILL)
        with pytest.raises(ts.StoreClosedError):
            await pending
        assert told() == [("m", "store-closed", 0, NBYTES)]


async def test_an_observer_is_told_which_transport_moved_the_bytes(
    site: Site, server: ServerThread
) -> None:
    site.install("watcher", OBSERVERS, w=WATCH)
    for blocked, expected in ((["shm"], "inprocess"), (["inprocess"], "shm")):
        async with connected(server.address, block=blocked) as client:
            await client.put("k", torch.zeros(1 << 18))
            await client.get("k", torch.empty(1 << 18))
        assert [(o.name, o.transport, o.store_name) for o in seen()[-2:]] == [
            ("put", expected, "here"),
            ("get", expected, "here"),
        ]


FAILING = {
    "raises": "raise ValueError('my fault')",
    "exits": "raise SystemExit('my fault')",
    "cancels": "raise asyncio.CancelledError('my fault')",
    "closes": "raise GeneratorExit('my fault')",
    "panics": "raise type('Panic', (BaseException,), {})('my fault')",
    "forgets": "return asyncio.sleep(0, 'my fault')",  # a coroutine, of a plain function
    "generates": "return (print(i) for i in ['my fault'])",
}


async def test_an_observer_that_fails_breaks_nothing_and_is_reported_once(
    site: Site, caplog: pytest.LogCaptureFixture, server: ServerThread
) -> None:
    """Whatever it raises; in every store that the process joins."""
    body = "import asyncio\n@hookimpl\ndef torchstore_operation(operation): "
    site.install("watcher", OBSERVERS, w=WATCH)
    site.install("another", OBSERVERS, **{name: body + how for name, how in FAILING.items()})
    site.install("third", OBSERVERS, a=WATCH)
    with caplog.at_level(logging.DEBUG):
        for _ in range(2):
            async with connected(server.address) as client:
                await client.put("k", 1)
                assert await client.get("k") == 1
                wrong = (await client.status()).plugin_errors
    for one in (seen(), seen("third", "a")):
        assert [o.name for o in one] == ["put", "get", "status"] * 2
    for name in FAILING:
        about = [r for r in caplog.records if f"plug-in {name!r} failed" in r.getMessage()]
        levels = [record.levelno for record in about]
        assert levels == [logging.WARNING] + [logging.DEBUG] * 5
        assert about[0].exc_info
        assert "it has failed 5 times" in wrong[f"{OBSERVERS}:{name}"]
    assert "ValueError('my fault')" in wrong[f"{OBSERVERS}:raises"]
    assert "returned a coroutine, which nobody runs" in wrong[f"{OBSERVERS}:forgets"]


async def test_an_observer_that_takes_long_is_named_once(
    site: Site, caplog: pytest.LogCaptureFixture, server: ServerThread
) -> None:
    """Calls took as long as it, and nothing said why."""
    body = "import time\n@hookimpl\ndef torchstore_operation(operation):\n    "
    site.install("another", OBSERVERS, quick=body + "pass")
    site.install("third", OBSERVERS, ponders=body + "if operation.name == 'put': time.sleep(1.1)")
    with caplog.at_level(logging.WARNING):
        async with connected(server.address) as client:
            for _ in range(2):
                await client.put("k", 1)
    (about,) = [r.getMessage() for r in caplog.records if "took" in r.getMessage()]
    assert "the observer plug-in 'ponders' took 1." in about


async def test_an_interrupt_in_an_observer_is_the_users(site: Site, server: ServerThread) -> None:
    """Ctrl-C comes up wherever the interpreter is; the operation has ended by then."""
    body = "@hookimpl\ndef torchstore_operation(operation):\n    if operation.name == 'put': "
    site.install("another", OBSERVERS, x=body + "raise KeyboardInterrupt")
    async with connected(server.address) as client:
        with pytest.raises(KeyboardInterrupt):
            await client.put("k", 1)
        assert await client.get("k") == 1
        assert f"{OBSERVERS}:x" not in (await client.status()).plugin_errors


async def test_observers_that_do_not_load_are_said_once_and_in_status(
    site: Site, server: ServerThread, tmp_path: Path
) -> None:
    """Through real entry points, in a process of its own: what it logs, and what tools say."""
    site.install("watcher", OBSERVERS, fine=WATCH)
    later = "@hookimpl\nasync def torchstore_operation(operation): pass"
    misspelt = "@hookimpl\ndef torchstore_operations(operation): pass"
    broken = {"missing": "import surely_not_here", "later": later, "misspelt": misspelt}
    site.install("another", OBSERVERS, **broken, blocked="raise SystemExit")
    with pytest.MonkeyPatch.context() as environment:
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        environment.setenv("PYTHONPATH", path)
        environment.setenv("TORCHSTORE_BLOCK", "blocked")
        printed = await run_script(
            body=f"""
            import json, logging
            logging.basicConfig(stream=sys.stdout, format="LOG %(levelname)s %(message)s")
            for name in ("one", "other"):
                client = await ts.connect({server.address!r}, store_name=name)
                await client.put("k", 1)
            await ts.reset_client("one")
            print("ERRORS", json.dumps((await ts.status(store_name="one")).plugin_errors))
            from site_watcher_fine import operations
            print("SEEN", [operation.name for operation in operations])
            """,
        )
        tool = [sys.executable, "-m", "torchstore_cli"]
        shown = await asyncio.to_thread(
            subprocess.run,
            [*tool, "status", "--json", "--address", server.address],
            capture_output=True,
            check=True,
            timeout=200,
        )
    lines = dict.fromkeys(line.partition(" ")[0] for line in printed.splitlines())
    assert list(lines) == ["LOG", "ERRORS", "SEEN"], printed
    logged = [line for line in printed.splitlines() if line.startswith("LOG")]
    assert len(logged) == len(broken)
    (errors,) = [line for line in printed.splitlines() if line.startswith("ERRORS")]
    for wrong in (json.loads(errors[7:]), json.loads(shown.stdout)["plugin_errors"]):
        assert set(wrong) == {f"{OBSERVERS}:{name}" for name in broken}
        for name, what in (
            ("missing", "surely_not_here"),
            ("later", "not async"),
            ("misspelt", "torchstore_operations"),
        ):
            assert what in wrong[f"{OBSERVERS}:{name}"]
            (line,) = [line for line in logged if repr(name) in line]
            assert line.startswith("LOG WARNING")
            assert what in line
            assert f"TORCHSTORE_BLOCK={name}" in line
    assert "SEEN ['put', 'put', 'status']" in printed


async def test_a_blocked_observer_sees_nothing(site: Site) -> None:
    site.install("watcher", OBSERVERS, w=WATCH)
    async with running_store(block=["w"]) as client:
        await client.put("k", 1)
    assert "site_watcher_w" not in sys.modules


async def test_a_cancelled_operation_is_observed_as_such(site: Site) -> None:
    site.install("watcher", OBSERVERS, w=WATCH)
    async with running_store() as client:
        waiting = asyncio.create_task(client.wait("never"))
        await until(lambda: sessions_waiting(client))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        waits = [operation for operation in seen() if operation.name == "wait"]
        assert [operation.error for operation in waits] == ["CancelledError"]


async def sessions_waiting(client: ts.Client) -> bool:
    """Whether the server has seen the Wait."""
    return (await client.status()).operations.get("Wait", 0) > 0
