"""Ending with the processes that a store is for, when none of them owns it. Torch-free.

A member is a session whose role says so (``MEMBER_ROLE``), opened beside those of the process's
client and used for nothing else: it comes over the control socket or a relay, as all others do. It
leaves by a ``Shutdown``, or when its process ends. The server ends with its last member.
"""

from __future__ import annotations

from collections.abc import Callable

from torchstore_core.contracts.engine import MEMBER_ROLE
from torchstore_core.errors import StoreClosedError
from torchstore_core.server.index.records import SessionRecord

__all__ = ["Members", "is_member"]


def is_member(session: SessionRecord) -> bool:
    """Whether the session keeps the server running."""
    return session.facts.role == MEMBER_ROLE


class Members:
    """The members of one server.

    Args:
        ended: called once, when the last one has left or died.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._present: set[bytes] = set()
        self._any_joined = False
        self._over = False

    def joined(self, session: SessionRecord) -> None:
        """A session was opened.

        Raises:
            StoreClosedError: it is a member's, and the server ends already.
        """
        if is_member(session):
            if self._over:
                raise StoreClosedError("this server ends: its last rank has left")
            self._any_joined = True
            self._present.add(session.token)

    def left(self, session: SessionRecord) -> bool:
        """A session has left, or its process has died; whether it was the last member's."""
        if session.token not in self._present:
            return False
        self._present.remove(session.token)
        if not self._present:
            self._end()
        return not self._present

    def starter_ended(self) -> None:
        """Whoever started the server is gone: it ends, unless it has had members."""
        if not self._any_joined:
            self._end()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._ended()
