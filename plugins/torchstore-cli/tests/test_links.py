"""Links to volumes: measured (``bench --transports``), and from both sides (``doctor --peer``)."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support import running_store
from tests.unit.plugins.test_plugins import TRANSPORTS, Site

from torchstore_cli.doctor.differences import differences
from torchstore_cli.doctor.links import numa_notes
from torchstore_core.contracts.transport import Bid, LinkContext, TransportSpec
from torchstore_core.machine import topology
from torchstore_core.machine.networks import Network, networks
from torchstore_core.machine.numa import Numa, probe_numa
from torchstore_core.plugins.calibration import (
    Calibration,
    calibration_file,
    corrected,
    link_of,
    save,
)
from torchstore_core.plugins.ranking import Policy, rank
from torchstore_core.plugins.surroundings import Surroundings
from torchstore_core.testing.timers import ends_within

from .test_cli import Result, _python_path, installed, torchstore

LINK = ("shm", "here", "there", "loopback")


async def test_every_transport_is_measured_and_later_bids_say_so(tmp_path: Path) -> None:
    where = str(tmp_path / "cache" / "calibration.json")
    async with running_store(num_storage_volumes=2, strategy="spread") as store:
        result = await torchstore(
            *("bench", "--transports", "--save", "--size", "4MiB", "--json"),
            *("--address", store.address),
            TORCHSTORE_CALIBRATION=where,
        )
        assert result.status == 0, result.err
        report = json.loads(result.out)
        assert (report["saved"], report["nbytes"]) == (where, 4 << 20)
        volumes = {"torchstore-0", "torchstore-1"}
        shm, tcp = (
            [line for line in report["lines"] if line["transport"] == name]
            for name in ("shm", "tcp")
        )
        for lines in (shm, tcp):
            assert {line["volume"] for line in lines} == volumes
            for line in lines:
                assert line["error"] is None
                assert min(line["put_bytes_per_s"], line["get_bytes_per_s"]) > 0
        refused = [line for line in report["lines"] if line["transport"] == "inprocess"]
        assert {line["error"] for line in refused} == {"the volume is in another process"}
        assert await store.keys() == []
        doctor = await torchstore(
            "doctor", "--json", TORCHSTORE_CALIBRATION=where, TORCHSTORE_BLOCK="rdma"
        )
        (bid,) = [b for b in json.loads(doctor.out)["link"]["bids"] if b["transport"] == "shm"]
        assert "figures measured here on" in bid["reason"]
        assert bid["latency_s"] in {line["latency_s"] for line in shm}


BIDS = """
@hookimpl
def torchstore_transport():
    bid = lambda context: Bid(1.0, 1e6, "it")
    return TransportSpec({name!r}, bid=bid, client=CLIENT, server=SERVER, max_bytes=MOST)

CLIENT = "torchstore_transports.shm.link:ShmLink"
SERVER = "torchstore_transports.shm.server:ShmServer"
MOST = None
"""


LATE = (
    BIDS
    + """
from torchstore_core.errors import TransportNotReadyError
from torchstore_transports.shm.link import ShmLink

class Late(ShmLink):
    tries = 0

    @classmethod
    async def connect(cls, offer, context):
        cls.tries += 1
        if cls.tries <= 2:  # to each volume
            raise TransportNotReadyError("not yet")
        return await super().connect(offer, context)

CLIENT = __name__ + ":Late"
"""
)


@pytest.mark.thorough
async def test_what_is_not_measured_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every transport that is installed here or offered there, to every volume."""
    there, here = Site(tmp_path / "there"), Site(tmp_path / "here")
    for site in (there, here):
        site.path.mkdir()
    common = {"little": BIDS + "MOST = 1000", "no_link": BIDS + "CLIENT = 'nowhere:Link'"}
    common["late"] = LATE
    there.install("acme", TRANSPORTS, only_there=BIDS, **common)
    here.install("acme", TRANSPORTS, broken="import nowhere", **common)
    monkeypatch.setenv("PYTHONPATH", _python_path(tmp_path / "there"))
    async with running_store(num_storage_volumes=2) as store:
        result = await installed(
            *("bench", "--transports", "--size", "1MiB", "--json", "--address", store.address),
            PYTHONPATH=_python_path(tmp_path / "here"),
            TORCHSTORE_BLOCK=os.environ["TORCHSTORE_BLOCK"] + ",monarch-rpc",
        )
        assert result.status == 0, result.err
        assert await store.keys() == []
    report = json.loads(result.out)
    lines = {(one["transport"], one["volume"]): one for one in report["lines"]}
    names = {"shm", "inline", "tcp", "gloo", *("only_there", "broken", "little", "no_link")}
    assert names <= {name for name, _ in lines}
    assert len(report["lines"]) == len(lines) == 2 * len({name for name, _ in lines})

    def why(name: str, volume: int = 0) -> str:
        return str(lines[name, f"torchstore-{volume}"]["error"])

    for name in ("shm", "late"):
        assert lines[name, "torchstore-0"]["error"] is None
    assert "its strategy chooses" in why("shm", 1)  # the default one takes the first volume
    assert "in control messages" in why("inline")
    for volume in (0, 1):
        assert why("only_there", volume) == "it is not installed here"
        assert why("little", volume) == "it takes at most 1,000 bytes"
        assert why("gloo", volume) == why("monarch-rpc", volume) == "blocked by configuration"
        assert "No module named 'nowhere'" in why("broken", volume)
    assert "nowhere" in why("no_link")


