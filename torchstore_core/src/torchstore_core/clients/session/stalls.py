"""When a transfer to another process has stalled, although its transport still waits. Torch-free.

The limits of transports are long, because they know nothing of the operation that a transfer is a
part of. An operation with less time than that would end without having tried the next transport.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import TypeVar

from torchstore_core.clients.session.links import has_progress, link_errors
from torchstore_core.contracts.transport import Link, SupportsProgress
from torchstore_core.errors import StoreClosedError, TransportError
from torchstore_core.plugins.ranking import Candidate

log = logging.getLogger(__name__)
T = TypeVar("T")

# Of the time that the operation has left, a transfer may stand still for this share; but at least
# and at most for so many seconds.
_SHARE = 1 / 3
_LEAST_S = 1.0
_MOST_S = 20.0
# At the end of its operation, a transfer that has stood still for so long is not merely late.
_LATE_S = 0.5
# A link that does not report progress is given the time that a slow network takes.
_SLOWER_THAN_BID = 20.0
_SLOW_BYTES_PER_S = 10e6
_LOOK_S = 0.25  # the pause before progress is looked at again
# A transfer that is cancelled has so long to end; the contract gives it a second.
_CANCEL_S = 2.0


class StallWatch:
    """Watches one transfer over one link, whose connecting is a part of it.

    Args:
        deadline: end of the operation, by ``time.perf_counter()``.
        last: whether no other transport is left, so that waiting is the best there is to do.
    """

    def __init__(self, candidate: Candidate, nbytes: int, deadline: float, *, last: bool) -> None:
        self._transport = candidate.spec.name
        self._deadline = deadline
        self._last = last
        self._moved_at = time.perf_counter()
        self._limit_s = min(max(_SHARE * (deadline - self._moved_at), _LEAST_S), _MOST_S)
        slow = max(nbytes / _SLOW_BYTES_PER_S, _SLOWER_THAN_BID * candidate.cost_s(nbytes))
        self._slow_s = _LEAST_S + slow
        self._link: Link | SupportsProgress | None = None
        self._progress = 0
        self._timer: asyncio.TimerHandle | None = None
        self._failed: TransportError | StoreClosedError | None = None

    def on_link(self, link: Link) -> None:
        """The link has been connected, and begins to move the bytes.

        Raises:
            TransportError: it cannot tell its progress.
        """
        self._moved_at = time.perf_counter()
        self._link = link
        if has_progress(link):
            with link_errors():
                self._progress = link.progress()
        else:
            self._limit_s = max(self._limit_s, self._slow_s)

    def still_s(self) -> float:
        """Return for how many seconds nothing has been seen to move.

        Raises:
            TransportError: the link cannot tell its progress.
        """
        now = time.perf_counter()
        if has_progress(self._link):
            with link_errors():
                progress = self._link.progress()
                if progress != self._progress:
                    self._progress, self._moved_at = progress, now
        return now - self._moved_at

    async def until_stalled(self, work: Awaitable[T]) -> T:
        """Await the transfer. If it stalls, cancel it, and wait until it has ended.

        Raises:
            TransportError: it has stalled, or its link cannot tell its progress.
        """
        try:
            async with asyncio.timeout(None) as limit:
                self._look(limit)
                try:
                    return await work
                finally:
                    if self._timer is not None:
                        self._timer.cancel()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._failed or self._stalled() from error

    def at_deadline(self) -> TransportError | None:
        """The transfer was cancelled. Return the link's error if that was because the operation's
        time is over, and the transfer stood still.
        """
        if time.perf_counter() < self._deadline:
            return None
        reports = self._link is None or has_progress(self._link)
        enough = _LATE_S if reports else self._slow_s
        # Not looked at again: ending the transfer has changed the link's progress.
        return self._stalled() if time.perf_counter() - self._moved_at >= enough else None

    def _look(self, limit: asyncio.Timeout) -> None:
        """Expire the limit if nothing has moved for too long, else look again later."""
        left = 0.0
        try:
            left = self._limit_s - self.still_s()
        except (TransportError, StoreClosedError) as error:
            self._failed = error
        loop = asyncio.get_running_loop()
        if self._failed is not None or not (left > 0 or self._last):
            self._timer = loop.call_later(_CANCEL_S, self._tell)
            limit.reschedule(0.0)
        elif time.perf_counter() >= self._deadline + _CANCEL_S:
            self._tell()
        else:
            pause = _LOOK_S if self._last else min(left, _LOOK_S)
            self._timer = loop.call_later(pause, self._look, limit)

    def _tell(self) -> None:
        log.warning(
            "transport %r goes on with a transfer that was cancelled; its call does not end before "
            "it does, because it may still use the memory",
            self._transport,
        )

    def _stalled(self) -> TransportError:
        still_s = time.perf_counter() - self._moved_at
        return TransportError(f"nothing has moved for {still_s:.1f} s")
