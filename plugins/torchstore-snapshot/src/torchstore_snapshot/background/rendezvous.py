"""How the writer processes of several ranks commit together: through files of the snapshot.

Each rank publishes what it has written as a *part*; rank 0 waits for all parts, commits, and says
so in place of each part, which the rank then removes. A rank that fails publishes that instead, or
an empty file if there is no room for more. No network between the processes is needed, and none of
them takes part in the program's collectives.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import msgspec

from torchstore_snapshot.committing.merging import Part
from torchstore_snapshot.committing.options import TakeOptions
from torchstore_snapshot.committing.publishing import commit
from torchstore_snapshot.errors import (
    RankFailedError,
    SnapshotCorruptError,
    SnapshotFormatError,
    SnapshotNotFoundError,
    TakeLostError,
)
from torchstore_snapshot.format.paths import MANIFEST, claim_file, part_file, take_of
from torchstore_snapshot.series.claims import Claim, require
from torchstore_snapshot.storage.base import FileInfo, Storage
from torchstore_snapshot.storage.opening import read_manifest

__all__ = ["commit_together", "rank_0_was_late", "report_failure"]

_LATE = "timeout"
_NO_ROOM = "the storage had no room to say why; the disk may be full"

_PAUSE_S = 0.02
_PAUSE_MAX_S = 1.0
# Seconds that a rank which sees that the take is committed waits for rank 0 to say so, too.
_TOLD_S = 10.0


class _Report(msgspec.Struct):
    """What a rank says in its file; or, once it is ``committed``, what rank 0 says there."""

    rank: int
    part: Part | None = None
    error: str = ""
    committed: bool = False


_reports = msgspec.json.Decoder(_Report)


def report_failure(storage: Storage, take: str, rank: int, error: str) -> None:
    """Tell the other ranks that this one failed, also if there is no room to say why: an empty file
    says that much, and takes no space.

    Raises:
        OSError: the storage fails for another reason.
    """
    try:
        _publish(storage, take, _Report(rank, error=error))
    except ConnectionError:
        raise  # to ask a server that cannot be reached once more would only take longer
    except OSError:
        storage.publish(part_file(take, rank), b"", take=take, overwrite=True, durable=False)


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
    check: Callable[[], None] = lambda: None,
) -> None:
    """Commit a take when all ranks have written their parts; return when it is committed.

    Args:
        timeout: seconds to wait for the other ranks.
        committing: entered while this rank reports its part, and while rank 0 makes the snapshot
            visible: whoever holds it has the last word about this rank.
        check: raises if this rank gives the take up; called while it waits, and before it commits.

    Raises:
        RankFailedError: another rank failed, or took too long.
        TakeLostError: the take was given up by a garbage collection.
        SnapshotExistsError, LayoutMismatchError, OSError: as for
            :func:`~torchstore_snapshot.committing.publishing.commit`.
    """
    committing = committing or nullcontext()
    if size == 1:
        with committing:
            check()
            commit(storage, take, [part], options, claim=claim)
        return
    with committing:
        nbytes = _publish(storage, take, _Report(part.rank, part))
    waiting = _Waiting(storage, take, size, timeout, check)
    if part.rank:
        waiting.for_commit(part.rank, nbytes)
        return
    parts = waiting.for_parts()
    try:
        with committing:
            check()
            commit(storage, take, parts, options, claim=claim)
    except Exception as error:
        report_failure(storage, take, part.rank, f"{type(error).__name__}: {error}")
        raise
    # It is committed, whatever happens now: a rank that is not told sees the manifest.
    with contextlib.suppress(OSError):
        for rank in range(1, size):
            _tell(storage, take, rank)
        storage.delete(part_file(take, 0))


def _tell(storage: Storage, take: str, rank: int) -> None:
    """Tell another rank that the take is committed. If there is no room to say so, its report is
    removed: it then looks at the manifest at once.
    """
    try:
        _publish(storage, take, _Report(rank, committed=True))
    except ConnectionError:
        raise
    except OSError:
        storage.delete(part_file(take, rank))


def _publish(storage: Storage, take: str, report: _Report) -> int:
    """Returns the size of the file."""
    data = msgspec.json.encode(report)
    name = part_file(take, report.rank)
    storage.publish(name, data, take=take, overwrite=True, durable=False)
    return len(data)


class _Waiting:
    """Looks at the snapshot's folder, less and less often."""

    def __init__(
        self, storage: Storage, take: str, size: int, timeout: float, check: Callable[[], None]
    ) -> None:
        self._storage = storage
        self._take = take
        self._size = size
        self._timeout = timeout
        self._check = check
        self._deadline = time.monotonic() + timeout
        self._pause = _PAUSE_S
        self._seen: dict[str, FileInfo] = {}

    def for_parts(self) -> list[Part]:
        """Return the parts of all ranks, when all have reported."""
        found: dict[int, Part] = {}
        while True:
            files = self._files()
            for rank in range(self._size):
                report = self._new(files, part_file(self._take, rank)) and self._report(rank)
                if report and report.part is not None:
                    found[rank] = report.part
            if len(found) == self._size:
                return [found[rank] for rank in range(self._size)]
            self._wait(sorted(set(range(self._size)) - set(found)))

    def for_commit(self, own: int, nbytes: int) -> None:
        """Return when rank 0 says that it has committed. It says so in the file of this rank,
        because the manifest may be that of a later take by the time that this one looks. If this
        rank sees the manifest first, it waits nevertheless: the file would come back after it was
        removed. Unless rank 0 says nothing, because it was killed. That the claim has ended says as
        much of a take that is not committed.

        Args:
            own: this rank.
            nbytes: the size of what it has reported.
        """
        name = part_file(self._take, own)
        committed = False
        told_by: float | None = None  # the take has ended: when this is over, at the latest
        while True:
            files = self._files()
            mine = files.get(name)
            if mine is None or mine.nbytes != nbytes:
                report = self._report(own)
                if report is not None and report.committed:
                    self._storage.delete(name)
                    return
            committed = committed or (self._new(files, MANIFEST) and self._committed())
            if told_by is None and (committed or self._ended(files)):
                told_by = time.monotonic() + _TOLD_S
            late = told_by is not None and time.monotonic() > told_by
            if committed and (mine is None or late):
                self._storage.delete(name)
                return
            if mine is None and self._committed():  # since its files were listed
                return
            if not committed and (mine is None or late):
                raise TakeLostError(
                    f"the take {self._take} at {self._storage.url!r} was given up, or what rank "
                    f"{own} had reported of it was removed, by a garbage collection or by somebody "
                    "else; take the snapshot again",
                    details={"path": self._storage.url, "take": self._take},
                )
            if not committed and self._new(files, part_file(self._take, 0)):
                self._report(0)
            if committed:
                time.sleep(_PAUSE_S)
            else:
                self._wait([0])

    def _ended(self, files: dict[str, FileInfo]) -> bool:
        """Whether the claim of the take is gone, or says that it was given up."""
        name = claim_file(self._take)
        if name in files and not self._new(files, name):
            return False
        try:
            require(self._storage, self._take)
        except TakeLostError:
            return True
        return False

    def _files(self) -> dict[str, FileInfo]:
        return {
            info.name: info
            for info in self._storage.list()
            if info.name == MANIFEST or take_of(info.name) == self._take
        }

    def _new(self, files: dict[str, FileInfo], name: str) -> bool:
        """Whether a file is there, and is not as it was the last time."""
        info = files.get(name)
        if info is None or self._seen.get(name) == info:
            return False
        self._seen[name] = info
        return True

    def _committed(self) -> bool:
        try:
            return read_manifest(self._storage).take == self._take
        except (SnapshotNotFoundError, SnapshotFormatError, SnapshotCorruptError):
            return False  # not yet: what is there may be damaged, and about to be replaced

    def _report(self, rank: int) -> _Report | None:
        """Read what is in the file of a rank; None if there is none any more.

        Raises:
            RankFailedError: the rank has failed.
        """
        try:
            data = self._storage.read(part_file(self._take, rank))
        except FileNotFoundError:
            return None
        report = _reports.decode(data) if data else _Report(rank, error=_NO_ROOM)
        if report.part is None and not report.committed:
            raise RankFailedError(
                f"given up, because rank {rank} failed: {report.error}",
                details={"ranks": {str(rank): report.error}},
            )
        return report

    def _wait(self, ranks: list[int]) -> None:
        self._check()
        if time.monotonic() > self._deadline:
            which = ", ".join(map(str, ranks))
            raise RankFailedError(
                f"given up, because rank {which} had not written its part "
                f"{self._timeout:.0f} s after this one",
                details={"ranks": {str(rank): _LATE for rank in ranks}},
            )
        time.sleep(self._pause)
        self._pause = min(self._pause * 1.3, _PAUSE_MAX_S)
