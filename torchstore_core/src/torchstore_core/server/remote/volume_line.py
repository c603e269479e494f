"""The server's end of the line to a volume in another process."""

from __future__ import annotations

from collections.abc import Callable

from torchstore_core.wire import messages as m


class VolumeLine:
    """What a server sends to a volume in another process, in this life of the server: it begins
    when the volume is there, and what was sent before waits until then.
    """

    def __init__(self) -> None:
        self._send: Callable[[m.Message], None] | None = None
        self._waiting: list[m.Message] = []

    @property
    def is_open(self) -> bool:
        """Whether the volume is there, or has been."""
        return self._send is not None

    def send(self, message: m.Message) -> None:
        """Send a message, now or when the volume is there."""
        (self._send or self._waiting.append)(message)

    def open(self, send: Callable[[m.Message], None]) -> None:
        """The volume is there; ``send`` sends it a message."""
        self._send = send
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            send(message)
