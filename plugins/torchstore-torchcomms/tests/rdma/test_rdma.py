"""The one-sided transport, over a library that stands in for torchcomms' where there is no device.

Everything of this package runs, in two processes. What has never run is the library itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import torch
from tests.support import noise, turn, until

from torchstore_core.contracts.transport import (
    Bid,
    Copy,
    LinkContext,
    Memory,
    Refusal,
    Segment,
    ServerContext,
)
from torchstore_core.errors import (
    TransportError,
    TransportUnavailableError,
)
from torchstore_core.machine.topology import probe
from torchstore_core.server.memory.isolated import IsolatedServer
from torchstore_core.server.memory.segment import open_memory
from torchstore_core.testing.timers import ends_within
from torchstore_torchcomms.rdma.link import RdmaLink
from torchstore_torchcomms.rdma.plugin import torchstore_transport
from torchstore_torchcomms.rdma.protocol import (
    VERSION,
    Goodbye,
    Hello,
    Move,
    Region,
    decode_request,
    decode_welcome,
    encode,
)

MB = 1 << 20
_STAND_IN = Path(__file__).parent / "stand_in"


class Volume:
    """A segment of 64 MiB, and its server half in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fd = open_memory("test", 64 * MB)
        self.server = IsolatedServer("torchstore_torchcomms.rdma.server:RdmaServer")
        self.memory = torch.from_file(f"/proc/self/fd/{self.fd}", True, 64 * MB, dtype=torch.uint8)

    async def link(self, peer: bytes = b"client") -> RdmaLink:
        async def ask(request: bytes) -> bytes:
            return await self.server.handshake(peer, request)

        here = probe()
        return await RdmaLink.connect(b"", LinkContext(here, here, True, True, b"", ask))

    @property
    def pid(self) -> int:
        process = self.server._process
        assert process is not None
        return process._process.pid

    def moved(self) -> int:
        """Bytes that have been moved so far."""
        file = self.folder / "moved"
        return sum(map(int, file.read_text().split())) if file.exists() else 0

    def own(self, kind: str) -> int:
        """How many connections, or pieces of memory, this process has registered."""
        return len(list(self.folder.glob(f"{kind}-{os.getpid()}-*")))


@pytest.fixture
async def volume(stand_in: Path, tmp_path: Path) -> AsyncIterator[Volume]:
    made = Volume(stand_in)
    context = ServerContext("store", "volume", str(tmp_path), probe())
    await made.server.start(context, [Segment(0, made.fd, 64 * MB)])
    yield made
    if made.server._process is not None and made.server._process._process.poll() is None:
        os.kill(made.pid, signal.SIGCONT)
    await made.server.close()
    os.close(made.fd)


def _memory(*tensors: torch.Tensor) -> list[Memory]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return [Memory(one.data_ptr(), one.nbytes(), one) for one in storages]


def _copy(tensor: torch.Tensor, offset: int) -> Copy:
    return Copy(tensor.data_ptr(), 0, offset, tensor.nbytes)


async def test_bytes_go_both_ways(volume: Volume) -> None:
    link = await volume.link()
    sent = noise(20 * MB)
    small = [torch.full((n,), n, dtype=torch.uint8) for n in range(1, 60)]
    places = [30 * MB + 100 * at for at in range(len(small))]
    copies = [_copy(sent, 5), *map(_copy, small, places), Copy(0, 0, 0, 0)]
    await link.write_from(copies, _memory(sent, *small))
    assert torch.equal(volume.memory[5 : 5 + 20 * MB], sent)
    got, few = torch.zeros_like(sent), [torch.zeros_like(one) for one in small]
    await link.read_into([_copy(got, 5), *map(_copy, few, places)], _memory(got))
    assert torch.equal(got, sent)
    assert all(map(torch.equal, few, small))
    assert volume.moved() == 2 * (20 * MB + sum(range(1, 60)))
    await link.read([_copy(got[100:200], 7)])  # without a word about whose memory it is
    assert torch.equal(got[100:200], sent[2:102])
    assert volume.server.registered(0) == 64 * MB
    await volume.server.disconnect(b"client")
    with pytest.raises(TransportError, match="has ended"):
        await link.write([_copy(sent, 0)])
    assert volume.server.registered(0) == 0


