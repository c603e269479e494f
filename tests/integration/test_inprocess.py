"""The example transport ``inprocess``: a store in the test's own process, on a thread of its own.

And observers: plug-ins that are told about every operation.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import bits, free_port, run_script, running_store, until
from tests.unit.test_plugins import OBSERVERS, Site

import torchstore_core as ts
import torchstore_inprocess.transport as inprocess
from torchstore_core.contracts.observer import Operation
from torchstore_core.server.app import Server, ServerOptions

CAPACITY = 64 << 20


class ServerThread:
    """A server on an event loop of its own, in this process."""

    def __init__(self, **options: Any) -> None:
        self._options = ServerOptions(capacity=CAPACITY, prefault=0, **options)
        self._ready = threading.Event()
        self.address = ""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(20)
        assert self.address

    async def _run(self) -> None:
        try:
            self._loop = asyncio.get_running_loop()
            self.server = Server(self._options)
            self.address = await self.server.start()
            self._ready.set()
            await self.server.serve()
            await self.server.close()
        finally:
            self._ready.set()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.server.stop_soon)
            self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def server() -> Iterator[ServerThread]:
    made = ServerThread()
    try:
        yield made
    finally:
        made.stop()


@asynccontextmanager
async def connected(address: str, **arguments: Any) -> AsyncIterator[ts.Client]:
    client = await ts.connect(address, store_name="here", timeout=20, **arguments)
    try:
        yield client
    finally:
        await ts.shutdown("here")


async def chosen(client: ts.Client, nbytes: int = 1 << 30) -> tuple[str | None, dict[str, str]]:
    """Who would move that many bytes, and who refused."""
    (volume,) = await client.explain(nbytes)
    return volume["chosen"], volume["refusals"]


# ---- the choice -----------------------------------------------------------------------------


async def test_it_bids_only_for_a_volume_of_this_process(server: ServerThread) -> None:
    async with connected(server.address) as client:
        name, refusals = await chosen(client)
        assert name == "inprocess"
        assert "inprocess" not in refusals
    async with running_store() as client:
        name, refusals = await chosen(client)
        assert name == "shm"
        assert refusals["inprocess"] == "the volume is in another process"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"block": ["shm"]}, "inprocess"),
        ({"prefer": ["inprocess"]}, "inprocess"),
        ({"prefer": ["inprocess"], "block": ["shm", "inline"]}, "inprocess"),
        ({"prefer": ["shm"]}, "shm"),
        ({"block": ["inprocess"]}, "shm"),
        ({"prefer": ["inprocess"], "block": ["inprocess"]}, "shm"),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["arguments", "environment"])
async def test_the_users_word_decides(
    server: ServerThread,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, list[str]],
    expected: str,
    how: str,
) -> None:
    if how == "environment":
        for name, value in arguments.items():
            monkeypatch.setenv(f"TORCHSTORE_{name.upper()}", ",".join(value))
        arguments = {}
    async with connected(server.address, **arguments) as client:
        assert (await chosen(client))[0] == expected
        await client.put("k", torch.arange(100_000))
        assert torch.equal(await client.get("k"), torch.arange(100_000))


async def test_names_that_nobody_has_are_refused_however_a_store_is_joined(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments, and the environment of a process that calls no ``connect``."""
    one = ts.SPMDEnv(0, 0, 1, 1, "127.0.0.1", free_port())
    for wrong in ({"prefer": ["shn"]}, {"block": ["shn"]}):
        with pytest.raises(ts.ConfigurationError, match=r"'shn'.*did you mean 'shm'"):
            await ts.connect(server.address, store_name="here", **wrong)
        with pytest.raises(ts.ConfigurationError, match=r"'shn'.*did you mean 'shm'"):
            await ts.initialize_spmd(env=one, **wrong)
    monkeypatch.setenv("TORCHSTORE_ADDRESS", server.address)
    for variable in ("TORCHSTORE_PREFER", "TORCHSTORE_BLOCK"):
        with monkeypatch.context() as environment:
            environment.setenv(variable, "shn")
            with pytest.raises(ts.ConfigurationError, match=f"{variable}.*'shn'"):
                await ts.put("k", 1)
            environment.setenv(variable, "inline")
            await ts.put("k", 1)
            await ts.shutdown()


