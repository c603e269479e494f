"""Damage to what other programs read of a snapshot: headers of data files, and maps of weights."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from torchstore_snapshot import (
    Series,
    Snapshot,
    SnapshotCorruptError,
    SnapshotFormatError,
    StateDict,
    gc,
)
from torchstore_snapshot.converting import convert
from torchstore_snapshot.format import manifest as manifests
from torchstore_snapshot.format.manifest import Manifest
from torchstore_snapshot.format.paths import MANIFEST

_MAP = "m.safetensors.index.json"


def state() -> StateDict:
    tied = torch.arange(6.0)
    return StateDict(
        aa=torch.arange(8.0),
        bb=-torch.arange(8.0),
        half=torch.ones(4, 2, dtype=torch.bfloat16),
        ids=torch.arange(2),
        bits=torch.ones(3, dtype=torch.complex128),
        empty=torch.zeros(0, 3),
        tied=tied,
        same=tied,
        text="x" * (1 << 17),
        nested={"aa": torch.ones(5)},
    )


def without_hashes(folder: Path) -> Manifest:
    """Make the snapshot one of an earlier version, whose manifest had no hashes of headers."""
    manifest = Snapshot(folder).manifest
    files = tuple(msgspec.structs.replace(file, header="") for file in manifest.files)
    manifest = msgspec.structs.replace(manifest, files=files)
    (folder / MANIFEST).write_bytes(manifests.encode(manifest))
    return manifest


@pytest.fixture(params=["now", "earlier"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "s"
    Snapshot.take(path, {"m": state()}, fsync=False)
    if request.param == "earlier":
        without_hashes(path)
    assert Snapshot(path).verify() == {}
    return path


def data_file(folder: Path) -> Path:
    (found,) = folder.glob("*.safetensors")
    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"aa"', b'"ab"'),
        (b'"BF16"', b'"F16" '),
        (b'"shape":[4,2]', b'"shape":[2,4]'),
        (b'"I64","shape":[2]', b'"F64","shape":[2]'),
        (b'{"__metadata__"', b'{"__metadata__('),
        (b'"U8"', b'"I8"'),
    ],
)
def test_damaged_header(folder: Path, old: bytes, new: bytes) -> None:
    file = data_file(folder)
    data = file.read_bytes()
    assert old in data[:4096]
    file.write_bytes(data.replace(old, new, 1))
    damaged = Snapshot(folder).verify()
    assert list(damaged) == [file.name]
    assert damaged[file.name].details == {"path": str(folder), "file": file.name}
    own = state()
    own["aa"].zero_()
    Snapshot(folder).restore({"m": own})  # it does not read headers
    assert torch.equal(own["aa"], state()["aa"])


def test_two_names_exchanged(folder: Path) -> None:
    file = data_file(folder)
    data = file.read_bytes()
    for old, new in ((b'"aa"', b'"\0\0"'), (b'"bb"', b'"aa"'), (b'"\0\0"', b'"bb"')):
        data = data.replace(old, new, 1)
    file.write_bytes(data)
    assert list(Snapshot(folder).verify()) == [file.name]


def test_length_of_the_header(folder: Path) -> None:
    file = data_file(folder)
    data = bytearray(file.read_bytes())
    for byte in (0, 1, 7):
        data[byte] ^= 1
        file.write_bytes(data)
        assert list(Snapshot(folder).verify()) == [file.name]
        data[byte] ^= 1


def test_a_missing_file_is_reported_by_its_objects_alone(folder: Path) -> None:
    file = data_file(folder)
    file.unlink()
    assert all(path.startswith("m/") for path in Snapshot(folder).verify())


@pytest.mark.parametrize("old", [b'"aa"', b"{", b".safetensors"])
def test_damaged_map(folder: Path, old: bytes) -> None:
    data = (folder / _MAP).read_bytes()
    (folder / _MAP).write_bytes(data.replace(old, old[:-1] + b"!", 1))
    assert list(Snapshot(folder).verify()) == [_MAP]
    (folder / _MAP).unlink()  # as if the take had died just after it was committed
    assert Snapshot(folder).verify() == {}


def test_files_of_earlier_snapshots(tmp_path: Path) -> None:
    """There, unchanged tensors may have other names."""
    weight = torch.arange(5000.0)
    series = Series(tmp_path)
    series.take("a", {"m": StateDict(w=weight, x=weight + 1)}, fsync=False)
    series.take("b", {"m": StateDict(renamed=weight, step=1)}, fsync=False)
    file = data_file(tmp_path / "a")
    whole = file.read_bytes()
    for damaged in (whole.replace(b'"w"', b'"v"', 1), whole.replace(b"[0,2", b"[1,2", 1)):
        file.write_bytes(damaged)
        assert list(Snapshot(tmp_path / "b").verify()) == [file.name]
    file.write_bytes(whole)
    without_hashes(tmp_path / "b")
    assert Snapshot(tmp_path / "b").verify() == {}
    file.write_bytes(damaged)
    assert list(Snapshot(tmp_path / "b").verify()) == [file.name]


def put_in_place(file: Path, what: str) -> None:
    file.unlink()
    if what == "folder":
        file.mkdir()
    elif what == "loop":
        file.symlink_to(file.name)
    elif what == "pipe":
        os.mkfifo(file)
    else:
        with socket.socket(socket.AF_UNIX) as there, in_folder(file.parent):
            there.bind(file.name)  # whose whole path may be too long


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


_NO_FILES = ["folder", "loop", "pipe", "socket"]


@pytest.mark.parametrize("what", _NO_FILES)
def test_what_is_no_file_in_place_of_a_file(folder: Path, what: str) -> None:
    file = data_file(folder)
    put_in_place(file, what)
    snapshot = Snapshot(folder)
    assert "m/aa" in snapshot.verify()
    for call in (
        lambda: snapshot.restore({"m": state()}),
        lambda: snapshot.restore({"m": state()}, verify="streaming"),
        lambda: snapshot.read_object("m/aa"),
        lambda: snapshot.get_state_dict_for_key("m"),
        lambda: convert(str(folder), str(folder.parent / "out"), to="torchsnapshot", fsync=False),
    ):
        with pytest.raises(SnapshotCorruptError) as raised:
            call()
        assert raised.value.details == {"path": str(folder), "file": file.name}
        assert "restore another" in str(raised.value)
    assert Snapshot.take(folder, {"m": state()}, fsync=False, overwrite=True).verify() == {}


@pytest.mark.parametrize("what", _NO_FILES)
@pytest.mark.parametrize("name", [MANIFEST, _MAP])
def test_what_is_no_file_in_place_of_a_document(folder: Path, name: str, what: str) -> None:
    put_in_place(folder / name, what)
    if name == _MAP:
        assert list(Snapshot(folder).verify()) == [_MAP]
        return
    for call in (Snapshot(folder).verify, lambda: Snapshot(folder).restore({"m": StateDict()})):
        with pytest.raises(SnapshotFormatError):
            call()
    assert [*gc(folder.parent).unreadable] == [folder.name]
    other = folder.parent / "other"
    assert Snapshot.take(other, {"m": state()}, fsync=False).verify() == {}
