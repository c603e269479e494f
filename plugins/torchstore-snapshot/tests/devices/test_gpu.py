"""Snapshots of CUDA tensors. Skipped, with the reason, where there is no CUDA device."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import bits

import torchstore_core as ts
from torchstore_core.machine import copying
from torchstore_snapshot import Snapshot, SnapshotCorruptError, SnapshotNotFoundError, StateDict
from torchstore_snapshot import aio as async_snapshots

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
MIB = 1 << 20
#: Cycles a kernel spins: some tenths of a second, far longer than a copy takes.
LONG = 1_000_000_000
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.int64,
]


def _value(nbytes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A table of 500 columns on the host, of numbers."""
    return _bits(2, nbytes, dtype)


def _any_value(nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """The same with any bits, those of NaNs with a payload, too."""
    return _bits(2 if dtype is torch.bool else 256, nbytes, dtype)


def _bits(most: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    rows = nbytes // (500 * dtype.itemsize)
    return torch.randint(0, most, (rows, 500 * dtype.itemsize), dtype=torch.uint8).view(dtype)


def _views(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "contiguous": tensor,
        "transposed": tensor.t(),
        "strided": tensor[1::2, ::3],
        "offset": tensor[1:],
        "expanded": tensor[:1].expand(tensor.shape[0], -1),
        "three dimensions": tensor.view(-1, 5, 100).permute(2, 0, 1),
        "no dimension": tensor[0, 0],
        "empty": tensor[:0],
    }


def _places(like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Destinations of any strides on the device."""
    rows, columns = like.shape

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=DEVICE).to(like.dtype)

    return {
        "contiguous": zeros(rows, columns),
        "transposed": zeros(columns, rows).t(),
        "every other row": zeros(2 * rows, columns)[::2],
        "inner block": zeros(rows + 2, columns + 2)[1:-1, 1:-1],
    }


def _same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    same = (got.dtype, got.shape) == (expected.dtype, expected.shape)
    return same and torch.equal(bits(got.cpu()), bits(expected.cpu()))


def _take(path: Path, state: dict[str, Any], **options: Any) -> Snapshot:
    return Snapshot.take(path, {"m": StateDict(**state)}, fsync=False, **options)


def _async_take(path: Path, state: dict[str, Any], **options: Any) -> Snapshot:
    made = Snapshot.async_take(path, {"m": StateDict(**state)}, fsync=False, **options)
    return made.wait()


takes = pytest.mark.parametrize("take", [_take, _async_take], ids=["take", "async_take"])
Take = Callable[..., Snapshot]


@takes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_strides_are_taken(tmp_path, take, dtype):
    value = _any_value(9 * MIB, dtype)
    on_device = value.to(DEVICE)
    snapshot = take(tmp_path / "s", {**_views(on_device), "host": value, "n": 5})
    got = snapshot.get_state_dict_for_key("m")
    for name, expected in {**_views(value), "host": value}.items():
        assert _same(got[name], expected), name
    assert not snapshot.verify()


@pytest.mark.parametrize("verify", [True, "streaming", "all", False], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_strides_are_restored(tmp_path, verify, dtype):
    value = _any_value(9 * MIB, dtype)
    places = _places(value)
    snapshot = _take(tmp_path / "s", dict.fromkeys(places, value))
    mine = StateDict(**places)
    snapshot.restore({"m": mine}, verify=verify)
    for name, place in places.items():
        assert mine[name] is place, name
        assert _same(place, value), name
        if place._base is not None:
            place.zero_()
            assert not bits(place._base.cpu()).any(), f"{name}: written outside of the view"


def test_a_model_and_its_optimizer_come_back(tmp_path):
    def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.Linear(900, 7)).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(8, 700, device=DEVICE)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained()
    snapshot = Snapshot.take(tmp_path / "s", {"model": model, "optimizer": optimizer}, fsync=False)
    other, its = trained()
    snapshot.restore({"model": other, "optimizer": its})
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)
        assert _same(its.state[same]["exp_avg"], optimizer.state[one]["exp_avg"])


def test_many_small_tensors(tmp_path):
    sizes = [i * 7 % 4099 for i in range(3000)]
    state = {f"t{i}": torch.full((n,), i, device=DEVICE) for i, n in enumerate(sizes)}
    snapshot = _take(tmp_path / "s", state)
    mine = StateDict(**{name: torch.zeros_like(each) for name, each in state.items()})
    snapshot.restore({"m": mine})
    assert all(torch.equal(mine[name], each) for name, each in state.items())


def test_parts_are_restored(tmp_path):
    """Rows and columns, into tensors and into shards."""
    value = _value(19 * MIB)
    rows, columns = value.shape
    whole = _take(tmp_path / "whole", {"w": value.to(DEVICE)})
    for index in ((slice(3, rows - 9), slice(0, columns)), (slice(0, rows), slice(3, 470))):
        expected = value[index]
        offsets = tuple(part.start for part in index)
        part = ts.TensorSlice(offsets, tuple(expected.shape), (rows, columns))
        for name, place in _places(expected).items():
            assert whole.read_object("m/w", place, tensor_slice=part) is place
            assert _same(place, expected), name
        mine = ts.TensorShard(torch.zeros(expected.shape, device=DEVICE), part)
        whole.restore({"m": StateDict(w=mine)})
        assert _same(mine.tensor, expected)


@pytest.mark.parametrize("budget", [1, 300_000, 3 * MIB, 64 * MIB])
def test_budgets_smaller_than_a_tensor(tmp_path, budget):
    value = _value(40 * MIB)
    on_device = value.to(DEVICE)
    state = {"w": on_device, "columns": on_device.t()}
    snapshot = _take(tmp_path / "s", state, memory_budget=budget)
    for name, place in _places(value).items():
        snapshot.read_object("m/w", place, memory_budget_bytes=budget)
        assert _same(place, value), name
    columns = torch.zeros_like(on_device).t()
    snapshot.read_object("m/columns", columns, memory_budget_bytes=budget)
    assert _same(columns, value.t())


def test_a_budget_of_a_take_in_the_background(tmp_path):
    value = _value(40 * MIB)
    on_device = value.to(DEVICE)
    state = {"w": on_device, "columns": on_device.t()}
    got = _async_take(tmp_path / "s", state, memory_budget=9 * MIB).get_state_dict_for_key("m")
    assert _same(got["w"], value)
    assert _same(got["columns"], value.t())


def test_only_what_has_changed_is_written_again(tmp_path):
    value = _value(9 * MIB)
    state = {"same": value.to(DEVICE), "columns": value.to(DEVICE).t(), "other": value.to(DEVICE)}
    first = _take(tmp_path / "a", state)
    state["other"].add_(1)
    second = _take(tmp_path / "b", state, base=first.path)
    written = sum(file.stat().st_size for file in (tmp_path / "b").glob("*.safetensors"))
    assert written < 1.5 * value.nbytes
    got = second.get_state_dict_for_key("m")
    assert _same(got["columns"], value.t())
    assert _same(got["other"], value + 1)


def test_checkpoints_of_torch(tmp_path):
    import torch.distributed.checkpoint as dcp

    from torchstore_snapshot.dcp import SnapshotStorageReader, SnapshotStorageWriter

    value = _value(9 * MIB)
    state = {"w": value.to(DEVICE), "columns": value.to(DEVICE).t()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(
            state, storage_writer=SnapshotStorageWriter(tmp_path / "s", fsync=False), no_dist=True
        )
        mine = {name: torch.zeros_like(each) for name, each in state.items()}
        dcp.load(mine, storage_reader=SnapshotStorageReader(tmp_path / "s"), no_dist=True)
    assert _same(mine["w"], value)
    assert _same(mine["columns"], value.t())


# ---- order, memory, ends ------------------------------------------------------------------


@takes
def test_a_take_waits_for_work_that_is_queued_on_the_current_stream(tmp_path, take):
    value = torch.zeros(9 * MIB, dtype=torch.uint8, device=DEVICE)
    take(tmp_path / "warm", {"w": value})
    torch.cuda.synchronize()
    for number, stream in enumerate((torch.cuda.current_stream(), torch.cuda.Stream()), start=1):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            value.fill_(number)
            snapshot = take(tmp_path / str(number), {"w": value})
        assert (snapshot.get_state_dict_for_key("m")["w"] == number).all()
        torch.cuda.synchronize()


@pytest.mark.parametrize("background", [False, True], ids=["take", "async_take"])
async def test_an_async_program_has_its_current_stream(tmp_path, background):
    value = torch.zeros(9 * MIB, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG)
        value.fill_(3)
        state: Any = {"m": StateDict(w=value)}
        if background:
            await (await async_snapshots.Snapshot.async_take(tmp_path / "s", state, fsync=False))
        else:
            await async_snapshots.Snapshot.take(tmp_path / "s", state, fsync=False)
    assert (Snapshot(tmp_path / "s").get_state_dict_for_key("m")["w"] == 3).all()


@takes
def test_tensors_may_change_right_after_a_take(tmp_path, take):
    value = torch.full((9 * MIB,), 1, dtype=torch.uint8, device=DEVICE)
    if take is _take:
        snapshot = _take(tmp_path / "s", {"w": value})
        value.fill_(2)
    else:
        pending = Snapshot.async_take(tmp_path / "s", {"m": StateDict(w=value)}, fsync=False)
        value.fill_(2)
        torch.cuda.synchronize()
        snapshot = pending.wait()
    assert (snapshot.get_state_dict_for_key("m")["w"] == 1).all()


@pytest.mark.parametrize("verify", [True, False], ids=str)
def test_a_restore_waits_for_work_that_still_reads_the_tensor(tmp_path, verify):
    snapshot = _take(tmp_path / "s", {"w": torch.full((9 * MIB,), 2, dtype=torch.uint8)})
    mine = torch.full((9 * MIB,), 1, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        mine.fill_(1)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            before = mine.clone()  # queued before the restore, runs long after it was called
            snapshot.restore({"m": StateDict(w=mine)}, verify=verify)
            after = mine.clone()
        torch.cuda.synchronize()
        assert (before == 1).all()
        assert (after == 2).all()


def test_a_restore_is_complete_when_it_returns(tmp_path):
    """For every stream, not only for the current one."""
    value = _value(200 * MIB)
    snapshot = _take(tmp_path / "s", {"w": value})
    mine = torch.zeros_like(value, device=DEVICE)
    torch.cuda.synchronize()
    snapshot.restore({"m": StateDict(w=mine)})
    with torch.cuda.stream(torch.cuda.Stream()):
        after = mine.clone()
    torch.cuda.synchronize()
    assert _same(after, value)


def test_page_locked_memory_is_bounded_and_used_again(tmp_path):
    value = _value(400 * MIB).to(DEVICE)
    state = {"w": value, "columns": value.t()}
    mine = StateDict(w=torch.zeros_like(value), columns=torch.zeros_like(value).t())
    torch.accelerator.empty_host_cache()
    locked = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    for number in range(3):
        _take(tmp_path / str(number), state).restore({"m": mine})
    assert torch.cuda.max_memory_allocated() - allocated < 100 * MIB
    now = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    assert now - locked <= copying.copy_threads() * 12 * MIB
    assert _same(mine["columns"], value.t())


def test_inference_mode(tmp_path):
    value = _value(40 * MIB)
    with torch.inference_mode():
        on_device = value.to(DEVICE)
        snapshot = _take(tmp_path / "s", {"w": on_device, "columns": on_device.t()})
        mine = {"w": torch.zeros_like(on_device), "columns": torch.zeros_like(on_device).t()}
        snapshot.restore({"m": StateDict(**mine)})
    assert _same(mine["w"], value)
    assert _same(mine["columns"], value.t())
    for tensor in mine.values():
        with torch.inference_mode():
            tensor.zero_()
    snapshot.restore({"m": StateDict(**mine)}, verify="streaming")
    assert _same(mine["w"], value)
    assert _same(mine["columns"], value.t())


def test_a_budget_bounds_what_is_page_locked(tmp_path):
    value = _value(100 * MIB).to(DEVICE)
    torch.accelerator.empty_host_cache()
    before = torch.cuda.host_memory_stats()["allocated_bytes.allocated"]
    _take(tmp_path / "s", {"w": value, "columns": value.t()}, memory_budget=4 * MIB)
    assert torch.cuda.host_memory_stats()["allocated_bytes.allocated"] - before <= 4 * MIB


def test_memory_that_cannot_be_page_locked_only_costs_time(tmp_path, monkeypatch):
    empty = torch.empty

    def refusing(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            return empty(1 << 50, dtype=torch.uint8, pin_memory=True)  # which no driver does
        return empty(*args, **kwargs)

    value = _value(40 * MIB)
    monkeypatch.setattr(torch, "empty", refusing)
    with pytest.warns(RuntimeWarning, match="page-lock"):
        snapshot = _take(tmp_path / "s", {"w": value.to(DEVICE), "columns": value.to(DEVICE).t()})
    places = _places(value)
    with pytest.warns(RuntimeWarning, match="page-lock"):
        snapshot.restore({"m": StateDict(w=places["contiguous"], columns=places["transposed"].t())})
    assert _same(places["contiguous"], value)
    assert _same(places["transposed"], value)


def test_damage_changes_nothing_on_the_device(tmp_path):
    value = _value(19 * MIB)
    snapshot = _take(tmp_path / "s", {"w": value})
    (file,) = (tmp_path / "s").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-9 * MIB] ^= 1
    file.write_bytes(data)
    for verify in (True, "all", "streaming"):
        mine = torch.zeros_like(value, device=DEVICE)
        with pytest.raises(SnapshotCorruptError):
            snapshot.restore({"m": StateDict(w=mine)}, verify=verify)
        assert verify == "streaming" or not mine.any()


async def test_a_cancelled_take_has_stopped_reading(tmp_path):
    value = torch.ones(9 * MIB, dtype=torch.uint8, device=DEVICE)
    torch.cuda._sleep(LONG)
    state: Any = {"m": StateDict(w=value)}
    task = asyncio.create_task(async_snapshots.Snapshot.take(tmp_path / "s", state, fsync=False))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(SnapshotNotFoundError):
        Snapshot(tmp_path / "s").get_manifest()
    value.zero_()
    await async_snapshots.Snapshot.take(tmp_path / "s", state, fsync=False)
