"""Two network namespaces with a slow link between them: where bytes are under way for seconds."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import turn

from torchstore_core.testing.timers import ends_within

from .pairs import MB, Memory, Pair, late_bytes, needs_nixl

pytestmark = needs_nixl
# Not everybody has the folders of system programs on the path.
_TC = shutil.which("tc", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "tc"
_BIG, _SOME = 128 * MB, 24 * MB
_RATE = "400mbit"
_LEAST, _CANCEL_S = 4 * MB, 1.0


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=300)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two namespaces, with the addresses 10.77.0.1 and 10.77.0.2."""
    names = f"rdma{os.getpid()}a", f"rdma{os.getpid()}b"
    links = f"r{os.getpid()}a", f"r{os.getpid()}b"
    try:
        for name in names:
            _run("ip", "netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        ends = [("name", link, "netns", name) for name, link in zip(names, links, strict=True)]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for at, (name, link) in enumerate(zip(names, links, strict=True), 1):
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{at}/24", "dev", link)
            for one in (link, "lo"):
                _run("ip", "-n", name, "link", "set", one, "up")
            limit = ("tbf", "rate", _RATE, "burst", "256kb", "latency", "50ms")
            _run("ip", "netns", "exec", name, _TC, "qdisc", "add", "dev", link, "root", *limit)
        yield names
    finally:
        for name in names:
            _run("ip", "netns", "del", name)


def test_calls_show_progress_and_when_cancelled_end_soon_and_for_good(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    """This process stays where it is; the client is another one, and starts the server half."""
    server, client = hosts
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec ip netns exec {server} {sys.executable} "$@"\n')
    python.chmod(0o755)
    root = Path(__file__).parents[3]
    module = ".".join(Path(__file__).relative_to(root).with_suffix("").parts)
    body = (
        "import asyncio, importlib, sys\n"
        f"sys.path.insert(0, {str(root)!r})\n"
        f"test = importlib.import_module({module!r})\n"
        f"sys.executable = {str(python)!r}\n"
        f"asyncio.run(test.show_and_cancel({str(tmp_path)!r}))"
    )
    command = ["ip", "netns", "exec", client, sys.executable, "-c", body]
    # Left to itself, UCX finds out that both are processes of one machine.
    env = {**os.environ, "UCX_TLS": "tcp"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


async def show_and_cancel(directory: str) -> None:
    volume = Pair(_BIG)
    await volume.start(directory)
    link, pid = await volume.link(same_host=False), volume.pid
    for move in (link.write, link.read):
        some = Memory(_SOME, 5)
        moving = asyncio.ensure_future(move([some.copy()]))
        seen = {link.progress()}
        while not moving.done():
            await asyncio.wait([moving], timeout=0.02)
            seen.add(link.progress())
        await moving
        assert len(seen) > 5, seen
        idle = link.progress()
        await turn()
        assert link.progress() == idle
    for write in (True, False):
        volume.fill(7)
        mine = Memory(_BIG, 1)
        moving = asyncio.ensure_future((link.write if write else link.read)([mine.copy()]))
        last = b"\1" if write else b"\7"
        while (volume.look(_LEAST, 1) if write else mine.bytes()[_LEAST : _LEAST + 1]) != last:
            await asyncio.wait([moving], timeout=0.05)
        moving.cancel()
        assert await ends_within(moving, _CANCEL_S)
        assert moving.cancelled(), (write, moving.exception())
        assert not link.unsettled
        moved = volume.count(1) if write else mine.count(7)
        assert _LEAST < moved < _BIG
        mine.fill(2)
        volume.fill(3)
        await late_bytes(1)
        assert mine.count(2) == _BIG
        assert volume.count(3) == _BIG
        few = Memory(MB, 9)
        await link.write([few.copy()])
        assert volume.count(9) == MB
        assert volume.pid == pid
    link.close()
    await volume.server.close()
