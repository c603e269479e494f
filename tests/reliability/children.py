"""What the processes of these tests do. Every function gets its end of a pipe first."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

import torchstore_core as ts


class Failed(NamedTuple):
    """Sent instead of a message when a child fails."""

    text: str


def run(function: Callable[..., Any], pipe: Connection, *args: Any) -> None:
    """Run a (sync or async) function of this module in a fresh process."""
    try:
        made = function(pipe, *args)
        if inspect.iscoroutine(made):
            asyncio.run(made)
    except BaseException:
        pipe.send(Failed(f"{function.__name__} failed:\n{traceback.format_exc()}"))
        raise


async def told(pipe: Connection, timeout: float = 60.0) -> Any:
    """Wait for the test's next message without blocking the event loop."""

    def receive() -> Any:
        if not pipe.poll(timeout):
            raise TimeoutError("the test said nothing")
        return pipe.recv()

    return await asyncio.to_thread(receive)


# ---- torn reads ---------------------------------------------------------------------------


def uniform(tensor: torch.Tensor) -> int:
    """The one number a tensor is full of."""
    low, high = (int(x) for x in tensor.aminmax())
    assert low == high, f"torn: it holds {low} and {high}"
    return low


async def overwrite(pipe: Connection, address: str, elements: int, seconds: float) -> None:
    """Put one key as fast as possible; version n is full of n."""
    torch.set_num_threads(1)
    await ts.connect(address)
    tensor = torch.empty(elements, dtype=torch.int32)
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    number = 0
    while loop.time() < end:
        number += 1
        ref = await ts.put("w", tensor.fill_(number))
        assert ref.version == number
    pipe.send(number)


async def read_in_place(pipe: Connection, address: str, elements: int, seconds: float) -> None:
    """Get into one tensor; report how many reads, and how many different versions."""
    torch.set_num_threads(1)
    await ts.connect(address)
    mine = torch.zeros(elements, dtype=torch.int32)
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    last = reads = versions = 0
    await ts.wait("w")
    while loop.time() < end:
        assert await ts.get("w", mine) is mine
        number = uniform(mine)
        assert number >= last, f"went back from {last} to {number}"
        reads += 1
        versions += number > last
        last = number
    pipe.send((reads, versions))


async def read_zero_copy(pipe: Connection, address: str, elements: int, seconds: float) -> None:
    """Get newest versions and exact ones; what is held stays as it was."""
    torch.set_num_threads(1)
    await ts.connect(address)
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    held: torch.Tensor | None = None
    last = reads = versions = 0
    while loop.time() < end:
        if reads % 2:
            tensor = await ts.get("w")
            number = uniform(tensor)
        else:
            ref = (await ts.wait("w"))["w"]
            try:
                tensor = await ts.get(ref)
            except ts.VersionGoneError:
                continue
            number = uniform(tensor)
            assert number == ref.version
        assert number >= last, f"went back from {last} to {number}"
        if held is not None:
            assert uniform(held) == last, "a tensor changed while it was held"
        held = tensor
        reads += 1
        versions += number > last
        last = number
    pipe.send((reads, versions))
