"""What ``torchstore snapshot`` answers, as data. ``--json`` writes exactly these fields.

Names that end in ``_bytes`` (and ``nbytes``) are exact numbers of bytes; ``created`` is in seconds
since 1970.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "Collected",
    "Converted",
    "Damage",
    "Difference",
    "DifferenceReport",
    "ListReport",
    "ObjectLine",
    "ObjectReport",
    "PieceLine",
    "SnapshotLine",
    "SnapshotReport",
    "Verified",
]


class SnapshotLine(msgspec.Struct, frozen=True):
    """One snapshot in a folder of several. ``error`` is empty if its manifest can be read. They are
    in the order of ``sequence``, in which they were committed; 0 if that is unknown.
    """

    name: str
    take: str
    created: float
    world_size: int
    objects: int
    nbytes: int
    error: str = ""
    sequence: int = 0


class ObjectLine(msgspec.Struct, frozen=True):
    """One object of a snapshot.

    Args:
        path: ``key/name``, or ``rank/key/name`` if only that rank has it.
        kind: ``tensor``, or the codec of a value that is none: ``msgpack`` or ``pickle``.
        dtype, shape: of a tensor; empty, and None, of anything else.
        pieces: how many pieces it is stored in.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...] | None
    pieces: int
    nbytes: int


class ListReport(msgspec.Struct, frozen=True):
    """``torchstore snapshot ls``: the objects of a snapshot, or the snapshots in a folder."""

    path: str
    objects: list[ObjectLine]
    snapshots: list[SnapshotLine]


class SnapshotReport(msgspec.Struct, frozen=True):
    """``torchstore snapshot show PATH``.

    Args:
        nbytes: of all objects.
        file_bytes: of the data files that the snapshot wrote itself.
        referred_bytes: of the files of other snapshots that it refers to.
        leavings: files in the folder that takes wrote and this snapshot does not contain.
        weight_maps: the files by which model libraries find the tensors of a key.
    """

    path: str
    take: str
    created: float
    world_size: int
    keys: dict[str, int]
    objects: int
    nbytes: int
    files: int
    file_bytes: int
    referred: list[str]
    referred_bytes: int
    store: bool
    leavings: list[str]
    weight_maps: list[str] = []


class PieceLine(msgspec.Struct, frozen=True):
    """A piece of an object: where it is in the tensor, and where in which file."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    nbytes: int
    digest: str


class ObjectReport(msgspec.Struct, frozen=True):
    """``torchstore snapshot show PATH OBJECT``."""

    snapshot: str
    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...] | None
    nbytes: int
    pieces: list[PieceLine]


class Damage(msgspec.Struct, frozen=True):
    """A damaged object, and what is wrong with it. ``path`` is the name of the file if only its
    header is damaged, or if it is a map of weights.
    """

    path: str
    file: str
    message: str


class Verified(msgspec.Struct, frozen=True):
    """``torchstore snapshot verify``."""

    path: str
    ok: bool
    nbytes: int
    seconds: float
    damaged: list[Damage]


class Difference(msgspec.Struct, frozen=True):
    """An object that differs. ``change``: ``added``, ``removed``, ``shape``, ``dtype``, ``kind`` or
    ``contents``.
    """

    path: str
    change: str
    before: str
    after: str


class DifferenceReport(msgspec.Struct, frozen=True):
    """``torchstore snapshot diff``. ``same`` counts the objects that are equal."""

    before: str
    after: str
    same: int
    differences: list[Difference]


class Collected(msgspec.Struct, frozen=True):
    """``torchstore snapshot gc``. With ``dry_run``, what would be removed.

    Args:
        nbytes: of ``files``.
        dropped, kept: names of snapshots that are not among the last ones to be kept, and of the
            others.
        files: ``snapshot/file``.
        running, dead: ids of takes; what a running one has written, or may refer to, stays.
        unreadable: names of snapshots whose manifests cannot be used, and why.
        held: what stays because one of those may refer to it, and which: snapshots, and
            ``snapshot/file``.
        mended: maps of weights, as ``snapshot/file``, that a take which died had not written.
    """

    path: str
    dry_run: bool
    nbytes: int
    dropped: list[str]
    kept: list[str]
    files: list[str]
    running: list[str]
    dead: list[str]
    unreadable: dict[str, str]
    held: dict[str, str]
    mended: list[str] = []


class Converted(msgspec.Struct, frozen=True):
    """``torchstore snapshot convert``. ``kind`` and ``into``: what the source was, and what the
    destination is: ``snapshot``, ``dcp``, ``torchsnapshot`` or ``safetensors``.
    """

    source: str
    destination: str
    kind: str
    into: str
    tensors: int
    objects: int
    nbytes: int
    seconds: float
