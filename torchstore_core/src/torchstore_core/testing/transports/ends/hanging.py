"""Says which call of a transport does not return, and where it is."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from torchstore_core.server.stalled_loop import OURS, foreign, module_of, place_of, stack_of

__all__ = ["Alarm", "hanging_call"]


def hanging_call(loop: asyncio.AbstractEventLoop, thread: int | None) -> str:
    """Return which call the event loop of a thread waits for, or is busy with, as text for people;
    empty if no call of a transport is under way. For another thread than that.

    >>> loop = asyncio.new_event_loop()
    >>> hanging_call(loop, None)
    ''
    >>> loop.close()
    """
    frame = sys._current_frames().get(thread) if thread is not None else None
    stacks = [stack_of(frame)]
    try:
        stacks += [_coroutines(task) for task in asyncio.all_tasks(loop)]
    except RuntimeError:  # the tasks change: it does not hang there
        return ""
    said = [_in_words(stack) for stack in stacks]
    return next(filter(None, said), "")


def _coroutines(task: asyncio.Task[Any]) -> list[FrameType]:
    """The frames of what a task awaits, the outermost first."""
    frames: list[FrameType] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        for kind in ("cr", "gi", "ag"):
            if (frame := getattr(awaited, f"{kind}_frame", None)) is not None:
                frames.append(frame)
                break
        inner = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
        awaited = inner or getattr(awaited, "gi_yieldfrom", None)
    return frames


def _in_words(stack: list[FrameType]) -> str:
    """The call that the kit, or a volume, has made, and where that is; empty if there is none."""
    if not stack or not module_of(stack[0]).startswith(OURS):
        return ""  # a task of the transport itself
    # The other half is asked by the session's `_ask`, for itself or for the half that is here.
    asked = [str(f.f_locals["method"]) for f in stack if f.f_code.co_qualname == "Session._ask"]
    there = f"the server half's {asked[0]!r}" if asked else ""
    half = [frame for frame in stack if foreign(frame)]
    if not half:
        return f"{there} has not returned" if there else ""
    said = f"{half[0].f_code.co_qualname} has not returned"
    return f"{said}: it waits for {there}" if there else f"{said}: it is at {place_of(half[-1])}"


class Alarm:
    """Calls ``tell`` in a thread with what hangs, unless it is closed within ``seconds``. Create it
    in the thread that is watched, on its running event loop.
    """

    def __init__(self, seconds: float, tell: Callable[[str], None]) -> None:
        self._where = asyncio.get_running_loop(), threading.get_ident()
        self._tell = tell
        self._timer = threading.Timer(seconds, self._ring)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> Alarm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing hangs. Idempotent."""
        self._timer.cancel()

    def _ring(self) -> None:
        self._tell(hanging_call(*self._where) or "no call of the transport is under way")
