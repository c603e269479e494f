"""Tensors that are made in the memory of the store: put without a copy, and nobody else's after."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
from tests.processes import run_script
from tests.support import at_rest, until, used

import torchstore_core as ts

NUMEL = 1 << 20  # of float32: 4 MB


async def unfinished() -> int:
    return sum(volume.unfinished_bytes for volume in (await ts.status()).volumes)


async def made(value: float, numel: int = NUMEL) -> torch.Tensor:
    tensor = await ts.empty(numel)
    assert await unfinished() >= 4 * numel, "it is not in the memory of the store"
    return tensor.fill_(value)


async def put_object(tensor: torch.Tensor) -> Any:
    return await ts.put_object(tensor)


async def put(tensor: torch.Tensor) -> Any:
    return await ts.put("t", tensor)


@pytest.mark.parametrize("how", [put, put_object])
async def test_it_is_put_where_it_is(shared, how):
    await ts.put("t", torch.full((NUMEL,), 3.0))
    tensor = await made(3)
    before = await used()
    ref = await how(tensor)
    assert await used() <= before, "it was copied"
    assert not await unfinished()
    got = await ts.get(ref)
    assert (got == 3).all()
    tensor.fill_(4)
    assert (got == 3).all(), "what was put has changed"
    assert (await ts.get(ref) == 3).all(), "what was put has changed"
    assert (tensor == 4).all()
    out = await run_script(
        f"""
        client = await ts.connect({await ts.address()!r})
        print((await client.get("t") == 3).all().item())
        """
    )
    assert out.split()[-1] == "True"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.complex64, torch.bool])
async def test_of_every_shape_and_dtype(shared, dtype):
    tensor = await ts.empty((3, 7, 1 << 16), dtype=dtype)
    assert (tensor.shape, tensor.dtype) == ((3, 7, 1 << 16), dtype)
    assert tensor.is_contiguous()
    expected = torch.arange(tensor.numel()).view(tensor.shape).to(dtype)
    tensor.copy_(expected)
    await ts.put("t", tensor)
    assert torch.equal(await ts.get("t"), expected)
    assert torch.equal(tensor, expected)


async def test_what_is_never_put_is_free_when_the_tensor_is(shared):
    before = await used()
    tensor = await made(1)
    view = tensor[5:]
    del tensor
    assert await unfinished()
    del view
    gc.collect()
    await at_rest(shared)
    assert await used() == before


async def test_its_memory_stays_while_it_lives(shared):
    """Deleted, overwritten, and with all other memory used again and again."""
    tensor = await made(5)
    await ts.put("t", tensor)
    await ts.put("t", torch.zeros(NUMEL))
    await ts.delete("t")
    for fill in range(8):
        await ts.put("other", torch.full((32 << 18,), float(fill)))
    assert (tensor == 5).all()
    del tensor
    gc.collect()
    await ts.delete("other")
    await until(lambda: _is_free())


async def _is_free() -> bool:
    return not await used()


async def test_a_second_put_is_a_copy(shared):
    tensor = await made(1)
    await ts.put("t", tensor)
    tensor.fill_(2)
    await ts.put("u", tensor)
    assert (await ts.get("u") == 2).all()
    assert (await ts.get("t") == 1).all()


@pytest.mark.parametrize(
    "put_it",
    [
        lambda t: ts.put("t", t[1:]),
        lambda t: ts.put("t", t.view(2, -1)),
        lambda t: ts.put("t", t.view(torch.int32)),
        lambda t: ts.put("t", t.view(2, -1).t()),
        lambda t: ts.put("v", t, version=7),
        lambda t: ts.put_batch({"t": t, "u": t}),
        lambda t: ts.put_state_dict({"t": t}, "model"),
        lambda t: ts.put("t", {"nested": t}),
    ],
)
async def test_put_in_another_way_it_is_copied_and_can_be_changed(shared, put_it):
    tensor = await made(1)
    await put_it(tensor)
    assert await unfinished(), "it can still be put as it is"
    tensor.fill_(2)
    ref = await ts.put("whole", tensor)
    assert (await ts.get(ref) == 2).all()
    for key in {"t", "u", "v", "model/t"} & {*await ts.keys()}:
        got = await ts.get(key)
        got = got["nested"] if isinstance(got, dict) else got
        assert (got != 2).all(), key


async def test_small_ones_are_ordinary_tensors(shared):
    tensor = (await ts.empty((10, 10))).fill_(1)
    assert not await unfinished()
    assert tensor.dtype is torch.get_default_dtype()
    await ts.put("t", tensor)
    assert torch.equal(await ts.get("t"), torch.ones(10, 10))
    assert (await ts.empty(0)).shape == (0,)


async def test_what_is_no_tensor_is_refused(shared):
    for shape, dtype in (((-1,), None), ("a", None), ((1 << 20,), "float32"), (3.5, None)):
        with pytest.raises(ts.UnsupportedValueError, match="empty"):
            await ts.empty(shape, dtype=dtype)
    with pytest.raises(ts.StoreFullError):
        await ts.empty(1 << 40, dtype=torch.uint8)
    assert not await unfinished()


async def test_many_at_once(shared):
    tensors = await asyncio.gather(*[made(at, 1 << 18) for at in range(20)])
    refs = await asyncio.gather(*[ts.put(f"t{at}", t) for at, t in enumerate(tensors)])
    for at, ref in enumerate(refs):
        assert (await ts.get(ref) == at).all()


async def test_numpy_and_autograd_see_an_ordinary_tensor(shared):
    tensor = await made(1)
    np.add(tensor.numpy(), 1, out=tensor.numpy())
    parameter = torch.nn.Parameter(tensor)
    (parameter * 3).sum().backward()
    ref = await ts.put("t", parameter)
    assert (await ts.get(ref) == 2).all()
    with torch.no_grad():
        parameter.fill_(9)
    assert (await ts.get(ref) == 2).all()


async def test_without_await(shared):
    def work() -> torch.Tensor:
        tensor = ts.blocking.empty((2, NUMEL)).fill_(6)
        return ts.blocking.get(ts.blocking.put("t", tensor))

    assert (await asyncio.to_thread(work) == 6).all()


async def test_a_forked_child_has_a_copy(shared):
    """What it writes is not in what the parent puts, and it keeps what was there."""
    tensor, sealed = await made(1), await made(2)
    await ts.put("sealed", sealed)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    first, second = tensor.numpy(), sealed.numpy()  # torch's own threads do not survive a fork

    def child() -> None:
        theirs.recv()
        theirs.send(bool((first == 1).all() and (second == 2).all()))
        first[:], second[:] = 8, 8
        theirs.recv()
        theirs.send(bool((first == 8).all() and (second == 8).all()))

    process = context.Process(target=child)
    process.start()
    try:
        tensor[0] = 0
        tensor[0] = 1
        ours.send("go")
        assert await asyncio.to_thread(ours.recv), "the child saw something else"
        ref = await ts.put("t", tensor)
        assert (await ts.get(ref) == 1).all(), "the child has written to it"
        tensor.fill_(3)
        await ts.delete("t")
        await ts.put("other", torch.zeros(8 << 20))
        ours.send("go")
        assert await asyncio.to_thread(ours.recv), "the child's tensor has changed"
    finally:
        process.join(30)
    assert (await ts.get("sealed") == 2).all()
