"""Two hosts with a network each: network namespaces, joined by a pair of virtual cables.

Nothing goes over the loopback between them, so what would only work there fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from tests.monarch import acts
from tests.monarch.jobs import Job

MB = 1 << 20


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


def _make(*words: str) -> None:
    done = _ip(*words)
    if done.returncode:
        pytest.skip(f"network namespaces are not permitted here: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def spaces() -> Iterator[list[tuple[str, str]]]:
    """Two namespaces, each with its address; this one is at the other end of both cables."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    made: list[tuple[str, str]] = []
    tag = f"{os.getpid() % 100_000}"
    try:
        _make("link", "add", f"tsb{tag}", "type", "bridge")
        _make("addr", "add", "10.213.77.1/24", "dev", f"tsb{tag}")
        _make("link", "set", f"tsb{tag}", "up")
        for number in (0, 1):
            space, cable, address = f"ts{tag}n{number}", f"ts{tag}v{number}", 2 + number
            _make("netns", "add", space)
            made.append((space, f"10.213.77.{address}"))
            _make("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            _make("link", "set", cable, "master", f"tsb{tag}", "up")
            inside = ("netns", "exec", space, "ip")
            _make(*inside, "addr", "add", f"10.213.77.{address}/24", "dev", "eth0")
            _make(*inside, "link", "set", "eth0", "up")
            _make(*inside, "link", "set", "lo", "up")
        yield made
    finally:
        for space, _ in made:
            _ip("netns", "delete", space)  # its end of the cable goes with it, and so the other
        _ip("link", "delete", f"tsb{tag}")


@pytest.fixture(scope="module")
def apart(spaces: list[tuple[str, str]]) -> Iterator[Job]:
    """A job over both; the root is in this namespace."""
    wrappers = [["ip", "netns", "exec", space] for space, _ in spaces]
    addresses = [f"tcp://{address}:26600" for _, address in spaces]
    with Job(
        workers=1,
        wrappers=wrappers,
        addresses=addresses,
        transport="tcp://10.213.77.1:26600",
    ) as made:
        yield made


async def test_a_store_over_networks(apart: Job) -> None:
    await apart.root(acts.initialize_on_hosts, {"strategy": "host"})
    try:
        for writer in (0, 1):
            await apart.at(writer, acts.put, f"small{writer}", writer)
            await apart.at(writer, acts.put_ones, f"large{writer}", 20 * MB, writer + 1)
        for reader in (0, 1):
            for writer in (0, 1):
                assert await apart.at(reader, acts.get, f"small{writer}") == writer
                got = await apart.at(reader, acts.get_shape, f"large{writer}")
                assert got == ((20 * MB,), [writer + 1])
        assert await apart.root(acts.get_shape, "large1") == ((20 * MB,), [2])
        status = await apart.root(acts.status)
        assert [v.host_id for v in status.volumes] == ["host0", "host1"]
        assert [v.used_bytes // MB for v in status.volumes] == [20, 20]
    finally:
        await apart.root(acts.shutdown)
