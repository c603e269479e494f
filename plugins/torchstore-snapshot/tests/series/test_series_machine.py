"""Series under random steps: takes with and without bases, overwrites, deaths between any two
steps of a take, collections at any time, and clocks that jump. Every committed snapshot restores
bit-exactly.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator
from unittest import mock

import msgspec
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torchstore_snapshot import Snapshot, SnapshotNotFoundError, StateDict, TakeLostError, gc
from torchstore_snapshot.format.paths import claim_file
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.series import claims
from torchstore_snapshot.series.retiring import retire
from torchstore_snapshot.storage.opening import open_storage
from torchstore_snapshot.taking.take import (
    Part,
    Prepared,
    TakeOptions,
    commit,
    discard,
    prepare,
    write,
)

NAMES = st.sampled_from("abcd")
_numbers = itertools.count()
# What tensors hold: few values, so that some are unchanged from take to take.
VALUES = st.lists(st.integers(0, 3), min_size=4, max_size=4)


def _state(values: list[int]) -> dict[str, StateDict]:
    # Large enough to be referred to.
    return {"m": StateDict({f"w{i}": torch.full((1500,), float(v)) for i, v in enumerate(values)})}


class _Take:
    """A take that is under way."""

    def __init__(self, prepared: Prepared, values: list[int], name: str) -> None:
        self.prepared = prepared
        self.values = values
        self.name = name
        self.part: Part | None = None


class SeriesMachine(RuleBasedStateMachine):
    """The model: what each snapshot was taken of, by its name."""

    @initialize(kind=st.sampled_from(["files", "memory"]))
    def begin(self, kind: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="series-")
        self.place = self.folder if kind == "files" else f"memory://series{next(_numbers)}/x"
        self.model: dict[str, list[int]] = {}
        self.order: list[str] = []
        self.takes: list[_Take] = []
        self.deaths = 0
        self.clock = mock.patch("time.time", self.now)
        self.offset = 0.0
        self.clock.start()

    def now(self) -> float:
        return time.time_ns() / 1e9 + self.offset

    @rule(offset=st.sampled_from([-1e6, -1.0, 0.0, 1e6]))
    def set_the_clock(self, offset: float) -> None:
        self.offset = offset

    @precondition(lambda self: len(self.takes) < 3)
    @rule(name=NAMES, values=VALUES, base=st.none() | NAMES)
    def prepare(self, name: str, values: list[int], base: str | None) -> None:
        url = None if base is None else f"{self.place}/{base}"
        options = TakeOptions(overwrite=True, fsync=False, base=url, file_max=10_000)
        args = (f"{self.place}/{name}", _state(values), Ranks.alone(), None, options)
        if base is not None and base not in self.model:
            with contextlib.suppress(SnapshotNotFoundError):
                prepare(*args)
                raise AssertionError("there is no such base")
            return
        self.takes.append(_Take(prepare(*args), values, name))

    @precondition(lambda self: self.takes)
    @rule(which=st.integers(0, 2))
    def write(self, which: int) -> None:
        take = self.takes[which % len(self.takes)]
        if take.part is None:
            take.part = write(take.prepared)

    @precondition(lambda self: self.takes)
    @rule(which=st.integers(0, 2))
    def commit(self, which: int) -> None:
        take = self.takes.pop(which % len(self.takes))
        if take.part is None:
            take.part = write(take.prepared)
        prepared = take.prepared
        commit(prepared.storage, prepared.take, [take.part], prepared.options, claim=prepared.claim)
        self.model[take.name] = take.values
        if take.name in self.order:
            self.order.remove(take.name)
        self.order.append(take.name)

    @precondition(lambda self: self.takes)
    @rule(which=st.integers(0, 2))
    def fail(self, which: int) -> None:
        discard(self.takes.pop(which % len(self.takes)).prepared)

    @precondition(lambda self: self.takes)
    @rule(which=st.integers(0, 2), late=st.booleans())
    def die(self, which: int, late: bool) -> None:
        """Its process is gone: what there is of the take stays, with a claim of nobody."""
        take = self.takes.pop(which % len(self.takes))
        prepared = take.prepared
        assert prepared.claim is not None
        prepared.claim.stop()
        storage, name = prepared.storage, claim_file(prepared.take)
        record = claims.decode(storage.read(name))
        assert record is not None
        data = msgspec.json.encode(msgspec.structs.replace(record, started=1))
        storage.publish(name, data, take=prepared.take, overwrite=True, durable=False)
        self.deaths += 1
        if late and take.part is not None:  # it was only slow, but has been given up
            gc(self.place, grace=0)
            with contextlib.suppress(TakeLostError):
                commit(storage, prepared.take, [take.part], prepared.options, claim=prepared.claim)
                raise AssertionError("a take was committed that had been given up")

    @rule(keep_last=st.none() | st.integers(1, 3), dry_run=st.booleans())
    def collect(self, keep_last: int | None, dry_run: bool) -> None:
        busy = {take.name for take in self.takes}
        doomed = set(self.order[:-keep_last]) - busy if keep_last else set()
        report = gc(self.place, keep_last=keep_last, dry_run=dry_run, grace=0)
        assert set(report.dropped) == doomed
        assert set(report.running) == {take.prepared.take for take in self.takes}
        if not dry_run:
            for name in doomed:
                del self.model[name]
                self.order.remove(name)
            assert gc(self.place, dry_run=True, grace=0).files == ()

    @rule(name=NAMES)
    def collection_dies(self, name: str) -> None:
        """After it has made a snapshot invisible, before it removes anything."""
        if name in self.model and name not in {take.name for take in self.takes}:
            path = f"{self.place}/{name}"
            assert retire(open_storage(path), Snapshot(path).manifest)
            del self.model[name]
            self.order.remove(name)

    @invariant()
    def every_snapshot_is_whole(self) -> None:
        for name, values in getattr(self, "model", {}).items():
            own = _state([9] * 4)
            Snapshot(f"{self.place}/{name}").restore(own)
            assert [float(own["m"][f"w{i}"][-1]) for i in range(4)] == values
            assert not Snapshot(f"{self.place}/{name}").verify()

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        self.clock.stop()
        for take in self.takes:
            discard(take.prepared)
        gc(self.place, grace=0)
        files = {(n, i.name) for n in "abcd" for i in self._files(n)}
        referred = {
            (file.snapshot or name, file.name)
            for name in self.model
            for file in Snapshot(f"{self.place}/{name}").manifest.files
        }
        shutil.rmtree(self.folder)
        assert files == referred  # nothing is missing, and nothing is left

    def _files(self, name: str) -> Iterator[object]:
        for info in open_storage(f"{self.place}/{name}").list():
            if info.name.endswith(".json") and "claim" not in info.name:
                continue
            yield info


TestSeries = SeriesMachine.TestCase
TestSeries.settings = settings(max_examples=settings().max_examples // 5, stateful_step_count=25)
