"""Sending replies to clients, at once or page by page."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from torchstore_core.wire import messages as m
from torchstore_core.wire.paging import first_frame, frames


class Sender:
    """Sends the messages of one conversation.

    Of a long reply, one page is encoded and sent per turn of the event loop, so that other clients
    are answered in between, and only while the client reads what it is sent.

    Args:
        write: sends a whole frame.

    Attributes:
        is_behind: whether some of what was sent is still to be given to the kernel.
        unsent: answers that may be among that; whoever sends some puts them there while it
            ``is_behind``.
    """

    __slots__ = ("_long", "_paused", "_scheduled", "_then", "_write", "is_behind", "unsent")

    def __init__(self, write: Callable[[bytearray], None]) -> None:
        self._write = write
        self._long: deque[tuple[int, Iterator[bytearray]]] = deque()
        self._paused = False
        self._scheduled = False
        self._then: Callable[[], None] | None = None
        self.is_behind = False
        self.unsent: dict[tuple[str, int], m.Reply] = {}

    def send(self, message: m.Message) -> None:
        """Send a message; if it is long, start sending it page by page."""
        frame = first_frame(message)
        if frame is not None:
            self._write(frame)
            return
        self._long.append((getattr(message, "id", 0), frames(message)))
        self.is_behind = True
        self._schedule()

    def cancel(self, request_id: int) -> None:
        """Drop the rest of a reply that the client no longer waits for."""
        self._long = deque(one for one in self._long if one[0] != request_id)
        self._look()

    def pause(self) -> None:
        """Stop sending pages, because the client does not read what it was sent."""
        self._paused = self.is_behind = True

    def resume(self) -> None:
        """Resume sending pages, because the client reads again, and has been sent the rest."""
        self._paused = False
        self._look()
        self._schedule()

    def when_sent(self, then: Callable[[], None]) -> bool:
        """Call ``then`` once all remaining pages are sent. Returns False, and does not call it, if
        there are none.
        """
        if self._long:
            self._then = then
        return bool(self._long)

    def close(self) -> None:
        """Stop sending for good, because the connection is gone."""
        self._long.clear()
        self.unsent.clear()
        self._then = None
        self._write = _to_nobody

    def _schedule(self) -> None:
        if self._long and not (self._scheduled or self._paused):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._send_page)

    def _send_page(self) -> None:
        self._scheduled = False
        if self._paused or not self._long:
            return
        one = self._long.popleft()
        frame = next(one[1], None)
        if frame is not None:
            self._long.append(one)  # several long replies take turns
            self._write(frame)
        self._look()
        self._schedule()
        if self._then is not None and not self._long:
            self._then()

    def _look(self) -> None:
        """Something has been sent, or need not be any more: perhaps that was all."""
        if not (self._paused or self._long):
            self.is_behind = False
            self.unsent.clear()


def _to_nobody(frame: bytearray) -> None:
    """Discard a frame, because the connection is gone."""
