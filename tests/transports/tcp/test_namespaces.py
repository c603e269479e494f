"""The halves of ``tcp`` in two networks: namespaces joined by a virtual cable, slow ones too."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support import until
from tests.transports.tcp.apart import Apart
from tests.transports.tcp.halves import MB, PEER, Local

from torchstore_core.errors import TransportError, TransportNotReadyError
from torchstore_core.machine.networks import namespace_id
from torchstore_core.testing.networks import free_number
from torchstore_transports.tcp.wire.protocol import Offer

Space = tuple[str, str]
_numbers = itertools.count()


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "not permitted" in done.stderr:
        pytest.skip(f"network namespaces are not permitted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=["10.214.{n}.{host}/24", "fd00:214:{n}::{host}/64"], ids=["IPv4", "IPv6"])
def space(request: pytest.FixtureRequest) -> Iterator[Space]:
    """A namespace, and the name of the cable to it in this one."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    with free_number() as number:
        yield from _joined(str(request.param), number)


def _joined(network: str, number: int) -> Iterator[Space]:
    tag = f"{os.getpid() % 100_000}n{next(_numbers)}"
    name, cable = f"tcp{tag}", f"tc{tag}"
    ours, theirs = (network.format(n=number, host=host) for host in (1, 2))
    fast = ["nodad"] if ":" in ours else []
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "addr", "add", ours, "dev", cable, *fast)
        _run("ip", "link", "set", cable, "up")
        inside = ("ip", "netns", "exec", name, "ip")
        _run(*inside, "addr", "add", theirs, "dev", "eth0", *fast)
        _run(*inside, "link", "set", "eth0", "up")
        _run(*inside, "link", "set", "lo", "up")
        yield name, cable
    finally:
        for words in (["link", "delete", cable], ["netns", "delete", name]):
            subprocess.run(["ip", *words], capture_output=True, check=False)


def _in(space: Space) -> list[str]:
    return ["ip", "netns", "exec", space[0]]


def _listeners(pid: int) -> set[tuple[str, int]]:
    """Where anybody listens in the network of a process: addresses as the kernel writes them."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found


async def test_two_networks(space: Space) -> None:
    with Apart(64 * MB, _in(space)) as there:
        offer = msgspec.msgpack.decode(there.offer, type=Offer)
        assert offer.namespace != namespace_id()
        assert not _listeners(there.pid)
        link = await there.connect()
        data = os.urandom(30 * MB)
        source, target = Local(30 * MB, data), Local(30 * MB)
        await link.write([source.copy()])
        await link.read([target.copy()])
        assert target.raw == data
        # At that one address, not at all of them and not at the loopback.
        ((address, _),) = _listeners(there.pid)
        assert set(address) != {"0"}
        assert not address.endswith("7F")
        link.close()
        await there.ask("disconnect", PEER.hex())
        assert not _listeners(there.pid)


@pytest.mark.parametrize("bind", ["eth0", "127.0.0.1", "eth1"])
async def test_where_the_user_wants_it_to_listen(space: Space, bind: str) -> None:
    with Apart(64 * MB, _in(space), {"TORCHSTORE_BIND": bind}) as there:
        if bind == "eth0":
            (await there.connect()).close()
        elif bind == "eth1":
            with pytest.raises(TransportError, match="neither an address nor an interface"):
                await there.connect()
        else:
            with pytest.raises(TransportNotReadyError):
                await there.connect()
            assert {address for address, _ in _listeners(there.pid)} == {"0100007F"}


async def test_a_cable_that_is_pulled_for_a_while(space: Space) -> None:
    """Nothing is lost, however long the kernel takes to try again."""
    with Apart(64 * MB, _in(space)) as there:
        link = await there.connect()
        slow = ("qdisc", "add", "dev", "eth0", *_limit("8mbit"))  # or it would be over too soon
        _run(*_in(space), _TC, *slow)
        data = os.urandom(16 * MB)
        source, target = Local(16 * MB, data), Local(16 * MB)
        await link.write([source.copy()])
        reading = asyncio.ensure_future(link.read([target.copy()]))
        await until(lambda: target.buffer[100_000:100_008] != bytes(8), 20)
        _run(*_in(space), "ip", "link", "set", "eth0", "down")
        assert not (await asyncio.wait([reading], timeout=2.0))[0]
        _run(*_in(space), "ip", "link", "set", "eth0", "up")
        (network,) = msgspec.msgpack.decode(there.offer, type=Offer).networks
        if ":" in network.address:  # the kernel drops it when the interface goes down
            _run(*_in(space), "ip", "addr", "add", f"{network.address}/64", "dev", "eth0", "nodad")
        _run(*_in(space), _TC, "qdisc", "delete", "dev", "eth0", "root")
        await asyncio.wait_for(reading, 30)
        assert target.raw == data
        link.close()


# Not everybody has the folders of system programs on the path.
_TC = shutil.which("tc", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "tc"


def _limit(rate: str) -> tuple[str, ...]:
    return ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")


async def test_a_slow_link(space: Space) -> None:
    with Apart(64 * MB, _in(space)) as there:
        link = await there.connect()
        _run(*_in(space), _TC, "qdisc", "add", "dev", "eth0", *_limit("200mbit"))
        data = os.urandom(20 * MB)
        source, target = Local(20 * MB, data), Local(20 * MB)
        await link.write([source.copy()])
        took = math.inf
        for _ in range(20):  # a busy machine may hold up some of them
            began = time.monotonic()
            await link.read([target.copy()])
            took = min(took, time.monotonic() - began)
            if 20 * MB * 8 / took > 100e6:
                break
        assert target.raw == data
        assert 20 * MB * 8 / took < 230e6  # so it did go over the slow link
        assert 20 * MB * 8 / took > 100e6
        link.close()
