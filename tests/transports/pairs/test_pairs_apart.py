"""A transport over pairs between two hosts with addresses of their own: network namespaces, joined
by a virtual cable. They share the file system, so the store's socket is reached from both.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes import Script
from tests.support import until

_ADDRESSES = ("10.213.91.1", "10.213.91.2")
_NETWORK = 0x40000000  # CLONE_NEWNET


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def spaces() -> Iterator[list[str]]:
    """Two namespaces and a cable."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    names = [f"tsp{os.getpid()}n{number}" for number in (0, 1)]
    cable = [f"tsp{os.getpid() % 100_000}v{number}" for number in (0, 1)]
    try:
        for name in names:
            done = _ip("netns", "add", name)
            if done.returncode:
                pytest.skip(f"network namespaces are not permitted here: {done.stderr.strip()}")
        first = ("link", "add", cable[0], "netns", names[0], "type", "veth")
        assert _ip(*first, "peer", "name", cable[1], "netns", names[1]).returncode == 0
        for name, end, address in zip(names, cable, _ADDRESSES, strict=True):
            inside = ("netns", "exec", name, "ip")
            assert _ip(*inside, "addr", "add", f"{address}/24", "dev", end).returncode == 0
            assert _ip(*inside, "link", "set", end, "up").returncode == 0
        yield names
    finally:
        for name in names:
            _ip("netns", "delete", name)


def _inside(space: str) -> str:
    """A script's process goes there, with all that it starts."""
    return textwrap.dedent(f"""
        import ctypes, os
        there = os.open("/run/netns/{space}", os.O_RDONLY)
        assert ctypes.CDLL(None).setns(there, {_NETWORK}) == 0
        os.close(there)
        """)


@pytest.mark.parametrize("name", ["gloo", pytest.param("torchcomms", marks=pytest.mark.soak)])
async def test_two_hosts(name: str, spaces: list[str], tmp_path: Path) -> None:
    """There is no loopback device in either that is up: only the cable leads to the other."""
    if name == "torchcomms" and importlib.util.find_spec(name) is None:
        pytest.skip("torchcomms is not installed")
    ready, end = tmp_path / "ready", tmp_path / "end"
    serve = f"""
        import pathlib
        from tests.support import until
        client = await ts.initialize(capacity=256 << 20, prefault=0)
        await client.put("t", torch.arange(1 << 20))
        found = pathlib.Path({str(ready)!r} + ".new")
        found.write_text(await ts.address())
        found.rename({str(ready)!r})
        await until(pathlib.Path({str(end)!r}).exists, 100)
        assert torch.equal(await client.get("u"), torch.arange(1 << 20) + 1)
        await ts.shutdown()
        """
    use = f"""
        import pathlib
        address = pathlib.Path({str(ready)!r}).read_text()
        client = await ts.connect(address, prefer=[{name!r}])
        got = torch.zeros(1 << 20, dtype=torch.int64)
        await client.get("t", got)
        assert torch.equal(got, torch.arange(1 << 20))
        await client.put("u", got + 1)
        print([entry["chosen"] for entry in await client.explain()])
        """
    with Script(_inside(spaces[0]) + textwrap.dedent(serve)) as server:
        await until(ready.exists, 60)
        with Script(_inside(spaces[1]) + textwrap.dedent(use)) as client:
            assert (await client.output()).strip() == f"['{name}']"
        end.touch()
        await server.output()
