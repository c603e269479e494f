"""Tensors as plain memory: what can be stored, where its bytes are, and how to rebuild it."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import msgspec
import torch

from torchstore_core import boxes
from torchstore_core.errors import LayoutMismatchError, UnsupportedValueError
from torchstore_core.machine import copying
from torchstore_core.values import TensorMeta, TensorSlice


def _dtypes() -> dict[str, torch.dtype]:
    """Every dtype of this torch by its canonical name (without aliases such as ``half``)."""
    found = (getattr(torch, name) for name in dir(torch))
    return {str(d).removeprefix("torch."): d for d in found if isinstance(d, torch.dtype)}


_BY_NAME = _dtypes()
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}
_BYTES_LIKE = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Their bytes are meaningless without scales, and in some of them several elements share a byte,
# whatever ``element_size()`` returns. In all other dtypes, even those of a few bits, every element
# has bytes of its own.
_QUANTIZED = frozenset(d for name, d in _BY_NAME.items() if name.startswith(("qint", "quint")))
# Dtypes that need a closer look.
_ODD = _QUANTIZED | {dtype for dtype in _NAMES if dtype.is_complex}
_dispatch: Any = torch._C
#: Returns the ``FakeTensorMode`` that this is inside of, in which tensors have no data; or None.
fake_mode: Callable[[], object] = partial(
    _dispatch._get_dispatch_mode, _dispatch._TorchDispatchModeKey.FAKE
)
_ONLY_TUPLES, _ONLY_INTS = frozenset((tuple,)), frozenset((int,))
_INT_END = 1 << 63
# More than any process can address; from 2**63 on, torch's own arithmetic overflows.
_TOO_MANY_BYTES = 1 << 57
# No memory of a process lies below this (torch's zero tensors have neither storage nor address).
LOWEST_ADDRESS = 4096
# torch copies so many elements in the calling thread, whatever they are (its GRAIN_SIZE).
_ALONE = 32_768
# torch.frombuffer certainly accepts these directly; other dtypes go through an integer view.
_BUFFER_DTYPES = frozenset(
    (
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.bool,
    )
)


Refusal = Callable[[str, str, str], UnsupportedValueError]


def _not_stored(key: str, what: str, hint: str) -> UnsupportedValueError:
    return UnsupportedValueError(f"{key!r}: {what} cannot be stored; {hint}", key=key)


def _no_destination(key: str, what: str, hint: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"{key!r}: {what} cannot be filled; give a dense tensor with memory of its own, on cpu or "
        "cuda; nothing was written",
        key=key,
    )


def storable(key: str, tensor: torch.Tensor, refused: Refusal = _not_stored) -> torch.Tensor:
    """A detached strided tensor with the same values, on CPU or CUDA; copied only if needed.
    Results of a collective that is still running are waited for.

    Args:
        refused: makes the error.

    Raises:
        UnsupportedValueError: explains what the tensor is and what to do instead.
    """
    kind = type(tensor)
    if (
        kind in _PLAIN
        and (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
        and tensor.dtype not in _ODD
        and not (tensor.is_nested or tensor.is_neg())
        and _has_storage(tensor)
    ):  # The usual case, in every small put: as few calls into torch as possible.
        if tensor.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                what = "a tensor on a device whose work is being captured (torch.cuda.graph)"
                raise refused(key, what, "put it outside of the capture, which would fail")
            return tensor.detach()  # the copy begins later, in another thread
        return tensor.detach() if tensor.requires_grad else tensor
    if kind not in _PLAIN and _is_wrapper(kind):
        if (result := result_of(tensor)) is not None:
            return storable(key, result, refused)
        if is_fake(tensor):
            raise refused(key, "a FakeTensor (it has no data)", "put what it stands for")
        hint = "put its .values() and .offsets()" if tensor.is_nested else "unwrap it"
        raise refused(key, f"a {kind.__module__}.{kind.__qualname__}", hint)
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        what = "a sparse tensor" if layout.startswith("sparse") else "an opaque tensor"
        raise refused(key, f"{what} ({layout})", "put its parts, or .to_dense()")
    if tensor.dtype in _QUANTIZED:
        what = f"a quantized tensor ({tensor.dtype})"
        raise refused(key, what, "put .int_repr() and its scales")
    device = tensor.device.type
    if torch.nn.parameter.is_lazy(tensor):
        raise refused(key, "an uninitialised (lazy) parameter", "run the module once first")
    if device == "meta":
        raise refused(key, "a meta tensor (it has no values)", "materialise it first")
    if tensor.is_nested:
        raise refused(key, "a nested tensor", "put its .values() and .offsets()")
    if not _has_storage(tensor):
        raise _without_storage(key, tensor, refused)
    tensor = tensor.detach()
    if device not in ("cpu", "cuda"):
        tensor = tensor.cpu()
    # Conjugate and negative views are only flags on the bytes of another tensor.
    return tensor.resolve_conj().resolve_neg()


def _is_wrapper(kind: type[torch.Tensor]) -> bool:
    """Subclasses that intercept dispatch (DTensor, FakeTensor, ...) have no bytes of their own."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor only stands for one, as those of a ``FakeTensorMode`` do. (To import their
    class takes long.)
    """
    return type(tensor).__name__ == "FakeTensor"


def result_of(tensor: Any) -> torch.Tensor | None:
    """The values of the result of a collective, waited for if it is still running; None for other
    tensors.
    """
    return tensor.wait() if hasattr(tensor, "wait") else None


def _has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie inside its storage, which may have been freed or shrunk:
    FSDP does that to parameters between uses. Not if they have more bytes than any memory.
    """
    try:
        there = tensor.untyped_storage().nbytes()
    except NotImplementedError:  # inside torch.func transforms
        return False
    offset = tensor.storage_offset()
    if tensor.is_contiguous():
        nbytes = tensor.nbytes
        return nbytes + (offset and offset * tensor.itemsize) <= there or nbytes == 0
    last, count = offset, 1
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if not extent:
            return True
        last += (extent - 1) * stride
        count *= extent
    return (last + 1) * tensor.itemsize <= there and count * tensor.itemsize < _TOO_MANY_BYTES


