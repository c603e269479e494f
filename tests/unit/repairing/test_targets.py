"""Where copies go if the store's strategy is broken."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence

import pytest

from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts
from torchstore_core.machine.topology import probe
from torchstore_core.server.index.records import Value
from torchstore_core.server.memory.segment import SegmentMemory
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.remote.attached import AttachedHalves
from torchstore_core.server.repairing.targets import Targets
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m


class Broken(Strategy, frozen=True, tag="broken"):
    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        raise RuntimeError("no idea")


def test_a_broken_strategy_is_complained_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Once for all values, and once more when other volumes are left."""
    here, facts = probe(), ClientFacts(1, "host", "host")
    with contextlib.closing(SegmentMemory("targets", 4096)) as memory:
        infos = [m.VolumeInfo(f"v{at}", at, os.getpid(), here, 4096, {}) for at in range(2)]
        volumes = [VolumeRecord(info, memory, AttachedHalves(info.id)) for info in infos]
        targets = Targets(volumes, Broken())
        meta = TensorMeta("uint8", (8,))
        values = [Value(key, meta, 8, 0, None, 0, facts, uses=1) for key in "abc"]
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
