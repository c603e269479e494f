"""Sockets: when they are found, and when they are made again."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from tests.support import until

from torchstore_core.machine.directories import CONTROL, PrivateDirectory
from torchstore_core.server.serving.listening import Listener


async def test_who_finds_a_socket_is_not_refused() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = f"{folder}/control.sock"
        refused: list[OSError] = []
        is_over = threading.Event()

        def connect() -> None:
            while not is_over.is_set():
                with socket.socket(socket.AF_UNIX) as sock:
                    try:
                        sock.connect(path)
                    except FileNotFoundError:
                        continue
                    except OSError as error:
                        refused.append(error)

        connecting = threading.Thread(target=connect)
        connecting.start()
        listeners = [Listener(lambda accepted, pid: accepted.close()) for _ in range(200)]
        for listener in listeners:
            listener.open(path)  # in place of the one before, which goes on listening
        is_over.set()
        await asyncio.to_thread(connecting.join)
        for listener in listeners:
            listener.close()
        assert not refused


async def test_a_removed_socket_is_made_again_but_not_when_its_owner_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever removes the directory of an owner that has died would not come a second time."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("torchstore_core.server.serving.listening._NAME_S", 0.01)
    script = "import sys; sys.stdin.read()"
    owner = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-S", "-c", script], stdin=subprocess.PIPE
    )
    theirs, ours = PrivateDirectory(), PrivateDirectory()
    owned, own = Listener(lambda *_: None), Listener(lambda *_: None)
    owned.owner = owner.pid
    try:
        for listener, directory in ((owned, theirs), (own, ours)):
            listener.open(directory.control)
        shutil.rmtree(theirs.path)
        await until((theirs.path / CONTROL).exists)
        await asyncio.to_thread(owner.communicate)
        shutil.rmtree(theirs.path)
        for _ in range(3):  # meanwhile the other one looks, too
            shutil.rmtree(ours.path)
            await until((ours.path / CONTROL).exists)
        assert not theirs.path.exists()
    finally:
        for listener in (owned, own):
            listener.close()
        owner.kill()
        owner.communicate()
