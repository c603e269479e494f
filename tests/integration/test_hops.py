"""How many functions of ours a call takes on the client's side."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from tests.support import running_store

import torchstore_core as ts
from torchstore_core.machine import copying

MB = 1 << 20
#: From ``api.put`` to the copy; an older arrangement of the client had 38.
MOST = 18
#: To put 1 KB without a key, read it, and drop the reference; it was 136.
MOST_OF_SMALL = 74


async def test_a_put_is_few_functions_away_from_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Path(ts.__file__).parent
    calling: list[list[str]] = []
    copying_threads: list[list[str]] = []
    here = threading.get_ident()

    def stack(frame: FrameType | None) -> list[str]:
        names = []
        while frame is not None:
            code: CodeType = frame.f_code
            if ours in Path(code.co_filename).parents:
                names.append(f"{Path(code.co_filename).stem}.{code.co_qualname}")
            frame = frame.f_back
        return names

    def notice(frame: FrameType, event: str, what: Any) -> None:
        if event != "call":
            return
        if frame.f_code is copying.copy_runs.__code__:
            (calling if threading.get_ident() == here else copying_threads).append(stack(frame))
        elif frame.f_code is copying.run.__code__:
            calling.append(stack(frame))

    async with running_store(capacity=256 * MB) as client:
        value = torch.ones(64 * MB, dtype=torch.uint8)
        await client.put("t", value)
        monkeypatch.setattr(copying, "_pool", None)  # only new threads are watched
        threading.setprofile(notice)
        sys.setprofile(notice)
        try:
            await ts.put("t", value)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        assert torch.equal(await ts.get("t"), value)
    assert calling
    assert copying_threads
    deepest = max(calling, key=len), max(copying_threads, key=len)
    assert len(deepest[0]) + len(deepest[1]) <= MOST, deepest


async def test_a_small_value_takes_few_calls() -> None:
    """At the least: a reply that is late is waited for on the event loop, which takes more."""
    ours = str(Path(ts.__file__).parent)
    calls = 0

    def note(frame: FrameType, event: str, what: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(ours)

    async with running_store(capacity=64 * MB):
        value = torch.arange(256, dtype=torch.float32)
        least = sys.maxsize
        for _ in range(50):
            calls = 0
            sys.setprofile(note)
            try:
                ref = await ts.put_object(value)
                got = await ts.get(ref)
                del ref
            finally:
                sys.setprofile(None)
            assert torch.equal(got, value)
            least = min(least, calls)
    assert least <= MOST_OF_SMALL
