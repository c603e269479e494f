"""Thousands of cycles: descriptors, mappings and memory of client and server stay flat."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
from tests.memory import rss
from tests.reliability import children
from tests.reliability.harness import MB, Child, account, fds, maps
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


async def stays_flat(child: Child, server: int, cycles: int, seconds: float) -> None:
    """Neither the child, which reports at 20 % and at 100 % of its cycles, each time within so
    many seconds, nor the server holds more at the end than it did at the beginning.
    """
    pids = {"client": child.pid, "server": server}
    early: dict[str, Sample] = {}
    for at in (cycles // 5, cycles):
        assert await child.said(seconds) == at
        # Leases are given back in the background, and so is the second log of a server that has
        # just written its log anew: that server must have been idle for a second or two.
        await until(nothing_is_held)
        for who, pid in pids.items():
            if who in early:
                await until(partial(has_as_few_fds, pid, early[who].fds))
                late = Sample.of(pid)
                assert late.maps <= early[who].maps + MAPS_GROWTH, who
                assert late.rss <= early[who].rss + RSS_GROWTH, who
            else:
                early[who] = Sample.of(pid)
        child.tell("go on")


def has_as_few_fds(pid: int, most: int) -> bool:
    return fds(pid) <= most


async def nothing_is_held() -> bool:
    seen = await account()
    return seen.leased == seen.unfinished == 0


@pytest.mark.parametrize(
    "cycles",
    [
        pytest.param(600, id="600"),
        pytest.param(300_000, id="300000", marks=pytest.mark.soak),
    ],
)
async def test_cycles_leave_nothing_behind(cycles: int):
    async with running_store(capacity=64 * MB) as client:
        server = (await ts.status()).controller_pid
        with Child(children.cycle, client.address, cycles) as child:
            await stays_flat(child, server, cycles, 180 + cycles / 100)
