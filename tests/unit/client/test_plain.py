"""Looking at many values at once: the compiled look sees what a look at each of them does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchstore_core.clients.values import plain
from torchstore_core.clients.values.plain import Looked, look, still_there
from torchstore_core.clients.values.tensors import _BY_NAME, LOWEST_ADDRESS, describe
from torchstore_core.machine import copying

needs_native = pytest.mark.skipif(
    not copying.has_native() or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="built without a compiler, or this torch does not let C code look at its tensors",
)


class Subclass(torch.Tensor):
    """Not what a plain tensor is, whatever it looks like."""


def resized_storage(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def of_inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


#: What a tensor of 6 x 8 floats may become, and whether it is plain then.
FORMS: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {
    "itself": (lambda t: t, True),
    "rows": (lambda t: t[2:4], True),
    "one element": (lambda t: t[3, 3], True),
    "no strides that count": (lambda t: t[1:2, 3:4].t(), True),
    "parameter": (torch.nn.Parameter, True),
    "with grad": (lambda t: t.clone().requires_grad_() * 2, True),
    "of inference mode": (of_inference, True),
    "bytes": (lambda t: t.view(torch.uint8), True),
    "float8": (lambda t: t.to(torch.float8_e5m2), True),
    "kept storage": (lambda t: resized_storage(t[:3], 96), True),
    "columns": (lambda t: t[:, 1:4], False),
    "transposed": (lambda t: t.t(), False),
    "expanded": (lambda t: t[:1].expand(6, 8), False),
    "empty": (lambda t: t[:0], False),
    "freed": (lambda t: resized_storage(t, 0), False),
    "shrunk": (lambda t: resized_storage(t, 191), False),
    "later rows, shrunk": (lambda t: resized_storage(t[3:], 96), False),
    "negative": (torch._neg_view, False),
    "imaginary": (lambda t: t.to(torch.complex64).conj().imag[:1, :1], False),
    "complex": (lambda t: t.to(torch.complex64), False),
    "meta": (lambda t: t.to("meta"), False),
    "sparse": (lambda t: t.to_sparse(), False),
    "quantized": (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), False),
    "said to be zeros": (lambda t: torch._efficientzerotensor((600, 700))[300:], False),
    "subclass": (lambda t: t.as_subclass(Subclass), False),
    "no tensor": (lambda t: t.tolist(), False),
    "nothing": (lambda t: None, False),
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def base() -> torch.Tensor:
    return torch.arange(48.0).view(6, 8)


def columns(looked: Looked) -> tuple[Any, ...]:
    memory = [None if s is None else s.data_ptr() for s in looked.storages]
    return looked.metas, looked.sizes, looked.addresses, memory


def one_by_one(values: list[Any]) -> Looked:
    """What is to be seen."""
    seen = [value if is_plain(value) else None for value in values]
    return Looked(
        [None if value is None else describe(value) for value in seen],
        [0 if value is None else value.nbytes for value in seen],
        [0 if value is None else value.data_ptr() for value in seen],
        [None if value is None else value.untyped_storage() for value in seen],
    )


def is_plain(value: Any) -> bool:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or not value.is_cpu:
        return False
    if value.layout is not torch.strided or value.is_complex() or value.is_quantized:
        return False
    if value.is_neg() or not value.is_contiguous() or not value.numel():
        return False
    begins = value.storage_offset() * value.itemsize
    there = value.untyped_storage().nbytes()
    return bool(begins + value.nbytes <= there and value.data_ptr() >= begins + LOWEST_ADDRESS)


@pytest.mark.parametrize("way", [pytest.param(plain._best(), marks=needs_native), one_by_one])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_plain(form: str, way: Callable[[list[Any]], Looked]) -> None:
    make, is_plain = FORMS[form]
    value = make(base())
    looked = way([value])
    assert (looked.metas[0] is not None) == is_plain
    if is_plain:
        meta = looked.metas[0]
        assert meta is not None
        assert (meta.dtype, meta.shape) == (str(value.dtype)[6:], tuple(value.shape))
        assert (looked.sizes, looked.addresses) == ([value.nbytes], [value.data_ptr()])


@needs_native
@given(st.lists(st.sampled_from(list(FORMS)), max_size=12))
def test_both_ways_see_the_same(forms: list[str]) -> None:
    values = [FORMS[form][0](base()) for form in forms]
    assert plain._best() is not plain._nothing
    assert columns(plain._best()(values)) == columns(one_by_one(values))


@needs_native
@pytest.mark.parametrize("form", FORMS)
def test_a_look_at_the_metadata_misses_at_most_what_a_storage_lost(form: str) -> None:
    value = FORMS[form][0](base())
    known, alone = plain._best()([value]), plain._best()([value], memory=False)
    assert alone.storages == []
    if "shrunk" in form or form == "said to be zeros":
        assert alone.metas == [describe(value)]
    else:
        assert alone[:3] == known[:3]


@needs_native
@pytest.mark.parametrize("form", [form for form, (_, is_plain) in FORMS.items() if is_plain])
def test_what_has_not_changed_is_still_there(form: str) -> None:
    values = [FORMS[form][0](base()) for _ in range(plain.MANY)]
    looked = look(values)
    storages = still_there(values, looked.addresses, looked.sizes)
    assert storages is not None
    assert columns(looked._replace(storages=storages)) == columns(looked)


#: What may become of a contiguous part of 6 x 8 floats after it was seen.
CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "freed": lambda t: t.untyped_storage().resize_(0),
    "shrunk": lambda t: t.untyped_storage().resize_(400),
    "smaller": lambda t: t.resize_(4, 4),
    "larger": lambda t: t.resize_(90, 90),
    "transposed": lambda t: t.t_(),
    "elsewhere": lambda t: t.set_(torch.zeros(12, 8)[5:11]),
    "other rows": lambda t: t.set_(t.untyped_storage(), 40, (6, 8)),
    "every other row": lambda t: t.set_(torch.zeros(12, 8)[::2]),
}


@needs_native
@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_not_there_any_more(change: str) -> None:
    values = [torch.arange(96.0).view(12, 8)[6:] for _ in range(plain.MANY)]
    looked = look(values, memory=False)
    assert still_there(values, looked.addresses, looked.sizes) is not None
    CHANGES[change](values[2])
    assert still_there(values, looked.addresses, looked.sizes) is None


@needs_native
@pytest.mark.parametrize("form", ["freed", "shrunk", "later rows, shrunk", "said to be zeros"])
def test_what_its_storage_does_not_hold_is_not_there(form: str) -> None:
    values = [FORMS[form][0](base()) for _ in range(plain.MANY)]
    places = [value.data_ptr() for value in values]
    assert still_there(values, places, [value.nbytes for value in values]) is None


@needs_native
def test_every_dtype_is_told_from_all_others() -> None:
    values = []
    for dtype in _BY_NAME.values():
        try:
            values.append(torch.empty(3, 5, dtype=dtype))
        except (RuntimeError, NotImplementedError):
            continue  # torch makes no tensor of it
    both = zip(plain._best()(values).metas, one_by_one(values).metas, strict=True)
    quick = [(a, b) for a, b in both if a is not None]  # of some DLPack says nothing
    assert len(quick) > 20
    assert all(a == b for a, b in quick)


def test_there_is_nothing_to_look_at_inside_of_transforms() -> None:
    def seen(x: torch.Tensor) -> torch.Tensor:
        assert look([x] * 9).metas == [None] * 9
        return x

    torch.func.vmap(seen)(torch.ones(2, 3))


@needs_native
def test_another_version_of_dlpack_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert plain._best() is plain._nothing


@needs_native
def test_a_failing_description_is_raised() -> None:
    from torchstore_core import _native

    def describe(value: object) -> str:
        raise KeyError("no name")

    tensor: Any = torch.Tensor
    how = (
        tensor.__dlpack_c_exchange_api__,
        (tensor, torch.nn.Parameter),
        (
            tensor.is_neg,
            tensor.storage_offset,
            tensor.untyped_storage,
            torch.UntypedStorage.nbytes,
        ),
    )
    with pytest.raises(KeyError, match="no name"):
        _native.look(*how, describe, {}, [torch.zeros(2)], True, 1)
    with pytest.raises(ValueError, match="PyCapsule"):
        _native.look(object(), *how[1:], describe, {}, [torch.zeros(2)], True, 1)
