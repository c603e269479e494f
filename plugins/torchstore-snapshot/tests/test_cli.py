"""``torchstore snapshot``: what it answers, for people and in JSON, and how it ends."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from torchstore_cli import main
from torchstore_core import TensorShard, TensorSlice
from torchstore_snapshot import Snapshot, StateDict
from torchstore_snapshot.format.paths import MANIFEST


class Result(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def call(*arguments: object) -> Result:
    """Run ``torchstore snapshot`` in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        status = main(["snapshot", *map(str, arguments)])
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return Result(status, *texts)


def test_without_a_command_it_shows_its_help() -> None:
    """The help was one line of an error."""
    shown = call()
    assert (shown.status, shown.err) == (2, "")
    assert shown.out == call("--help").out


@pytest.mark.parametrize("how", [(), ("--json",)], ids=["text", "json"])
def test_what_nobody_reads_ends_a_command_as_the_signal_would(
    taken: Path, how: tuple[str, ...]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "torchstore_cli", "snapshot", "ls", str(taken), *how]
    with os.fdopen(writer, "wb") as closed:
        ended = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=300)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


def state(**changes: Any) -> dict[str, StateDict]:
    values = {"w": torch.arange(6.0).view(2, 3), "big": torch.ones(70_000), "step": 3}
    return {"model": StateDict(**{**values, **changes})}


@pytest.fixture
def taken(tmp_path: Path) -> Path:
    Snapshot.take(tmp_path / "a", state(), fsync=False)
    return tmp_path / "a"


def test_ls_lists_the_objects_of_a_snapshot_and_the_snapshots_of_a_folder(taken: Path) -> None:
    listed = call("ls", taken, "model/w")
    assert (listed.status, listed.err) == (0, "")
    line = listed.out.splitlines()[1].split()
    assert line == ["24", "B", "float32", "2×3", "1", "model/w"]
    assert "1 object, 24 B" in listed.out

    found = call("ls", taken, "--json").json
    assert [o["path"] for o in found["objects"]] == ["model/big", "model/step", "model/w"]
    assert found["objects"][1]["kind"] == "msgpack"
    assert found["objects"][2]["shape"] == [2, 3]

    Snapshot.take(taken.parent / "b", state(), fsync=False)
    (taken.parent / "broken").mkdir()
    (taken.parent / "broken" / MANIFEST).write_text("{}")
    (taken.parent / "other").mkdir()
    found = call("ls", taken.parent, "--json").json
    assert found["objects"] == []
    assert {s["name"]: s["objects"] for s in found["snapshots"]} == {"a": 3, "b": 3, "broken": 0}
    assert "cannot be read" in call("ls", taken.parent).out


def test_ls_and_gc_know_the_order_of_snapshots(
    taken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)  # before the first one
    Snapshot.take(taken.parent / "0", state(), fsync=False)
    Snapshot.take(taken.parent / "1", state(), fsync=False)
    path = taken.parent / "0" / MANIFEST
    path.write_bytes(path.read_bytes()[:-9])
    found = call("ls", taken.parent, "--json").json["snapshots"]
    assert [(s["name"], s["sequence"]) for s in found] == [("a", 1), ("0", 2), ("1", 3)]
    done = call("gc", taken.parent, "--keep-last", "1", "--json").json
    assert (done["dropped"], done["held"]["a"]) == ([], "'0' cannot be read, and may refer to it")
    assert "a  stays: '0' cannot be read" in call("gc", taken.parent, "--keep-last", "1").out


def test_show_says_what_a_snapshot_and_an_object_consist_of(taken: Path) -> None:
    left = f"model-{'0' * 12}-{'0' * 8}-0-0.safetensors"
    (taken / left).write_bytes(b"x")
    found = call("show", taken, "--json").json
    assert found["take"] == Snapshot(taken).manifest.take
    assert (found["world_size"], found["keys"], found["objects"]) == (1, {"model": 3}, 3)
    assert found["leavings"] == [left]
    assert found["files"] == 1
    (file,) = Snapshot(taken).manifest.files
    assert found["file_bytes"] == (taken / file.name).stat().st_size
    shown = call("show", taken)
    assert "1 rank" in shown.out
    assert "1 file, which `torchstore snapshot gc` looks at" in shown.out

    (piece,) = call("show", taken, "model/w", "--json").json["pieces"]
    entry = Snapshot(taken).manifest.shared["model"]["w"]
    assert (piece["nbytes"], piece["digest"]) == (24, entry.pieces[0].digest)
    assert (taken / piece["file"]).exists()
    assert piece["digest"] in call("show", taken, "model/w").out
    assert call("show", taken, "0/model/w", "--json").json["path"] == "model/w"


