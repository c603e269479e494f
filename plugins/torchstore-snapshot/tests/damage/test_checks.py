"""What is checked when a snapshot is read, when, and with how much memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from tests.memory import forget_peak, peak

import torchstore_core as ts
from torchstore_core.machine import copying
from torchstore_core.values import TensorSlice
from torchstore_snapshot import Snapshot, SnapshotCorruptError, StateDict
from torchstore_snapshot.format.hashes import BLOCK, BLOCK_OF_V1, digest_of
from torchstore_snapshot.format.paths import MANIFEST

_COLUMNS = 1024
_ROWS_OF_BLOCK = BLOCK // (4 * _COLUMNS)
_BLOCKS = 5


def state(fill: float = 0.0) -> StateDict:
    large = torch.arange(_BLOCKS * BLOCK // 4, dtype=torch.float32).view(-1, _COLUMNS)
    return StateDict(large=large + fill, small=torch.full((5,), fill))


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checks") / "s"
    Snapshot.take(folder, {"m": state()}, fsync=False)
    return folder


@pytest.fixture
def folder(taken: Path, tmp_path: Path) -> Path:
    """A snapshot that the test may damage."""
    (tmp_path / "s").mkdir()
    for path in taken.iterdir():
        (tmp_path / "s" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "s"


def damage(folder: Path, name: str, at: int) -> None:
    """Flip a bit of a tensor; ``at`` is the position of its byte."""
    manifest = Snapshot(folder).manifest
    piece = manifest.shared["m"][name].pieces[0]
    with (folder / manifest.files[piece.file].name).open("r+b") as file:
        file.seek(piece.start + at)
        byte = file.read(1)[0]
        file.seek(piece.start + at)
        file.write(bytes([byte ^ 1]))


def strided(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape[::-1]).t()


@pytest.mark.parametrize("verify", [True, "streaming"])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_damage_is_found(
    folder: Path,
    verify: bool | Literal["streaming"],
    contiguous: bool,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not compiled:
        monkeypatch.setattr(copying, "_hash_runs", None)
    expected = state()
    own = state(1.0)
    if not contiguous:
        own["large"] = strided(own["large"])
    Snapshot(folder).restore({"m": own}, verify=verify)
    assert all(torch.equal(own[name], expected[name]) for name in expected)
    damage(folder, "large", 3 * BLOCK + 5)
    own["large"].fill_(-1)
    with pytest.raises(SnapshotCorruptError, match="m/large"):
        Snapshot(folder).restore({"m": own}, verify=verify)
    if verify is True or not contiguous:
        assert bool((own["large"] == -1).all())
    Snapshot(folder).restore({"m": own}, verify=False)


def test_another_way_to_verify(taken: Path) -> None:
    with pytest.raises(ts.ConfigurationError):
        Snapshot(taken).restore({"m": state()}, verify="later")  # type: ignore[arg-type]
    with pytest.raises(ts.ConfigurationError):
        Snapshot(taken).read_object("m/small", verify="streaming")  # type: ignore[arg-type]


def rows(begin: int, end: int) -> TensorSlice:
    shape = (_BLOCKS * _ROWS_OF_BLOCK, _COLUMNS)
    return TensorSlice((begin, 0), (end - begin, _COLUMNS), shape)


@pytest.mark.parametrize("budget", [None, 1 << 20])
def test_a_part_of_a_tensor_is_checked_by_blocks(folder: Path, budget: int | None) -> None:
    damage(folder, "large", 2 * BLOCK)  # the first byte of the third block
    snapshot, one = Snapshot(folder), _ROWS_OF_BLOCK

    def read(begin: int, end: int) -> torch.Tensor:
        where = rows(begin, end)
        return snapshot.read_object("m/large", None, budget, tensor_slice=where)

    assert torch.equal(read(0, 2 * one), state()["large"][: 2 * one])
    assert torch.equal(read(3 * one - 5, 5 * one), state()["large"][3 * one - 5 :])
    with pytest.raises(SnapshotCorruptError):
        read(2 * one, 3 * one)
    with pytest.raises(SnapshotCorruptError):
        read(one + 3, 4 * one - 1)
    read(2 * one, 3 * one - 1)  # not all of the block: that is not checked


def parts() -> dict[str, TensorSlice]:
    """Ranges of tensors that contain a part of the damaged block, but not all of it: rows, columns
    (which another layout of shards asks for), and a part of a tensor smaller than a block.
    """
    rows_of_all = _BLOCKS * _ROWS_OF_BLOCK
    return {
        "rows": rows(2 * _ROWS_OF_BLOCK - 3, 3 * _ROWS_OF_BLOCK - 1),
        "columns": TensorSlice((0, 0), (rows_of_all, 16), (rows_of_all, _COLUMNS)),
        "small": TensorSlice((1,), (2,), (5,)),
    }


@pytest.mark.parametrize("where", ["files", "budget", "memory"])
@pytest.mark.parametrize("part", parts())
def test_all_checks_every_block_that_is_read_from(folder: Path, part: str, where: str) -> None:
    name = "small" if part == "small" else "large"
    wanted = parts()[part]
    beside = {"rows": 3 * BLOCK - 1, "columns": 2 * BLOCK + 400, "small": 16}
    damage(folder, name, beside[part])
    snapshot = Snapshot(folder)
    if where == "memory":
        for path in folder.iterdir():
            fsspec.filesystem("memory").pipe_file(f"/{folder}/{path.name}", path.read_bytes())
        snapshot = Snapshot(f"memory://{folder}")
    budget = 1 << 20 if where == "budget" else None
    out = torch.full(wanted.local_shape, -1.0)

    def read(verify: bool | Literal["all"]) -> None:
        path = f"m/{name}"
        snapshot.read_object(path, out, budget, tensor_slice=wanted, verify=verify)

    with pytest.raises(SnapshotCorruptError, match=f"m/{name}"):
        read("all")
    assert bool((out == -1).all())
    read(True)  # reads, and checks, no more than it has to
    begin, extent = wanted.offsets, wanted.local_shape
    box = tuple(slice(o, o + n) for o, n in zip(begin, extent, strict=True))
    assert torch.equal(out, state()[name][box])


def test_all_finds_nothing_wrong_with_what_is_whole(taken: Path) -> None:
    for part, wanted in parts().items():
        name = "small" if part == "small" else "large"
        found = Snapshot(taken).read_object(f"m/{name}", tensor_slice=wanted, verify="all")
        assert tuple(found.shape) == wanted.local_shape
    own = state(1.0)
    Snapshot(taken).restore({"m": own}, verify="all")
    assert torch.equal(own["large"], state()["large"])


def older(folder: Path) -> None:
    """Make a snapshot what version 1 of the format would have written."""
    manifest = Snapshot(folder).manifest
    (file,) = manifest.files
    data = (folder / file.name).read_bytes()
    body = json.loads((folder / MANIFEST).read_bytes())["body"]
    body.pop("sequence")
    for described in body["files"]:
        described.pop("block")
    for entry in body["shared"]["m"].values():
        for piece in entry["pieces"]:
            piece.pop("blocks", None)
            of = data[piece["start"] : piece["start"] + piece["nbytes"]]
            piece["digest"] = digest_of(of, BLOCK_OF_V1)
    text = json.dumps(body)
    digest = digest_of(text.encode(), BLOCK_OF_V1)
    outer = f'{{"format":"torchstore-snapshot","version":1,"digest":"{digest}","body":{text}}}'
    (folder / MANIFEST).write_text(outer)


def test_a_snapshot_of_version_1(folder: Path, tmp_path: Path) -> None:
    older(folder)
    own = state(1.0)
    Snapshot(folder).restore({"m": own})
    assert torch.equal(own["large"], state()["large"])
    assert Snapshot(folder).verify() == {}
    again = Snapshot.take(tmp_path / "t", {"m": own}, base=folder, fsync=False)
    assert again.verify() == {}
    damage(folder, "large", 4 * BLOCK)
    assert [*Snapshot(folder).verify()] == ["m/large"]
    with pytest.raises(SnapshotCorruptError):
        Snapshot(folder).restore({"m": own})
    last = rows(4 * _ROWS_OF_BLOCK, 5 * _ROWS_OF_BLOCK)
    Snapshot(folder).read_object("m/large", tensor_slice=last)  # it has no hashes of blocks
    assert Snapshot(tmp_path / "t").verify() == {}


@pytest.mark.parametrize("turned", [False, True])
def test_a_memory_budget_holds(taken: Path, turned: bool) -> None:
    budget, slack = 1 << 20, 3 << 20  # the allocator may get memory in huge pages of 2 MiB
    shape = (_BLOCKS * _ROWS_OF_BLOCK, _COLUMNS)
    where = TensorSlice((0, 0), shape, shape)
    if not turned:  # every page of the file has some of it
        where = TensorSlice((0, 7), (shape[0], 16), shape)
    out = torch.zeros(where.local_shape[::-1]).t() if turned else torch.zeros(where.local_shape)
    Snapshot(taken).read_object("m/small", None, budget)  # imports are done
    snapshot = Snapshot(taken)
    snapshot.get_manifest()
    before = forget_peak()
    snapshot.read_object("m/large", out, budget, tensor_slice=where)
    assert peak() - before < budget + slack
    expected = state()["large"]
    assert torch.equal(out, expected if turned else expected[:, 7:23])


def test_a_budget_that_is_none(taken: Path) -> None:
    with pytest.raises(ts.ConfigurationError):
        Snapshot(taken).read_object("m/small", None, 0)
