"""Public value types: small, frozen, torch-free, msgspec-encodable and picklable."""

from __future__ import annotations

import msgspec

__all__ = ["ObjectMeta", "ObjectRef", "Request", "StateDictMeta", "TensorMeta", "TensorSlice"]
__all__ += ["ValueMeta"]


class ObjectRef(msgspec.Struct, frozen=True, array_like=True):
    """Names exactly one version of one key.

    Versions of a key are integers that only grow, and a version number is never used twice for
    the same key, deletion included.

    >>> ObjectRef("policy/w", 3).version
    3
    """

    key: str
    version: int


class TensorSlice(msgspec.Struct, frozen=True, array_like=True):
    """One piece of a tensor: where it starts and how large it is, in elements.

    Args:
        offsets: start of the piece in the global tensor, one per dimension.
        local_shape: shape of the piece.
        global_shape: shape of the whole tensor.
        mesh_shape: shape of the device mesh the piece comes from; () if there is none.
        coordinates: position in that mesh; () if there is none.

    >>> TensorSlice(offsets=(2, 0), local_shape=(2, 4), global_shape=(4, 4)).local_shape
    (2, 4)
    """

    offsets: tuple[int, ...]
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    mesh_shape: tuple[int, ...] = ()
    coordinates: tuple[int, ...] = ()


class Request(msgspec.Struct, frozen=True):
    """What a reader wants: a key, at a version (None: the newest), whole or one slice of it."""

    key: str
    version: int | None = None
    tensor_slice: TensorSlice | None = None


class TensorMeta(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """A dense tensor as data: dtype name without ``torch.`` (``"bfloat16"``) and shape."""

    dtype: str
    shape: tuple[int, ...]


class ObjectMeta(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """Any other Python value as encoded bytes. ``codec``: ``"msgpack"`` or ``"pickle"``."""

    codec: str


class StateDictMeta(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """A state dict: a manifest of ``entries`` tensors and objects, one version together.

    ``packed``: it was put as a ``TorchStoreStateDict``, and is got as one.
    """

    entries: int
    packed: bool = False


ValueMeta = TensorMeta | ObjectMeta | StateDictMeta