def check_storage(key: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedValueError if the storage of a tensor does not hold all its elements."""
    if not _has_storage(tensor):
        raise _without_storage(key, tensor)


def _without_storage(
    key: str, tensor: torch.Tensor, refused: Refusal = _not_stored
) -> UnsupportedValueError:
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        what = "a tensor inside of a transform of torch.func (vmap, grad, ...)"
        return refused(key, what, "use what the transform takes or returns")
    if math.prod(tensor.shape) * tensor.itemsize >= _TOO_MANY_BYTES:
        what = f"a tensor of {list(tensor.shape)}, expanded to more bytes than any memory has,"
        return refused(key, what, "put it before it is expanded")
    return UnsupportedValueError(
        f"{key!r}: the storage of this tensor ({tensor.dtype} {list(tensor.shape)}) was freed or "
        "shrunk, and does not hold its elements; materialise it first (of FSDP: put inside of "
        "summon_full_params, or unshard() the module)",
        key=key,
    )


def address_of(key: str, tensor: torch.Tensor) -> int:
    """The address of the first element, after checking that the storage holds all elements.

    Memory to be read or written must get its address from here: other tasks may have run, and
    changed the tensor, since :func:`storable` checked it.

    Raises:
        UnsupportedValueError: the storage does not hold all elements.
    """
    address = tensor.data_ptr()
    if not _has_storage(tensor) or (address < LOWEST_ADDRESS and tensor.numel()):
        raise _without_storage(key, tensor)
    return address


def describe(tensor: torch.Tensor) -> TensorMeta:
    """The dtype name and shape of a tensor."""
    return TensorMeta(_NAMES[tensor.dtype], tuple(tensor.shape))


def dtype_of(meta: TensorMeta, key: str) -> torch.dtype:
    """The dtype of a stored tensor. Raises UnsupportedValueError if this torch does not have it, or
    if it cannot be stored.
    """
    dtype = _BY_NAME.get(meta.dtype)
    if dtype in _QUANTIZED:
        raise UnsupportedValueError(
            f"{key!r} has dtype {meta.dtype!r}, which is not stored: its bytes say nothing without "
            "their scales",
            key=key,
        )
    if dtype is None:
        raise UnsupportedValueError(
            f"{key!r} has dtype {meta.dtype!r}, which torch {torch.__version__} does not know",
            key=key,
        )
    return dtype


def byte_like(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory viewed as a dtype of the same width: copies of it keep every bit of any
    dtype, and it always has a copy kernel.
    """
    return tensor.view(_BYTES_LIKE[tensor.element_size()])


def dtype_name(dtype: torch.dtype) -> str:
    """The canonical name of a dtype, as in TensorMeta."""
    return _NAMES[dtype]


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Raw memory, which the caller must keep alive, as a :func:`byte_like` tensor with at least one
    element.
    """
    numel = 1
    for extent in shape:
        numel *= extent
    raw = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    like = _BYTES_LIKE[dtype.itemsize]
    return torch.frombuffer(raw, dtype=like, count=numel).view(shape)


def from_buffer(
    buffer: Any,
    offset: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    stride: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """A tensor on a writable buffer, from byte ``offset`` on. It keeps the buffer alive.

    Args:
        stride: None: that of contiguous tensors.
    """
    numel = math.prod(shape)
    if numel == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")  # whatever the default device is
    if dtype in _BUFFER_DTYPES:
        flat = torch.frombuffer(buffer, dtype=dtype, count=numel, offset=offset)
    else:
        like = _BYTES_LIKE[dtype.itemsize]
        flat = torch.frombuffer(buffer, dtype=like, count=numel, offset=offset).view(dtype)
    if stride is not None:
        return flat.as_strided(shape, stride)
    return flat if len(shape) == 1 else flat.view(shape)


def were_written(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd, which did not see the writes to these tensors."""
    with torch.inference_mode():  # where tensors of inference mode, which have no version, may be
        torch.autograd.graph.increment_version(tensors)


def compact(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor itself if its elements fill the memory from the first to the last one, otherwise a
    copy of which that is true. None if :func:`from_buffer` could not restore it from that memory,
    or if it has more elements than its storage, because they are repeated.
    """
    if not (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype not in _QUANTIZED
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not (tensor.__dict__ or tensor._is_zerotensor())
        and _has_storage(tensor)
        and tensor.nbytes <= tensor.untyped_storage().nbytes()
    ):
        return None
    return tensor if tensor.is_contiguous() else tensor.clone()


def check_cast(key: str, of: torch.dtype, to: torch.dtype) -> None:
    """Raise UnsupportedValueError if torch cannot convert one dtype to the other."""
    if not _casts(of, to):
        raise UnsupportedValueError(
            f"{key!r}: torch {torch.__version__} cannot cast {of} to {to}", key=key
        )


@lru_cache(maxsize=256)
def _casts(of: torch.dtype, to: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=of, device="cpu").to(to)
    except NotImplementedError:
        return False
    return True


def _instead_of(destination: object) -> str:
    """What to give instead of what is no tensor, if that can be told."""
    if isinstance(destination, TensorSlice):
        return "; give tensor_slice_spec="
    if hasattr(destination, "__array_interface__"):
        return "; torch.from_numpy() of it is one in its memory"
    return "; get_batch gets several keys" if isinstance(destination, str) else ""


def check_destination(
    key: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, cast: bool
) -> torch.Tensor:
    """The destination, detached, if a value of ``shape`` and ``dtype`` can be written to it; with
    ``cast``, its dtype may be a different floating-point one.

    Raises:
        LayoutMismatchError: wrong shape or dtype, or memory that overlaps itself.
        UnsupportedValueError: a tensor that cannot be written to (meta, sparse, DTensor, ...), or a
            cast that torch does not support.
    """
    if not isinstance(tensor, torch.Tensor):
        raise LayoutMismatchError(
            f"{key!r}: the destination is a {type(tensor).__qualname__}, not a tensor"
            f"{_instead_of(tensor)}",
            key=key,
        )
    if type(tensor) not in _PLAIN and torch.nn.parameter.is_lazy(tensor):  # it has no shape
        raise _no_destination(key, "an uninitialised (lazy) parameter", "")
    if tensor.is_nested:
        raise _no_destination(key, "a nested tensor", "")
    fits = tensor.dtype == dtype or (
        cast and tensor.dtype.is_floating_point and dtype.is_floating_point
    )
    if tuple(tensor.shape) != shape or not fits:
        raise LayoutMismatchError(
            f"{key!r} is stored as {dtype} {list(shape)}, the destination is {tensor.dtype} "
            f"{list(tensor.shape)}; nothing was written",
            key=key,
            details={"stored": [str(dtype), *shape], "wanted": [str(tensor.dtype), *tensor.shape]},
        )
    if tensor.dtype is not dtype:
        check_cast(key, dtype, tensor.dtype)
    if tensor.is_conj() or tensor.is_neg():
        raise _no_destination(key, "a conjugate or negative view", "")
    target = storable(key, tensor, _no_destination)
    if target.data_ptr() < LOWEST_ADDRESS and target.numel():
        raise _without_storage(key, tensor)
    if target.device != tensor.device:
        raise _no_destination(key, f"a tensor on {tensor.device}", "")
    if _may_overlap(target):
        raise LayoutMismatchError(
            f"{key!r}: the destination's elements share memory (an expanded or unfolded tensor, "
            "say); give it memory of its own",
            key=key,
        )
    return target


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory: some stride is no longer than the span of the smaller
    ones.

    Views of a tensor without overlap are never reported, except for ``as_strided`` views with
    interleaved rows.
    """
    if tensor.is_contiguous():
        return False
    span = 0
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1:
            if stride <= span:
                return True
            span += stride * (extent - 1)
    return False


def plain_slice(key: str, part: TensorSlice) -> TensorSlice:
    """The same slice as tuples of int, in the form that messages carry.

    Raises:
        LayoutMismatchError: it contains something that is not an integer, or one that is too large.
    """
    given = msgspec.structs.astuple(part)
    if _ONLY_TUPLES.issuperset(map(type, given)):  # the usual case, very often
        flat = [0, *[n for numbers in given for n in numbers]]
        if (
            _ONLY_INTS.issuperset(map(type, flat))
            and -_INT_END <= min(flat) <= max(flat) < _INT_END
        ):
            return part
    plain = []
    for numbers in given:
        try:
            converted = tuple([operator.index(n) for n in numbers])
        except TypeError as error:
            raise LayoutMismatchError(
                f"{key!r}: a TensorSlice has tuples of int, not {numbers!r}", key=key
            ) from error
        if not all(-_INT_END <= n < _INT_END for n in converted):
            raise LayoutMismatchError(f"{key!r}: no tensor is as large as {numbers!r}", key=key)
        plain.append(converted)
    return TensorSlice(*plain)


@lru_cache(maxsize=4096)  # layers of a model repeat, and so do training steps
def is_inside(offsets: tuple[int, ...], extents: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a box is a part of a tensor of ``shape``, and has as many dimensions.

    >>> is_inside((2,), (2,), (4,)), is_inside((3,), (2,), (4,)), is_inside((), (), (4,))
    (True, False, False)
    """
    return len(offsets) == len(extents) == len(shape) and all(
        o >= 0 and n >= 0 and o + n <= whole
        for o, n, whole in zip(offsets, extents, shape, strict=True)
    )


def slice_box(key: str, wanted: TensorSlice, shape: tuple[int, ...]) -> boxes.Box:
    """The box that a slice describes in a stored tensor of ``shape``.

    Raises:
        LayoutMismatchError: the slice has another global shape, or lies outside it.
    """
    offset, local = tuple(wanted.offsets), tuple(wanted.local_shape)
    if tuple(wanted.global_shape) != shape or not is_inside(offset, local, shape):
        raise LayoutMismatchError(
            f"{key!r} has shape {list(shape)}; the slice asks for {list(local)} at {list(offset)} "
            f"of {list(wanted.global_shape)}",
            key=key,
        )
    return boxes.Box(offset, local)


def split_rows(
    a: torch.Tensor, b: torch.Tensor, chunk: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Split two tensors of one shape in the same way, into pieces of about ``chunk`` bytes."""
    nbytes = a.numel() * a.element_size()
    if nbytes <= chunk or a.dim() == 0:
        return [(a, b)]
    dim = max(range(a.dim()), key=lambda d: a.shape[d])
    parts = min(-(-nbytes // chunk), a.shape[dim])
    return list(zip(a.tensor_split(parts, dim), b.tensor_split(parts, dim), strict=True))


def rows_of(a: torch.Tensor, b: torch.Tensor) -> list[copying.Grid] | None:
    """How to copy ``b`` into ``a``, which has the same shape, row by row. None if the rows are too
    short, the dtypes differ, or one of them is on a device.
    """
    if a.dtype is not b.dtype or not (a.is_cpu and b.is_cpu):
        return None
    return copying.grids(
        tuple(a.shape), a.element_size(), a.data_ptr(), a.stride(), b.data_ptr(), b.stride()
    )


def elements_of(a: torch.Tensor, b: torch.Tensor) -> copying.Task | None:
    """A task that copies ``b`` into ``a``, which has the same shape, element by element. None if
    torch should do it: the dtypes differ, or one of them is on a device.
    """
    if a.dtype is not b.dtype or not (a.is_cpu and b.is_cpu):
        return None
    return copying.strided(
        tuple(a.shape), a.element_size(), a.data_ptr(), a.stride(), b.data_ptr(), b.stride()
    )


def _copy_here(a: torch.Tensor, b: torch.Tensor) -> None:
    """Let torch copy ``b`` into ``a``, which has the same shape, ``_ALONE`` elements at a time: it
    does that in the calling thread. For more it wakes threads of its own, which takes milliseconds
    where processors are busy, and for ever in a forked child whose parent has used them.
    """
    if a.numel() <= _ALONE:
        a.copy_(b)
        return
    dim = max(range(a.dim()), key=lambda d: a.shape[d])
    rows = max(1, _ALONE * a.shape[dim] // a.numel())
    for to, of in zip(a.split(rows, dim), b.split(rows, dim), strict=True):
        _copy_here(to, of)


def strided_copy(a: torch.Tensor, b: torch.Tensor, *, stream: bool) -> copying.Task:
    """A task that copies ``b`` into ``a``, which has the same shape; bit for bit if the dtypes are
    the same. The caller must have checked both with :func:`address_of` immediately before.
    """
    if (rows := rows_of(a, b)) is not None:
        return partial(copying.copy_grids, rows, stream=stream)
    if (by_elements := elements_of(a, b)) is not None:
        return by_elements

    def by_torch() -> None:
        with torch.inference_mode():  # the only place where inference tensors may be written to
            is_large = min(a.nbytes, b.nbytes) > copying.DIRECT_MAX
            if (is_large and copying.on_copy_thread()) or not (a.is_cpu and b.is_cpu):
                a.copy_(b)
            else:
                _copy_here(a, b)

    return by_torch
