"""When a log is written anew, and what memory is kept for that."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import NoReturn

import pytest
from tests.support import turn, until
from tests.unit.keeping.test_coming_back import (
    HERE,
    LinkToLogs,
    facts,
    inline,
    singleton,
    volumes,
)

from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.keeping.compaction import Compaction
from torchstore_core.server.keeping.log import Log
from torchstore_core.server.keeping.recorded import RecordedController
from torchstore_core.wire import messages as m

MIB = 1 << 20


class Recorded:
    """A controller with its compaction, and puts of 40 KB to one key."""

    def __init__(self, controller: RecordedController) -> None:
        self.controller = controller
        self.keeper = LinkToLogs()
        self.kept = self.keeper.kept
        self.compaction = Compaction(controller, self.keeper)
        self.session: SessionRecord = controller.open_session(facts(), HERE)
        self._number = 0

    def put(self, nbytes: int) -> None:
        for _ in range(nbytes // 40_000 + 1):
            self._number += 1
            number = self._number
            self.controller.put(self.session, m.Put(number, number, [inline("k", bytes(40_000))]))

    async def until_written(self) -> None:
        await until(lambda: not self.compaction.is_running)


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    with volumes(64 * MIB) as there:
        yield Recorded(RecordedController(Log(), there, singleton(), prefault=False))


async def test_it_begins_by_itself_before_the_log_takes_much_memory(recorded: Recorded) -> None:
    first = recorded.controller.log
    recorded.put(30 * MIB)
    await turn()
    assert not recorded.compaction.is_running
    recorded.put(6 * MIB)
    assert not recorded.compaction.is_running  # the state has no request that is not executed yet
    await turn()
    assert recorded.compaction.is_running
    await recorded.until_written()
    assert recorded.controller.log is not first
    assert recorded.kept == [recorded.controller.log.fd]
    assert recorded.controller.log.nbytes < MIB


async def test_what_came_while_it_was_written_is_not_carried_along_for_ever(
    recorded: Recorded,
) -> None:
    recorded.compaction.begin()
    recorded.put(40 * MIB)
    await recorded.until_written()
    assert len(recorded.kept) == 2
    assert recorded.controller.log.nbytes < MIB
    assert recorded.compaction.memory_nbytes < 100 * MIB


async def test_memory_is_given_back_when_nothing_is_recorded(recorded: Recorded) -> None:
    for _ in range(2):
        recorded.put(36 * MIB)
        await turn()
        await recorded.until_written()
    assert recorded.compaction.memory_nbytes > 60 * MIB  # warm, for what comes
    recorded.put(2 * MIB)
    recorded.compaction.look()
    assert recorded.compaction.memory_nbytes > 60 * MIB
    recorded.compaction.look()
    assert recorded.compaction.memory_nbytes < 4 * MIB
    recorded.put(36 * MIB)
    await turn()
    await recorded.until_written()
    assert recorded.controller.log.nbytes < MIB


async def test_one_that_fails_is_tried_again_when_as_much_has_come(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> NoReturn:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", refused)
        recorded.put(36 * MIB)
        await turn()
    recorded.put(20 * MIB)
    await turn()
    assert not recorded.compaction.is_running
    recorded.put(16 * MIB)
    await turn()
    assert recorded.compaction.is_running
    await recorded.until_written()
    assert recorded.controller.log.nbytes < MIB


async def test_a_log_that_the_keeper_cannot_hold_takes_nothing_over(recorded: Recorded) -> None:
    """What was recorded there would be lost with the server."""
    first = recorded.controller.log
    recorded.keeper.is_full = True
    recorded.put(36 * MIB)
    await turn()
    await recorded.until_written()
    assert recorded.controller.log is first
    assert not recorded.kept
    recorded.keeper.is_full = False
    recorded.put(36 * MIB)
    await turn()
    await recorded.until_written()
    assert recorded.kept == [recorded.controller.log.fd]
    assert recorded.controller.log.nbytes < MIB


async def test_a_server_that_ends_begins_none(recorded: Recorded) -> None:
    recorded.put(36 * MIB)
    recorded.compaction.close()
    await turn()
    assert not recorded.compaction.is_running
