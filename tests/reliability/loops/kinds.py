"""The kinds of event loops that programs use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

__all__ = ["LOOPS", "NewLoop", "new_uvloop"]

NewLoop = Callable[[], asyncio.AbstractEventLoop]


def new_uvloop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


LOOPS = [
    pytest.param(asyncio.new_event_loop, id="asyncio"),
    pytest.param(new_uvloop, id="uvloop"),
]
