"""Every dtype of this torch, by every way that bytes travel: exact, or refused by name.

An element of some dtypes has less than the bytes that ``element_size()`` says; a link that was told
of one address and that many bytes would write behind the end.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from tests.integration.test_freed_storage import client, server  # noqa: F401 - fixtures
from tests.support import bits

import torchstore_core as ts
from torchstore_core.clients.packed import header as packed_header
from torchstore_core.clients.transfer.targets import resolve
from torchstore_core.clients.values.codec import decode_object, encode_object
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m

_ALL = (getattr(torch, name) for name in dir(torch))
DTYPES = sorted({d for d in _ALL if isinstance(d, torch.dtype)}, key=str)
QUANTIZED = [torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4]
ROWS, ROW_BYTES = 6, 192


def any_bits(dtype: torch.dtype) -> torch.Tensor:
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (ROWS, ROW_BYTES), dtype=torch.uint8).view(dtype)


def filled(dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """As a reader makes room, of zeros."""
    room = torch.empty(like.shape, dtype=dtype)
    room.untyped_storage().fill_(0)
    return room


def quantized(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """With and without the flag: views of other dtypes do not have it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.empty((ROWS, 64), dtype=dtype)
    assert made.is_quantized
    view = torch.zeros((ROWS, 64 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    assert not view.is_quantized
    return {"real": made, "view": view}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
async def test_each_is_exact_or_refused_by_name(client: ts.Client) -> None:  # noqa: F811
    refused = []
    for dtype in DTYPES:
        tensor = any_bits(dtype)
        try:
            await client.put("k", tensor)
        except ts.UnsupportedValueError:
            refused.append(dtype)
            continue
        assert torch.empty(tensor.shape, dtype=dtype).untyped_storage().nbytes() == tensor.nbytes
        await client.put("columns", tensor.t())
        await client.put_state_dict({"w": tensor, "n": {"w": tensor[1:, ::2]}}, "model")
        packed = ts.TorchStoreStateDict.from_state_dict({"w": tensor, "c": tensor.t()})
        await client.put("packed", ts.TorchStoreStateDict.from_bytes(packed.to_bytes()))
        part = ts.TensorSlice((1, 1), (3, 5), tuple(tensor.shape))
        results = {
            "new": (await client.get("k"), tensor),
            "columns": (await client.get("columns"), tensor.t()),
            "in place": (await client.get("k", filled(dtype, tensor)), tensor),
            "in columns": (await client.get("k", filled(dtype, tensor.t()).t()), tensor),
            "slice": (await client.get("k", tensor_slice_spec=part), tensor[1:4, 1:6]),
            "entry": ((await client.get_state_dict("model"))["n"]["w"], tensor[1:, ::2]),
            "packed": ((await client.get("packed")).to_state_dict()["c"], tensor.t()),
        }
        for how, (got, expected) in results.items():
            assert (got.dtype, got.shape) == (dtype, expected.shape), (dtype, how)
            assert torch.equal(bits(got), bits(expected)), (dtype, how)
    assert set(refused) == set(QUANTIZED)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
async def test_quantized_ones_are_refused_however_they_come(
    client: ts.Client,  # noqa: F811
    dtype: torch.dtype,
) -> None:
    words = rf"'k'.*quantized.*{dtype}.*put \.int_repr\(\)"
    for tensor in quantized(dtype).values():
        shape = tuple(tensor.shape)
        shard = ts.TensorShard(tensor, ts.TensorSlice((0, 0), shape, shape))
        for value in (tensor, torch.nn.Parameter(tensor, requires_grad=False), shard):
            with pytest.raises(ts.UnsupportedValueError, match=words):
                await client.put("k", value)
        with pytest.raises(ts.UnsupportedValueError, match=words):
            await client.put_state_dict({"k": tensor}, "model")
        with pytest.raises(ts.UnsupportedValueError, match=words):
            ts.TorchStoreStateDict.from_state_dict({"k": tensor})
        with pytest.raises(ts.UnsupportedValueError, match=words):
            await client.put("k", [tensor])
        await client.put("k", torch.zeros(tensor.shape, dtype=torch.uint8))
        with pytest.raises((ts.LayoutMismatchError, ts.UnsupportedValueError)):
            await client.get("k", tensor)
        await client.delete("k")
    assert await client.keys() == []


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_nor_are_they_read_if_another_release_has_stored_them(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    entry = m.Entry(1, TensorMeta(name, (64,)), 64 * dtype.itemsize, bytes(64 * dtype.itemsize))
    with pytest.raises(ts.UnsupportedValueError, match=rf"'k' has dtype '{name}'.*not stored"):
        resolve(0, 0, "k", entry)
    part = packed_header.TensorReference(0, 64 * dtype.itemsize, name, (64,))
    header = packed_header.Header((packed_header.HeaderEntry("w", b"", (part,)),), 1, "")
    with pytest.raises(ts.UnsupportedValueError, match=rf"'w' has dtype '{name}'.*not stored"):
        packed_header.decode(packed_header.encode(header), 64 * dtype.itemsize)


async def test_every_cast_is_that_of_torch_or_refused_by_name(
    client: ts.Client,  # noqa: F811
) -> None:
    floating = [d for d in DTYPES if d.is_floating_point]
    for of in floating:
        for to in floating:
            value = any_bits(of)
            expected: Any = None
            with contextlib.suppress(NotImplementedError):
                expected = value.to(to)
            into = filled(to, value)
            await client.put_state_dict({"w": value}, "stored")
            if expected is None:
                words = rf"{of}.*{to}"
                with pytest.raises(ts.UnsupportedValueError, match=words):
                    await client.put_state_dict({"w": value}, "cast", transfer_dtype=to)
                with pytest.raises(ts.LayoutMismatchError, match=words):
                    await client.get_state_dict("stored", {"w": into}, cast=True)
                continue
            await client.put_state_dict({"w": value}, "cast", transfer_dtype=to)
            assert torch.equal(bits(await client.get("cast/w")), bits(expected)), (of, to)
            await client.get_state_dict("stored", {"w": into}, cast=True)
            assert torch.equal(bits(into), bits(expected)), (of, to)


@pytest.mark.filterwarnings("ignore")
def test_inside_of_an_object_each_comes_back_or_is_refused_by_name() -> None:
    """torch pickles some that it cannot unpickle."""
    for dtype in DTYPES:
        value = (1, torch.empty(3, dtype=dtype))
        try:
            meta, data = encode_object("k", value, allow_pickle=True)
        except ts.UnsupportedValueError as error:
            said = error.message
        else:
            back = decode_object("k", meta, data, allow_pickle=True)[1]
            said = str(back.dtype)
        assert str(dtype) in said
