"""Gets without a copy: writable tensors that are nobody else's, on memory nobody takes away."""

from __future__ import annotations

import _thread
import asyncio
import copy
import gc
import io
import os
import signal
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.processes import run_script
from tests.support import leased, nothing_leased, until

import torchstore_core as ts

NUMEL = 1 << 20  # of int64: 8 MB


async def test_a_large_get_is_an_ordinary_writable_tensor(shared):
    await ts.put("t", torch.arange(NUMEL).view(1024, 1024))
    tensor = await ts.get("t")
    assert type(tensor) is torch.Tensor
    assert tensor.is_contiguous()
    assert not tensor.requires_grad
    assert await leased() > 0, "it was copied"
    tensor += 1
    tensor[0].zero_()
    tensor.numpy()[1] = 7
    torch.relu_(tensor)
    assert tensor[2, 0].item() == 2049
    assert (tensor[0] == 0).all()
    assert (tensor[1] == 7).all()
    parameter = torch.nn.Parameter(tensor.view(-1)[:9].float())
    (parameter**2).sum().backward()
    assert parameter.grad.shape == (9,)
    buffer = io.BytesIO()
    torch.save(tensor[:2], buffer)
    assert torch.equal(copy.deepcopy(tensor), tensor)


async def test_writing_changes_nothing_for_anyone_else(shared):
    """The server, gets of before and after, and other processes keep the stored value."""
    original = torch.arange(NUMEL)
    await ts.put("t", original)
    before = await ts.get("t")
    mine = await ts.get("t")
    mine.fill_(-1)
    after = await ts.get("t")
    copied = await ts.get("t", torch.zeros_like(original))
    for other in (before, after, copied):
        assert torch.equal(other, original)
    out = await run_script(
        f"""
        tensor = await ts.get("t")
        assert torch.equal(tensor, torch.arange({NUMEL}))
        tensor.fill_(-2)
        assert torch.equal(await ts.get("t"), torch.arange({NUMEL}))
        print(int(tensor[0]))
        """
    )
    assert out == "-2\n"
    assert torch.equal(await ts.get("t"), original)
    assert (mine == -1).all()


async def test_values_of_one_batch_do_not_share_memory(shared):
    """Neighbours may share a mapping; a write to one must not show in another."""
    await ts.put_batch({f"t{i}": torch.full((50_000 + i,), i) for i in range(20)})
    got = await ts.get_batch([f"t{i}" for i in range(20)])
    twice = await ts.get_batch([f"t{i}" for i in range(20)])
    for i in range(0, 20, 2):
        got[f"t{i}"].fill_(-1)
    for i in range(20):
        assert (got[f"t{i}"] == (i if i % 2 else -1)).all()
        assert (twice[f"t{i}"] == i).all()


async def test_leased_bytes_rise_and_fall(shared):
    nbytes = NUMEL * 8
    await ts.put_batch({"a": torch.zeros(NUMEL).long(), "b": torch.zeros(NUMEL).long()})
    assert await leased() == 0
    first = await ts.get("a")
    assert await leased() == nbytes
    again = await ts.get("a")
    assert await leased() == nbytes, "the same memory, leased twice"
    other = await ts.get("b")
    assert await leased() == 2 * nbytes
    (session,) = [one for one in (await ts.status()).sessions if one.pid == os.getpid()]
    assert (session.leases, session.leased_bytes) == (3, 2 * nbytes), "what it has, not how often"
    assert (await ts.stat("a")).leases == 2
    del first
    await until(lambda: _leases_of("a", 1))
    assert await leased() == 2 * nbytes
    del again

    async def only_b() -> bool:
        return await leased() == nbytes

    await until(only_b)
    assert int(other[0]) == 0
    del other
    await until(nothing_leased)
    assert (await ts.stat("b")).leases == 0


async def _leases_of(key: str, count: int) -> bool:
    return (await ts.stat(key)).leases == count


@pytest.mark.parametrize("keep", ["view", "numpy", "storage", "slice", "cycle", "thread"])
async def test_whatever_holds_the_memory_holds_the_lease(shared, keep):
    await ts.put("t", torch.arange(NUMEL))
    tensor = await ts.get("t")
    holder: object
    match keep:
        case "view":
            holder = tensor.view(1024, -1)[5:6]
        case "numpy":
            holder = tensor.numpy()[3:]
        case "storage":
            holder = tensor.untyped_storage()
        case "slice":
            holder = torch.chunk(tensor, 4)[3]
        case "cycle":
            knot: list[object] = [tensor]
            knot.append(knot)
            holder = knot
        case "thread":
            go = threading.Event()
            holder = threading.Thread(target=lambda tensor: go.wait(30), args=(tensor,))
            holder.start()
    del tensor
    if keep == "cycle":
        del knot
    await ts.put("t", 0)
    assert await leased() == NUMEL * 8
    if isinstance(holder, threading.Thread):
        go.set()
        holder.join()
    del holder
    if keep == "cycle":
        gc.collect()
    await until(nothing_leased)


