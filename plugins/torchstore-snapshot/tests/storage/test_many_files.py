"""Snapshots of more files than a process may have open."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.processes import run_script

from torchstore_snapshot import Snapshot, SnapshotCorruptError, StateDict
from torchstore_snapshot.restoring.files import Files

_SOAK = pytest.mark.soak
_LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from torchstore_snapshot import Series, Snapshot, StateDict
from torchstore_snapshot.converting import convert
def state(fill):
    return {f"k{i}": StateDict(w=torch.full((3000,), fill + i)) for i in range(200)}
def fill(own):
    return {float(state["w"][0]) - i for i, state in enumerate(own.values())}
"""


@pytest.mark.parametrize("how", [pytest.param("take", marks=_SOAK), "async_take"])
async def test_more_files_than_may_be_open(tmp_path: Path, how: str) -> None:
    begin = "Snapshot.take(path, state(1.0), fsync=False)"
    if how == "async_take":
        begin = "Snapshot.async_take(path, state(1.0), fsync=False).wait(50)"
    said = await run_script(
        _LIMITED
        + f"""
path = {str(tmp_path / "s")!r}
{begin}
for verify in (True, "streaming", False):
    own = state(0.0)
    Snapshot(path).restore(own, verify=verify)
    print(fill(own))
print(Snapshot(path).verify())
"""
    )
    assert said.split() == ["{1.0}"] * 3 + ["{}"]


# What it takes grows with the square of the steps.
@pytest.mark.parametrize(("steps", "limit"), [(52, 48), pytest.param(150, 128, marks=_SOAK)])
async def test_a_long_series_of_increments_comes_back(
    tmp_path: Path, steps: int, limit: int
) -> None:
    said = await run_script(
        _LIMITED.replace("128", str(limit))
        + f"""
series = Series({str(tmp_path)!r})
state = {{f"w{{i}}": torch.full((2000,), float(i)) for i in range({steps})}}
for step in range({steps}):
    state[f"w{{step}}"] = torch.full((2000,), -float(step))
    last = series.take(f"{{step:04}}", {{"m": StateDict(**state)}}, fsync=False)
own = StateDict(**{{name: torch.zeros(2000) for name in state}})
last.restore({{"m": own}})
print(len(last.manifest.files), all(own[name].equal(value) for name, value in state.items()))
"""
    )
    assert said.split() == [str(steps), "True"]


async def test_conversions_of_many_files(tmp_path: Path) -> None:
    said = await run_script(
        _LIMITED
        + f"""
path = {str(tmp_path / "s")!r}
model = {{f"l{{i}}": torch.full((10,), float(i)) for i in range(300)}}
Snapshot.take(path, {{"model": StateDict(**model)}}, fsync=False)
convert(path, path + "-other", to="torchsnapshot", fsync=False)
convert(path + "-other", path + "-back", fsync=False)
convert(path, path + "-files", to="safetensors", file_max=40, fsync=False)
convert(path + "-files", path + "-again", fsync=False)
for end in ("-back", "-again"):
    back = Snapshot(path + end).get_state_dict_for_key("model")
    print(all(back[name].equal(value) for name, value in model.items()))
"""
    )
    assert said.split() == ["True", "True"]


def test_columns_of_a_file_that_becomes_shorter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.arange(3_000_000, dtype=torch.float32).view(-1, 3000)
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=value)}, fsync=False)
    (file,) = (tmp_path / "s").glob("m-*.safetensors")
    own = torch.zeros(3000, 1000).t()
    before = Files.map

    def shortened(self: Files, index: int, nbytes: int | None = None) -> None:
        before(self, index, nbytes)
        with file.open("r+b") as opened:
            opened.truncate(5_000_000)

    monkeypatch.setattr(Files, "map", shortened)
    with pytest.raises(SnapshotCorruptError, match="became shorter"):
        Snapshot(tmp_path / "s").restore({"m": StateDict(w=own)}, verify=False)
