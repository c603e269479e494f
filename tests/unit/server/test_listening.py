"""Sockets that are made again, or not."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import until

from torchstore_core.machine.directories import CONTROL, PrivateDirectory
from torchstore_core.server.serving.listening import Listener


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
