"""The JSON of the command line: the names of its document, and those of Python."""

from __future__ import annotations

import inspect
import io
import re
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

import torchstore_core as ts
from torchstore_cli import reports
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.reports.refs import HolderReport, RefReport
from torchstore_core.wire import messages as m

DOCUMENT = (Path(__file__).parents[3] / "docs/json.md").read_text()

SECTIONS = {
    "torchstore status": reports.StatusReport,
    "A volume": m.VolumeStatus,
    "Full memory": m.SpillStatus,
    "Repair": m.RepairStatus,
    "A session": m.SessionStatus,
    "A pending version": m.Pending,
    "torchstore status --refs": reports.RefsReport,
    "A held version": RefReport,
    "A holder": HolderReport,
    "torchstore ls": reports.KeyReport,
    "A key": reports.KeyLine,
    "torchstore stat": reports.KeyDetails,
    "torchstore drain": reports.Drained,
    "torchstore rm": reports.Removed,
    "torchstore serve": reports.Serving,
    "torchstore doctor": reports.DoctorReport,
    "torchstore doctor --peer": reports.PeerReport,
    "A link": reports.LinkReport,
    "torchstore bench": reports.BenchReport,
    "torchstore bench --transports": reports.TransportsReport,
    "Errors": reports.Failed,
    "A running store": ts.RunningStore,
}
# Fields whose own fields are named beside them.
INSIDE = {
    "creator": reports.Creator,
    "host": reports.Host,
    "copy": reports.CopyEngine,
    "limits": reports.Limits,
    "stores": reports.StoreLinks,
    "plugins": reports.PluginLine,
    "bids": reports.BidLine,
    "floors": reports.Floors,
    "small": reports.Small,
    "large": reports.Large,
    "lines": reports.TransportLine,
    "volumes": reports.PeerVolume,
    "shards": reports.ShardPlace,
}


def _fields(kind: type) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)}


def _told(kind: object) -> set[str]:
    """What a value of Python's tells by name."""
    return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}


def _rows(section: str) -> list[tuple[list[str], list[str]]]:
    """Names in the first column of a section's table, and those beside them."""
    text = re.search(rf"^#+ {section}\n(.*?)(?=^#|\Z)", DOCUMENT, re.M | re.S)
    assert text is not None
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", text[1], re.M)
    return [(re.findall(r"`(\w+)`", first), re.findall(r"`(\w+)`", rest)) for first, rest in rows]


@pytest.mark.parametrize("section", SECTIONS)
def test_the_document_names_every_field(section: str) -> None:
    rows = _rows(section)
    named = [name for first, _ in rows for name in first]
    wanted = _fields(SECTIONS[section])
    if section == "torchstore stat":  # it has those of a key, too
        wanted -= _fields(reports.KeyLine)
    assert sorted(named) == sorted(wanted)
    for first, beside in rows:
        if first[0] in INSIDE and beside:
            assert _fields(INSIDE[first[0]]) <= set(beside)


def test_every_report_has_a_section() -> None:
    kinds = {getattr(reports, name) for name in reports.__all__}
    kinds = {kind for kind in kinds if isinstance(kind, type)}
    assert kinds == kinds & {*SECTIONS.values(), *INSIDE.values()}
    commands = re.findall(r"^## torchstore (\w+)$", DOCUMENT, re.M)
    from torchstore_cli.app import cli

    assert sorted(commands) == sorted(cli.commands)


def test_names_are_those_of_python() -> None:
    assert _fields(reports.StatusReport) == _fields(m.StatusReport) | {"address"}
    assert _fields(reports.KeyDetails) == _told(m.Found) - {"meta"}
    assert _fields(reports.KeyLine) == _told(m.Listed) - {"meta", "segment"}
    assert _fields(reports.KeyLine) - _told(m.Found) == {"creator_pid"}
    assert _fields(reports.Creator) < _fields(ClientFacts)
    assert _fields(reports.Serving) < _fields(ts.RunningStore) | {"strategy"}


async def test_names_are_those_of_explain(shared: ts.Client) -> None:
    (volume,) = await shared.explain()
    assert _fields(reports.LinkReport) - set(volume) == {"same_host"}
    assert _fields(reports.BidLine) - set(volume["bids"][0]) == {"max_bytes"}


async def test_status_and_stat_are_printed_readably(
    shared: ts.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    await shared.put("model/w", torch.zeros(256, 512, dtype=torch.bfloat16))
    await shared.put_state_dict({"w": torch.zeros(3)}, "policy", keep=2)
    await shared.put_state_dict({"w": torch.zeros(3)}, "policy", keep=2)
    await shared.put_state_dict({"w": torch.zeros(3)}, "half", participants=9, participant=1)
    await shared.put("o", {"a": 1})
    status = await shared.status()
    lines = str(status).splitlines()
    assert f"{status}" == str(status) != repr(status)
    who = f"controller pid {status.controller_pid}, strategy singleton"
    who += f", incarnation {status.incarnation}"
    assert re.fullmatch(rf"store 'torchstore', up \d+ s, {who}", lines[0])
    assert lines[1].startswith("3 keys, 1 session, ")
    assert lines[2] == (
        "volume torchstore-0: 256 KiB of 256 MiB used, 0 B leased, 0 B being written"
    )
    assert re.fullmatch(rf"keeper pid {status.keeper_pid}, its log \S+ .?i?B", lines[3])
    assert lines[4:] == [
        "1 unfinished version, 12 B",
        "  version 1 of 'half': not whole yet: 1 of 9 done, 0 writing, nothing from "
        "participants 0, 2, 3, 4, 5 and 3 more",
    ]
    tensor = str(await shared.stat("model/w")).splitlines()
    assert tensor[0] == "'model/w' version 1: bfloat16 256×512, 256 KiB"
    assert tensor[1] == "  in torchstore-0, 0 leases"
    assert re.match(r"  put \d+ s ago by pid \d+ on ", tensor[2])
    policy = str(await shared.stat("policy")).splitlines()
    assert policy[0] == "'policy' version 2: state dict (1), 12 B"
    assert policy[3] == "  kept, too: version 1"
    assert str(await shared.stat("o")).startswith("'o' version 1: object (msgpack), ")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)  # ages are told in whole seconds
    for shown in (await shared.stat("model/w"), await shared.status()):  # as a notebook shows it
        text = io.StringIO()
        printer = SimpleNamespace(text=text.write)  # all that is used of IPython's
        shown._repr_pretty_(printer, False)
        assert text.getvalue() == str(shown)


def test_what_is_lost_is_printed_too() -> None:
    volume = m.VolumeStatus("v-0", 1, "h", "host", 4096, 0, 0, 0, 0, 0, [], "its process died")
    alive = m.VolumeStatus("v-1", 1, "h", "host", 4096, 0, 0, 0, 4096, 0, [])
    many = [volume, *[alive] * 7]
    report = m.StatusReport("s", 2, 3.0, 0, many, [], {}, 0.0, "hash", {"x": "is broken"})
    lines = str(report).splitlines()
    assert "and 2 volumes more" in lines
    assert "volume v-0 is lost: its process died" in lines
    assert lines[-1] == "plug-in x: is broken"
