"""The transport in a real store, as its only transport, with tensors of every kind."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from torchstore_core.errors import PluginError, TransportError
from torchstore_core.plugins.registry import Registry
from torchstore_core.testing import leftovers
from torchstore_core.testing.transports.base import TransportKit, check, fail, run

if TYPE_CHECKING:
    import torch

    import torchstore_core as ts

__all__ = ["StoreTests"]

_GROUP = "torchstore.transports"
_STRATEGIES = "torchstore.strategies"
_STORE: dict[str, Any] = {"capacity": 256 << 20, "prefault": 0}
_TIMEOUT_S = 150.0
_ASKED = 1 << 10
_LARGE = 3_000_001
_DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"),
    *("float64", "complex64", "complex128", "uint16", "float8_e4m3fn", "float8_e5m2"),
)
_SHAPES = ((), (0,), (1,), (7,), (3, 0, 2), (4, 5, 6), (1000, 33), (70_001,))
_numbers = itertools.count()


class StoreTests(TransportKit):
    """Tests with a store that has no other transport, not even for small values."""

    def test_a_store_moves_tensors_of_every_kind(self) -> None:
        """Dtypes × shapes × strides arrive bit by bit, in new tensors and in the caller's."""
        import torch

        async def main() -> None:
            async with self._store() as client:
                values = {name: tensor for name, tensor in _tensors() if self._fits(tensor)}
                await client.put_batch(values)
                new = await client.get_batch(list(values))
                into = {name: _like(tensor) for name, tensor in values.items()}
                await client.get_batch(dict(into))
                for name, tensor in values.items():
                    for how, got in (("new", new[name]), ("the caller's", into[name])):
                        same = got.shape == tensor.shape and got.dtype is tensor.dtype
                        check(same, f"{name} came as {got.dtype} {tuple(got.shape)}")
                        if not torch.equal(_bits(got), _bits(tensor)):
                            fail(f"{name} came back changed ({how} tensor)")

        run(main())

    def test_a_store_moves_parts_of_a_large_tensor(self) -> None:
        """A large tensor, its columns and its transpose arrive, also after an overwrite."""
        import torch

        if self.spec().max_bytes is not None:
            pytest.skip("it has a limit (max_bytes)")

        async def main() -> None:
            async with self._store() as client:
                for seed in (1, 2):
                    whole = _random((1733, 1741), torch.uint8, seed)
                    await client.put("whole", whole)
                    await client.put("columns", whole[:, 3::5])
                    target = torch.zeros(1741, 1733, dtype=torch.uint8).t()
                    await client.get("whole", target)
                    check(torch.equal(target, whole), "a transposed destination has other values")
                    got = await client.get("columns")
                    check(torch.equal(got, whole[:, 3::5]), "columns came back changed")
                    spread = torch.full((1733, 2 * 348), 9, dtype=torch.uint8)[:, ::2]
                    await client.get("columns", spread[:, : got.shape[1]])
                    check(torch.equal(spread[:, : got.shape[1]], got), "columns have other values")

        run(main())

    def test_a_store_refuses_what_is_over_max_bytes(self) -> None:
        """A batch of ``max_bytes`` is moved; one byte more raises, without another transport."""
        import torch

        limit = self.spec().max_bytes
        if limit is None:
            pytest.skip("it has no limit (max_bytes is None)")

        async def main() -> None:
            async with self._store() as client:
                largest = _random((limit,), torch.uint8, 1)
                await client.put("largest", largest)
                got = await client.get("largest")
                check(torch.equal(got, largest), "a value of max_bytes came back changed")
                with contextlib.suppress(TransportError):
                    await client.put("more", _random((limit + 1,), torch.uint8, 2))
                    fail(f"{limit + 1} bytes were put over a transport of at most {limit}")
                got = await client.get("largest")
                check(torch.equal(got, largest), "a refused put changed another value")

        run(main())

    # ---- inside ---------------------------------------------------------------------------

    def _fits(self, tensor: torch.Tensor) -> bool:
        """Return whether the transport takes this value; a batch's values are sent one by one."""
        return self.spec().max_bytes is None or tensor.nbytes <= 1 << 14

    @contextlib.asynccontextmanager
    async def _store(self) -> AsyncIterator[ts.Client]:
        """Yield a client of a store whose clients have no other transport."""
        import torchstore_core as ts

        if not self.stores:
            pytest.skip("no store that any process can start has it (stores is False)")
        registry = Registry()
        if self.name not in registry.installed(_GROUP):
            pytest.skip(f"no transport {self.name!r} is installed")
        if "strategy" not in self.store_arguments and not registry.installed(_STRATEGIES):
            pytest.skip("a store needs a strategy, and none is installed: torchstore-strategies")
        try:
            registry.transport(self.name)
        except PluginError as error:
            fail(f"the transport does not load: {error}")
        others = [name for name in registry.installed(_GROUP) if name != self.name]
        name = f"kit-{os.getpid()}-{next(_numbers)}"
        arguments = {**_STORE, **self.store_arguments}
        with leftovers.private_runtime_directory():
            client = await ts.initialize(
                store_name=name, block=others, timeout=_TIMEOUT_S, **arguments
            )
            try:
                limit = self.spec().max_bytes
                for entry in await client.explain(_ASKED if limit is None else min(limit, _ASKED)):
                    if entry["chosen"] != self.name:
                        why = entry["refusals"].get(self.name)
                        if why is None:
                            fail(f"a store uses {entry['chosen']!r}, though nothing refuses it")
                        pytest.skip(f"a store does not use it: {why}")
                yield client
            finally:
                await ts.shutdown(name)


def _tensors() -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    for name in _DTYPES:
        dtype: torch.dtype | None = getattr(torch, name, None)
        if dtype is None:
            continue
        for at, shape in enumerate(_SHAPES):
            yield f"{name} {shape}", _random(shape, dtype, at)
        square = _random((60, 44), dtype, 99)
        yield f"{name} transposed", square.t()
        yield f"{name} every third column", square[:, 1::3]
        yield f"{name} every second row", square[::2]
        yield f"{name} columns of rows", square[5:50, 7:31]
        yield f"{name} expanded", square[:1].expand(9, 44)
        yield f"{name} permuted", _random((6, 7, 8), dtype, 98).permute(2, 0, 1)
    yield "large", _random((_LARGE,), torch.uint8, 97)


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of random bits, or, for bool, of random values."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    count = 1
    for size in shape:
        count *= size
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool().view(shape)
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a destination of the same shape and dtype, with other strides where possible."""
    import torch

    if tensor.dim() < 2:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), dtype=tensor.dtype)
    return wide[..., : 2 * tensor.shape[-1] : 2]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the values in row-major order, which are equal if all bits are equal."""
    import torch

    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    whole = plain.view(integers[plain.element_size()]).contiguous()
    return whole.reshape(-1).view(torch.uint8)
