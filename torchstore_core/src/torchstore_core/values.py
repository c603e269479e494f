"""Public value types: small and frozen, encodable by msgspec, picklable, free of torch."""

from __future__ import annotations

import msgspec

__all__ = ["ObjectMeta", "ObjectRef", "Request", "StateDictMeta", "TensorMeta", "TensorSlice"]
__all__ += ["ValueMeta"]


class ObjectRef(msgspec.Struct, frozen=True, array_like=True):
    """A reference to exactly one version of one key.

    The versions of a key are increasing integers. A version number is never reused for the same
    key, not even after the key was deleted.

    >>> ObjectRef("policy/w", 3).version
    3
    """

    key: str
    version: int


class TensorSlice(msgspec.Struct, frozen=True, array_like=True):
    """The position and extent of one piece of a tensor, in elements.

    Args:
        offsets: where the piece starts in the global tensor, one offset per dimension.
        local_shape: the shape of the piece.
        global_shape: the shape of the whole tensor.
        mesh_shape: the shape of the device mesh that the piece belongs to; () if there is none.
        coordinates: the position in that mesh; () if there is none.

    >>> TensorSlice(offsets=(2, 0), local_shape=(2, 4), global_shape=(4, 4)).local_shape
    (2, 4)
    """

    offsets: tuple[int, ...]
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    mesh_shape: tuple[int, ...] = ()
    coordinates: tuple[int, ...] = ()


class Request(msgspec.Struct, frozen=True):
    """What a reader requests: a version of a key (None: the newest), whole or one slice of it."""

    key: str
    version: int | None = None
    tensor_slice: TensorSlice | None = None


class TensorMeta(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="t"):
    """Describes a dense tensor: its shape, and its dtype without ``torch.`` (``"bfloat16"``)."""

    dtype: str
    shape: tuple[int, ...]


class ObjectMeta(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="o"):
    """Describes any other Python value. ``codec`` is ``"msgpack"`` or ``"pickle"``."""

    codec: str


class StateDictMeta(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="s"):
    """Describes a state dict: ``entries`` tensors and objects that share one version.

    ``packed``: it was put as a ``TorchStoreStateDict``, so ``get`` returns one.
    """

    entries: int
    packed: bool = False


ValueMeta = TensorMeta | ObjectMeta | StateDictMeta
