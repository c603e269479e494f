"""Finds what an earlier snapshot has already: pieces with the same bytes are not written again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import msgspec
import xxhash

from torchstore_snapshot.devices import DeviceBytes, Devices
from torchstore_snapshot.format.hashes import BLOCK, block_hash, blocks, combined
from torchstore_snapshot.format.manifest import DataFile, Manifest, ObjectEntry, Piece
from torchstore_snapshot.series.survey import folder_name
from torchstore_snapshot.storage.base import FileInfo, Storage
from torchstore_snapshot.storage.gathering import STEP
from torchstore_snapshot.taking.collecting import Item
from torchstore_snapshot.taking.planning import Unit
from torchstore_snapshot.taking.strided import Strided
from torchstore_snapshot.taking.writing import source_of
from torchstore_snapshot.threads import run_tasks

__all__ = ["Reused", "find_unchanged"]

# Smaller pieces are written again: for a few bytes, a whole file would have to be kept.
_MIN = 4096


class Reused(NamedTuple):
    """A unit that is in a file of an earlier snapshot.

    Args:
        file: the file, as the new manifest names it.
        piece: where it is in that file; its ``file`` has no meaning.
    """

    unit: Unit
    file: DataFile
    piece: Piece


def find_unchanged(
    items: Sequence[Item],
    units: Sequence[Unit],
    base: Manifest,
    home: Storage,
    own_name: str,
    budget: int | None = None,
) -> tuple[list[Unit], list[Reused]]:
    """Divide ``units`` into those that have to be written and those that ``base`` has. A file of
    the base that is missing, or has another size than it should have, has nothing.

    Args:
        home: where the base is.
        own_name: the name of the folder of the new snapshot.
        budget: bytes of memory that what comes from devices may pass through; None: no matter.

    Raises:
        OSError: the storage failed.
    """
    whole = _whole_files(base, home)
    known: dict[tuple[int, str], tuple[DataFile, Piece]] = {}
    for entries in (base.shared, *base.own):
        for named in entries.values():
            for entry in named.values():
                if isinstance(entry, ObjectEntry):
                    continue
                for piece in entry.pieces:
                    # Version 1 of the format hashed large pieces in another way.
                    comparable = piece.nbytes <= BLOCK or base.files[piece.file].block == BLOCK
                    if piece.nbytes >= _MIN and comparable and whole[piece.file]:
                        file = _as_seen(base.files[piece.file], folder_name(home), own_name)
                        known.setdefault((piece.nbytes, piece.digest), (file, piece))
    sizes = {nbytes for nbytes, _ in known}
    candidates = [unit for unit in units if _nbytes(items[unit.item], unit) in sizes]
    with Devices(STEP, budget) as devices:
        digests = dict(zip(candidates, _digests(items, candidates, devices), strict=True))
    rest: list[Unit] = []
    reused: list[Reused] = []
    for unit in units:
        digest = digests.get(unit)
        found = known.get((_nbytes(items[unit.item], unit), digest)) if digest else None
        if found is None:
            rest.append(unit)
        else:
            reused.append(Reused(unit, *found))
    return rest, reused


def _whole_files(base: Manifest, home: Storage) -> list[bool]:
    """Whether each file that a snapshot consists of is there, with all of its bytes."""
    folders = {file.snapshot for file in base.files}
    sizes = {
        name: {info.name: info.nbytes for info in _listed(home.sibling(name) if name else home)}
        for name in folders
    }
    return [sizes[file.snapshot].get(file.name) == file.nbytes for file in base.files]


def _listed(folder: Storage) -> Sequence[FileInfo]:
    try:
        return folder.list()
    except PermissionError:
        return []


def _as_seen(file: DataFile, base_name: str, own_name: str) -> DataFile:
    """The file of a base, as a snapshot beside it names it."""
    home = file.snapshot or base_name
    return msgspec.structs.replace(file, snapshot="" if home == own_name else home)


def _nbytes(item: Item, unit: Unit) -> int:
    return item.pieces[unit.piece].tensor.nbytes if item.is_tensor else -1


def _digests(items: Sequence[Item], units: Sequence[Unit], devices: Devices) -> list[str]:
    found: list[list[bytes]] = [[] for _ in units]

    def tasks() -> Iterator[Callable[[], None]]:
        for unit, hashes in zip(units, found, strict=True):
            data = source_of(items[unit.item], unit, devices)
            if isinstance(data, Strided):
                yield partial(data.write, None, 0, hashes)
                continue
            spans = list(blocks(data.nbytes))
            hashes.extend([b""] * len(spans))
            for number, (begin, end) in enumerate(spans):
                block = data[begin:end]
                if isinstance(block, DeviceBytes):
                    yield partial(_hash_on_device, block, hashes, number, devices.slot)
                else:
                    yield partial(_hash, block, hashes, number)

    run_tasks(tasks())
    return [combined(hashes) for hashes in found]


def _hash(data: Any, hashes: list[bytes], number: int) -> None:
    hashes[number] = block_hash(data)


def _hash_on_device(data: DeviceBytes, hashes: list[bytes], number: int, step: int) -> None:
    hasher = xxhash.xxh3_128()
    windows = ([data[begin:end]] for begin, end in blocks(data.nbytes, step))
    with closing(data.arrivals(windows)) as arrivals:
        for memory in arrivals:
            hasher.update(memory)
    hashes[number] = hasher.digest()
