"""What a store knows about its keys: the result of ``stat``, and the items of lists of keys.

The messages of the wire protocol carry these values. Torch-free.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.reports.summaries import (
    count_text,
    kind_text,
    pending_text,
    pretty,
    shape_text,
)
from torchstore_core.reports.units import human_bytes, human_duration
from torchstore_core.values import StateDictMeta, TensorMeta, TensorSlice, ValueMeta


class Pending(msgspec.Struct, frozen=True):
    """An unfinished version.

    Args:
        participants: how many participants it needs; 0: as many as it takes to cover the tensor.
        committed: the participants that have committed.
        writing: the participants that are still putting their parts.
        missing: the first hundred boxes that are not committed, as (name of the entry, offset,
            shape); for a plain tensor, the name is its key. For a state dict, they are given only
            by ``stat`` and by the error that its readers get.
        key: the key that this is a version of.
        nbytes: the bytes that are committed.
        missing_participants: the first hundred participants that have not begun, as far as their
            names are known.
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
        """Return the fields as dicts and lists, for the details of an error."""
        boxes = [[name, list(offset), list(shape)] for name, offset, shape in self.missing]
        return {**msgspec.structs.asdict(self), "missing": boxes}


class Described:
    """The kind of a key's value. Tensors have ``dtype`` and ``shape``, objects have ``codec``, and
    state dicts have ``entries``; the properties that do not apply are None.
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
        """The name of the dtype, as in ``torch.<dtype>``."""
        return getattr(self.meta, "dtype", None)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of a tensor."""
        return getattr(self.meta, "shape", None)

    @property
    def codec(self) -> str | None:
        """How an object is encoded: ``msgpack`` or ``pickle``."""
        return getattr(self.meta, "codec", None)

    @property
    def entries(self) -> int | None:
        """How many tensors and objects a state dict has."""
        return getattr(self.meta, "entries", None)

    @property
    def inline(self) -> bool:
        """Whether the controller keeps the value itself, because it was sent inside a message."""
        return self.segment == -1


class Listed(Described, msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One key of a list. Its fields mean the same as in :class:`Found`."""

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


class Found(Described, msgspec.Struct, frozen=True):
    """What a store knows about one key; the result of ``stat``. ``str()`` of it is a short summary.

    Args:
        segment: -1 for an inline value, -2 for a value in several places (shards, a state dict).
        offset: the offset in the segment; -1 if there is none.
        created: when the version was committed, in seconds since the epoch.
        parts: how many shards the value has, or how many entries.
        versions: the versions that can be read, ascending.
        pending: the unfinished versions.
        lost: why some or all of the value can no longer be read; empty if all of it can.
        copies: the number of volumes that hold each byte, at least.
        spilled_bytes: how many bytes of it are only on disk; a get reads them back.
        shards: where the shards of a tensor lie in it, sorted by their offsets; empty if it is one
            piece. A get with one of them as its ``tensor_slice_spec`` reads only that shard.
    """

    key: str
    version: int
    meta: ValueMeta
    nbytes: int
    volume: str
    segment: int
    offset: int
    leases: int
    created: float
    creator: ClientFacts
    parts: int = 1
    versions: list[int] = []
    pending: list[Pending] = []
    lost: str = ""
    copies: int = 1
    spilled_bytes: int = 0
    shards: list[TensorSlice] = []

    def __str__(self) -> str:
        """Describe the value, where it is stored, and which process put it."""
        shape = "" if self.shape is None else f" {shape_text(self.shape)}"
        creator = self.creator
        rank = "" if creator.rank is None else f", rank {creator.rank}"
        age = human_duration(time.time() - self.created)
        lines = [
            f"{self.key!r} version {self.version}: {kind_text(self)}{shape}, "
            f"{human_bytes(self.nbytes)}",
            f"  in {'the controller' if self.inline else self.volume or 'no volume'}, "
            f"{count_text(self.leases, 'lease')}",
            f"  put {age} ago by pid {creator.pid} on {creator.hostname}{rank}",
        ]
        if len(self.versions) > 1:
            lines.append(f"  kept, too: version {', '.join(map(str, self.versions[:-1]))}")
        if self.spilled_bytes:
            lines.append(f"  {human_bytes(self.spilled_bytes)} of it on disk only")
        if self.lost:
            lines.append(f"  lost: {self.lost}")
        lines += [f"  version {p.version}: {pending_text(p)}" for p in self.pending]
        return "\n".join(lines)

    _repr_pretty_ = pretty
