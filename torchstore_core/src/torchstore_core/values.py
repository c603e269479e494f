"""Public value types: small and frozen, encodable by msgspec, picklable, free of torch."""

from __future__ import annotations

import msgspec

__all__ = ["ObjectMeta", "ObjectRef", "Request", "StateDictMeta", "TensorMeta", "TensorSlice"]
__all__ += ["ValueMeta"]


class ObjectRef(msgspec.Struct, frozen=True, array_like=True, eq=False, gc=False):
    """A reference to exactly one version of one key.

    The versions of a key are increasing integers. A number is never used again for the same key,
    not even after the key was deleted, with two exceptions, and a ref that the store has returned
    tells them apart: a store that starts again without its memory starts again with version 1, and
    a put with ``rewind=True`` goes back to a lower version. A get by a ref whose value is gone
    raises ``VersionGoneError``, whatever has the same number now.

    Args:
        key: the key, or that of an entry of a state dict.
        version: the number of the version.
        incarnation: that of the store (see ``StatusReport``); 0 if it is not known, as in a ref
            that was made by hand. Such a ref is only a key and a number.
        timeline: which of the histories of the key the version belongs to. Each rewind begins a
            new one; 0 is the first.

    Two refs are equal if they name the same version. Where one of them has no incarnation, only
    key and version are compared.

    >>> ref = ObjectRef("policy/w", 3)
    >>> ref.version
    3
    >>> ref == ObjectRef("policy/w", 3, incarnation=71)
    True
    >>> ref != ObjectRef("policy/w", 3)
    False
    >>> ObjectRef("policy/w", 3, incarnation=44) == ObjectRef("policy/w", 3, incarnation=71)
    False
    """

    key: str
    version: int
    incarnation: int = 0
    timeline: int = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ObjectRef):
            return NotImplemented
        if self.version != other.version or self.key != other.key:
            return False
        if not (self.incarnation and other.incarnation):
            return True
        return (self.incarnation, self.timeline) == (other.incarnation, other.timeline)

    def __ne__(self, other: object) -> bool:
        return not self == other  # that of a Struct would compare identities

    def __hash__(self) -> int:
        return hash((self.key, self.version))

    def __repr__(self) -> str:
        """Key and version: the same text for every run of a program."""
        return f"ObjectRef(key={self.key!r}, version={self.version!r})"


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
    """Describes any other Python value. ``codec`` is ``"msgpack"`` or ``"pickle"``, followed by
    ``"+buffers"`` if large arrays or tensors in it have memory of their own, which can be mapped.
    """

    codec: str


class StateDictMeta(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="s"):
    """Describes a state dict: ``entries`` tensors and objects that share one version.

    ``packed``: it was put as a ``TorchStoreStateDict``, so ``get`` returns one.
    """

    entries: int
    packed: bool = False


ValueMeta = TensorMeta | ObjectMeta | StateDictMeta
