"""Keeping the log short: from time to time the state takes the place of what has led to it.

A forked child of the server writes the state of the moment of the fork into a new log, while the
server goes on. When the child has ended, and the keeper has the new log, the server copies what it
has recorded meanwhile behind that, has the keeper take it for the log, and goes on with it. Nobody
waits for any of it but the fork, which takes as long as copying the page tables of the server.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Callable
from functools import partial

from torchstore_core.errors import StoreFullError
from torchstore_core.machine.processes import ProcessWatch, how_ended
from torchstore_core.server.keeping.link import LOG, NEXT_LOG, KeeperLink
from torchstore_core.server.keeping.log import Log
from torchstore_core.server.keeping.recorded import RecordedController

log = logging.getLogger(__name__)

# A log is written anew when so much has come behind the state that it begins with: a tenth of a
# second to repeat. Writing a large state takes longer, and is worth more.
_BYTES = 8 << 20
_STATES = 8
# That is looked at from time to time. So much more is too much memory to wait for it.
_AT_ONCE = 24 << 20
# A server that has recorded no more since the last look has no use for memory to write to.
_IDLE = 1 << 20
# How long to wait before a log that cannot grow is written anew, again.
_AGAIN_S = 5.0
_FIRST_OTHER_FD = 3


def _soon(call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(call)


class Compaction:
    """Of one server's log.

    Args:
        controller: whose log it is.
        keeper: has the log.
    """

    def __init__(self, controller: RecordedController, keeper: KeeperLink) -> None:
        self._controller = controller
        self._keeper = keeper
        self._watch: ProcessWatch | None = None
        self._child = self._status = 0
        self._is_kept: bool | None = None  # by the keeper; None: it has not answered
        self._new: Log | None = None
        self._mark = 0
        # Of the state that the log begins with, and of what had come behind it when one failed.
        self._state_bytes, self._in_vain = controller.state_nbytes, 0
        self._spare: Log | None = None
        self._seen = 0
        self._not_before = 0.0
        self._closed = False
        self._expect_more()

    @property
    def is_due(self) -> bool:
        """Whether the log has become long."""
        return self._behind > self._most

    @property
    def _behind(self) -> int:
        return self._controller.log.nbytes - self._state_bytes - self._in_vain

    @property
    def _most(self) -> int:
        return _BYTES + self._state_bytes // _STATES

    @property
    def memory_nbytes(self) -> int:
        """How much memory the logs have, in bytes."""
        logs = (self._controller.log, self._new, self._spare)
        return sum(log.memory_nbytes for log in logs if log is not None)

    def _expect_more(self) -> None:
        """Look again when so much has come that the next look would be late."""
        log = self._controller.log
        # The request that was recorded is executed and answered first: the state must include it,
        # and nobody waits for memory.
        log.expect(log.end - self._behind + self._most + _AT_ONCE, partial(_soon, self.begin))
        log.when_used = partial(_soon, log.make_ready)
        log.make_ready()

    def look(self) -> None:
        """Begin if it is due, or give back memory that is not needed; and do what waits for room
        in the log. From time to time, on the running event loop.
        """
        self._controller.catch_up()
        end = self._controller.log.end
        recorded, self._seen = end - self._seen, end
        if self.is_due or self._may_make_room():
            self.begin()
        elif self._spare is not None and 0 <= recorded < _IDLE:
            self._spare.close()
            self._spare = None
            self._controller.log.give_back()

    def _may_make_room(self) -> bool:
        """Whether the log cannot grow, and the state may take less room than what has led to it. It
        is not tried all the time.
        """
        log, now = self._controller.log, asyncio.get_running_loop().time()
        if not log.is_full or log.nbytes < self._state_bytes + _IDLE or now < self._not_before:
            return False
        self._not_before = now + _AGAIN_S
        return True

    @property
    def is_running(self) -> bool:
        """Whether a child is writing a log."""
        return self._new is not None

    def begin(self) -> None:
        """Have a child write the state, unless one does already. On the running event loop."""
        if self._new is not None or self._closed:
            return
        # Two logs take turns: writing to memory for the first time would cost a put most.
        new, self._spare = self._spare, None
        self._mark = self._controller.log.end
        try:
            new = new or Log()
            child = os.fork()
        except (OSError, StoreFullError) as error:
            log.warning("the log stays as long as it is: %s", error)
            self._spare = new
            self._failed()
            return
        if not child:
            self._write(new)  # which does not return
        self._new, self._child = new, child
        self._watch = ProcessWatch(child, self._written)
        self._is_kept = None
        self._keeper.ask_to_keep(NEXT_LOG, new.fd, self._answered)

    def _write(self, new: Log) -> None:
        """In the child: write the state, and end."""
        status = 1
        try:
            gc.disable()
            # It must not keep open what belongs to the server: clients see their connections end.
            os.closerange(_FIRST_OTHER_FD, new.fd)
            os.closerange(new.fd + 1, os.sysconf("SC_OPEN_MAX"))
            self._controller.write_state(new)
            status = 0
        except BaseException:
            log.exception("the state could not be written")
        finally:
            os._exit(status)

    def _written(self) -> None:
        """The child has ended."""
        self._watch = None
        _, self._status = os.waitpid(self._child, 0)
        self._finish()

    def _answered(self, is_kept: bool) -> None:
        self._is_kept = is_kept
        self._finish()

    def _finish(self) -> None:
        """Use the new log, if it is written and kept."""
        if self._watch is not None or self._is_kept is None or self._closed or self._new is None:
            return
        new, self._new = self._new, None
        old = self._controller.log
        try:
            if self._status:
                how = how_ended(os.waitstatus_to_exitcode(self._status))
                raise StoreFullError(f"the process that was writing another {how}")
            if not self._is_kept:
                raise StoreFullError("the keeper has no file descriptor left for another")
            new.refresh()
            state_bytes = new.nbytes
            new.append_from(old, self._mark)
            self._keeper.rename(NEXT_LOG, LOG)
        except StoreFullError as error:
            log.warning("the log stays as long as it is: %s", error)
            new.close()
            self._keeper.drop(NEXT_LOG)
            self._failed()
            return
        self._state_bytes = state_bytes
        self._controller.log = new
        self._in_vain = 0
        old.clear(self._most + _AT_ONCE + self._state_bytes)
        self._spare = old
        self._go_on()

    def _failed(self) -> None:
        self._in_vain = self._controller.log.nbytes - self._state_bytes
        self._expect_more()

    def _go_on(self) -> None:
        """With what has been recorded meanwhile, which may be too much already."""
        self._expect_more()
        if self._behind > self._most + _AT_ONCE:
            self.begin()

    def close(self) -> None:
        """The server ends; a child that is still writing does so in vain."""
        self._closed = True
        if self._watch is not None:
            self._watch.close()
            self._watch = None