async def test_save_needs_transports() -> None:
    result = await torchstore("bench", "--save")
    assert result.status == 2
    assert "--save needs --transports" in result.err


def test_measurements_of_other_links_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSTORE_CALIBRATION", str(tmp_path / "c.json"))
    bid = Bid(1.0, 2.0, "estimated")
    assert corrected(bid, LINK) is bid
    save({LINK: Calibration(3.0, 4.0, 0.0)})
    save({("tcp", *LINK[1:]): Calibration(5.0, 6.0, 0.0)})
    assert corrected(bid, LINK) == Bid(3.0, 4.0, corrected(bid, LINK).reason)
    assert corrected(bid, LINK).reason.startswith("estimated; figures measured here on 1")
    assert corrected(bid, ("shm", "here", "elsewhere", "loopback")) is bid


def test_a_measurement_applies_to_the_way_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one host there are several: the loopback, and whatever is between network namespaces."""

    def place(namespace: str, address: str = "10.0.0.1", host: str = "one") -> topology.Topology:
        networks = (Network("eth0", address, 24),)
        return msgspec.structs.replace(
            topology.probe(), host_id=host, namespace=namespace, networks=networks
        )

    here = place("a")
    loopback = link_of("tcp", here, place("a", "10.9.0.1"))
    assert loopback == link_of("tcp", place("b"), place("b"))
    between = link_of("tcp", here, place("b", "10.0.0.2"))
    others = [
        link_of("tcp", here, place("b", "10.0.0.3")),
        link_of("tcp", here, place("b", "10.0.0.2", "two")),
        link_of("gloo", here, place("b", "10.0.0.2")),
        link_of("tcp", place(""), place("")),  # where the system does not tell namespaces apart
    ]
    assert len({loopback, between, *others}) == 6
    # Bids are corrected accordingly.
    monkeypatch.setenv("TORCHSTORE_CALIBRATION", str(tmp_path / "c.json"))
    save({loopback: Calibration(3.0, 4.0, 0.0)})
    spec = TransportSpec("tcp", bid=lambda _: Bid(1.0, 2.0, "estimated"))
    for there, measured in ((place("a"), True), (place("b", "10.0.0.2"), False)):
        context = LinkContext(here, there, same_host=True, offered=True)
        (candidate,) = rank([spec], context, {}, Policy()).candidates
        assert (candidate.bid.latency_s == 3.0) is measured
    # A namespace may be another one with the same addresses, such as a container's next life.
    assert between == link_of("tcp", place("c"), place("d", "10.0.0.2"))


_NONSENSE = ["", "nonsense", "[1]", '{"\xff": [1, 1, 1]}', '{"shm here there loopback": [0, 0, 0]}']
_NONSENSE += ['{"shm here there loopback": [1, 1, 1e300]}']


@pytest.mark.parametrize("text", _NONSENSE)
def test_a_file_that_makes_no_sense_corrects_nothing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSTORE_CALIBRATION", str(tmp_path / "c.json"))
    calibration_file().write_text(text, encoding="latin-1")
    bid = Bid(1.0, 2.0, "estimated")
    assert corrected(bid, LINK) is bid


async def test_a_pipe_in_place_of_the_file_is_neither_read_nor_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSTORE_CALIBRATION", str(tmp_path / "c.json"))
    os.mkfifo(calibration_file())
    writer = os.open(calibration_file(), os.O_RDWR)  # whoever reads waits until this is closed
    bid = Bid(1.0, 2.0, "estimated")
    asked = asyncio.ensure_future(asyncio.to_thread(corrected, bid, LINK))
    try:
        assert await ends_within(asked, 10)
    finally:
        os.close(writer)
    assert await asked is bid
    with pytest.raises(OSError, match="it is no regular file"):
        save({LINK: Calibration(3.0, 4.0, 0.0)})
    assert calibration_file().is_fifo()


@pytest.fixture
def with_rdma(monkeypatch: pytest.MonkeyPatch) -> str:
    """A store whose volume also offers rdma; what else takes time to connect stays apart."""
    apart = [name for name in os.environ["TORCHSTORE_BLOCK"].split(",") if name != "rdma"]
    monkeypatch.setenv("TORCHSTORE_BLOCK", ",".join(apart))
    return ",".join(apart)


@pytest.mark.thorough
async def test_both_sides_of_a_link_are_shown(with_rdma: str) -> None:
    async with running_store() as store:
        here = topology.probe()
        # Others come and go while this runs: those of network namespaces of other tests.
        lasting = {one.address for one in here.networks} & {one.address for one in networks()}

        def host(report: dict[str, Any]) -> dict[str, Any]:
            addresses = [one for one in report["addresses"] if one["address"] in lasting]
            return {**report, "addresses": addresses}

        async def doctor(peer: str, *arguments: str, block: str = "rdma") -> Result:
            options = (*arguments, "--address", store.address)
            return await torchstore("doctor", "--peer", peer, *options, TORCHSTORE_BLOCK=block)

        for peer in (here.hostname, here.host_id, "torchstore-0"):
            result = await doctor(peer, "--json")
            assert result.status == 0, result.err
            report = json.loads(result.out)
            (volume,) = report["volumes"]
            lasting &= {one.address for one in networks()}
            lasting &= {one["address"] for one in volume["host"]["addresses"]}
            assert host(report["host"]) == host(volume["host"])
            addresses = [one["address"] for one in host(volume["host"])["addresses"]]
            assert addresses == [one.address for one in here.networks if one.address in lasting]
            assert "shm" in volume["offers"]
            assert {"shm", "inline"} <= set(report["installed"])
            assert (volume["link"]["volume"], volume["link"]["chosen"]) == ("torchstore-0", "shm")
            common = {"python", "torchstore-core", "torchstore-transports"}
            assert common <= {*volume["versions"]} & {*report["versions"]}
            assert volume["notes"] == []
            assert not any(bid["route"] for bid in volume["link"]["bids"])
        # One that is not chosen is connected, too, if its library decides over what it goes.
        result = await doctor("torchstore-0", "--json", block=with_rdma)
        (volume,) = json.loads(result.out)["volumes"]
        routes = {bid["transport"]: bid["route"] for bid in volume["link"]["bids"]}
        over = routes.pop("rdma")
        assert over.startswith("UCX has connected over ")
        assert not any(routes.values())
        shown = await doctor("torchstore-0", block=with_rdma)
        assert "THERE (OFFERED)" in shown.out
        assert "UCX has connected over" in " ".join(shown.out.split())
        lasting &= {one.address for one in networks()}
        assert all(shown.out.count(address) >= 2 for address in lasting)
        # Without --peer, it is tried on this host, and no volume starts a process for it.
        block = (
            f"{with_rdma},monarch,monarch-rdma,monarch-rpc,spmd"  # import much, and tell nothing
        )
        plain = await torchstore(
            "doctor", "--json", "--address", store.address, TORCHSTORE_BLOCK=block
        )
        report = json.loads(plain.out)
        tried, (link,) = report["link"], report["stores"][0]["links"]
        found = [{b["transport"]: b["route"] for b in one["bids"]}["rdma"] for one in (tried, link)]
        assert found == [over, ""]
        other = await doctor("nowhere")
        assert other.status == 1
        assert f"no volume on 'nowhere'; it has some on {here.hostname}" in other.err


def test_what_differs_in_a_way_that_matters() -> None:
    needs = {"rdma": ("torchstore-rdma", "nixl"), "gloo": ("torchstore-gloo", "torch")}
    versions = {"python": "3.11", "torchstore-core": "1", "torchstore-rdma": "1", "nixl": "1"}
    here = Surroundings({**versions, "other": "1"}, needs)
    assert differences(here, here) == []
    # That of Python, or of what nobody needs at both ends, does not.
    harmless = {**versions, "python": "3.13", "other": "2"}
    assert differences(here, Surroundings(harmless, needs)) == []
    newer = Surroundings({**versions, "torchstore-core": "2", "nixl": "2"}, needs)
    assert differences(here, newer) == [
        "nixl is 1 here and 2 there: both ends of 'rdma' use it; install the same on both hosts",
        "torchstore-core is 1 here and 2 there: install the same release on both hosts",
    ]
    del versions["nixl"]
    assert differences(here, Surroundings(versions, needs)) == [
        "nixl is 1 here and missing there: 'rdma' needs it at both ends"
    ]
    # Where the transport itself is missing or blocked, its refusal says so.
    assert differences(here, Surroundings(versions, {"gloo": needs["gloo"]})) == []


def test_devices_on_other_nodes_than_the_process(tmp_path: Path) -> None:
    (cpu, *_) = os.sched_getaffinity(0)
    for name, text in {
        "devices/system/node/node0/cpulist": "9000-9003,9008\n",
        "devices/system/node/node1/cpulist": f"{cpu}\n",
        "devices/system/node/has_cpu": "0-1\n",
        "class/net/eth0/device/numa_node": "1\n",
        "class/net/eth1/device/numa_node": "-1\n",
        "class/net/lo/mtu": "65536\n",
        "class/infiniband/mlx5_0/device/numa_node": "0\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = probe_numa(tmp_path)
    assert found == Numa(2, (1,), {"eth0": 1, "mlx5_0": 0})
    (note,) = numa_notes("there", found)
    assert note.startswith("there, mlx5_0 is on node 0, and the process runs on 1: ")
    assert "No bid counts that" in note
    nothing = probe_numa(tmp_path / "nothing")
    assert nothing == Numa()
    assert numa_notes("here", nothing) == []
