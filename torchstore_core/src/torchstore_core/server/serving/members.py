"""Members: the processes whose end ends a store that no single one of them owns. Torch-free.

A member is a session with the role ``MEMBER_ROLE``, which a process opens in addition to its
client's session and uses for nothing else. Like any other session it may come through a relay. It
leaves with a ``Shutdown``, or when its process ends. The server ends with its last member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torchstore_core.contracts.engine import MEMBER_ROLE
from torchstore_core.errors import StoreClosedError
from torchstore_core.server.index.records import SessionRecord


def is_member(session: SessionRecord) -> bool:
    """Return whether the session is a member's, which keeps the server running."""
    return session.facts.role == MEMBER_ROLE


class Members:
    """The members of one server.

    Args:
        ended: called once, when the last member has left or died.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._present: set[bytes] = set()
        self._any_joined = False
        self._over = False

    def joined(self, session: SessionRecord) -> None:
        """Count a session that was opened, if it is a member's.

        Raises:
            StoreClosedError: it is a member's, but the server is already ending.
        """
        if is_member(session):
            if self._over:
                raise StoreClosedError("this server ends: its last rank has left")
            self._any_joined = True
            self._present.add(session.token)

    def restored(self, sessions: Iterable[SessionRecord]) -> None:
        """Count those of an earlier life of this server that are members'."""
        self._present.update([one.token for one in sessions if is_member(one)])
        self._any_joined = bool(self._present)

    def left(self, session: SessionRecord) -> bool:
        """Remove a session that has left or whose process has died. Returns whether it was the last
        member's.
        """
        if session.token not in self._present:
            return False
        self._present.remove(session.token)
        if not self._present:
            self._end()
        return not self._present

    def starter_ended(self) -> None:
        """End the server, because its starter is gone, unless it has had members."""
        if not self._any_joined:
            self._end()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._ended()
