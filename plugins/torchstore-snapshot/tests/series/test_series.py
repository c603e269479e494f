"""What a series does with names and options."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import msgspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import torchstore_core as ts
from torchstore_snapshot import Series, Snapshot, StateDict, gc
from torchstore_snapshot.format.paths import MANIFEST
from torchstore_snapshot.format.weight_maps import MAP


def test_options_hold_for_what_a_background_take_returns(tmp_path: Path) -> None:
    series = Series(tmp_path, keep_last=2)
    state = {"m": StateDict(x=torch.ones(2), pickled=Fraction(1, 3))}
    pending = series.async_take("1", state, allow_pickle=True, fsync=False)
    own = StateDict(x=torch.zeros(2), pickled=None)
    pending.wait(300).restore({"m": own})
    assert own["pickled"] == Fraction(1, 3)
    assert own["x"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "name", ["a/b", "../x", "/x", "", ".", "..", "a\\b", "a\0b", "snapshot.json", "x" * 256, 7]
)
def test_names_that_are_not_those_of_folders(tmp_path: Path, name: Any) -> None:
    series = Series(tmp_path / "run")
    for take in (series.take, series.async_take):
        with pytest.raises(ts.ConfigurationError) as raised:
            take(name, {"m": StateDict(x=torch.ones(2))})
        assert raised.value.__context__ is None or "snapshot in" in str(raised.value)
    assert not [*tmp_path.iterdir()]


def test_a_base_of_ones_own(tmp_path: Path) -> None:
    series = Series(tmp_path)
    state = {"m": StateDict(x=torch.arange(5000.0))}
    series.take("1", state, fsync=False)
    folders: dict[str, set[str]] = {}
    bases: dict[str, dict[str, Any]] = {
        "newest": {},
        "none": {"base": None},
        "given": {"base": tmp_path / "1"},
    }
    for name, options in bases.items():
        taken = series.take(name, state, fsync=False, **options)
        folders[name] = {file.snapshot for file in taken.manifest.files}
    assert folders == {"newest": {"1"}, "none": {""}, "given": {"1"}}
    pending = series.async_take("background", state, base=None, fsync=False)
    assert {file.snapshot for file in pending.wait(300).manifest.files} == {""}


class _Overtaken(StateDict):
    """Is inspected while another program takes a snapshot into the series, and keeps only that."""

    series: Path
    rest: list[str]

    def state_dict(self) -> dict[str, Any]:
        if self.rest:
            name = self.rest.pop()
            Snapshot.take(self.series / name, {"m": StateDict(x=self["x"])}, fsync=False)
            gc(self.series, keep_last=1)
        return super().state_dict()


@pytest.mark.parametrize("background", [False, True])
def test_a_base_that_others_have_dropped_meanwhile(tmp_path: Path, background: bool) -> None:
    series = Series(tmp_path)
    series.take("1", {"m": StateDict(x=torch.arange(5000.0))}, fsync=False)
    state = _Overtaken(x=torch.arange(5000.0))
    state.series, state.rest = tmp_path, ["2"]
    if background:
        taken = series.async_take("3", {"m": state}, fsync=False).wait(300)
    else:
        taken = series.take("3", {"m": state}, fsync=False)
    assert (state.rest, series.names()) == ([], ["2", "3"])
    assert {file.snapshot for file in taken.manifest.files} == {"2"}
    assert taken.verify() == {}


class _Counting(MemoryFileSystem):
    """Counts the bytes that are read of manifests."""

    protocol = ("counting", "memory")
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    nbytes: ClassVar[int] = 0

    def cat_file(self, path: str, *args: Any, **options: Any) -> Any:
        data = super().cat_file(path, *args, **options)
        if path.endswith(MANIFEST):
            _Counting.nbytes += len(data)
        return data

    @classmethod
    def during(cls, call: Callable[[], object]) -> int:
        before = cls.nbytes
        call()
        return cls.nbytes - before


def test_of_earlier_snapshots_only_the_first_bytes_are_read() -> None:
    fsspec.register_implementation("counting", _Counting, clobber=True)
    url = f"counting://{secrets.token_hex(8)}"
    series = Series(url)
    many = {"m": StateDict({f"l.{i}": torch.ones(4) for i in range(300)})}
    for name in "123":
        series.take(name, many)
    read_by_few = _Counting.during(lambda: series.take("4", many))
    for number in range(5, 20):
        series.take(str(number), many)
    size = len(_Counting().cat_file(f"{url}/4/{MANIFEST}"))
    assert read_by_few > size > 20_000
    assert _Counting.during(lambda: series.take("20", many)) - read_by_few < size // 2
    assert size <= _Counting.during(series.latest) < 2 * size
    assert series.latest().path == f"{url}/20"
    # So of those that a take has written whose files are replaced: none of them refers to these.
    small = {"m": StateDict(w=torch.ones(4))}
    Snapshot.take(f"{url}/latest", small)
    replace = partial(Snapshot.take, f"{url}/latest", small, overwrite=True)
    assert _Counting.during(replace) < size
    files = _Counting().ls(f"{url}/latest", detail=False)
    assert len([file for file in files if file.endswith(".safetensors")]) == 1


def test_each_key_has_a_weight_map_of_its_own(tmp_path: Path) -> None:
    keys = ["a/b", "a_b", "ä", "ö", "y" * 64 + "1", "y" * 64 + "2"]
    states = {key: StateDict(w=torch.full((3,), float(i))) for i, key in enumerate(keys)}
    Snapshot.take(tmp_path / "s", states, fsync=False)
    found = {}
    for path in (tmp_path / "s").glob(f"*{MAP}"):
        (file,) = msgspec.json.decode(path.read_bytes())["weight_map"].values()
        with contextlib.closing((tmp_path / "s" / file).open("rb")) as data:
            found[data.read()[-4096:].rstrip(b"\0")] = path.name
    assert len(set(found.values())) == len(found) == len(keys)
    gc(tmp_path, grace=0)
    assert len([*(tmp_path / "s").glob(f"*{MAP}")]) == len(keys)
    gc(tmp_path, keep_last=1, grace=0)
    Snapshot.take(tmp_path / "s", {"a_b": states["a_b"]}, overwrite=True, fsync=False)
    assert [p.name for p in (tmp_path / "s").glob(f"*{MAP}")] == [f"a_b{MAP}"]
