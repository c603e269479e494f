"""Volumes of simulated stores: real bytes, of which it is known who may read and write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from tests.simulation.promises.violations import Violation

from torchstore_core.machine.topology import Topology
from torchstore_core.server.memory.volume_record import Halves, VolumeRecord
from torchstore_core.wire import messages as m

__all__ = ["LINE", "Holder", "Memory", "Owners", "Range", "simulated_volume"]

#: All values of a simulation are whole cache lines, which the allocator deals in.
LINE = 64

#: Volume, first byte, and end of a range of memory.
Range = tuple[int, int, int]
#: What for, the client, its life, and the number of its put or lease.
Holder = tuple[str, int, int, int]
_SERVER: Holder = ("server", -1, 0, 0)


class Memory:
    """A segment: the part of ``SegmentMemory`` that the controller sees."""

    def __init__(self, capacity: int) -> None:
        self.bytes = bytearray(capacity)
        self.warm = capacity
        #: Called with the first byte and the end of what the server is about to write.
        self.about_to_write: Callable[[int, int], None] = lambda start, end: None

    def touched(self, end: int) -> None:
        """All of it is warm."""

    def prefault(self, target: int, done: Callable[[], None]) -> None:
        """All of it is warm."""

    def trim(self, start: int) -> int:
        return 0

    @property
    def is_here(self) -> bool:
        return True

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self.bytes[offset : offset + nbytes])

    def write(self, offsets: Sequence[int], contents: Sequence[bytes]) -> bool:
        for offset, content in zip(offsets, contents, strict=True):
            self.about_to_write(offset, offset + len(content))
            self.bytes[offset : offset + len(content)] = content
        return True

    def close(self) -> None:
        """Nothing is left of it."""


class Owners:
    """Who may touch which memory, as the clients see it: a grant lasts until its client says that
    it has written, and a lease until its client says that it reads no more, or until they die.

    The server can only know later. So whatever it does, nobody may write what another one may
    still read or write.
    """

    def __init__(self, memories: list[Memory]) -> None:
        self._memories = memories
        for at, memory in enumerate(memories):
            memory.about_to_write = partial(self._check, _SERVER, at)
        self.readers: dict[Holder, list[Range]] = {}
        self.writers: dict[Holder, list[Range]] = {}

    def forget(self, client: int) -> None:
        """A client's process is dead: it neither reads nor writes any more."""
        for held in (self.readers, self.writers):
            for who in [who for who in held if who[1] == client]:
                del held[who]

    def write(self, who: Holder, volume: int, start: int, data: bytes) -> None:
        """A client writes to memory that was granted to it."""
        end = start + len(data)
        self._check(who, volume, start, end)
        self._memories[volume].bytes[start:end] = data

    def _check(self, who: Holder, volume: int, start: int, end: int) -> None:
        for held, text in ((self.readers, "is being read"), (self.writers, "is being written")):
            for other, ranges in held.items():
                if other is who:
                    continue
                for at, first, last in ranges:
                    if at == volume and first < end and start < last:
                        raise Violation(
                            "reuse",
                            f"bytes {start} to {end} of volume {volume}, granted to {who}, are "
                            f"written while the range from {first} to {last} {text} by {other}",
                        )

    def read(self, volume: int, start: int, nbytes: int) -> bytes:
        return bytes(self._memories[volume].bytes[start : start + nbytes])


def simulated_volume(
    index: int, memory: Memory, halves: Halves, here: Topology, transports: Iterable[str]
) -> VolumeRecord:
    """A volume in this process."""
    offers = dict.fromkeys(transports, b"")
    info = m.VolumeInfo(f"v{index}", index, here.pid, here, len(memory.bytes), offers)
    return VolumeRecord(info, memory, halves)
