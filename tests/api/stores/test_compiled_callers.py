"""Blocking calls inside of compiled functions: they are not compiled, and move the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.processes import run_script

import torchstore_core.blocking as ts


@pytest.fixture
def store():
    client = ts.initialize(capacity=64 << 20, prefault=0, store_name="compiled")
    yield client
    ts.shutdown("compiled")


def _calls(client: ts.Client) -> dict[str, tuple[Callable[[torch.Tensor], Any], str]]:
    """Calls with a tensor that is computed in the graph, each with where it puts that."""

    def pending(x: torch.Tensor) -> None:
        put = client.put_state_dict({"w": x}, "pending", blocking=False)
        assert isinstance(put, ts.PendingPut)
        put.result()

    return {
        "function": (lambda x: ts.put("f", x, store_name="compiled"), "f"),
        "method": (lambda x: client.put("m", x), "m"),
        "batch": (lambda x: client.put_batch({"b": x}), "b"),
        "state dict": (lambda x: client.put_state_dict({"w": x}, "sd"), "sd/w"),
        "pending": (pending, "pending/w"),
    }


@pytest.mark.parametrize("name", _calls(None))  # type: ignore[arg-type]
def test_a_put_in_a_compiled_function_stores_what_it_is_given(store, name):
    call, key = _calls(store)[name]
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        call(y)
        return y + 1

    for value in range(3):
        x = torch.full((4,), float(value))
        assert torch.equal(step(x), x * 2 + 1)
        assert torch.equal(store.get(key), x * 2)


def test_a_get_in_a_compiled_function_is_made_each_time(store):
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        mine = torch.empty(4)
        store.get("k", mine)
        return x * 2 + store.get("k") + mine

    for value in range(3):
        store.put("k", torch.full((4,), float(value)))
        assert torch.equal(step(torch.ones(4)), torch.full((4,), 2.0 + 2 * value))


def test_the_graph_breaks_there(store):
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        store.put("k", x * 2)
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        step(torch.ones(4))


@pytest.mark.thorough
async def test_dynamo_is_not_imported_for_that():
    script = "import sys, torchstore_core.blocking; print('torch._dynamo' in sys.modules)"
    assert (await run_script(script, fresh=True)).split() == ["False"]
