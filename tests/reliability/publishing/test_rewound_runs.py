"""Ranks that are killed, and a new run of them that goes back, under the eyes of readers."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
import torch
from tests.processes import fork_server
from tests.support import running_store

import torchstore_core as ts

ELEMENTS = 1 << 17


def rank(address: str, who: int, run: int, first: int, last: int) -> None:
    """Publish some steps, the first one by going back; then be killed."""

    async def publish() -> None:
        await ts.connect(address)
        await ts.put(f"here/{run}/{who}", 1)
        await ts.wait([f"here/{run}/0", f"here/{run}/1"])  # as the ranks of a job: all together
        for step in range(first, last + 1):
            number = 1000 * run + step
            weights = {f"large{who}": torch.full((ELEMENTS,), number), f"small{who}": number}
            await ts.put_state_dict(
                weights,
                "k",
                version=step,
                rewind=step == first,
                participants=2,
                participant=who,
                keep=3,
            )

    asyncio.run(publish())
    os.kill(os.getpid(), signal.SIGKILL)


async def follow(seen: list[tuple[int, int]], last: tuple[int, int]) -> None:
    """Take every version that comes, until the last one."""
    report = ts.StateDictReport()
    while not seen or seen[-1] != last:
        newer: dict[str, Any] = {"after": report.ref} if report.ref else {"min_version": 1}
        try:
            got = await ts.get_state_dict("k", report=report, **newer)
        except ts.VersionGoneError:
            report.ref = None
            continue
        numbers = {got["small0"], got["small1"], *got["large0"].tolist(), *got["large1"].tolist()}
        (number,) = numbers  # nothing of it is of another run, or of another step
        assert number % 1000 == report.version
        seen.append((number // 1000, report.version))


async def run_ranks(address: str, run: int, first: int, *last: int) -> None:
    context = fork_server()
    started = [
        context.Process(target=rank, args=(address, who, run, first, end), daemon=True)
        for who, end in enumerate(last)
    ]
    for process in started:
        process.start()
    for process in started:
        await asyncio.to_thread(process.join, 60)
        assert process.exitcode == -signal.SIGKILL


async def test_readers_never_see_two_runs_mixed():
    async with running_store(capacity=64 << 20, prefault=0) as store:
        seen: list[list[tuple[int, int]]] = [[], []]
        readers = [asyncio.create_task(follow(one, (3, 8))) for one in seen]
        await run_ranks(store.address, 1, 1, 7, 6)  # the second one dies before it has put step 7
        first = {version: ts.ObjectRef("k", version) for version in await ts.versions("k")}
        refs = await ts.wait("k", min_version=6)
        assert [*first] == [4, 5, 6]
        await run_ranks(store.address, 2, 5, 5, 4)  # one of them dies before it has put anything
        assert await ts.versions("k") == [4, 5, 6]
        await run_ranks(store.address, 3, 5, 8, 8)
        await asyncio.wait_for(asyncio.gather(*readers), 60)
        assert await ts.versions("k") == [6, 7, 8]
        with pytest.raises(ts.VersionGoneError):
            await ts.get(refs["k"])
        for one in seen:
            assert one == sorted(set(one))
            assert one[-1] == (3, 8)
            assert {run for run, _ in one} <= {1, 3}
