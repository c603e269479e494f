"""Where further copies go, also if the store's strategy is broken."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts
from torchstore_core.machine.topology import probe
from torchstore_core.server.index.records import Value
from torchstore_core.server.memory.segment import SegmentMemory
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.remote.attached_volume import AttachedHalves
from torchstore_core.server.remote.volume_line import VolumeLine
from torchstore_core.server.repairing.targets import Targets
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_strategies import ReplicatedStrategy, SpreadStrategy

ME = ClientFacts(1, "host", "host")


class Broken(Strategy, frozen=True, tag="broken"):
    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        raise RuntimeError("no idea")


@contextlib.contextmanager
def volumes_on(*hosts: str) -> Iterator[list[VolumeRecord]]:
    """One volume on each host, of names like ``host_id/hostname``."""
    made: list[VolumeRecord] = []
    with contextlib.ExitStack() as opened:
        for at, host in enumerate(hosts):
            host_id, _, hostname = host.partition("/")
            there = msgspec.structs.replace(probe(), host_id=host_id, hostname=hostname)
            memory = opened.enter_context(contextlib.closing(SegmentMemory("targets", 4096)))
            info = m.VolumeInfo(f"v{at}", at, os.getpid(), there, 4096, {})
            made.append(VolumeRecord(info, memory, AttachedHalves(info.id, VolumeLine())))
        yield made


def value(key: str, *places: int) -> Value:
    """A value with copies on these volumes."""
    made = Value(key, TensorMeta("uint8", (8,)), 8, places[0], None, 0, ME, uses=1)
    made.more = tuple([(at, 0) for at in places[1:]])
    return made


def test_a_broken_strategy_is_complained_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Once for all values, and once more when other volumes are left."""
    with volumes_on("host", "host") as volumes:
        targets = Targets(volumes, Broken())
        values = [value(key, 0) for key in "abc"]
        entries = [targets.entry(value.key, value) for value in values]
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                order = targets.order()
                assert [list(order(entry)) for entry in entries] == [[0, 1]] * 3
            assert len(caplog.records) == 1
            assert "no idea" in caplog.text
            targets.look_again()
            targets.order()(entries[0])
            assert len(caplog.records) == 2


class Noting(Strategy, frozen=True, tag="noting"):
    """Says in the order of its answers what it was asked."""

    def place_copy(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        key: str,
        copies: Sequence[int],
    ) -> Sequence[int]:
        assert (client, nbytes, key) == (ME, 8, "w")
        assert [v.hostname for v in volumes] == ["one", "two", "one", "two"]
        return [v.index for v in volumes if v.index not in copies and not v.lost]


def test_a_strategy_is_told_which_copies_stay() -> None:
    with volumes_on("a/one", "b/two", "a/one", "b/two") as volumes:
        volumes[1].draining = True
        targets = Targets(volumes, Noting())
        targets.look_again()
        assert targets.order()(targets.entry("w", value("w", 0, 1)))[:2] == [2, 3]
        volumes[2].lost = "it is gone"
        targets.look_again()
        assert targets.order()(targets.entry("w", value("w", 1, 2)))[:2] == [0, 3]


def test_copies_stay_on_different_hosts_when_one_is_made_again() -> None:
    """The emptiest volume is beside the copy that is left: it is not taken."""
    with volumes_on("a", "a", "b", "b") as volumes:
        volumes[0].allocator.allocate(2048)
        volumes[3].allocator.allocate(1024)
        volumes[2].draining = True
        targets = Targets(volumes, ReplicatedStrategy(SpreadStrategy()))
        targets.look_again()
        assert targets.reserve(targets.entry("w", value("w", 0, 2)), targets.order()) is not None
        assert [v.free for v in volumes if not v.draining] == [2048, 4096, 3072 - 64]
