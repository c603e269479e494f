"""Keeping the log short: from time to time the state takes the place of what has led to it.

A forked child of the server writes the state of the moment of the fork into a new log, while the
server goes on. When the child has ended, the server copies what it has recorded meanwhile behind
that, leaves the new log with the keeper and goes on with it. Nobody waits for any of it but the
fork, which takes as long as copying the page tables of the server.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable

from torchstore_core.machine.processes import ProcessWatch
from torchstore_core.server.keeping.log import Log
from torchstore_core.server.keeping.recorded import RecordedController

__all__ = ["Compaction"]

log = logging.getLogger(__name__)

# A log is written anew when it has grown by so much since the last time: some 50 ms to repeat.
_WEIGHT = 20_000
_BYTES = 16 << 20
# Of a large store, so many times the state: writing that takes time, too.
_KEYS_A_RECORD = 4
_STATE_SHARE = 1
_FIRST_OTHER_FD = 3


class Compaction:
    """Of one server's log.

    Args:
        controller: whose log it is.
        keep: has the keeper hold another log instead.
    """

    def __init__(self, controller: RecordedController, keep: Callable[[int], None]) -> None:
        self._controller = controller
        self._keep = keep
        self._watch: ProcessWatch | None = None
        self._child = 0
        self._new: Log | None = None
        self._mark = 0
        self._state_bytes = 0
        self._begun = 0  # the weight when the child was forked
        self._before = 0  # the weight that is not worth another attempt

    @property
    def is_due(self) -> bool:
        """Whether the log has become long."""
        there = self._controller.log
        weight = _WEIGHT + len(self._controller.catalog.newest) // _KEYS_A_RECORD
        nbytes = self._state_bytes + _BYTES + self._state_bytes * _STATE_SHARE
        return there.weight - self._before > weight or there.nbytes > nbytes

    @property
    def is_running(self) -> bool:
        """Whether a child is writing a log."""
        return self._new is not None

    def begin(self) -> None:
        """Have a child write the state, unless one does already. On the running event loop."""
        if self._new is not None:
            return
        try:
            new = Log()
        except OSError as error:
            log.warning("the log stays as long as it is: %s", error)
            return
        self._mark, self._begun = self._controller.log.end, self._controller.log.weight
        try:
            child = os.fork()
        except OSError as error:
            log.warning("the log stays as long as it is: %s", error)
            new.close()
            return
        if not child:
            self._write(new)  # which does not return
        self._new, self._child = new, child
        self._watch = ProcessWatch(child, self._written)

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
        """The child has ended: use its log."""
        self._watch = None
        _, status = os.waitpid(self._child, 0)
        new, self._new = self._new, None
        if new is None:
            return
        if status:
            new.close()
            self._before = self._controller.log.weight  # try again, but not at once
            return
        new.refresh()
        self._state_bytes = new.nbytes
        old = self._controller.log
        new.append_from(old, self._mark)
        self._keep(new.fd)
        self._controller.log = new
        new.weight, self._before = old.weight - self._begun, 0
        old.close()

    def close(self) -> None:
        """The server ends; a child that is still writing does so in vain."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