async def test_with_every_way_blocked_the_error_says_who_and_why(server: ServerThread) -> None:
    async with connected(server.address, block=["shm", "inprocess", "inline"]) as client:
        with pytest.raises(ts.TransportUnavailableError) as caught:
            await client.put("k", torch.arange(100_000))
        assert {"shm", "inprocess", "inline"} <= {
            *caught.value.details["refusals"],
            *(n for n in ("shm", "inprocess", "inline") if n in caught.value.message),
        }
        assert not await client.exists("k")
        assert (await client.status()).volumes[0].used_bytes == 0


async def test_a_server_that_blocks_it_does_not_offer_it() -> None:
    server = ServerThread(block=("inprocess",))
    try:
        async with connected(server.address) as client:
            name, refusals = await chosen(client)
            assert name == "shm"
            assert "does not offer" in refusals["inprocess"]
    finally:
        server.stop()


# ---- the bytes ------------------------------------------------------------------------------


async def test_bytes_are_right_both_ways(server: ServerThread) -> None:
    """Without a window or a map: packed, moved, spread; every layout and kind."""
    big = torch.randn(300, 400)
    values = {
        "contiguous": big,
        "transposed": big.t(),
        "strided": big[::3, 5:300:7],
        "expanded": torch.arange(400).expand(200, 400),
        "bfloat16": big.bfloat16(),
        "bool": big > 0,
        "complex": torch.complex(big, -big),
        "float8": big.to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 5),
        "grad": torch.randn(200, 300, requires_grad=True),
    }
    payload = {"text": "x" * 100_000, "parts": (1, {2}, b"3")}
    async with connected(server.address, block=["shm", "inline"]) as client:
        refs = await client.put_batch({**values, "object": payload})
        got = await client.get_batch(list(refs))
        assert got.pop("object") == payload
        for name, value in values.items():
            assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape)
            assert torch.equal(bits(got[name]), bits(value))
        await in_place_and_slices(client, big)


async def in_place_and_slices(client: ts.Client, big: torch.Tensor) -> None:
    """What a reader may ask for of the key ``contiguous``."""
    room = torch.zeros(400, 600)
    target = room.t()[::2, ::1][:300, :400]
    assert not target.is_contiguous()
    assert await client.get("contiguous", target) is target
    assert torch.equal(target, big)
    room[:400, :600:2] = 0
    assert not room.any()  # nothing beside the destination was written
    for offsets, shape in (((10, 20), (30, 40)), ((0, 0), (5, 400)), ((299, 0), (1, 400))):
        part = ts.TensorSlice(offsets, shape, (300, 400))
        wanted = big[offsets[0] :, offsets[1] :][: shape[0], : shape[1]]
        assert torch.equal(await client.get("contiguous", tensor_slice_spec=part), wanted)
        into = torch.zeros(shape[1], shape[0]).t()
        assert torch.equal(await client.get("contiguous", into, part), wanted)
    with pytest.raises(ts.LayoutMismatchError):
        await client.get("contiguous", torch.empty(400, 300))


async def test_what_was_got_is_the_readers_own(server: ServerThread) -> None:
    async with connected(server.address, block=["shm", "inline"]) as client:
        await client.put("k", torch.zeros(100_000))
        first = await client.get("k")
        first.fill_(7)
        assert not (await client.get("k")).any()
        await client.put("k", torch.ones(100_000))
        assert (first == 7).all()
        status = await client.status()
        assert status.volumes[0].leased_bytes == 0  # nothing is mapped, nothing stays leased


async def test_it_ends_with_its_server_and_leaves_nothing(server: ServerThread) -> None:
    async with connected(server.address, block=["shm", "inline"]) as client:
        await client.put("k", torch.zeros(100_000))
        assert len(inprocess._served) == 1
        server.stop()
        assert inprocess._served == {}
        with pytest.raises(ts.StoreClosedError):
            await client.put("k", torch.zeros(100_000))


# ---- observers ------------------------------------------------------------------------------

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


