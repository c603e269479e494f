"""Writes data files from the memory of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from torchstore_snapshot.committing.files import OpenFiles, Source
from torchstore_snapshot.devices import DeviceBytes, Devices
from torchstore_snapshot.format.hashes import Digest
from torchstore_snapshot.garbage import no_collections
from torchstore_snapshot.progress import Advance
from torchstore_snapshot.stopping import check
from torchstore_snapshot.storage.base import Storage
from torchstore_snapshot.storage.gathering import STEP
from torchstore_snapshot.taking.collecting import Item, LocalPiece
from torchstore_snapshot.taking.planning import PlannedFile, Unit
from torchstore_snapshot.taking.strided import Strided, data_of

__all__ = ["Fetch", "source_of", "write_files"]

# Bytes of pieces that are fetched at a time.
_FETCHED = 64 << 20

#: Returns the tensors of pieces that are not in the memory of this process.
Fetch = Callable[[Sequence[tuple[Item, LocalPiece]]], Sequence[torch.Tensor]]


def write_files(
    storage: Storage,
    items: Sequence[Item],
    files: Sequence[PlannedFile],
    *,
    durable: bool,
    threads: int | None,
    advance: Advance | None,
    fetch: Fetch | None,
    budget: int | None = None,
) -> list[list[Digest]]:
    """Write all files straight from the memory of ``items``. If that fails, none of them is left.

    Args:
        budget: bytes of memory that what comes from devices may pass through; None: no matter.
        fetch: called for the pieces that are on the meta device, about ``_FETCHED`` bytes at a
            time, which are freed when they are written. May raise anything.

    Returns and raises what :meth:`OpenFiles.close` and :meth:`OpenFiles.write` do.
    """
    layouts = [(file.name, file.layout) for file in files]
    devices = Devices(STEP, budget, threads)
    step = devices.slot if any(map(_on_device, items)) else STEP
    opened = OpenFiles(
        storage, layouts, durable=durable, threads=threads, advance=advance, step=step
    )
    try:
        with devices:
            if fetch is None:
                opened.write(_all_sources(items, files, devices))
            else:
                for batch in _batches(items, files):
                    check()
                    opened.write(_sources(items, batch, fetch, devices))
        return opened.close()
    except BaseException:
        opened.abort()
        raise


def _on_device(item: Item) -> bool:
    return not all(piece.tensor.is_cpu or piece.tensor.is_meta for piece in item.pieces)


class _Place(NamedTuple):
    file: int
    position: int
    unit: Unit
    piece: LocalPiece | None  # that has to be fetched


def _batches(items: Sequence[Item], files: Sequence[PlannedFile]) -> Iterator[list[_Place]]:
    batch: list[_Place] = []
    nbytes = 0
    for index, file in enumerate(files):
        for position in sorted(range(len(file.units)), key=file.layout.starts.__getitem__):
            unit = file.units[position]
            item = items[unit.item]
            piece = item.pieces[unit.piece] if item.is_tensor else None
            if piece is not None and not piece.tensor.is_meta:
                piece = None
            batch.append(_Place(index, position, unit, piece))
            if piece is None:
                continue
            nbytes += piece.tensor.nbytes
            if nbytes >= _FETCHED:
                yield batch
                batch, nbytes = [], 0
    yield batch


@no_collections()
def _all_sources(
    items: Sequence[Item], files: Sequence[PlannedFile], devices: Devices
) -> list[Source]:
    batches = _batches(items, files)
    return [source for batch in batches for source in _sources(items, batch, None, devices)]


def _sources(
    items: Sequence[Item], batch: Sequence[_Place], fetch: Fetch | None, devices: Devices
) -> Iterator[Source]:
    absent = [(items[at.unit.item], at.piece) for at in batch if at.piece is not None]
    fetched = iter(fetch(absent) if fetch is not None and absent else ())
    for at in batch:
        item = items[at.unit.item]
        if at.piece is not None:
            item = item._replace(pieces=(LocalPiece(next(fetched), at.piece.slice),))
            unit = Unit(at.unit.item, 0)
            data, owner = source_of(item, unit, devices), item.pieces[0].tensor
            yield Source(at.file, at.position, 0, data, owner)
        else:
            yield Source(at.file, at.position, 0, source_of(item, at.unit, devices))


def source_of(item: Item, unit: Unit, devices: Devices) -> memoryview | DeviceBytes | Strided:
    """Return the bytes of a unit."""
    if not item.is_tensor:
        return memoryview(item.data)
    return data_of(f"{item.key}/{item.name}", item.pieces[unit.piece].tensor, devices)
