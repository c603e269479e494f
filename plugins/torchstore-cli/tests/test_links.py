"""Links to volumes: measured (``bench --transports``), and from both sides (``doctor --peer``)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support import running_store

from torchstore_core.contracts.transport import Bid
from torchstore_core.machine import topology
from torchstore_core.plugins.calibration import Calibration, calibration_file, corrected, save

from .test_cli import torchstore

LINK = ("shm", "here", "there")


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
        shm = [line for line in report["lines"] if line["transport"] == "shm"]
        assert {line["volume"] for line in shm} == volumes
        for line in shm:
            assert line["error"] is None
            assert min(line["put_bytes_per_s"], line["get_bytes_per_s"]) > 0
        refused = [line for line in report["lines"] if line["transport"] == "inprocess"]
        assert {line["error"] for line in refused} == {"the volume is in another process"}
        assert await store.keys() == []
        doctor = await torchstore("doctor", "--json", TORCHSTORE_CALIBRATION=where)
        (bid,) = [b for b in json.loads(doctor.out)["link"]["bids"] if b["transport"] == "shm"]
        assert "figures measured here on" in bid["reason"]
        assert bid["latency_s"] in {line["latency_s"] for line in shm}


async def test_save_needs_transports() -> None:
    result = await torchstore("bench", "--save")
    assert result.status == 2
    assert "--save needs --transports" in result.err


def test_measurements_of_other_links_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSTORE_CALIBRATION", str(tmp_path / "c.json"))
    bid = Bid(1.0, 2.0, "estimated")
    assert corrected(bid, LINK) is bid
    save({LINK: Calibration(3.0, 4.0, 0.0)})
    save({("tcp", "here", "there"): Calibration(5.0, 6.0, 0.0)})
    assert corrected(bid, LINK) == Bid(3.0, 4.0, corrected(bid, LINK).reason)
    assert corrected(bid, LINK).reason.startswith("estimated; figures measured here on 1")
    assert corrected(bid, ("shm", "here", "elsewhere")) is bid


_NONSENSE = ["", "nonsense", "[1]", '{"\xff": [1, 1, 1]}', '{"shm here there": [0, 0, 0]}']
_NONSENSE += ['{"shm here there": [1, 1, 1e300]}']


@pytest.mark.parametrize("text", _NONSENSE)
def test_a_file_that_makes_no_sense_corrects_nothing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSTORE_CALIBRATION", str(tmp_path / "c.json"))
    calibration_file().write_text(text, encoding="latin-1")
    bid = Bid(1.0, 2.0, "estimated")
    assert corrected(bid, LINK) is bid


async def test_both_sides_of_a_link_are_shown() -> None:
    async with running_store() as store:
        here = topology.probe()
        for peer in (here.hostname, here.host_id, "torchstore-0"):
            result = await torchstore(
                *("doctor", "--json", "--peer", peer, "--address", store.address)
            )
            assert result.status == 0, result.err
            report = json.loads(result.out)
            (volume,) = report["volumes"]
            assert report["host"] == volume["host"]
            addresses = [one["address"] for one in volume["host"]["addresses"]]
            assert addresses == [one.address for one in here.networks]
            assert "shm" in volume["offers"]
            assert {"shm", "inline"} <= set(report["installed"])
            assert (volume["link"]["volume"], volume["link"]["chosen"]) == ("torchstore-0", "shm")
        shown = await torchstore("doctor", "--peer", "torchstore-0", "--address", store.address)
        assert "THERE (OFFERED)" in shown.out
        assert all(shown.out.count(one.address) >= 2 for one in here.networks)
        other = await torchstore("doctor", "--peer", "nowhere", "--address", store.address)
        assert other.status == 1
        assert f"no volume on 'nowhere'; it has some on {here.hostname}" in other.err