async def test_an_observer_sees_every_operation_with_its_phases(site: Site) -> None:
    site.install("watcher", OBSERVERS, w=WATCH)
    async with running_store() as client:
        await client.put("small", 5)
        await client.put_batch({"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 18)})
        into = torch.empty(1 << 20)
        await client.get("a", into)
        await client.get_batch(["a", "b", "small"])
        await client.exists("a")
        await client.keys()
        await client.wait(["a", "b"])
        with pytest.raises(ts.StoreTimeoutError):
            await client.wait("never", timeout=0.01)
        with pytest.raises(ts.KeyNotFoundError):
            await client.get("missing")
        with pytest.raises(ts.UnsupportedValueError):
            await client.put("meta", torch.empty(3, device="meta"))
        await client.delete("a")
        await client.delete_batch(["b", "missing"])
        await client.put_state_dict({"w": torch.zeros(1 << 20), "n": {"step": 1}}, "model")
        await client.put_state_dict({"w": torch.zeros(3)}, "small model")
        mine = {"w": torch.empty(1 << 20), "n": {"step": 0}}
        await client.get_state_dict("model", mine)
        with pytest.raises(ts.LayoutMismatchError):
            await client.get_state_dict("model", {"w": torch.empty(1)})
        with pytest.raises(ts.UnsupportedValueError):
            await client.put_state_dict([], "model")
        await client.versions("model")
        await client.latest_version("model")
    operations = seen()
    assert [(o.name, o.entries, o.error) for o in operations] == [
        ("put", 1, ""),
        ("put_batch", 2, ""),
        ("get", 1, ""),
        ("get_batch", 3, ""),
        ("exists", 1, ""),
        ("keys", 1, ""),
        ("wait", 2, ""),
        ("wait", 1, "timeout"),
        ("get", 1, "key-not-found"),
        ("put", 1, "unsupported-value"),
        ("delete", 1, ""),
        ("delete_batch", 2, ""),
        ("put_state_dict", 2, ""),
        ("put_state_dict", 1, ""),
        ("get_state_dict", 2, ""),
        ("get_state_dict", 1, "layout-mismatch"),
        ("put_state_dict", 1, "unsupported-value"),
        ("versions", 1, ""),
        ("latest_version", 1, ""),
    ]
    assert all(o.store_name == "torchstore" for o in operations)
    small, batch, get, several = operations[:4]
    assert (small.transport, set(small.phases)) == ("inline", {"plan"})
    assert (batch.transport, set(batch.phases)) == ("shm", {"plan", "copy", "commit"})
    assert (get.transport, set(get.phases)) == ("shm", {"plan", "copy"})
    assert batch.nbytes == (5 << 20) and get.nbytes == 4 << 20  # noqa: PT018
    assert several.nbytes >= 5 << 20
    for operation in operations:
        assert 0 <= sum(operation.phases.values()) <= operation.seconds < 20
    assert batch.phases["copy"] > 0
    assert operations[8].transport == ""
    published, little, filled = operations[12:15]
    assert (published.transport, set(published.phases)) == ("shm", {"plan", "copy", "commit"})
    assert (little.transport, set(little.phases)) == ("inline", {"plan"})
    assert (filled.transport, set(filled.phases)) == ("shm", {"plan", "copy"})
    assert published.nbytes >= 4 << 20
    assert filled.nbytes == published.nbytes


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
            f"""
            import json, logging
            logging.basicConfig(stream=sys.stdout, format="LOG %(levelname)s %(message)s")
            for name in ("one", "other"):
                client = await ts.connect({server.address!r}, store_name=name)
                await client.put("k", 1)
            await ts.reset_client("one")
            print("ERRORS", json.dumps((await ts.status(store_name="one")).plugin_errors))
            from site_watcher_fine import operations
            print("SEEN", [operation.name for operation in operations])
            """
        )
        tool = [sys.executable, "-m", "torchstore_core.cli"]
        shown = await asyncio.to_thread(
            subprocess.run,
            [*tool, "status", "--json", "--address", server.address],
            capture_output=True,
            check=True,
            timeout=30,
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
