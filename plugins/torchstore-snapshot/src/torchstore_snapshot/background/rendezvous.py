"""How the writer processes of several ranks commit together: through files of the snapshot.

Each rank publishes what it has written as a *part*; rank 0 waits for all parts, commits, and
removes them. A rank that fails publishes that instead. No network between the processes is needed,
and none of them takes part in the program's collectives.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

import msgspec

from torchstore_snapshot.errors import (
    RankFailedError,
    SnapshotCorruptError,
    SnapshotFormatError,
    SnapshotNotFoundError,
)
from torchstore_snapshot.format.manifest import Manifest
from torchstore_snapshot.format.paths import part_file, take_of
from torchstore_snapshot.series.claims import Claim
from torchstore_snapshot.storage.base import Storage
from torchstore_snapshot.storage.opening import read_manifest
from torchstore_snapshot.taking.merging import Part
from torchstore_snapshot.taking.take import TakeOptions, commit

__all__ = ["commit_together", "rank_0_was_late", "report_failure"]

_LATE = "timeout"

_PAUSE_S = 0.02
_PAUSE_MAX_S = 1.0


class _Report(msgspec.Struct):
    rank: int
    part: Part | None = None
    error: str = ""


_reports = msgspec.json.Decoder(_Report)


def report_failure(storage: Storage, take: str, rank: int, error: str) -> None:
    """Tell the other ranks that this one failed. Raises OSError if the storage fails, too."""
    _publish(storage, take, _Report(rank, error=error))


def rank_0_was_late(error: BaseException) -> bool:
    """Whether this rank gave a take up because rank 0 took too long to commit it, which it may
    still do.
    """
    return isinstance(error, RankFailedError) and error.details["ranks"].get("0") == _LATE


def commit_together(
    storage: Storage,
    take: str,
    part: Part,
    size: int,
    options: TakeOptions,
    timeout: float,
    claim: Claim | None = None,
    committing: AbstractContextManager[object] | None = None,
) -> None:
    """Commit a take when all ranks have written their parts; return when it is committed.

    Args:
        timeout: seconds to wait for the other ranks.
        committing: entered while rank 0 makes the snapshot visible.

    Raises:
        RankFailedError: another rank failed, or took too long.
        SnapshotExistsError, LayoutMismatchError, OSError: as for
            :func:`~torchstore_snapshot.taking.take.commit`.
    """
    if size == 1:
        with committing or nullcontext():
            commit(storage, take, [part], options, claim=claim)
        return
    _publish(storage, take, _Report(part.rank, part))
    waiting = _Waiting(storage, take, size, timeout)
    if part.rank:
        waiting.for_commit()
        return
    parts = waiting.for_parts()
    try:
        with committing or nullcontext():
            commit(storage, take, parts, options, claim=claim)
    except Exception as error:
        report_failure(storage, take, part.rank, f"{type(error).__name__}: {error}")
        raise
    for rank in range(size):
        storage.delete(part_file(take, rank))


def _publish(storage: Storage, take: str, report: _Report) -> None:
    storage.publish(
        part_file(take, report.rank),
        msgspec.json.encode(report),
        take=take,
        overwrite=True,
        durable=False,
    )


class _Waiting:
    """Looks at the snapshot's folder, less and less often."""

    def __init__(self, storage: Storage, take: str, size: int, timeout: float) -> None:
        self._storage = storage
        self._take = take
        self._size = size
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._pause = _PAUSE_S
        self._found: dict[int, Part] = {}

    def for_parts(self) -> list[Part]:
        while True:
            self._look()
            if len(self._found) == self._size:
                return [self._found[rank] for rank in range(self._size)]
            self._wait(sorted(set(range(self._size)) - set(self._found)))

    def for_commit(self) -> None:
        while True:
            if self._committed():
                return
            self._look(only=0)
            self._wait([0])

    def _committed(self) -> bool:
        try:
            manifest: Manifest = read_manifest(self._storage)
        except (SnapshotNotFoundError, SnapshotFormatError, SnapshotCorruptError):
            return False  # not yet: what is there may be damaged, and about to be replaced
        return manifest.take == self._take

    def _look(self, only: int | None = None) -> None:
        """Read the parts that have arrived.

        Raises:
            RankFailedError: a rank has failed.
        """
        names = {info.name for info in self._storage.list() if take_of(info.name) == self._take}
        for rank in range(self._size):
            if part_file(self._take, rank) not in names or rank in self._found:
                continue
            try:
                report = _reports.decode(self._storage.read(part_file(self._take, rank)))
            except FileNotFoundError:
                continue  # committed in the meantime
            if report.part is not None:
                if only is None:
                    self._found[rank] = report.part
                continue
            raise RankFailedError(
                f"given up, because rank {rank} failed: {report.error}",
                details={"ranks": {str(rank): report.error}},
            )

    def _wait(self, ranks: list[int]) -> None:
        if time.monotonic() > self._deadline:
            which = ", ".join(map(str, ranks))
            raise RankFailedError(
                f"given up, because rank {which} had not written its part "
                f"{self._timeout:.0f} s after this one",
                details={"ranks": {str(rank): _LATE for rank in ranks}},
            )
        time.sleep(self._pause)
        self._pause = min(self._pause * 1.3, _PAUSE_MAX_S)
