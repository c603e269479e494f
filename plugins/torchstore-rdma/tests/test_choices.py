"""What the transport bids, and on which addresses its library listens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.support import open_files

from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, ServerContext
from torchstore_core.errors import TransportUnavailableError
from torchstore_core.machine.networks import BIND, Network
from torchstore_core.machine.topology import probe
from torchstore_rdma import fabric
from torchstore_rdma.fabric import Place
from torchstore_rdma.plugin import Offer, torchstore_transport, version
from torchstore_rdma.server import RdmaServer

from .pairs import Memory, needs_nixl, pair

_PLAIN = msgspec.structs.replace(probe(), rdma_devices=(), cuda_devices=0)
_FAST = msgspec.structs.replace(_PLAIN, rdma_devices=("mlx5_0", "mlx5_1"))


def _bid(client: object, volume: object, offer: bytes | None = None) -> Bid | Refusal:
    context = LinkContext(client, volume, False, offer is not None, offer or b"")  # type: ignore[arg-type]
    return torchstore_transport().bid(context)


def test_it_wins_with_devices_on_both_sides_and_says_what_runs_without() -> None:
    fast, slow = _bid(_FAST, _FAST), _bid(_PLAIN, _FAST)
    assert isinstance(fast, Bid)
    assert isinstance(slow, Bid)
    assert fast.cost_s(1 << 20) < slow.cost_s(1 << 20)
    assert "no RDMA device on this host: UCX over TCP or shared memory" in slow.reason
    other = _bid(_FAST, _PLAIN)
    assert isinstance(other, Bid)
    assert "on the volume's host" in other.reason


def test_without_devices_shared_memory_and_sockets_are_cheaper() -> None:
    slow = _bid(_PLAIN, _PLAIN)
    assert isinstance(slow, Bid)
    for nbytes in (1, 1 << 20, 1 << 30):
        assert slow.cost_s(nbytes) > 1e-3 + nbytes / 0.11e9  # plain sockets at 1 Gbit/s


@pytest.mark.parametrize("setting", ["UCX_TLS=tcp", "UCX_TLS=^ib", "UCX_NET_DEVICES=eth0,eth1:1"])
def test_what_keeps_ucx_from_the_devices_counts_as_none(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = msgspec.msgpack.encode(Offer(version(), setting))
    there, slow = _bid(_FAST, _FAST, offer), _bid(_PLAIN, _PLAIN)
    monkeypatch.setenv(*setting.split("="))
    here = _bid(_FAST, _FAST)
    for bid, whose in ((here, "this host"), (there, "the volume's host")):
        assert isinstance(bid, Bid)
        assert isinstance(slow, Bid)
        assert bid.reason.startswith(f"{setting} on {whose}: UCX over TCP")
        assert bid.cost_s(1 << 30) == slow.cost_s(1 << 30)


@pytest.mark.parametrize(
    "setting", ["UCX_TLS=^tcp", "UCX_TLS=rc_x,self", "UCX_NET_DEVICES=mlx5_1:1"]
)
def test_other_settings_leave_the_devices(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = _bid(_FAST, _FAST)
    monkeypatch.setenv(*setting.split("="))
    assert _bid(_FAST, _FAST) == fast


@needs_nixl
def test_another_version_of_the_library_is_refused() -> None:
    refused = _bid(_PLAIN, _PLAIN, msgspec.msgpack.encode(Offer("0.1")))
    assert isinstance(refused, Refusal)
    assert "NIXL 0.1" in refused.reason
    assert isinstance(_bid(_PLAIN, _PLAIN, b"?"), Refusal)


def test_doctor_may_ask_without_a_volume() -> None:
    """An offer that nobody has made is not one of another version."""
    assert isinstance(_bid(_PLAIN, _PLAIN, b""), Bid)


def test_the_hook_module_loads_no_library() -> None:
    body = (
        "import sys, torchstore_rdma.plugin as p; p.torchstore_transport().probe();"
        "heavy = {'torch', 'numpy', 'nixl_cu12', 'torchstore_rdma.fabric'};"
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", body], check=True)


def test_without_the_library_the_probe_says_what_to_install() -> None:
    body = (
        "import sys; sys.modules['nixl_cu12'] = None\n"
        "import torchstore_rdma.plugin as p\n"
        "print(p.torchstore_transport().probe())"
    )
    hidden = "import importlib.util as u; u.find_spec = lambda name: None\n"
    said = subprocess.run([sys.executable, "-c", hidden + body], stdout=-1, text=True, check=True)
    assert "pip install nixl-cu12" in said.stdout


def test_a_pair_uses_the_devices_that_both_have() -> None:
    fast = Place("here", ("10.0.0.1",), ("mlx5_0", "mlx5_1"))
    plain = Place("here", ("10.0.0.1",), ())
    assert fabric.options(fast, fast, {}) == {"device_list": "mlx5_0, mlx5_1"}
    assert fabric.options(fast, plain, {}) == {"engine_config": "NET_DEVICES=lo"}
    assert fabric.options(plain, plain, {"UCX_NET_DEVICES": "eth7"}) == {}


def test_an_address_that_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BIND, "127.0.0.1")
    chosen = fabric.here(())
    assert chosen.addresses == ("127.0.0.1",)
    assert fabric.options(chosen, Place("there", ("192.0.2.77",), ()), {}) == {
        "engine_config": "NET_DEVICES=lo"
    }
    monkeypatch.setenv(BIND, "127.0.0.1,192.0.2.77")
    with pytest.raises(TransportUnavailableError, match=r"192\.0\.2\.77"):
        fabric.here(())


async def test_addresses_that_the_engine_has_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's words are stronger, and within a host nobody listens at them."""
    told = (Network("eth7", "192.0.2.77", 24), Network("lo", "127.0.0.1", 8))
    elsewhere = Place("there", ("192.0.2.78",), ())
    server = RdmaServer()
    await server.start(ServerContext("store", "volume", "", probe(), told), [])
    place = server._place()
    assert (place.addresses, place.told) == (("127.0.0.1",), True)  # what is not here is left out
    assert fabric.options(place, elsewhere, {}) == {"engine_config": "NET_DEVICES=lo"}
    other = msgspec.structs.replace(place, addresses=("192.0.2.77",))
    assert fabric.options(other, fabric.here(()), {}) == {"engine_config": "NET_DEVICES=lo"}
    assert fabric.options(other, elsewhere, {}) == {}
    monkeypatch.setenv(BIND, "127.0.0.1")
    assert (server._place().chosen, server._place().told) == (True, False)


@needs_nixl
async def test_within_a_host_the_library_listens_on_the_loopback_alone(tmp_path: Path) -> None:
    others = _listening("self")  # a rendezvous store of a test before, for instance
    async with pair(tmp_path) as volume:
        link = await volume.link()
        await link.write([Memory(1).copy()])
        for pid in ("self", str(volume.pid)):
            assert {address for _, address in _listening(pid) - others} <= {"0100007F"}


def _listening(pid: str) -> set[tuple[str, str]]:
    """The sockets with which a process listens for TCP, and the addresses, in hexadecimal."""
    own = {*open_files(pid).values()}
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            found.add((fields[9], fields[1].partition(":")[0]))
    return found