async def test_memory_of_a_tensor_is_registered_once(volume: Volume) -> None:
    link = await volume.link()
    tensors = [torch.zeros(MB, dtype=torch.uint8) for _ in range(3)]
    for value in (1, 2):
        volume.memory.fill_(value)
        await link.read_into(
            [_copy(one, at * MB) for at, one in enumerate(tensors)], _memory(*tensors)
        )
        assert all(bool((one == value).all()) for one in tensors)
        assert volume.own("memory") == link._kept.made == 3
    part = [_copy(tensors[0][:100], 0), _copy(tensors[1][-5:], 0)]
    await link.read_into(part, _memory(*tensors[:2]))
    assert link._kept.made == 3
    del tensors[1:]
    await link.read_into(part[:1], _memory(tensors[0]))
    assert volume.own("memory") == 1
    link.close()
    assert volume.own("memory") == volume.own("transport") == 0


async def test_only_ranges_of_segments_and_of_registered_memory(volume: Volume) -> None:
    tensor = torch.zeros(100, dtype=torch.uint8)
    for segment, offset in ((0, 64 * MB - 99), (0, -1), (1, 0), (0, 1 << 62)):
        link = await volume.link()
        with pytest.raises(TransportError, match="outside"):
            await link.read([Copy(tensor.data_ptr(), segment, offset, 100)])
    link = await volume.link()
    region = Region(tensor.data_ptr(), 100, "no such key")
    for copy in ((0, 0, 0, 0, 101), (0, 1, 0, 0, 100), (1, 0, 0, 0, 1), (-1, 0, 0, 0, 1)):
        with pytest.raises(TransportError, match="outside"):
            await volume.server.handshake(b"client", encode(Move(link._id, True, [region], [copy])))
    move = Move(link._id, True, [region], [(0, 0, 0, 0, 100)])
    with pytest.raises(TransportError, match="failed with code 3"):
        await volume.server.handshake(b"client", encode(move))
    assert volume.moved() == 0


@pytest.mark.parametrize("into", [True, False])
async def test_a_cancelled_call_ends_within_a_second(volume: Volume, into: bool) -> None:
    link, tensor = await volume.link(), torch.ones(64 * MB, dtype=torch.uint8)
    (volume.folder / "slow").write_text("0.2")
    call = link.write_from if into else link.read_into
    moving = asyncio.ensure_future(call([_copy(tensor, 0)], _memory(tensor)))
    await until(lambda: volume.moved() >= 8 * MB, 20)
    moving.cancel()
    assert await ends_within(moving, 1)
    assert moving.cancelled()
    assert not link.unsettled
    before = volume.moved()
    assert before < 64 * MB
    (volume.folder / "slow").unlink()
    again = await volume.link()  # whoever comes next moves its own bytes alone
    few = torch.zeros(5, dtype=torch.uint8)
    await again.read([_copy(few, 0)])
    assert volume.moved() == before + 5


async def test_a_half_that_is_stopped_or_killed(volume: Volume) -> None:
    """A write is unsettled; nothing reaches this process's memory any more."""
    link, tensor = await volume.link(), torch.ones(64 * MB, dtype=torch.uint8)
    pid = volume.pid
    os.kill(pid, signal.SIGSTOP)
    moving = asyncio.ensure_future(link.write([_copy(tensor, 0)]))
    await asyncio.wait([moving], timeout=0.3)
    moving.cancel()
    assert await ends_within(moving, 1)
    assert moving.cancelled()
    assert link.unsettled
    assert volume.own("transport") == volume.own("memory") == 0
    os.kill(pid, signal.SIGCONT)
    await volume.server.disconnect(b"client")
    assert int(volume.memory.count_nonzero()) == 0
    other = await volume.link(b"other")
    (volume.folder / "slow").write_text("0.2")
    moving = asyncio.ensure_future(other.write([_copy(tensor, 0)]))
    await until(lambda: volume.moved() > 0, 20)
    os.kill(volume.pid, signal.SIGKILL)
    with pytest.raises(TransportError):
        await asyncio.wait_for(moving, 10)
    (volume.folder / "slow").unlink()
    await (await volume.link(b"other")).write([_copy(tensor, 0)])
    assert bool(volume.memory.all())


