"""The manifest of a snapshot: everything about it except the bytes of its tensors.

It is a JSON document of two layers. The outer one says what it is, of which version, and has the
hash of the inner one, so that a damaged manifest is noticed. The inner one is a :class:`Manifest`.
"""

from __future__ import annotations

import re
from math import prod

import msgspec

from torchstore_core import boxes
from torchstore_core.values import TensorSlice
from torchstore_snapshot.errors import (
    SnapshotCorruptError,
    SnapshotFormatError,
    SnapshotVersionError,
)
from torchstore_snapshot.format.hashes import BLOCK, BLOCK_OF_V1, HASH, digest_of
from torchstore_snapshot.format.heads import Head, make_head
from torchstore_snapshot.format.paths import MANIFEST, check_file_name
from torchstore_snapshot.format.safetensors_files import DTYPES
from torchstore_snapshot.garbage import no_collections

__all__ = [
    "FORMAT",
    "VERSION",
    "Checkpoint",
    "DataFile",
    "Entries",
    "Entry",
    "Manifest",
    "ObjectEntry",
    "Piece",
    "StoredKey",
    "TensorEntry",
    "decode",
    "encode",
]

FORMAT = "torchstore-snapshot"
#: The version that this package writes, and the newest that it reads.
VERSION = 2
# More ranks than any job has. What is listed by rank is as long.
_MOST_RANKS = 1 << 17
_CODECS = ("msgpack", "pickle")


class DataFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file with tensors.

    Args:
        name: the name of the file inside the folder of the snapshot that wrote it.
        nbytes: its size in bytes.
        rank: the rank that wrote it.
        snapshot: empty if this snapshot wrote the file; otherwise the name of the folder beside
            this one, whose snapshot did.
        block: bytes of a block of the hashes of its pieces; see :mod:`.hashes`.
        header: the hash of its header; empty if an earlier version of this package wrote it.
    """

    name: str
    nbytes: int
    rank: int
    snapshot: str = ""
    block: int = BLOCK_OF_V1
    header: str = ""


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """The bytes of a box of a tensor: contiguous, in row-major order.

    Args:
        file: the index of the file in :attr:`Manifest.files`.
        start: the position of the first byte in that file.
        nbytes: the number of bytes.
        digest: their hash; see :mod:`.hashes`.
        slice: the position of the box in the tensor; None if the piece is the whole tensor.
        blocks: the hashes of its blocks, one after the other (base64 in JSON); empty if it has only
            one, or if version 1 of the format wrote it.
    """

    file: int
    start: int
    nbytes: int
    digest: str
    slice: TensorSlice | None = None
    blocks: bytes = b""


class TensorEntry(msgspec.Struct, frozen=True, omit_defaults=True, tag="tensor"):
    """A tensor.

    Args:
        dtype: its dtype without ``torch.``.
        shape: its global shape.
        pieces: what it consists of. They cover the tensor; they do not overlap.
        steps: where it is in the nested state dict (see ``torchstore_core.clients.values.nesting``;
            empty if it is at the top).
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    steps: bytes = b""

    def boxes(self) -> list[boxes.Box]:
        """Return the boxes of the pieces, in order."""
        return [
            boxes.whole(self.shape)
            if piece.slice is None
            else boxes.Box(piece.slice.offsets, piece.slice.local_shape)
            for piece in self.pieces
        ]

    @property
    def nbytes(self) -> int:
        """The bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)


class ObjectEntry(msgspec.Struct, frozen=True, omit_defaults=True, tag="object"):
    """A value that is not a tensor.

    Args:
        codec: ``"msgpack"`` or ``"pickle"``. A version of torchstore-core that does not know an
            extension in the msgpack of a value cannot read that one value.
        data: the encoded value (base64 in JSON); empty if it is in a data file.
        piece: where the encoded value is in a data file; None if it is in ``data``.
        steps: as for a tensor.
    """

    codec: str
    data: bytes = b""
    piece: Piece | None = None
    steps: bytes = b""


Entry = TensorEntry | ObjectEntry
#: The entries of each state dict: by its key in the application state, then by name.
Entries = dict[str, dict[str, Entry]]


class StoredKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a key was in the store that a snapshot was taken of.

    Args:
        kind: ``"tensor"``, ``"object"`` or ``"state dict"``.
        version: its version.
        packed: a state dict was put as a ``TorchStoreStateDict``.
        key: the key in the store, if the snapshot has the version under another name, because it
            is not the newest one; otherwise empty.
        shared: its tensors are in files that other keys use, too, under names that begin with this
            key.
    """

    kind: str
    version: int
    packed: bool = False
    key: str = ""
    shared: bool = False


class Checkpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the state dict of ``torch.distributed.checkpoint`` was divided into keys.

    Args:
        top: the key whose entries were at the top of that state dict, without a key of their own.
        flat: its entries are one level of names, and their values are not to be looked into.
    """

    top: str
    flat: bool = False


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The contents of a snapshot.

    Args:
        take: the id of the take that wrote it.
        created: when it was committed, in seconds since the epoch.
        sequence: how many snapshots beside it, in the order of their commits, came before it, and
            one more; 0 if it was written by a version of this package that did not count.
        world_size: how many ranks took part, up to 131,072.
        files: all data files.
        shared: what all ranks have in common: sharded and replicated tensors, and everything of
            which all ranks had an equal value.
        own: what each rank alone has, by rank; empty if no rank has anything of its own.
        store: the keys of the store that it is a snapshot of; empty if it is one of objects.
        checkpoint: how a state dict was divided, if ``torch.distributed.checkpoint`` saved it.
    """

    take: str
    created: float
    world_size: int
    files: tuple[DataFile, ...]
    shared: Entries
    own: tuple[Entries, ...] = ()
    store: dict[str, StoredKey] = {}
    checkpoint: Checkpoint | None = None
    sequence: int = 0

    @property
    def age(self) -> tuple[int, float, str]:
        """What snapshots beside each other are sorted by, the oldest first. Clocks decide only
        between those that were committed at the same time, or were not counted.
        """
        return self.sequence, self.created, self.take

    def of_rank(self, rank: int) -> Entries:
        """Return the entries that a rank restores: the shared ones and its own."""
        if rank >= len(self.own):
            return self.shared
        mine = self.own[rank]
        return {
            key: {**self.shared.get(key, {}), **mine.get(key, {})}
            for key in {**self.shared, **mine}
        }


class _Document(msgspec.Struct, kw_only=True, omit_defaults=True):
    format: str
    version: int
    head: Head | None = None
    digest: str
    body: msgspec.Raw


class _Outer(msgspec.Struct):
    """Of a document of any version."""

    format: str
    version: int


_encoder = msgspec.json.Encoder()
_documents = msgspec.json.Decoder(_Document)
_outers = msgspec.json.Decoder(_Outer)
_manifests = msgspec.json.Decoder(Manifest)


def encode(manifest: Manifest) -> bytes:
    """Return a manifest as the bytes of its file."""
    body = _encoder.encode(manifest)
    return _encoder.encode(
        _Document(
            format=FORMAT,
            version=VERSION,
            head=make_head(manifest.take, manifest.sequence),
            digest=digest_of(body),
            body=msgspec.Raw(body),
        )
    )


@no_collections()
def decode(data: bytes, path: str) -> Manifest:
    """Return the manifest of the snapshot at ``path`` from the bytes of its file.

    Raises:
        SnapshotFormatError: it is no manifest, is of a newer version, or contradicts itself.
        SnapshotCorruptError: its bytes are not those that were written.
    """
    details = {"path": path, "file": MANIFEST}
    try:
        outer = _outers.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SnapshotFormatError(
            f"the manifest of {path!r} cannot be read: {error}", details=details
        ) from error
    if outer.format != FORMAT:
        raise SnapshotFormatError(
            f"{MANIFEST} in {path!r} is the manifest of {outer.format!r}, not of a snapshot",
            details=details,
        )
    if outer.version > VERSION or outer.version < 1:
        raise SnapshotVersionError(
            f"the snapshot {path!r} has format version {outer.version}, and this package reads "
            f"versions up to {VERSION}; install a newer torchstore-snapshot",
            details={**details, "version": outer.version},
        )
    try:
        document = _documents.decode(data)
        body = bytes(document.body)
        if digest_of(body, BLOCK_OF_V1 if outer.version == 1 else BLOCK) != document.digest:
            raise SnapshotCorruptError(
                f"the manifest of {path!r} was damaged: its hash is wrong", details=details
            )
        manifest = _manifests.decode(body)
        head = make_head(manifest.take, manifest.sequence)
        # Snapshots from before there were heads were not counted, either.
        if document.head != head and (manifest.sequence or document.head is not None):
            raise SnapshotCorruptError(
                f"the manifest of {path!r} was damaged: its first bytes, which say when it was "
                "committed, are not what they were",
                details=details,
            )
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SnapshotFormatError(
            f"the manifest of {path!r} cannot be read: {error}", details=details
        ) from error
    _check(manifest, path)
    return manifest


