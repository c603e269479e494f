"""A take that goes on in the background."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
from collections.abc import Generator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any

from torchstore_core.clients.calls.arguments import check_timeout
from torchstore_core.errors import StoreTimeoutError, in_seconds
from torchstore_snapshot.errors import SnapshotWriterError

if TYPE_CHECKING:
    from torchstore_snapshot.api.snapshot import Snapshot

__all__ = ["PendingSnapshot"]

_unfinished: set[Future[None]] = set()


class PendingSnapshot:
    """A snapshot that is being written. The tensors that it was taken of may be changed.

    It can also be awaited, which returns the :class:`Snapshot`. The program may end normally before
    the snapshot is committed: it then ends when it is. If the program is killed, there is no
    snapshot. A forked child hears nothing of the takes of its parent, and cannot wait for them.
    """

    def __init__(self, snapshot: Snapshot, future: Future[None]) -> None:
        self.path = snapshot.path
        self._snapshot = snapshot
        self._future = future
        self._process = os.getpid()
        _unfinished.add(future)
        # Registered again, so that it runs before what ends the store: last come, first served.
        atexit.unregister(_finish)
        atexit.register(_finish)
        future.add_done_callback(_unfinished.discard)

    def __repr__(self) -> str:
        return f"<PendingSnapshot of {self.path!r}, {'done' if self.done() else 'writing'}>"

    def done(self) -> bool:
        """Whether the take has ended, successfully or not."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Snapshot:
        """Return the snapshot when it is committed, on all ranks.

        Args:
            timeout: seconds; None: wait as long as it takes.

        Raises:
            SnapshotWriterError: the process that writes has ended, or the store that the take was
                staged in; or this process was forked from the one that takes.
            SnapshotExistsError, RankFailedError, LayoutMismatchError, OSError: as for
                ``Snapshot.take``.
            StoreTimeoutError: it takes longer; it goes on, and may be waited for again.
            ConfigurationError: ``timeout`` is no number from 0, or None.
        """
        seconds = check_timeout(timeout)
        self._check_process()
        try:
            self._future.result(seconds)
        except FutureTimeoutError as error:
            if self._future.done():  # the take's own error
                raise
            raise StoreTimeoutError(
                f"the snapshot {self.path!r} was not written within {in_seconds(timeout)}",
                details={"operation": "wait", "timeout": timeout, "path": self.path},
            ) from error
        return self._snapshot

    def __await__(self) -> Generator[Any, None, Snapshot]:
        return self._result().__await__()

    def _check_process(self) -> None:
        if os.getpid() != self._process and not self._future.done():
            raise SnapshotWriterError(
                f"the snapshot {self.path!r} was being written when this process was forked from "
                f"process {self._process}, which alone hears of it: wait for it there",
                details={"path": self.path, "pid": self._process},
            )

    async def _result(self) -> Snapshot:
        self._check_process()
        await asyncio.shield(asyncio.wrap_future(self._future))
        return self._snapshot


def _finish() -> None:
    for future in [*_unfinished]:
        with contextlib.suppress(Exception, CancelledError):
            future.result()


# In a forked child nobody hears of the takes of its parent.
os.register_at_fork(after_in_child=_unfinished.clear)
