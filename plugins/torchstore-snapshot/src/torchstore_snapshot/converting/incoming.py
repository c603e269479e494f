"""Writes a snapshot of what is loaded piece by piece."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

from torchstore_core.clients.values.tensors import dtype_of, storable
from torchstore_core.errors import LayoutMismatchError
from torchstore_core.values import TensorMeta, TensorSlice
from torchstore_snapshot.committing.files import OpenFiles, Source
from torchstore_snapshot.committing.merging import Part, merge
from torchstore_snapshot.committing.options import TakeOptions
from torchstore_snapshot.committing.publishing import give_up, publish
from torchstore_snapshot.committing.replacing import (
    never_visible,
    refuse_existing,
    refuse_foreign_maps,
)
from torchstore_snapshot.devices import Devices
from torchstore_snapshot.errors import SnapshotCorruptError
from torchstore_snapshot.format.manifest import Entry, Manifest
from torchstore_snapshot.format.paths import new_take_id
from torchstore_snapshot.series.claims import Claim
from torchstore_snapshot.storage.local import LocalReader
from torchstore_snapshot.storage.opening import open_storage
from torchstore_snapshot.taking.collecting import Item, LocalPiece
from torchstore_snapshot.taking.parts import maps_of, part_of
from torchstore_snapshot.taking.planning import INLINE_MAX, Unit, plan_files
from torchstore_snapshot.taking.strided import data_of

__all__ = ["Load", "Member", "chunk", "loaded_from", "tensor_item", "write_parts"]

#: Loads a piece: a tensor, or the bytes of one. Called when it is the piece's turn to be written.
Load = Callable[[], "torch.Tensor | memoryview"]


class Member(NamedTuple):
    """Something that goes into a snapshot.

    Args:
        item: what it is; its tensors have no memory.
        loads: how to get each piece of a tensor.
    """

    item: Item
    loads: tuple[Load, ...] = ()


def chunk(
    dtype: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int], path: str
) -> LocalPiece:
    """Describe a piece of a tensor that is not loaded.

    Raises:
        UnsupportedValueError: torch does not have the dtype.
        LayoutMismatchError: the piece is not inside of the tensor.
    """
    offsets, sizes, shape = tuple(offsets), tuple(sizes), tuple(shape)
    if not len(offsets) == len(sizes) == len(shape) or any(
        o < 0 or n < 0 or o + n > g for o, n, g in zip(offsets, sizes, shape, strict=True)
    ):
        raise LayoutMismatchError(
            f"{path!r}: {list(sizes)} at {list(offsets)} is no part of {list(shape)}", key=path
        )
    kind = dtype_of(TensorMeta(dtype, shape), path)
    raw = torch.empty(prod(sizes) * kind.itemsize, dtype=torch.uint8, device="meta")
    where = None if sizes == shape else TensorSlice(offsets, sizes, shape)
    return LocalPiece(raw.view(kind).view(sizes), where)


def tensor_item(
    key: str,
    name: str,
    dtype: str,
    shape: Sequence[int],
    pieces: Sequence[tuple[LocalPiece, Load]],
    *,
    steps: bytes = b"",
    common: bool = False,
) -> Member:
    """Describe a tensor. Empty pieces of a tensor that is not empty are left out."""
    kept = [(p, load) for p, load in pieces if 0 not in p.tensor.shape or 0 in shape]
    local = tuple(piece for piece, _ in kept)
    item = Item(key, name, steps, dtype, tuple(shape), local, common=common)
    return Member(item, tuple(load for _, load in kept))


def loaded_from(reader: LocalReader, start: int, nbytes: int, path: str, url: str) -> memoryview:
    """Return bytes of a file, in memory.

    Raises:
        SnapshotCorruptError: the file ends before.
    """
    short = SnapshotCorruptError(
        f"{url!r} is damaged: the file with {path!r} is too short",
        key=path,
        details={"path": url},
    )
    if start < 0 or nbytes < 0 or start + nbytes > reader.nbytes:
        raise short
    data = memoryview(bytearray(nbytes))
    try:
        reader.read_into(start, data)
    except EOFError as error:
        raise short from error
    return data


class Take(NamedTuple):
    """A snapshot that is being written."""

    url: str
    take: str
    options: TakeOptions
    claim: Claim

    @staticmethod
    def begin(destination: str, options: TakeOptions) -> Take:
        """Prepare the folder.

        Raises:
            SnapshotExistsError: there is a snapshot already.
        """
        options.check()
        storage = open_storage(destination)
        refuse_existing(storage, overwrite=options.overwrite)
        take = new_take_id()
        return Take(storage.url, take, options, Claim.begin(storage, take, durable=options.fsync))

    def discard(self, files: Sequence[str]) -> None:
        """Remove files of a take that failed."""
        storage = open_storage(self.url)
        try:
            for name in files:
                storage.delete(name)
        finally:
            self.claim.release()


def write_parts(
    destination: str,
    ranks: Sequence[Sequence[Member]],
    options: TakeOptions,
    arrange: Callable[[Manifest, dict[str, Entry]], Manifest] | None = None,
) -> Manifest:
    """Write a snapshot of what several ranks have, one after the other, through two pieces of
    memory at a time.

    Args:
        ranks: what each of them has.
        arrange: changes the manifest; it gets the entries by ``"key/name"``, too.

    Raises:
        SnapshotExistsError, ForeignFileError, LayoutMismatchError, OSError: as for
            ``Snapshot.take``.
        TorchStoreError: what loading raises. There is no snapshot then, or still the one before.
    """
    items = [member.item for members in ranks for member in members]
    refuse_foreign_maps(open_storage(destination), maps_of(items))
    begun = Take.begin(destination, options)
    written: list[str] = []
    try:
        parts = [_write_part(begun, rank, members, written) for rank, members in enumerate(ranks)]
        manifest = merge(parts, begun.take, time.time())
        if arrange is not None:
            entries = {
                f"{key}/{name}": entry
                for key, named in manifest.shared.items()
                for name, entry in named.items()
            }
            manifest = arrange(manifest, entries)
    except BaseException:
        begun.discard(written)
        raise
    storage = open_storage(begun.url)
    try:
        publish(storage, manifest, options, begun.claim)
    except BaseException as raised:
        if never_visible(storage, begun.take, options, raised, begun.claim):
            begun.discard(written)
        else:
            give_up(storage, begun.claim)
        raise
    finally:
        begun.claim.release()
    return manifest


def _write_part(begun: Take, rank: int, members: Sequence[Member], written: list[str]) -> Part:
    items = [member.item for member in members]
    units: list[Unit] = []
    for number, item in enumerate(items):
        if item.is_tensor:
            units += [Unit(number, piece) for piece in range(len(item.pieces))]
        elif len(item.data) > INLINE_MAX:
            units.append(Unit(number, 0))
    files = plan_files(items, units, begun.take, rank, begun.options.file_max)
    layouts = [(file.name, file.layout) for file in files]
    options = begun.options
    opened = OpenFiles(
        open_storage(begun.url), layouts, durable=options.fsync, threads=options.threads
    )

    def sources(devices: Devices) -> Iterator[Source]:
        for index, file in enumerate(files):
            for position, unit in enumerate(file.units):
                yield _source(members[unit.item], unit, index, position, devices)

    try:
        with Devices() as devices:
            opened.write(sources(devices))
        digests = opened.close()
    except BaseException:
        opened.abort()
        raise
    written += [file.name for file in files]
    keys = sorted({item.key for item in items})
    return part_of(rank, keys, items, files, digests)


def _source(member: Member, unit: Unit, index: int, position: int, devices: Devices) -> Source:
    item = member.item
    if not item.is_tensor:
        return Source(index, position, 0, memoryview(item.data))
    planned, path = item.pieces[unit.piece].tensor, f"{item.key}/{item.name}"
    found = member.loads[unit.piece]()
    nbytes = found.nbytes
    if isinstance(found, torch.Tensor):
        if found.dtype != planned.dtype or found.shape != planned.shape:
            raise SnapshotCorruptError(
                f"{path!r} is {found.dtype} {list(found.shape)}, and not {planned.dtype} "
                f"{list(planned.shape)} as its metadata say",
                key=path,
            )
        tensor = storable(path, found)
        return Source(index, position, 0, data_of(path, tensor, devices), tensor)
    if nbytes != planned.nbytes:
        raise SnapshotCorruptError(
            f"{path!r} has {nbytes} bytes, and not {planned.nbytes} as its metadata say", key=path
        )
    return Source(index, position, 0, found, found)
