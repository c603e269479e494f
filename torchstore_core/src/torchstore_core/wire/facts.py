"""What all messages share: their base, and what they tell of volumes, sessions and keys.

:mod:`.messages` names all of it, too.
"""

from __future__ import annotations

from typing import Any

import msgspec

from torchstore_core.machine.topology import Topology
from torchstore_core.values import StateDictMeta, TensorMeta, ValueMeta

__all__ = [
    "Described",
    "Listed",
    "Message",
    "Pending",
    "SessionStatus",
    "VolumeInfo",
    "VolumeStatus",
]


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages."""


class VolumeInfo(msgspec.Struct, frozen=True, array_like=True):
    """One volume and what its transports offer (name to opaque bytes).

    ``lost``: why its memory is gone for good; empty while it lives.
    """

    id: str
    index: int
    pid: int
    topology: Topology
    capacity_bytes: int
    offers: dict[str, bytes]
    lost: str = ""


class Pending(msgspec.Struct, frozen=True):
    """A version that is not whole yet.

    Args:
        participants: how many make it; 0: as many as it takes to cover the tensor.
        committed, writing: who of them is done, who is at it.
        missing: boxes that nobody has put, as (name, offset, shape), by the name of an entry, or
            the key of a plain tensor; the first hundred. Of a state dict only `stat`, and the error
            of who reads it, say them.
        key: whose version it is.
        nbytes: bytes of those that are done.
        missing_participants: who has not begun, as far as their names are known; the first hundred.
    """

    version: int
    participants: int
    committed: list[str]
    writing: list[str]
    missing: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    key: str = ""
    nbytes: int = 0
    missing_participants: list[str] = []

    def plain(self) -> dict[str, Any]:
        """It as the details of errors have it: dicts and lists."""
        boxes = [[name, list(offset), list(shape)] for name, offset, shape in self.missing]
        return {**msgspec.structs.asdict(self), "missing": boxes}


class Described:
    """What the facts of a key say of its value: ``dtype`` and ``shape`` are of a tensor, ``codec``
    is of an object, ``entries`` (how many) of a state dict; each else None.
    """

    __slots__ = ()
    meta: ValueMeta
    segment: int

    @property
    def kind(self) -> str:
        """``tensor``, ``state dict`` or ``object``."""
        if isinstance(self.meta, TensorMeta):
            return "tensor"
        return "state dict" if isinstance(self.meta, StateDictMeta) else "object"

    @property
    def dtype(self) -> str | None:
        """As in ``torch.<dtype>``."""
        return getattr(self.meta, "dtype", None)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """In elements."""
        return getattr(self.meta, "shape", None)

    @property
    def codec(self) -> str | None:
        """``msgpack`` or ``pickle``."""
        return getattr(self.meta, "codec", None)

    @property
    def entries(self) -> int | None:
        """Tensors and objects."""
        return getattr(self.meta, "entries", None)

    @property
    def inline(self) -> bool:
        """Whether it came in the message, and lies in no segment."""
        return self.segment == -1


class Listed(Described, msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One key of a Listing; the fields mean what they mean in :class:`Found`."""

    key: str
    version: int
    meta: ValueMeta
    nbytes: int
    volume: str
    segment: int
    leases: int
    created: float
    creator_pid: int
    lost: str = ""


class VolumeStatus(msgspec.Struct, frozen=True):
    """Memory of one volume, bytes. ``warm``: pool memory that is already backed by pages.

    ``lost``: why the volume is gone for good; empty while it lives. Nothing of it is free then.
    """

    id: str
    pid: int
    host_id: str
    hostname: str
    capacity_bytes: int
    used_bytes: int
    leased_bytes: int
    unfinished_bytes: int
    free_bytes: int
    warm_bytes: int
    transports: list[str]
    lost: str = ""


class SessionStatus(msgspec.Struct, frozen=True):
    """One client process. ``role``: see ``ClientFacts``; "orphan": its relay is gone, and what is
    left is what the process may still read (``server.orphans``).
    """

    pid: int
    hostname: str
    rank: int | None
    lanes: int
    leases: int
    leased_bytes: int
    unfinished_puts: int
    unfinished_bytes: int
    age_s: float
    role: str = ""