async def test_tensors_may_die_in_any_thread(shared):
    await ts.put("t", torch.arange(NUMEL))
    tensors = [await ts.get("t") for _ in range(40)]

    def drop() -> None:
        while tensors:
            tensors.pop()

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    await until(nothing_leased)


async def test_small_and_in_place_gets_lease_nothing(shared):
    await ts.put_batch({"small": torch.ones(100), "large": torch.ones(NUMEL)})
    small = await ts.get("small")
    filled = await ts.get("large", torch.zeros(NUMEL))
    assert await leased() == 0
    assert small.all()
    assert filled.all()


# ---- inside of objects ----------------------------------------------------------------------


class Rollout:
    def __init__(self) -> None:
        self.observations = np.arange(NUMEL)
        self.logits = torch.arange(NUMEL)


def _objects() -> dict[str, object]:
    made = Rollout()
    return {
        "array": made.observations,
        "plain": {"step": 7, "observations": [made.observations]},
        "tensors": [made.logits, made.logits.to(torch.bfloat16)],
        "own class": made,
        "by value": {"logits": made.logits, "policy": lambda x: x + 1},
    }


def _memory_of(value: object) -> np.ndarray | torch.Tensor:
    """The first large array or tensor of one of these."""
    match value:
        case Rollout():
            return value.logits
        case dict():
            return _memory_of(value.get("observations", value.get("logits")))
        case list():
            return _memory_of(value[0])
    assert isinstance(value, np.ndarray | torch.Tensor)
    return value


@pytest.mark.parametrize("name", _objects())
async def test_large_arrays_and_tensors_in_objects_are_not_copied_either(shared, name):
    value = _objects()[name]
    await ts.put("o", value)
    mine, other = await ts.get("o"), await ts.get("o")
    assert await leased() >= NUMEL * 8, "they were copied"
    assert type(mine) is type(value)
    part = _memory_of(mine)
    assert (part == _memory_of(value)).all()
    part[1:] = -1
    for one in (other, await ts.get("o")):
        assert (_memory_of(one) == _memory_of(value)).all()
    await ts.delete("o")
    assert int(part[0]) == 0
    assert int(part[-1]) == -1
    assert (_memory_of(other) == _memory_of(value)).all()
    del mine, other, one
    assert await leased() >= NUMEL * 8, "a part of it is still there"
    del part
    await until(nothing_leased)


async def test_objects_and_tensors_of_one_get(shared):
    """Of a batch, with destinations, and of a state dict; of two names of one array, too."""
    array = np.arange(NUMEL)
    values = {
        "w": torch.arange(NUMEL),
        "o": {"a": array, "again": array.reshape(2, -1)},
        "small": np.arange(3),
        "n": 7,
    }
    into = torch.zeros(NUMEL).long()
    await ts.put_batch(values)
    await ts.put_state_dict(values, "s")
    for got in (
        await ts.get_batch({"w": into, "o": None, "small": None, "n": None}),
        await ts.get_batch([*values]),
        await ts.get_state_dict("s"),
    ):
        assert torch.equal(got["w"], values["w"])
        assert np.array_equal(got["o"]["a"], array)
        assert np.array_equal(got["o"]["again"], array.reshape(2, -1))
        assert got["small"].tolist() == [0, 1, 2]
        assert got["n"] == 7
        assert await leased() > 0
    assert got["w"] is not into
    del got
    await until(nothing_leased)


async def test_what_cannot_be_rebuilt_keeps_no_lease(shared):
    await ts.put("o", [torch.arange(NUMEL), Unbuildable()])
    with pytest.raises(ts.UnsupportedValueError, match="'o' cannot be rebuilt"):
        await ts.get("o")
    with pytest.raises(ts.UnsafeObjectError):
        await ts.get("o", allow_pickle=False)
    await until(nothing_leased)


class Unbuildable:
    def __setstate__(self, state: object) -> None:
        raise ValueError("of another release")

    def __getstate__(self) -> object:
        return 1


class CtrlC(weakref.ref):
    """What its callback, which is in C, takes for the number of a signal."""

    def __index__(self) -> int:
        return int(signal.SIGINT)


def _is_mapped(address: int) -> bool:
    """Whether a part of a segment is there, in this process alone."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, rights, *_ = line.split()
        first, end = (int(number, 16) for number in where.split("-"))
        if first <= address < end:
            return rights.endswith("p") and "memfd:" in line
    return False


@pytest.mark.local_only
async def test_ctrl_c_as_a_tensor_dies_is_not_lost_nor_is_the_memory(shared):
    """It was raised in the finalizer, from where nobody gets it: the lease stayed for good."""
    await ts.put("t", torch.arange(NUMEL))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        dying = [await ts.get("t"), threading.Event()]  # the last one dies first
        ctrl_c, address = CtrlC(dying[1], _thread.interrupt_main), dying[0].data_ptr()
        assert _is_mapped(address)
        with pytest.raises(KeyboardInterrupt):
            dying.clear()
        assert ctrl_c() is None
    finally:
        signal.signal(signal.SIGINT, before)
    await until(nothing_leased)
    assert not _is_mapped(address)
