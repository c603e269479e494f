"""Manifests that lie, with hashes that are right: nothing hangs, and every error is typed."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from tests.support import SMALL, start_store
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

import torchstore_core as ts
from torchstore_snapshot import (
    Series,
    Snapshot,
    SnapshotFormatError,
    StateDict,
    gc,
    load_into_store,
)
from torchstore_snapshot.cli.comparing import compare
from torchstore_snapshot.cli.looking import list_path, show_object, show_snapshot
from torchstore_snapshot.converting.convert import convert
from torchstore_snapshot.dcp.reading import SnapshotStorageReader
from torchstore_snapshot.format.hashes import digest_of
from torchstore_snapshot.format.paths import MANIFEST

_HANGS_S = 10
_STORE = "forged"


def state() -> StateDict:
    return StateDict(
        grid=torch.arange(48.0).view(6, 8),
        bits=torch.arange(5, dtype=torch.bfloat16),
        none=torch.empty(0, 3),
        text="x" * 20_000,
        nested={"step": 3, "list": [torch.ones(2), "y"]},
    )


def _sharded(manifest: dict[str, Any]) -> None:
    """Make three pieces of one tensor."""
    entry = manifest["shared"]["m"]["grid"]
    (piece,) = entry["pieces"]
    entry["pieces"] = [
        {
            **piece,
            "start": piece["start"] + row * 64,
            "nbytes": nbytes,
            "slice": [[row * 2, 0], [rows, 8], [6, 8], [], []],
        }
        for row, rows, nbytes in ((0, 2, 64), (1, 2, 64), (2, 2, 64))
    ]


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A series of two snapshots, of which the second uses the first one's file."""
    folder = tmp_path_factory.mktemp("forged") / "s"
    saved = Series(folder)
    saved.take("1", {"m": state()}, fsync=False)
    own = state()
    own["bits"] += 1
    saved.take("2", {"m": own}, fsync=False)
    return folder


@pytest.fixture(scope="module")
def store() -> Iterator[None]:
    asyncio.run(start_store(store_name=_STORE, **SMALL))
    yield
    asyncio.run(ts.shutdown(_STORE))


