"""Says which call of a transport does not return, and where it is."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Alarm", "hanging_call"]

# Of the coroutines and frames on the way to a half, these are not the half's own.
_OURS = ("torchstore_core", "__main__")


def hanging_call(loop: asyncio.AbstractEventLoop, thread: int | None) -> str:
    """Return which call the event loop of a thread waits for, or is busy with, as text for people;
    empty if no call of a transport is under way. For another thread than that.

    >>> loop = asyncio.new_event_loop()
    >>> hanging_call(loop, None)
    ''
    >>> loop.close()
    """
    frame = sys._current_frames().get(thread) if thread is not None else None
    stacks = [_stack(frame)]
    try:
        stacks += [_coroutines(task) for task in asyncio.all_tasks(loop)]
    except RuntimeError:  # the tasks change: it does not hang there
        return ""
    said = [_in_words(stack) for stack in stacks]
    return next(filter(None, said), "")


def _stack(frame: FrameType | None) -> list[FrameType]:
    """The frames that a thread runs, the outermost first, from where its event loop runs a task."""
    frames: list[FrameType] = []
    while frame is not None and _module(frame) != "asyncio.events":
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


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
    if not stack or not _module(stack[0]).startswith(_OURS):
        return ""  # a task of the transport itself
    # The other half is asked by the session's `_ask`, for itself or for the half that is here.
    asked = [str(f.f_locals["method"]) for f in stack if f.f_code.co_qualname == "Session._ask"]
    there = f"the server half's {asked[0]!r}" if asked else ""
    half = [frame for frame in stack if _is_foreign(frame)]
    if not half:
        return f"{there} has not returned" if there else ""
    said = f"{half[0].f_code.co_qualname} has not returned"
    return f"{said}: it waits for {there}" if there else f"{said}: it is at {_place(half[-1])}"


def _is_foreign(frame: FrameType) -> bool:
    name = _module(frame)
    return not name.startswith(_OURS) and name.partition(".")[0] not in sys.stdlib_module_names


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _place(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


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