def test_show_says_which_snapshots_model_libraries_read(taken: Path) -> None:
    Snapshot.take(taken.parent / "b", state(step=4), base=taken, fsync=False)
    assert call("show", taken, "--json").json["weight_maps"] == ["model.safetensors.index.json"]
    assert "from_pretrained" not in call("show", taken).out
    assert call("show", taken.parent / "b", "--json").json["weight_maps"] == []
    assert "from_pretrained" in call("show", taken.parent / "b").out
    assert not [*(taken.parent / "b").glob("*.index.json")]
    # What replaces its own base still has files of that, with other values of the same names.
    Snapshot.take(taken, state(w=torch.zeros(2, 3)), base=taken, overwrite=True, fsync=False)
    assert call("show", taken, "--json").json["weight_maps"] == []
    assert not [*taken.glob("*.index.json")]


def test_verify_ends_with_1_and_names_what_is_damaged(taken: Path) -> None:
    whole = call("verify", taken)
    assert (whole.status, whole.err) == (0, "")
    assert "✓ whole" in whole.out
    (piece,) = Snapshot(taken).manifest.shared["model"]["w"].pieces
    file = taken / Snapshot(taken).manifest.files[piece.file].name
    data = bytearray(file.read_bytes())
    data[piece.start] ^= 1
    file.write_bytes(data)
    found = call("verify", taken, "--json")
    assert found.status == 1
    assert not found.json["ok"]
    (damage,) = found.json["damaged"]
    assert (damage["path"], damage["file"]) == ("model/w", file.name)
    assert "✗ damaged: 1 object" in call("verify", taken).out
    file.unlink()
    assert len(call("verify", taken, "--json").json["damaged"]) == 2


def test_diff_ends_with_1_if_anything_differs(taken: Path) -> None:
    other = taken.parent / "b"
    shutil.copytree(taken, other)
    same = call("diff", taken, other)
    assert (same.status, same.out) == (0, "3 the same, 0 not\n")
    changed = torch.arange(6.0).view(2, 3)
    changed[1, 2] = -0.0
    Snapshot.take(
        other,
        state(w=changed, big=torch.ones(7), step=4, more=torch.ones(1)),
        overwrite=True,
        fsync=False,
    )
    found = call("diff", taken, other, "--json")
    assert found.status == 1
    assert {d["path"]: d["change"] for d in found.json["differences"]} == {
        "model/big": "shape",
        "model/more": "added",
        "model/step": "contents",
        "model/w": "contents",
    }
    assert "model/more  added" in call("diff", taken, other).out
    assert "model/more  removed" in call("diff", other, taken).out


def test_diff_compares_tensors_that_are_cut_differently(taken: Path) -> None:
    whole = torch.arange(6.0).view(2, 3)
    for name, last in (("equal", 5.0), ("unequal", 6.0)):
        row = whole[1:].clone()
        row[0, 2] = last
        # A shard that is the whole tensor: stored with its position, as a whole tensor is not.
        shard = TensorShard(
            torch.cat([whole[:1], row]),
            TensorSlice(offsets=(0, 0), local_shape=(2, 3), global_shape=(2, 3)),
        )
        Snapshot.take(taken.parent / name, state(w=shard), fsync=False)
    assert call("diff", taken, taken.parent / "equal").status == 0
    found = call("diff", taken, taken.parent / "unequal", "--json").json
    assert [d["path"] for d in found["differences"]] == ["model/w"]


