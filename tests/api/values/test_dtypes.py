"""Every dtype, in every form a tensor can have, comes back bit for bit: small and large."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.support import bits

import torchstore_core as ts

pytestmark = [
    pytest.mark.usefixtures("module_store"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

_ALL = (getattr(torch, name) for name in dir(torch))
DTYPES = sorted({d for d in _ALL if isinstance(d, torch.dtype)}, key=str)
PLAIN = [d for d in DTYPES if not str(d).startswith(("torch.qint", "torch.quint"))]
QUANTIZED = [d for d in DTYPES if d not in PLAIN]
COMPLEX = [d for d in PLAIN if d.is_complex]

#: Name of a size to base shape, rows × bytes per row: every form of the large one is > 1 MB, also a
#: sixth of what has six times the rows.
SIZES = {"small": (6, 192), "large": (352, 3072)}
LARGE = 1 << 20


def _any_bits(dtype: torch.dtype, rows: int, row_bytes: int) -> torch.Tensor:
    """A matrix of random bits: NaNs of all kinds, infinities, negative zeros, subnormals."""
    return _any_bytes(2 if dtype is torch.bool else 256, rows, row_bytes).view(dtype)


@functools.cache
def _any_bytes(high: int, rows: int, row_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(0, high, (rows, row_bytes), dtype=torch.uint8, generator=generator)


def _forms(dtype: torch.dtype, rows: int, row_bytes: int) -> dict[str, torch.Tensor]:
    base = _any_bits(dtype, rows, row_bytes)
    forms = {
        "contiguous": base,
        "transposed": base.t(),
        "strided": _any_bits(dtype, 6 * rows, row_bytes)[1::2, ::3],
        "offset": base[1:],
        "expanded": base[:1].expand(base.shape[0], -1),
        "inner expanded": base[:, :1].expand(-1, base.shape[1]),
        "three dims permuted": base.view(2, base.shape[0] // 2, -1).permute(2, 0, 1),
        "parameter": torch.nn.Parameter(base, requires_grad=False),
    }
    if base.dtype.is_floating_point or base.dtype.is_complex:
        forms["requires grad"] = base.clone().requires_grad_()
        forms["not a leaf"] = base.clone().requires_grad_().view(-1)
        forms["trained parameter"] = torch.nn.Parameter(base)
    return forms


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
@pytest.mark.parametrize("size", SIZES)
async def test_every_form_of_every_dtype(dtype, size):
    for form, tensor in _forms(dtype, *SIZES[size]).items():
        nbytes = tensor.numel() * tensor.element_size()
        assert (nbytes > LARGE) == (size == "large"), form
        expected = bits(tensor).clone()
        await ts.put(form, tensor)
        # Small values ride in messages, large ones lie in a segment: both ways are tested.
        assert ((await ts.stat(form)).segment < 0) == (size == "small"), form
        got = await ts.get(form)
        assert type(got) is torch.Tensor, form
        assert (got.dtype, got.shape) == (dtype, tensor.shape), form
        assert not got.requires_grad, form
        assert got.is_contiguous(), form
        assert torch.equal(bits(got), expected), form
        await ts.delete(form)


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
async def test_no_dims_and_no_elements(dtype):
    base = _any_bits(dtype, *SIZES["small"])
    tensors = {
        "0-dim view": base[2, 3],
        "0-dim": torch.zeros((), dtype=torch.uint8).expand(dtype.itemsize).clone().view(dtype)[0],
        "one element": base[:1, :1],
        "empty vector": torch.empty(0, dtype=dtype),
        "empty matrix": base[:0],
        "empty in the middle": torch.empty((3, 0, 5), dtype=dtype),
        "empty and strided": base.t()[:, :0],
    }
    refs = await ts.put_batch(tensors)
    assert list(refs) == list(tensors)
    for values in (await ts.get_batch(list(tensors)), {k: await ts.get(k) for k in tensors}):
        for key, tensor in tensors.items():
            assert (values[key].dtype, values[key].shape) == (dtype, tensor.shape), key
            assert torch.equal(bits(values[key]), bits(tensor)), key
    await ts.delete_batch(tensors)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
@pytest.mark.parametrize("rows", [3, 300_000])
async def test_conjugate_and_negative_views_are_stored_as_they_read(dtype, rows):
    parts = torch.randn(rows, 2, 2, dtype=dtype.to_real())
    base = torch.view_as_complex(parts)
    conjugated, imaginary = base.conj(), base.conj().imag
    assert conjugated.is_conj()
    assert imaginary.is_neg()
    views = {"conj": conjugated, "conj transposed": conjugated.t(), "neg": imaginary}
    await ts.put_batch(views)
    got = await ts.get_batch(list(views))

    flipped = torch.stack([parts[..., 0], -parts[..., 1]], dim=-1)  # written out by hand
    for key, tensor in got.items():
        assert not tensor.is_conj(), key
        assert not tensor.is_neg(), key
    assert torch.equal(torch.view_as_real(got["conj"]), flipped)
    assert torch.equal(torch.view_as_real(got["conj transposed"]), flipped.transpose(0, 1))
    assert torch.equal(got["neg"], flipped[..., 1])
    await ts.delete_batch(views)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
async def test_quantized_tensors_are_refused_by_name(dtype):
    tensor = torch.quantize_per_tensor(torch.ones(4), 1.0, 0, dtype)
    with pytest.raises(ts.UnsupportedValueError, match=rf"'q'.*quantized.*{dtype}"):
        await ts.put("q", tensor)
    with pytest.raises(ts.UnsupportedValueError, match="quantized"):
        await ts.put_batch({"fine": torch.ones(4), "q": tensor})
    assert not await ts.exists("q")
    assert not await ts.exists("fine")


def test_all_dtypes_of_this_torch_are_here():
    """The lists above are not empty by accident."""
    assert len(PLAIN) + len(QUANTIZED) == len(DTYPES)
    assert len(QUANTIZED) == 5
    assert len(COMPLEX) == 3
    expected = {torch.bool, torch.bfloat16, torch.uint16, torch.float8_e4m3fn, torch.complex32}
    assert expected <= set(PLAIN)
    assert len(PLAIN) >= 40