def _check(manifest: Manifest, path: str) -> None:
    ranks = manifest.world_size
    if not 0 < ranks <= _MOST_RANKS or len(manifest.own) not in (0, ranks):
        raise SnapshotFormatError(
            f"the manifest of {path!r} contradicts itself: it names {ranks} ranks, and the values "
            f"of {len(manifest.own)}",
            details={"path": path, "file": MANIFEST},
        )
    for file in manifest.files:
        check_file_name(file.name, path)
        if file.snapshot:
            check_file_name(file.snapshot, path)
        if file.block < 1:
            raise SnapshotFormatError(
                f"the manifest of {path!r} contradicts itself about {file.name!r}",
                details={"path": path, "file": MANIFEST},
            )
    for entries in (manifest.shared, *manifest.own):
        for key, named in entries.items():
            for name, entry in named.items():
                if isinstance(entry, TensorEntry):
                    fits = _consistent(entry) and all(_inside(p, manifest) for p in entry.pieces)
                else:
                    fits = entry.codec in _CODECS
                    fits &= entry.piece is None or _inside(entry.piece, manifest)
                if not fits:
                    raise SnapshotFormatError(
                        f"the manifest of {path!r} contradicts itself about {key + '/' + name!r}",
                        key=f"{key}/{name}",
                        details={"path": path, "file": MANIFEST},
                    )


def _inside(piece: Piece, manifest: Manifest) -> bool:
    if not 0 <= piece.file < len(manifest.files):
        return False
    file = manifest.files[piece.file]
    return (
        piece.start >= 0
        and piece.nbytes >= 0
        and piece.start + piece.nbytes <= file.nbytes
        and len(piece.blocks) in (0, HASH * -(-piece.nbytes // file.block))
    )


def _consistent(entry: TensorEntry) -> bool:
    """Whether the pieces lie in the tensor and cover it, all with elements of one size, which is
    that of the dtype if it is known here.
    """
    shape = entry.shape
    if min(shape, default=0) < 0:
        return False
    size = _SIZES.get(entry.dtype, 0)
    if size and len(entry.pieces) == 1 and entry.pieces[0].slice is None:  # nearly all are
        return entry.pieces[0].nbytes == prod(shape) * size
    sizes = {size} if size else set()
    found: list[boxes.Box] = []
    for piece in entry.pieces:
        if (where := piece.slice) is None:
            box = boxes.whole(shape)
        else:
            if not len(where.offsets) == len(where.local_shape) == len(shape) or any(
                o < 0 or n < 0 or o + n > g
                for o, n, g in zip(where.offsets, where.local_shape, shape, strict=True)
            ):
                return False
            box = boxes.Box(where.offsets, where.local_shape)
        if piece.nbytes % (box.numel or 1) or (box.is_empty and piece.nbytes):
            return False
        if not box.is_empty:
            sizes.add(piece.nbytes // box.numel)
        found.append(box)
    return len(sizes - {0}) == len(sizes) <= 1 and boxes.covers(boxes.whole(shape), found)


def _size_of(dtype: str) -> int:
    """Return the bytes of an element, which the name of its dtype tells.

    >>> [_size_of(name) for name in ("bool", "bfloat16", "float8_e5m2", "complex64")]
    [1, 2, 1, 8]
    """
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else int(bits[0]) // 8


_SIZES = {dtype: _size_of(dtype) for dtype in (*DTYPES, "complex32", "complex128")}
