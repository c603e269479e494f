"""A server that is stopped: every call ends with a time-out that says of what, where and when; and
one whose end takes long.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.reliability.harness import MB
from tests.support import before_commits, halt, running_store, stop, until

import torchstore_core as ts
import torchstore_core.blocking as blocking
from torchstore_core.machine.processes import is_exiting
from torchstore_core.runtimes.server_process import ServerProcess

THIRD_S = 1 / 3

# What is called, and the key that it is about.
CALLS: dict[str, tuple[str, Callable[[ts.Client], Awaitable[Any]]]] = {
    "put": ("a", lambda c: c.put("a", torch.zeros(MB), timeout=THIRD_S)),
    "put_batch": ("a", lambda c: c.put_batch({"a": 1, "b": 2}, timeout=THIRD_S)),
    "get": ("k", lambda c: c.get("k", timeout=THIRD_S)),
    "get_batch": ("k", lambda c: c.get_batch(["k", "l"], timeout=THIRD_S)),
    "put_state_dict": ("d", lambda c: c.put_state_dict({"w": 1}, "d", timeout=THIRD_S)),
    "get_state_dict": ("d", lambda c: c.get_state_dict("d", timeout=THIRD_S)),
    "delete": ("k", lambda c: c.delete("k", timeout=THIRD_S)),
    "delete_batch": ("k", lambda c: c.delete_batch(["k"], timeout=THIRD_S)),
    "exists": ("k", lambda c: c.exists("k", timeout=THIRD_S)),
    "keys": ("", lambda c: c.keys(timeout=THIRD_S)),
    "versions": ("k", lambda c: c.versions("k", timeout=THIRD_S)),
    "latest_version": ("k", lambda c: c.latest_version("k", timeout=THIRD_S)),
    "stat": ("k", lambda c: c.stat("k", timeout=THIRD_S)),
    "status": ("", lambda c: c.status(timeout=THIRD_S)),
}


def _check(error: BaseException | None, name: str, key: str, where: str) -> None:
    assert type(error) is ts.StoreTimeoutError, (name, error)
    about = f"{key!r}: " if key else ""
    more = ""
    if error.details.get("accepted"):  # a new connection: there may be no descriptor for it, too
        more = ", or has no file descriptors left for more clients, as its log says"
    assert (
        str(error)
        == error.args[0]
        == (
            f"{about}store 'torchstore' ({where}) did not answer `{name}` within 0.333 s: it is "
            f"stopped, or busy{more}"
        )
    )
    assert error.key == (key or None)
    said = {"operation": name, "timeout": THIRD_S, "address": where, "answered": False}
    assert said.items() <= error.details.items()


@pytest.mark.quick
async def test_every_call_says_what_was_not_answered():
    async with running_store() as client:
        await ts.put("k", 1)
        known = client.address
        pid = (await ts.status()).controller_pid
        await halt(pid)
        try:
            # With a connection that is open, and with one that has to be made first.
            for _ in range(2):
                calls = {
                    name: asyncio.ensure_future(call(client)) for name, (_, call) in CALLS.items()
                }
                await asyncio.wait(calls.values())
                for name, call in calls.items():
                    _check(call.exception(), name, CALLS[name][0], known)
                await ts.reset_client()
            with pytest.raises(ts.StoreTimeoutError, match=r"within 0\.333 s: it is") as caught:
                await ts.connect(known, store_name="other", timeout=THIRD_S)
            assert caught.value.details == {
                "operation": "connect",
                "timeout": THIRD_S,
                "address": known,
                "answered": False,
                "accepted": True,
            }

            def bare() -> None:
                blocking.get("k", timeout=THIRD_S)

            with pytest.raises(ts.StoreTimeoutError) as caught:
                await asyncio.to_thread(bare)
            _check(caught.value, "get", "k", known)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await ts.get("k") == 1


async def test_a_commit_that_goes_on_says_it_too(caplog: pytest.LogCaptureFixture):
    """Of ``put_state_dict(blocking=False)``, whose call is over when its time is."""
    async with running_store() as client:
        pid = (await ts.status()).controller_pid
        value = {"w": torch.zeros(MB)}
        try:
            with before_commits(lambda: stop(pid)):
                pending = await ts.put_state_dict(value, "d", blocking=False, timeout=3)
            with pytest.raises(ts.StoreTimeoutError) as caught:
                await pending
        finally:
            os.kill(pid, signal.SIGCONT)
        assert caught.value.details["operation"] == "put_state_dict"
        assert caught.value.details["address"] == client.address
        assert "'d': store 'torchstore'" in caplog.text


# As while the kernel frees a large spill file, which may take a second for each GB: the process is
# exiting, and is not gone. Here its last thread is to blame.
SLOW_EXIT = """
import ctypes, json, os, signal, threading
threading.Thread(target=signal.pause).start()
exit_thread = lambda *_: ctypes.CDLL(None).syscall(60, 0)
signal.signal(signal.SIGTERM, exit_thread)
print(json.dumps({"address": "unix:/nowhere/socket", "pid": os.getpid()}), flush=True)
while True:
    signal.pause()
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of exit() is that of x86-64")
async def test_a_server_that_exits_for_long_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends by itself; and no longer than the time-out is waited for that."""
    (tmp_path / "slow_exit.py").write_text(SLOW_EXIT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ServerProcess("slow_exit")
    await server.launch({"store_name": "slow"}, 60)
    pid = server.pid
    try:
        await server.stop(0.5)
        assert [one.message for one in caplog.records] == [
            f"server {pid} has ended, but the kernel is still freeing its memory or its files"
        ]
        assert is_exiting(pid)
        assert len(os.listdir(f"/proc/{pid}/task")) == 2, "it was killed"
    finally:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not os.path.exists(f"/proc/{pid}"))  # reaped, once it is gone