async def test_disconnect_waits_for_what_a_goodbye_is_ending(volume: Volume) -> None:
    link, tensor = await volume.link(), torch.ones(MB, dtype=torch.uint8)
    (volume.folder / "slow").write_text("0.5")
    moving = asyncio.ensure_future(link.write([_copy(tensor, 0)]))
    await until(lambda: volume.moved() > 0, 20)
    ask = encode(Goodbye(link._id))
    leaving = asyncio.ensure_future(volume.server.handshake(b"client", ask))
    await turn()  # it is sent, before what comes next
    await volume.server.disconnect(b"client")
    assert bool(volume.memory[:MB].all())  # so nothing is under way any more
    await asyncio.gather(moving, leaving, return_exceptions=True)


async def test_it_refuses_where_the_library_finds_no_device(volume: Volume) -> None:
    (volume.folder / "unsupported").touch()
    with pytest.raises(TransportUnavailableError, match=r"supported\(\) is false here"):
        await volume.link()


def test_the_handshake_s_messages() -> None:
    region = Region((1 << 64) - 1, 5, "key")
    for message in (
        Hello(VERSION, b"link", b"\0address"),
        Move(b"link", True, [region], [(0, 1, 2, 3, 4)]),
        Goodbye(b"link"),
    ):
        assert decode_request(encode(message)) == message
    for wrong in (
        b"",
        b"?",
        encode(Hello(VERSION + 1, b"", b"")),
        msgspec.msgpack.encode(["move"]),
    ):
        with pytest.raises(TransportError):
            decode_request(wrong)
    with pytest.raises(TransportError):
        decode_welcome(b"?")


def test_it_bids_where_both_hosts_have_the_devices() -> None:
    spec, plain = (
        torchstore_transport(),
        msgspec.structs.replace(probe(), rdma_devices=(), cuda_devices=0),
    )
    network = msgspec.structs.replace(plain, rdma_devices=("mlx5_0",))
    fast = msgspec.structs.replace(network, cuda_devices=1)
    for client, volume, why in (
        (plain, fast, "no RDMA device on this host"),
        (fast, plain, "no RDMA device on the volume's host"),
        (fast, network, "no GPU on the volume's host"),
    ):
        refused = spec.bid(LinkContext(client, volume, same_host=False, offered=True))
        assert isinstance(refused, Refusal)
        assert why in refused.reason
    assert isinstance(spec.bid(LinkContext(fast, fast, same_host=False, offered=True)), Bid)


_ASK = """
import sys
from torchstore_torchcomms.rdma.plugin import torchstore_transport
print(torchstore_transport().probe())
print(sorted({"torch", "torchcomms", "numpy"} & set(sys.modules)))
"""


@pytest.mark.parametrize("build", ["stand-in", "without", "none"])
def test_the_probe_says_what_is_missing_and_imports_nothing(build: str, tmp_path: Path) -> None:
    folder = _STAND_IN if build == "stand-in" else tmp_path
    code = _ASK
    if build == "without":
        (tmp_path / "torchcomms").mkdir()
        (tmp_path / "torchcomms/__init__.py").touch()
        (tmp_path / "torchcomms/_transport.pyi").touch()  # builds for CPUs have this alone
    if build == "none":
        code = "import importlib.util as u; u.find_spec = lambda name: None\n" + _ASK
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout.splitlines()
    expected = {
        "stand-in": "None",
        "without": "was built without its one-sided transport (torchcomms._transport)",
        "none": "torchcomms is not installed",
    }
    assert expected[build] in said[0]
    assert said[1] == "[]"


def test_the_installed_build() -> None:
    """Here it is one for CPUs: the library says no, in words, and so does the probe."""
    probe_here = torchstore_transport().probe
    assert probe_here is not None
    reason = probe_here()
    if reason is None:
        pytest.skip("this torchcomms has the one-sided transport")
    from torchstore_torchcomms.rdma import library

    with pytest.raises(TransportUnavailableError, match="has no one-sided transport"):
        library.check_supported()
