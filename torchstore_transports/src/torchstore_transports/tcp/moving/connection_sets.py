"""The connections from this process to one that serves volumes, shared by the links to them all."""

from __future__ import annotations

import os
import threading

from torchstore_transports.tcp.moving.dialing import Dialer
from torchstore_transports.tcp.moving.streams import Streams
from torchstore_transports.tcp.moving.widths import Widths

__all__ = ["ConnectionSet", "shared"]


class ConnectionSet:
    """The streams to one process, and how many are best, for all event loops of this process."""

    def __init__(self, ticket: bytes, dialer: Dialer, *, checked: bool) -> None:
        self.streams = Streams(dialer.dial, checked=checked)
        self.reads, self.writes = Widths(), Widths()
        self._ticket = ticket
        self._users = 0

    def release(self) -> None:
        """Give up the use of one link; the connections are closed with the last of them."""
        with _lock:
            self._users -= 1
            if self._users:
                return
            if _sets.get(self._ticket) is self:
                del _sets[self._ticket]
        self.streams.close()


_sets: dict[bytes, ConnectionSet] = {}
# Reentrant, because the collector may close a link in a thread that holds it.
_lock = threading.RLock()


def shared(ticket: bytes, dialer: Dialer, *, checked: bool) -> ConnectionSet:
    """Return the set for the process that issued the ticket; each link must release it once."""
    with _lock:
        found = _sets.get(ticket)
        if found is None:
            found = _sets[ticket] = ConnectionSet(ticket, dialer, checked=checked)
        found._users += 1
        return found


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # a thread that does not exist here may have held it
    _sets.clear()


os.register_at_fork(after_in_child=_after_fork)