def _read(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    return document


def _write(folder: Path, document: dict[str, Any]) -> None:
    body = json.dumps(document["body"]).encode()
    outer = {key: value for key, value in document.items() if key != "body"}
    text = json.dumps({**outer, "digest": digest_of(body)}).encode()
    (folder / MANIFEST).write_bytes(text[:-1] + b', "body": ' + body + b"}")


@contextmanager
def _forged(folder: Path, change: Callable[[dict[str, Any]], object]) -> Iterator[None]:
    before = (folder / MANIFEST).read_bytes()
    document = _read(folder)
    change(document["body"])
    try:
        _write(folder, document)
        yield
    finally:
        (folder / MANIFEST).write_bytes(before)


# ---- by hand ------------------------------------------------------------------------------


def _grid(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda m: m["shared"]["m"]["grid"].update(changes)


def _piece(number: int, **changes: object) -> Callable[[dict[str, Any]], object]:
    def change(manifest: dict[str, Any]) -> None:
        _sharded(manifest)
        manifest["shared"]["m"]["grid"]["pieces"][number].update(changes)

    return change


def _huge(manifest: dict[str, Any]) -> None:
    entry = manifest["shared"]["m"]["grid"]
    entry["shape"] = [1 << 40, 8]
    entry["pieces"][0]["nbytes"] = 0


@pytest.mark.parametrize(
    "change",
    [
        _huge,
        _grid(shape=[6, 9]),
        _grid(dtype="float64"),
        _grid(pieces=[]),
        _piece(1, nbytes=0),
        _piece(1, nbytes=32),
        _piece(1, slice=[[0, 0], [2, 8], [6, 8], [], []]),
        _piece(1, slice=[[1, 0], [2, 8], [6, 8], [], []]),
        _piece(1, slice=[[5, 0], [2, 8], [6, 8], [], []]),
        _piece(1, slice=[[2, 0], [2, 8, 1], [6, 8], [], []]),
    ],
)
def test_pieces_that_are_not_the_tensor(
    series: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    folder = series / "2"
    own = {"m": state()}
    own["m"]["bits"].zero_()
    with _forged(folder, change):
        with pytest.raises(SnapshotFormatError, match="contradicts itself about 'm/grid'"):
            Snapshot(folder).restore(own)
        with pytest.raises(SnapshotFormatError):
            Snapshot(folder).read_object("m/grid")
    assert not own["m"]["bits"].any()
    Snapshot(folder).restore(own)
    assert torch.equal(own["m"]["bits"], state()["bits"] + 1)


def test_pieces_that_are_the_tensor(series: Path) -> None:
    folder = series / "2"
    with _forged(folder, _sharded):
        got = Snapshot(folder)
        assert len(got.manifest.shared["m"]["grid"].pieces) == 3


# ---- at random ----------------------------------------------------------------------------

_NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 64, 4096, 1 << 20, 1 << 31, 1 << 45, (1 << 63) - 1])
_TEXTS = st.sampled_from(
    ["", "m", "grid", "float32", "float64", "bool", "msgpack", "pickle", "x/y"]
)


class Forgery:
    """A manifest in which some values are others, missing, or there twice."""

    def __init__(self, changed: list[object], body: dict[str, Any]) -> None:
        self.changed = changed
        self.body = body

    def __repr__(self) -> str:
        return f"Forgery({self.changed})"


@st.composite
def _forgeries(draw: st.DrawFn, body: dict[str, Any]) -> Forgery:
    changed: dict[str, Any] = deepcopy(body)
    said: list[object] = []
    if draw(st.booleans()):
        said.append("sharded")
        _sharded(changed)
    for _ in range(draw(st.integers(1, 3))):
        at: Any = changed
        path: list[object] = []
        while isinstance(at, (dict, list)) and at:
            keys = sorted(at) if isinstance(at, dict) else list(range(len(at)))
            path.append(draw(st.sampled_from(keys)))
            inside, at = at, at[path[-1]]
            if isinstance(at, (dict, list)) and draw(st.integers(0, 5)) == 0:
                break
        key: Any = path[-1]
        if isinstance(at, bool) or not isinstance(at, (int, str)) or draw(st.integers(0, 7)) == 0:
            how = draw(st.sampled_from(["remove", "twice", "empty"]))
            if how == "remove":
                del inside[key]
            elif how == "twice" and isinstance(inside, list):
                inside.insert(key, deepcopy(at))
            elif isinstance(inside, dict):
                inside[draw(_TEXTS)] = deepcopy(at)
            else:
                inside[key] = type(at)()
        else:
            how = inside[key] = draw(_NUMBERS if isinstance(at, int) else _TEXTS)
        said.append((path, how))
    return Forgery(said, changed)


@contextmanager
def _in_time(name: str) -> Iterator[None]:
    """Fail if this takes long, and tell where it was."""

    def late(_number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"{name} takes more than {_HANGS_S} s")

    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(_HANGS_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _restored(folder: Path) -> None:
    own = state()
    Snapshot(folder).restore({"m": own}, strict=False)
    assert own["grid"].shape == (6, 8)


def _loaded(folder: Path) -> None:
    reader = SnapshotStorageReader(folder)
    reader.read_metadata()  # of its errors, torch makes an assertion
    try:
        dcp.load({}, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    except CheckpointException as error:
        ((cause, _),) = error.failures.values()
        raise cause from error


#: Everything that reads a snapshot. Each gets the folder, and another one for what it writes.
READERS: dict[str, Callable[[Path, Path], object]] = {
    "manifest": lambda folder, _: Snapshot(folder).get_manifest(),
    "verify": lambda folder, _: Snapshot(folder).verify(),
    "restore": lambda folder, _: _restored(folder),
    "read_object": lambda folder, _: Snapshot(folder).read_object("m/grid"),
    "read_object bits": lambda folder, _: Snapshot(folder).read_object("m/bits"),
    "read_object text": lambda folder, _: Snapshot(folder).read_object("m/text"),
    "get_state_dict_for_key": lambda folder, _: Snapshot(folder).get_state_dict_for_key("m"),
    "dcp.load": lambda folder, _: _loaded(folder),
    "ls": lambda folder, _: list_path(str(folder), ""),
    "ls of all": lambda folder, _: list_path(str(folder.parent), ""),
    "show": lambda folder, _: show_snapshot(str(folder)),
    "show an object": lambda folder, _: show_object(str(folder), "m/grid"),
    "diff": lambda folder, _: compare(str(folder.parent / "1"), str(folder)),
    "gc": lambda folder, _: gc(folder.parent, dry_run=True),
    "convert": lambda folder, out: convert(folder, out / "plain", to="safetensors", fsync=False),
    "load_into_store": lambda folder, _: asyncio.run(load_into_store(folder, store_name=_STORE)),
    "convert to dcp": lambda folder, out: convert(folder, out / "dcp", to="dcp", fsync=False),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@given(st.data())
def test_no_reader_hangs_or_raises_what_is_not_typed(
    series: Path, store: None, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = series / "2"
    forgery = data.draw(_forgeries(_read(folder)["body"]))
    out = tmp_path_factory.mktemp("out")
    with _forged(folder, lambda body: (body.clear(), body.update(forgery.body))):
        for name, read in READERS.items():
            try:
                with _in_time(name):
                    read(folder, out)
            except ts.TorchStoreError:
                pass
            except Exception as error:
                raise AssertionError(f"{name} raises {error!r}") from error
    assert Snapshot(folder).verify() == {}
