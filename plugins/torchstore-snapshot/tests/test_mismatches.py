"""What does not match, and what is damaged: named errors, and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchstore_core as ts
from torchstore_snapshot import (
    AppStateError,
    RNGState,
    Snapshot,
    SnapshotCorruptError,
    SnapshotExistsError,
    SnapshotFormatError,
    SnapshotNotFoundError,
    StateDict,
    gc,
)
from torchstore_snapshot.format.hashes import digest_of
from torchstore_snapshot.format.manifest import VERSION
from torchstore_snapshot.format.paths import MANIFEST


def state(fill: float) -> StateDict:
    return StateDict(a=torch.full((100, 100), fill), b=torch.full((50,), fill), n=int(fill))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Snapshot.take(tmp_path / "s", {"m": state(1)}, fsync=False)
    return tmp_path / "s"


def unchanged(own: StateDict, fill: float) -> bool:
    expected = state(fill)
    return own["n"] == expected["n"] and all(torch.equal(own[k], expected[k]) for k in "ab")


def refuses(folder: Path, error: type[ts.TorchStoreError]) -> ts.TorchStoreError:
    own = state(2)
    with pytest.raises(error) as caught:
        Snapshot(folder).restore({"m": own})
    assert unchanged(own, 2)
    return caught.value


def test_what_is_not_stateful_is_named_whatever_is_at_the_path(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {"step": 1}
    with pytest.raises(TypeError, match="step"):
        Snapshot.take(tmp_path / "s", wrong)
    with pytest.raises(TypeError, match="step"):
        Snapshot(tmp_path / "s").restore(wrong)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("now", [None, 0, "", {}, [], [1, 2]])
@pytest.mark.parametrize("then", [{"a": torch.ones(2)}, [torch.ones(2), 3], {"n": {"m": 1}}])
def test_a_container_takes_the_place_of_what_is_no_tensor(
    tmp_path: Path, now: Any, then: Any
) -> None:
    Snapshot.take(tmp_path / "s", {"m": StateDict(best=then, n=1)}, fsync=False)
    own = StateDict(best=now, n=0)
    assert not Snapshot(tmp_path / "s").restore({"m": own})
    assert own["n"] == 1
    torch.testing.assert_close(own["best"], then)


def test_a_container_does_not_take_the_place_of_a_tensor(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "s", {"m": StateDict(best={"a": 1})}, fsync=False)
    own = StateDict(best=torch.zeros(2))
    with pytest.raises(ts.LayoutMismatchError, match="1 missing: 'm/best'"):
        Snapshot(tmp_path / "s").restore({"m": own})
    assert own["best"].tolist() == [0, 0]


def test_strict_names_all_differences(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "s", {"m": torch.nn.Linear(3, 2)}, fsync=False)
    other = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False))
    other.weight = torch.nn.Parameter(torch.full((3, 3), 5.0))
    own = StateDict(x=torch.ones(1))
    with pytest.raises(ts.LayoutMismatchError) as caught:
        Snapshot(tmp_path / "s").restore({"m": other, "other": own})
    assert caught.value.details["missing"] == ["m/0.weight", "other"]
    assert caught.value.details["unexpected"] == ["m/bias"]
    assert [*caught.value.details["mismatched"]] == ["m/weight"]
    assert float(other.weight.detach().sum()) == 45.0

    report = Snapshot(tmp_path / "s").restore({"m": other, "other": own}, strict=False)
    assert report.unexpected == ["m/bias"]


def test_without_strict_what_matches_is_restored(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "s", {"m": StateDict(a=torch.ones(2), b=torch.ones(3))}, fsync=False)
    own = StateDict(a=torch.zeros(2), b=torch.zeros(4))
    report = Snapshot(tmp_path / "s").restore({"m": own}, strict=False)
    assert [*report.mismatched] == ["m/b"]
    assert own["a"].tolist() == [1, 1]
    assert own["b"].tolist() == [0] * 4


def test_an_existing_snapshot_is_not_replaced_unless_asked(folder: Path) -> None:
    files = sorted(path.name for path in folder.iterdir())
    with pytest.raises(SnapshotExistsError):
        Snapshot.take(folder, {"m": state(3)})
    assert sorted(path.name for path in folder.iterdir()) == files
    Snapshot.take(folder, {"m": state(3)}, overwrite=True, fsync=False)
    own = state(2)
    Snapshot(folder).restore({"m": own})
    assert unchanged(own, 3)
    assert len([*folder.iterdir()]) == len(files)
    Snapshot.take(folder, {"other": state(3)}, overwrite=True, fsync=False)
    assert sorted(path.name.split("-")[0] for path in folder.iterdir()) == [
        "other",
        "other.safetensors.index.json",
        MANIFEST,
    ]


def test_a_flipped_bit_in_data(folder: Path) -> None:
    data = next(folder.glob("*.safetensors"))
    content = bytearray(data.read_bytes())
    content[-3] ^= 4
    data.write_bytes(content)
    error = refuses(folder, SnapshotCorruptError)
    assert data.name in str(error)
    with pytest.raises(SnapshotCorruptError):
        Snapshot(folder).get_state_dict_for_key("m")
    with pytest.raises(SnapshotCorruptError):
        Snapshot(folder).read_object("m/b")
    Snapshot(folder).read_object("m/a")
    Snapshot(folder).restore({"m": state(2)}, verify=False)
    assert [*Snapshot(folder).verify()] == ["m/b"]


def test_a_truncated_file(folder: Path) -> None:
    data = next(folder.glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1])
    refuses(folder, SnapshotCorruptError)


def test_a_missing_file(folder: Path) -> None:
    assert not Snapshot(folder).verify()
    next(folder.glob("*.safetensors")).unlink()
    assert [*Snapshot(folder).verify()] == ["m/a", "m/b"]
    refuses(folder, SnapshotCorruptError)


def test_no_snapshot(tmp_path: Path) -> None:
    refuses(tmp_path, SnapshotNotFoundError)
    refuses(tmp_path / "nothing", SnapshotNotFoundError)


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    document = json.loads((folder / MANIFEST).read_bytes())
    change(document)
    body = json.dumps(document.pop("body")).encode()
    text = json.dumps({**document, "digest": digest_of(body)}).encode()
    (folder / MANIFEST).write_bytes(text[:-1] + b', "body": ' + body + b"}")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", "a/b", MANIFEST])
@pytest.mark.parametrize("field", ["name", "snapshot"])
def test_a_path_out_of_the_snapshot(folder: Path, name: str, field: str) -> None:
    edit(folder, lambda d: d["body"]["files"][0].update({field: name}))
    error = refuses(folder, SnapshotFormatError)
    assert error.details["file"] == name


def test_a_manifest_of_a_newer_version(folder: Path) -> None:
    newer = VERSION + 1
    edit(folder, lambda d: d.update(version=newer, more="fields"))
    assert f"version {newer}" in str(refuses(folder, SnapshotFormatError))


def test_a_piece_outside_of_its_file(folder: Path) -> None:
    edit(folder, lambda d: d["body"]["shared"]["m"]["a"]["pieces"][0].update(start=1 << 40))
    refuses(folder, SnapshotFormatError)


def test_a_damaged_manifest(folder: Path) -> None:
    text = (folder / MANIFEST).read_bytes()
    (folder / MANIFEST).write_bytes(text.replace(b"[100,100]", b"[200,50]"))
    refuses(folder, SnapshotCorruptError)
    (folder / MANIFEST).write_bytes(text[:-10])
    refuses(folder, SnapshotFormatError)


@pytest.mark.parametrize("wrong", [[state(1)], None, 5, state(1).data.keys()])
def test_an_application_state_that_is_no_mapping(folder: Path, wrong: Any) -> None:
    for call in (
        lambda: Snapshot.take(folder.parent / "t", wrong),
        lambda: Snapshot.async_take(folder.parent / "t", wrong),
        lambda: Snapshot(folder).restore(wrong),
    ):
        with pytest.raises(AppStateError, match="an app_state is a dict of objects"):
            call()
    assert not (folder.parent / "t").exists()


def test_a_class_in_place_of_an_object_of_it(folder: Path) -> None:
    wrong: Any = {"m": state(1), "rng": RNGState}
    for call in (
        lambda: Snapshot.take(folder.parent / "t", wrong),
        lambda: Snapshot(folder).restore(wrong),
    ):
        with pytest.raises(AppStateError, match=r"'rng'.* class RNGState; .* RNGState\(\)"):
            call()
    assert not (folder.parent / "t").exists()


def test_bools_are_bools(folder: Path) -> None:
    own: dict[str, Any] = {"m": state(2)}
    snapshot = Snapshot(folder)
    no: Any = "no"
    for name, call in {
        "overwrite": lambda: Snapshot.take(folder, own, overwrite=no),
        "fsync": lambda: Snapshot.async_take(folder.parent / "t", own, fsync=no),
        "progress": lambda: Snapshot.take(folder.parent / "t", own, progress=no),
        "allow_pickle": lambda: Snapshot(folder, allow_pickle=no),
        "strict": lambda: snapshot.restore(own, no),
        "verify": lambda: snapshot.get_state_dict_for_key("m", verify=no),
        "dry_run": lambda: gc(folder, dry_run=no),
    }.items():
        with pytest.raises(ts.ConfigurationError, match=f"{name} is a bool"):
            call()
    assert unchanged(own["m"], 2)
    assert snapshot.read_object("m/n") == 1


def test_arguments_of_other_types(folder: Path) -> None:
    snapshot = Snapshot(folder)
    wrong: Any = None
    for call in (
        lambda: snapshot.read_object(wrong),
        lambda: snapshot.get_state_dict_for_key(wrong),
        lambda: snapshot.read_object("m/a", tensor_slice=(0, 1)),  # type: ignore[arg-type]
        lambda: gc(folder, grace="1"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ts.ConfigurationError):
            call()


def test_reading_into_an_array(folder: Path) -> None:
    snapshot = Snapshot(folder)
    array = np.zeros((100, 100), np.int64)
    assert snapshot.read_object("m/a", array) is array
    assert (array == 1).all()
    turned = np.zeros((50, 2), np.int64)[:, 0]
    assert snapshot.read_object("m/b", turned) is turned
    assert (turned == 1).all()
    fixed = np.zeros((50,), np.int64)
    fixed.flags.writeable = False
    for other in (fixed, np.zeros((50,)), np.zeros((49,), np.int64), np.zeros(50, object), [0.0]):
        with pytest.raises(ts.LayoutMismatchError):
            snapshot.read_object("m/b", other)
    assert not fixed.any()
    with pytest.raises(ts.LayoutMismatchError, match="no tensor in the snapshot"):
        snapshot.read_object("m/n", array)
    assert snapshot.read_object("m/n", 0) == 1


def test_names_that_differ_by_a_wrapper_are_said_to(tmp_path: Path) -> None:
    """As those of a module and of the same one in ``DistributedDataParallel`` do."""
    plain = torch.nn.Linear(3, 2)
    wrapped = torch.nn.ModuleDict({"module": torch.nn.Linear(3, 2)})
    for stored, own in (plain, wrapped), (wrapped, plain):
        Snapshot.take(tmp_path / "s", {"m": stored}, fsync=False, overwrite=True)
        with pytest.raises(ts.LayoutMismatchError, match="names differ only by 'module', which"):
            Snapshot(tmp_path / "s").restore({"m": own})


def test_tied_destinations_of_values_that_differ_are_named(tmp_path: Path) -> None:
    """Both would be read into one tensor, which had the one that a thread read last."""
    one, other = torch.full((3, 4), 1.0), torch.full((3, 4), 2.0)
    values = StateDict(a=one, b=other, c=one.clone(), d=torch.zeros(2))
    snapshot = Snapshot.take(tmp_path / "s", {"m": values, "n": StateDict(e=other)}, fsync=False)
    tied = torch.zeros(3, 4)
    own = {
        "m": StateDict(a=tied, b=tied, c=tied, d=torch.ones(2)),
        "n": StateDict(e=tied.view(3, 4)),
    }
    with pytest.raises(ts.LayoutMismatchError, match="'m/a'") as caught:
        snapshot.restore(own)
    assert caught.value.details["mismatched"].keys() == {"m/b", "n/e"}
    assert not tied.any()
    assert own["m"]["d"].all()

    report = snapshot.restore(own, strict=False)
    assert report.mismatched.keys() == {"m/b", "n/e"}
    assert torch.equal(tied, one)
    assert not own["m"]["d"].any()


def test_tied_destinations_of_equal_values_are_filled(tmp_path: Path) -> None:
    one = torch.randn(3, 4)
    snapshot = Snapshot.take(tmp_path / "s", {"m": StateDict(a=one, b=one.clone())}, fsync=False)
    tied = torch.zeros(4, 3).t()
    assert not snapshot.restore({"m": StateDict(a=tied, b=tied)})
    assert torch.equal(tied, one)


@pytest.mark.parametrize("strict", [True, False])
def test_destinations_that_share_a_part_of_their_memory_are_refused(
    tmp_path: Path, strict: bool
) -> None:
    """What would be in that part depended on a thread. As when a store is asked for them."""
    values = {name: torch.full((4, 2), 1.0) for name in "abc"}
    snapshot = Snapshot.take(tmp_path / "s", {"m": StateDict(values)}, fsync=False)
    whole = torch.zeros(4, 6)
    own = {name: whole[:, at : at + 2] for name, at in zip("abc", (0, 3, 1), strict=True)}
    with pytest.raises(ts.LayoutMismatchError, match=r"'m/a' and 'm/c' overlap") as caught:
        snapshot.restore({"m": StateDict(own)}, strict=strict)
    assert caught.value.details == {"overlapping": ["m/a", "m/c"]}
    assert not whole.any()

    apart = {name: whole[:, at : at + 2] for name, at in zip("abc", (0, 2, 4), strict=True)}
    assert not snapshot.restore({"m": StateDict(apart)}, strict=strict)
    assert whole.all()


@pytest.mark.parametrize("part", ["take", "sequence", "digest"])
def test_a_damaged_head_of_a_manifest_is_damage(folder: Path, part: str) -> None:
    """Only what orders snapshots reads it: a restore would be right, but the next take would not
    know that this one is there.
    """
    path = folder / MANIFEST
    data = path.read_bytes()
    at = data.index(b'"%s":' % part.encode()) + len(part) + len('"":')
    at += data[at] == ord('"')
    changed = bytearray(data)
    changed[at] ^= 1
    path.write_bytes(changed)
    error = refuses(folder, SnapshotCorruptError)
    assert error.details["file"] == MANIFEST
    with pytest.raises(SnapshotCorruptError):
        Snapshot(folder).verify()
