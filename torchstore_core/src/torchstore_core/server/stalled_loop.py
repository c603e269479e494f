"""Says in the log where the event loop of a server stands still: plug-ins run on it, too."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from types import FrameType

from torchstore_core.errors import TransportNotReadyError, in_seconds
from torchstore_core.machine.threads import start_thread

__all__ = ["OURS", "LoopWatch", "foreign", "module_of", "place_of", "stack_of"]

log = logging.getLogger(__name__)

#: So often the loop is asked to turn, in seconds.
EVERY_S = 2.0
#: It stands still if it has not turned between so many questions.
_QUESTIONS = 5
#: Of the coroutines and frames on the way to a plug-in, these modules' are not its own.
OURS = ("torchstore_core", "__main__")
# From here on, a stack is that of a loop itself; those of compiled loops are not on it.
_LOOPS = ("asyncio.events", "asyncio.base_events", "asyncio.runners")


class LoopWatch:
    """Watches the running event loop of this thread, from another one, until it is closed.

    Seconds are counted in questions, not by a clock: a process that was stopped, or had no
    processor, has asked none meanwhile, and nothing is said of it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._turned = True
        self._closed = threading.Event()
        try:
            start_thread(self._run, "torchstore-loop-watch")
        except TransportNotReadyError:
            log.debug("no thread is left to watch the event loop", exc_info=True)

    def close(self) -> None:
        """Say nothing any more. Idempotent."""
        self._closed.set()

    def _run(self) -> None:
        unanswered = 0
        while not self._closed.wait(EVERY_S):
            if not self._turned:
                unanswered += 1
                if unanswered == _QUESTIONS:
                    self._tell()
                continue
            if unanswered >= _QUESTIONS:
                log.warning("the event loop goes on")
            unanswered, self._turned = 0, False
            try:
                self._loop.call_soon_threadsafe(self._turn)
            except RuntimeError:  # it was closed
                return

    def _turn(self) -> None:
        self._turned = True

    def _tell(self) -> None:
        frame = sys._current_frames().get(self._watched)
        log.warning(
            "the event loop has stood still for %s, and all calls of all clients wait for it: %s",
            in_seconds(EVERY_S * _QUESTIONS),
            _in_words(frame),
        )


def _in_words(frame: FrameType | None) -> str:
    """What a thread does: the call of a plug-in, or else a line of ours."""
    stack = stack_of(frame)
    theirs = [one for one in stack if foreign(one)]
    if theirs:
        call, at = theirs[0], theirs[-1]
        return (
            f"{call.f_code.co_qualname} of the plug-in {module_of(call)} has not returned, it is "
            f"at {place_of(at)}; what a server calls must not block"
        )
    ours = [one for one in stack if module_of(one).startswith(OURS)]
    return f"it is at {module_of(ours[-1])}:{ours[-1].f_lineno}" if ours else "nobody knows where"


def stack_of(frame: FrameType | None) -> list[FrameType]:
    """The frames that a thread runs, the outermost first, from where its event loop runs a task."""
    frames: list[FrameType] = []
    while frame is not None and module_of(frame) not in _LOOPS:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def foreign(frame: FrameType) -> bool:
    """Whether a frame is that of a plug-in, or of a library which it uses."""
    name = module_of(frame)
    return not name.startswith(OURS) and name.partition(".")[0] not in sys.stdlib_module_names


def module_of(frame: FrameType) -> str:
    """The name of the module that a frame runs in; empty if it has none."""
    return str(frame.f_globals.get("__name__", ""))


def place_of(frame: FrameType) -> str:
    """The file and the line at which a frame is."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
