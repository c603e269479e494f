"""Batches of bytes that are not the values of this process: for processes without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torchstore_core.clients.moving.batches import (
    MAP_MIN,
    Batch,
    Mapped,
    Move,
    ReadsInPlace,
    Run,
)
from torchstore_core.clients.moving.mapping import map_values
from torchstore_core.contracts.transport import Memory, SupportsMap, SupportsWindow
from torchstore_core.errors import TransportError
from torchstore_core.machine.virtual_memory import allocate


class BytesBatch(Batch):
    """Runs of bytes between memory of this process and a segment."""

    on_device = False

    def __init__(
        self, place: tuple[int, int], memory: Memory | None, runs: Sequence[Run], *, into: bool
    ) -> None:
        self.volume, self.segment = place
        self.nbytes = sum([nbytes for _, _, nbytes in runs])
        self.into_segment = into
        self._in = memory
        self._runs = list(runs)

    def memory(self) -> list[Memory]:
        return [] if self._in is None else [self._in]

    def moves(self, room: int | None) -> Iterator[Move]:
        if room is not None and any(not 0 <= at <= room - n for _, at, n in self._runs):
            raise TransportError(f"bytes would lie outside segment {self.segment}")
        yield self._runs


class BytesGet(ReadsInPlace):
    """Values to be read as bytes.

    Args:
        wanted: offsets and sizes, and the keys under which ``found`` has them when they were
            copied; what is mapped has its key with it.
    """

    on_device = into_segment = False

    def __init__(
        self,
        place: tuple[int, int],
        wanted: Iterable[tuple[int, int, int]],
        found: dict[int, memoryview],
    ) -> None:
        self.volume, self.segment = place
        self._wanted = list(wanted)
        self._found = found
        self.nbytes = sum([nbytes for _, nbytes, _ in self._wanted])
        self._memory: list[Memory] = []

    @property
    def is_empty(self) -> bool:
        return not self._wanted

    def memory(self) -> list[Memory]:
        return self._memory

    def map(self, link: SupportsMap) -> tuple[Sequence[Mapped], BytesGet]:
        large = [one for one in self._wanted if one[1] >= MAP_MIN]
        if not large:
            return (), self
        rest = [one for one in self._wanted if one[1] < MAP_MIN]
        sizes = {key: nbytes for _, nbytes, key in large}
        found, refused = map_values(link, self.segment, large)
        mapped = [
            Mapped(owner, [(key, _view(owner, at, sizes[key])) for key, at in inside])
            for owner, inside in found
        ]
        return mapped, BytesGet((self.volume, self.segment), [*rest, *refused], self._found)

    def decode(self, link: SupportsWindow) -> None:
        """There is nothing to decode."""

    def moves(self, room: int | None) -> Iterator[Move]:
        runs: list[Run] = []
        for offset, nbytes, key in self._wanted:
            if room is not None and not 0 <= offset <= room - nbytes:
                raise TransportError(f"bytes would lie outside segment {self.segment}")
            address, block = allocate(nbytes)
            self._memory.append(Memory(address, nbytes, block))
            self._found[key] = _view(block, 0, nbytes)
            runs.append((address, offset, nbytes))
        yield runs


def _view(block: object, at: int, nbytes: int) -> memoryview:
    whole: memoryview = memoryview(block).cast("B")  # type: ignore[arg-type]
    return whole[at : at + nbytes]
