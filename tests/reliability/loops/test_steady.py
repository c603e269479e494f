"""Thousands of cycles: descriptors, mappings and memory of client and server stay flat."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from tests.reliability import children
from tests.reliability.harness import MB, Child, account, fds, maps, rss
from tests.support import running_store, until

import torchstore_core as ts

# Allocators move in steps; losing 1 KB in each cycle would come to eight times as much.
RSS_GROWTH = 1 * MB
MAPS_GROWTH = 10


class Sample(NamedTuple):
    """What a process holds."""

    fds: int
    maps: int
    rss: int

    @classmethod
    def of(cls, pid: int) -> Sample:
        return cls(fds(pid), maps(pid), rss(pid))


async def nothing_is_held() -> bool:
    seen = await account()
    return seen.leased == seen.unfinished == 0


@pytest.mark.parametrize(
    "cycles",
    [
        pytest.param(1_500, id="1500"),
        pytest.param(300_000, id="300000", marks=pytest.mark.soak),
    ],
)
async def test_cycles_leave_nothing_behind(cycles: int):
    async with running_store(capacity=64 * MB) as client:
        server = (await ts.status()).controller_pid
        with Child(children.cycle, client.address, cycles) as child:
            samples: list[dict[str, Sample]] = []
            for at in (cycles // 5, cycles):
                assert await child.said(60 + cycles / 100) == at
                # Leases are given back in the background.
                await until(nothing_is_held, 1)
                samples.append({"client": Sample.of(child.pid), "server": Sample.of(server)})
                child.tell("go on")
        early, late = samples
        for who in early:
            assert late[who].fds <= early[who].fds, who
            assert late[who].maps <= early[who].maps + MAPS_GROWTH, who
            assert late[who].rss <= early[who].rss + RSS_GROWTH, who
