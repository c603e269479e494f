"""The optional abilities of links, if they declare them: windows and mappings."""

from __future__ import annotations

import ctypes

import pytest

from torchstore_core.contracts.transport import Link, SupportsMap, SupportsWindow
from torchstore_core.testing.transports.base import TransportKit, check
from torchstore_core.testing.transports.ends.memory import Memory, pattern
from torchstore_core.testing.transports.ends.session import Session

__all__ = ["AbilityTests"]


class AbilityTests(TransportKit):
    """Tests of ``window``, ``prepare`` and ``map``."""

    def test_a_window_shows_the_segment(self) -> None:
        """Bytes written through the window are in the segment, and the reverse."""
        endpoints = self.anywhere()

        async def work(_: Session, link: Link) -> None:
            window: object = link
            if not isinstance(window, SupportsWindow):
                pytest.skip("it has no windows")
            shown = window.window(0)
            check(shown.nbytes == endpoints.nbytes, f"a window of {shown.nbytes} bytes")
            offset, data = endpoints.take(300_000), pattern(11, 300_000)
            window.prepare(0, offset, len(data), fresh=True)
            source, target = Memory(data), Memory(len(data))
            ctypes.memmove(shown.address + offset, source.address, len(data))
            check(endpoints.look(offset, len(data)) == data, "the segment has other bytes")
            endpoints.put(offset, data[::-1])
            window.prepare(0, offset, len(data), fresh=False)
            ctypes.memmove(target.address, shown.address + offset, len(data))
            check(target.data() == data[::-1], "the window shows other bytes")
            check(window.window(0) == shown, "a second window of the segment is another one")

        self.with_link(endpoints, work)

    def test_a_mapping_is_private_and_outlives_its_link(self) -> None:
        """Writing to a mapping does not change the segment; it is usable after ``close``."""
        endpoints = self.anywhere()

        async def work(_: Session, link: Link) -> None:
            mapper: object = link
            if not isinstance(mapper, SupportsMap):
                pytest.skip("it has no mappings")
            offset, data = endpoints.take(100_000), pattern(12, 100_000)
            endpoints.put(offset, data)
            mapped = mapper.map(0, offset, len(data))
            check(mapped.nbytes == len(data), f"a mapping of {mapped.nbytes} bytes")
            target = Memory(len(data))
            ctypes.memmove(target.address, mapped.address, len(data))
            check(target.data() == data, "the mapping shows other bytes")
            link.close()
            view = memoryview(mapped.owner).cast("B")  # type: ignore[arg-type]
            view[mapped.offset : mapped.offset + 10] = bytes(10)
            check(
                endpoints.look(offset, len(data)) == data,
                "writing to a mapping changed the segment",
            )
            ctypes.memmove(target.address, mapped.address, len(data))
            check(target.data() == bytes(10) + data[10:], "the mapping ended with its link")

        self.with_link(endpoints, work)
