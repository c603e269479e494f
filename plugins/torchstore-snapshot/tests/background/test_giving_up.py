"""What the writer of one rank does when its program gives a take up."""

from __future__ import annotations

import importlib
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.support import until

from torchstore_core.errors import LayoutMismatchError, StoreFullError
from torchstore_snapshot import StateDict, errors
from torchstore_snapshot.background import messages as m
from torchstore_snapshot.background.staging import begin_message
from torchstore_snapshot.background.writer import _Program, _serve
from torchstore_snapshot.format.paths import part_file
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.taking.take import Prepared, TakeOptions, prepare


class Writer:
    """The thread of a writer process that handles messages, and its program's end."""

    def __init__(self) -> None:
        here, self._there = socket.socketpair()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._program = _Program()
        args = (here, self._inbox, self._program)
        threading.Thread(target=_serve, args=args, daemon=True).start()
        self._there.settimeout(30)

    def tell(self, message: Any) -> None:
        self._program.note(message)
        self._inbox.put(message)

    def reply(self) -> Any:
        data = m.receive(self._there)
        assert data is not None
        return m.from_writer.decode(data)


_together = importlib.import_module("plugins.torchstore-snapshot.tests.background.test_together")
_takes_without_a_claim = _together._takes_without_a_claim


@pytest.fixture
def writer() -> Iterator[Writer]:
    made = Writer()
    yield made
    made._there.close()


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    state = {"m": StateDict(w=torch.empty(0), n=1)}
    options = TakeOptions(fsync=False)
    made = prepare(str(tmp_path / "s"), state, Ranks.alone(), None, options)
    assert made.claim is not None
    made.claim.release(keep_folder=True)
    return made._replace(claim=None)


def begun(writer: Writer, prepared: Prepared, timeout: float) -> Path:
    """A take of two ranks, of which this is rank 1, with nothing to be staged; its data file."""
    writer.tell(m.Join(1, prepared.url, prepared.take, 1, 2))
    begin = begin_message(prepared, 1)
    part = msgspec.structs.replace(begin.part, rank=1)
    writer.tell(msgspec.structs.replace(begin, timeout=timeout, part=part))
    return Path(prepared.url) / prepared.files[0].name


async def test_a_rank_keeps_its_files_once_it_has_reported(
    writer: Writer, prepared: Prepared
) -> None:
    file = begun(writer, prepared, 60.0)
    writer.tell(m.Finish(1))
    report = file.parent / part_file(prepared.take, 1)
    await until(report.exists, 30)
    writer.tell(m.Abandon(1, "it was interrupted"))
    reply = writer.reply()
    assert isinstance(reply, m.Failed)
    assert file.exists()  # rank 0 may know of it, and commit
    assert b"it was interrupted" in report.read_bytes()


async def test_whoever_waits_hears_that_a_take_was_given_up(
    writer: Writer, prepared: Prepared
) -> None:
    """Also if the writer had nothing to do when it was."""
    file = begun(writer, prepared, 30.0)
    await until(file.exists, 30)
    writer.tell(m.Abandon(1, "ValueError: no"))
    failed = writer.reply()
    assert (failed.error().message, failed.told) == ("ValueError: no", True)
    assert not file.exists()


async def test_a_rank_keeps_its_files_if_rank_0_is_late(writer: Writer, prepared: Prepared) -> None:
    file = begun(writer, prepared, 0.0)
    writer.tell(m.Finish(1))
    assert writer.reply().code == errors.RankFailedError.code
    assert file.exists()


async def test_a_rank_that_has_not_reported_leaves_no_files(
    writer: Writer, prepared: Prepared
) -> None:
    file = begun(writer, prepared, 60.0)
    writer.tell(m.Abandon(1, "it was interrupted"))
    report = file.parent / part_file(prepared.take, 1)
    await until(report.exists, 30)
    assert [*file.parent.iterdir()] == [report]


class _Lock:
    """Says that a second one waits for it."""

    def __init__(self) -> None:
        self._lock, self.wanted = threading.Lock(), threading.Event()

    def acquire(self) -> None:
        self._lock.acquire()

    def __enter__(self) -> None:
        self.wanted.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


async def test_a_rank_whose_program_has_ended_reports_nothing_else(
    writer: Writer, prepared: Prepared
) -> None:
    """The thread that writes would replace what the other one has just told the other ranks, which
    would wait for this one until they gave up.
    """
    lock = writer._program.committing = _Lock()  # type: ignore[assignment]
    file = begun(writer, prepared, 60.0)
    await until(file.exists, 30)
    writer._program.bury()
    report = file.parent / part_file(prepared.take, 1)
    said = report.read_bytes()
    writer.tell(m.Finish(1))
    await until(lambda: lock.wanted.is_set() or report.read_bytes() != said, 30)
    assert b"its program has ended" in report.read_bytes()


@pytest.mark.parametrize(
    "error",
    [
        *[getattr(errors, name)("what happened") for name in errors.__all__],
        LayoutMismatchError("what happened", key="m/w"),
        StoreFullError("what happened"),
        OSError(28, "No space left on device"),
        RuntimeError("what happened"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_reach_whoever_waits(error: Exception) -> None:
    sent = msgspec.msgpack.encode(m.Failed.of(1, error))
    found = m.from_writer.decode(sent).error()
    expected = errors.SnapshotError if isinstance(error, RuntimeError) else type(error)
    assert type(found) is expected
    text = "No space left" if isinstance(error, OSError) and error.errno else "what happened"
    assert text in str(found)