@pytest.mark.quick
def test_gc_removes_what_dead_takes_left_and_older_snapshots(taken: Path) -> None:
    left = taken / f"model-{'0' * 12}-{'0' * 8}-0-0.safetensors"
    left.write_bytes(b"left")
    os.utime(left, (0, 0))
    found = call("gc", taken, "--dry-run", "--json").json
    assert (found["files"], found["nbytes"], found["dry_run"]) == ([f"a/{left.name}"], 4, True)
    assert left.exists()
    assert "0 snapshots and 1 file removed, 4 B" in call("gc", taken).out
    assert not left.exists()
    Snapshot.take(taken.parent / "b", state(step=4), fsync=False)
    assert call("gc", taken.parent, "--keep-last", "1", "--json").json["dropped"] == ["a"]
    assert not taken.exists()
    assert Snapshot(taken.parent / "b").read_object("model/step") == 4
    misspelt = call("gc", taken.parent / "c")
    assert misspelt.status == 1
    assert misspelt.err.startswith(
        f"torchstore: snapshot-not-found: there is no folder '{taken.parent}/c'"
    )


@pytest.mark.quick
def test_convert_makes_what_it_says(taken: Path) -> None:
    into = taken.parent / "plain"
    refused = call("convert", taken, into, "--to", "safetensors")
    assert (refused.status, refused.err.split(":")[1]) == (1, " layout-mismatch")
    tensors = StateDict({k: v for k, v in state()["model"].items() if k != "step"})
    Snapshot.take(taken, {"model": tensors}, overwrite=True, fsync=False)
    found = call("convert", taken, into, "--to", "safetensors", "--json").json
    assert (found["kind"], found["into"], found["tensors"]) == ("snapshot", "safetensors", 2)
    back = taken.parent / "back"
    assert "safetensors → snapshot, 2 tensors" in call("convert", into, back).out
    assert torch.equal(Snapshot(back).read_object("model/w"), state()["model"]["w"])
    refused = call("convert", into, back)
    assert refused.status == 1
    assert "give --overwrite to replace it" in refused.err
    assert call("convert", into, back, "--overwrite").status == 0


def test_convert_one_key_of_several(taken: Path) -> None:
    values = {key: StateDict(w=torch.full((3,), fill)) for key, fill in (("a", 1.0), ("b", 2.0))}
    Snapshot.take(taken, values, overwrite=True, fsync=False)
    into = taken.parent / "plain"
    refused = call("convert", taken, into, "--to", "safetensors")
    assert (refused.status, refused.err.split(":")[1]) == (1, " layout-mismatch")
    assert "say which, --key\n" in refused.err
    for kind in ("dcp", "torchsnapshot", "safetensors"):
        missing = call("convert", taken, into, "--to", kind, "--key", "c")
        assert (missing.status, missing.err.split(":")[1]) == (1, " snapshot-not-found")
        assert not into.exists()
    found = call("convert", taken, into, "--to", "safetensors", "--key", "b", "--rank", "0")
    assert found.status == 0
    assert call("convert", into, taken.parent / "back", "--key", "c").status == 0
    assert Snapshot(taken.parent / "back").read_object("c/w").tolist() == [2, 2, 2]


def test_errors_are_those_of_the_command_line(tmp_path: Path, taken: Path) -> None:
    missing = call("verify", tmp_path / "none")
    assert (missing.status, missing.out) == (1, "")
    assert missing.err.startswith("torchstore: snapshot-not-found: there is no snapshot at")
    assert call("show", taken, "model/none", "--json").json["error"] == "snapshot-not-found"
    assert call("ls", "what://ever").status == 1
    assert call("nothing").status == 2
    assert call("verify").status == 2
    assert call("gc", taken, "--keep-last", "0").status == 2


_NO_TORCH = """
import sys
from torchstore_cli import main
for arguments in (["ls", {0!r}], ["show", {0!r}], ["verify", {0!r}], ["diff", {0!r}, {0!r}]):
    assert main(["snapshot", *arguments]) == 0, arguments
    assert "torch" not in sys.modules, arguments
"""


def test_looking_needs_no_torch(taken: Path) -> None:
    program = _NO_TORCH.format(str(taken))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
