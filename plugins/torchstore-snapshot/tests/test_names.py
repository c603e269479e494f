"""Names of tensors, of keys and of folders that are out of the ordinary."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from torchstore_core.errors import ConfigurationError, UnsupportedValueError
from torchstore_snapshot import Series, Snapshot, SnapshotNotFoundError, StateDict
from torchstore_snapshot.converting import convert
from torchstore_snapshot.dcp import SnapshotStorageReader, SnapshotStorageWriter
from torchstore_snapshot.format import safetensors_files


def test_a_tensor_with_the_name_of_the_header(tmp_path: Path) -> None:
    state = StateDict(__metadata__=torch.ones(3), w=torch.zeros(2))
    snapshot = Snapshot.take(tmp_path / "s", {"m": state}, fsync=False)
    back = snapshot.get_state_dict_for_key("m")
    assert back["__metadata__"].equal(torch.ones(3))
    (file,) = (tmp_path / "s").glob("*.safetensors")
    assert len(load_file(file)) == 2
    assert not [*(tmp_path / "s").glob("*.index.json")]
    with pytest.raises(UnsupportedValueError, match="__metadata__"):
        convert(tmp_path / "s", tmp_path / "out", to="safetensors")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_name_of_an_entry_may_be_empty(tmp_path: Path) -> None:
    """As that of the root among the modules of a model."""

    def state(number: float) -> dict[str, Any]:
        tensors = {"": torch.full((3,), number), "n": {"": torch.full((2,), number)}}
        return {**tensors, "w": torch.full((1,), number), "o": {"": number}}

    def same(found: dict[str, Any]) -> None:
        assert found[""].tolist() == [1, 1, 1]
        assert found["n"][""].tolist() == [1, 1]
        assert (found["w"].tolist(), found["o"]) == ([1], {"": 1.0})

    Snapshot.take(tmp_path / "s", {"m": StateDict(state(1.0))}, fsync=False)
    Snapshot.async_take(tmp_path / "async", {"m": StateDict(state(1.0))}, fsync=False).wait()
    for kind in ("dcp", "torchsnapshot"):
        convert(tmp_path / "s", tmp_path / f"as {kind}", to=kind)
        convert(tmp_path / f"as {kind}", tmp_path / f"from {kind}")
    for name in ("s", "async", "from dcp", "from torchsnapshot"):
        snapshot = Snapshot(tmp_path / name)
        assert snapshot.verify() == {}
        same(snapshot.get_state_dict_for_key("m"))
        into = StateDict(state(0.0))
        snapshot.restore({"m": into})
        same(dict(into))
        assert snapshot.read_object("m/").tolist() == [1, 1, 1]
    saved = {"": torch.ones(2), "m": {"": torch.ones(3)}}
    dcp.save(saved, storage_writer=SnapshotStorageWriter(tmp_path / "dcp"))
    loaded = {"": torch.zeros(2), "m": {"": torch.zeros(3)}}
    dcp.load(loaded, storage_reader=SnapshotStorageReader(tmp_path / "dcp"))
    assert (loaded[""].sum(), loaded["m"][""].sum()) == (2, 3)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_dtypes_that_safetensors_did_not_always_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    value = torch.randint(0, 256, (3, 4), dtype=torch.uint8).view(dtype)
    snapshot = Snapshot.take(tmp_path / "s", {"m": StateDict(w=value)}, fsync=False)
    (file,) = (tmp_path / "s").glob("*.safetensors")
    stored = load_file(file)["w"]
    assert stored.dtype == dtype
    assert stored.view(torch.uint8).equal(value.view(torch.uint8))
    monkeypatch.delitem(safetensors_files.DTYPES, str(dtype).removeprefix("torch."))
    older = Snapshot.take(tmp_path / "older", {"m": StateDict(w=value)}, fsync=False)
    (file,) = (tmp_path / "older").glob("*.safetensors")
    assert load_file(file)["w"].dtype == torch.uint8
    for each in (snapshot, older):
        back = each.read_object("m/w")
        assert back.dtype == dtype
        assert back.view(torch.uint8).equal(value.view(torch.uint8))


def test_urls_of_local_folders(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    Snapshot.take(folder, {"m": StateDict(w=torch.ones(2))}, fsync=False)
    path = str(folder).replace(" ", "%20")
    for begin in ("file:", "file://", "file://localhost", "FILE://", "local://"):
        assert Snapshot(begin + path).read_object("m/w").equal(torch.ones(2)), begin
    for url in ("file:rel", "file://rel", f"file://elsewhere{path}", "local://rel", "file://"):
        with pytest.raises(ConfigurationError, match="absolute path"):
            Snapshot.take(url, {"m": StateDict(w=torch.ones(2))})


@pytest.mark.parametrize("how", ["take", "async_take"])
def test_two_entries_with_one_path(tmp_path: Path, how: str) -> None:
    state = {"a/b": StateDict(c=torch.ones(1)), "a": StateDict(**{"b/c": torch.zeros(2)})}
    with pytest.raises(UnsupportedValueError, match="'b/c' in 'a'") as caught:
        getattr(Snapshot, how)(tmp_path / "s", state)
    assert caught.value.key == "a/b/c"
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("nested", "named"),
    [
        ({1: torch.ones(1), "1": torch.ones(2)}, "x.1"),
        ({None: torch.ones(1)}, "'x' are str or int, and None"),
        ({(1, 2): torch.ones(1)}, "'x' are str or int, and (1, 2)"),
        ({"y": {None: torch.ones(1)}}, "x.y"),
        ({"\ud800": torch.ones(1)}, r"x.\ud800"),
    ],
)
def test_a_name_that_cannot_be_stored(tmp_path: Path, nested: Any, named: str) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        Snapshot.take(tmp_path / "s", {"m": StateDict(x=nested)})
    assert named in str(caught.value)
    assert not (tmp_path / "s").exists()


def test_a_base_by_another_path(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.symlink(tmp_path / "run", tmp_path / "link")
    state = {"m": StateDict(w=torch.ones(5000))}
    Snapshot.take(tmp_path / "run" / "1", state, fsync=False)
    os.symlink("1", tmp_path / "run" / "latest")
    for number, base in enumerate(("link/1", "run/latest", "link/latest"), start=2):
        path = tmp_path / "run" / str(number)
        taken = Snapshot.take(path, state, base=tmp_path / base, fsync=False)
        assert [file.snapshot for file in taken.manifest.files] == ["1"]
        assert not taken.verify()
    taken = Snapshot.take(tmp_path / "link" / "9", state, base=tmp_path / "run/1", fsync=False)
    assert [file.snapshot for file in taken.manifest.files] == ["1"]


def test_a_snapshot_by_a_link_elsewhere(tmp_path: Path) -> None:
    series = Series(tmp_path / "run")
    state = {"m": StateDict(w=torch.arange(5000.0), x=torch.zeros(5000))}
    series.take("1", state, fsync=False)
    state["m"]["x"] += 1
    series.take("2", state, fsync=False)
    (tmp_path / "best").symlink_to("run/2")
    best = Snapshot(tmp_path / "best")
    assert best.path == str(tmp_path / "best")
    assert best.verify() == {}
    own = StateDict(w=torch.zeros(5000), x=torch.zeros(5000))
    best.restore({"m": own})
    assert torch.equal(own["w"], torch.arange(5000.0))
    assert own["x"].sum() == 5000
    # What replaces it leaves nothing of it behind.
    Snapshot.take(tmp_path / "best", state, overwrite=True, fsync=False)
    assert (tmp_path / "best").is_symlink()
    (data,) = (tmp_path / "run" / "2").glob("*.safetensors")
    assert [data.name] == [file.name for file in Snapshot(tmp_path / "run/2").manifest.files]
    # One that was moved, with a link in its place, may still refer to what is beside the link.
    state["m"]["x"] += 1
    series.take("3", state, fsync=False)
    (tmp_path / "large").mkdir()
    shutil.move(tmp_path / "run" / "3", tmp_path / "large" / "3")
    (tmp_path / "run" / "3").symlink_to(tmp_path / "large" / "3")
    Snapshot(tmp_path / "run" / "3").restore({"m": own})
    assert own["x"].sum() == 10000


def test_a_glob_alone_is_no_list_of_globs(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="list of globs"):
        Snapshot.take(tmp_path / "s", {"m": StateDict()}, replicated="m/*")  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()


def test_what_is_in_a_container_without_tensors_is_read_by_its_path(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    values = {"a": {1: [5, {"b.c": 6, "d": (7, None)}], "e": {"f/g": 8}}, "a.x": [1, 2], "n": 3}
    snapshot = Snapshot.take(tmp_path, {"optim": optimizer, "m": StateDict(values)}, fsync=False)
    assert snapshot.read_object("0/optim/param_groups/0/lr") == 0.25
    assert snapshot.read_object("optim/param_groups.0.params.1") == 1
    assert snapshot.read_object("m/a/1/0") == 5
    assert snapshot.read_object("m/a.1.1.d.1") is None
    assert snapshot.read_object("m/a.x/1") == 2
    assert snapshot.read_object("m/a.x") == [1, 2]
    for path in ("m/a/2", "m/a/1/2", "m/a/1/-1", "m/n/0", "m/a/1/0/0", "optim/param_groups/0/z"):
        with pytest.raises(SnapshotNotFoundError, match=path):
            snapshot.read_object(path)
