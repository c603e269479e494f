"""The lives of a simulated server that is killed at any moment; a keeper holds what outlives it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from tests.simulation.machine.disks import PAGE, MappedMemory
from tests.simulation.machine.memory import LINE, Memory
from tests.simulation.machine.servers import server_on
from tests.simulation.promises.states import OF_A_LIFE, state_of
from tests.simulation.promises.violations import Violation

from torchstore_core.server.keeping.link import KeeperLink
from torchstore_core.server.keeping.log import SPARE, Log
from torchstore_core.server.keeping.recorded import RecordedController
from torchstore_core.server.server import Server
from torchstore_core.server.spilling.spilling import Spilling
from torchstore_core.wire import messages as m
from torchstore_core.wire.repeating import number_of

if TYPE_CHECKING:
    from tests.simulation.machine.lasting import Lasting
    from tests.simulation.plans import Fault
    from tests.simulation.promises.histories import Call
    from tests.simulation.world import World

__all__ = ["Handled", "Killed", "Lives"]

# What a client sees of it at most.
_PAUSE_S = 0.5
_PUTS = frozenset((m.Put, m.Rewind, m.PutObject))


class Killed(SystemExit):
    """The server is killed here: nothing of it goes on."""


class Handled(msgspec.Struct, frozen=True):
    """A request that a server has not answered yet.

    Args:
        token: of its session.
    """

    token: bytes
    request: m.Message
    call: Call


class _Log(Log):
    """A log in which the death of its writer can be planned.

    Attributes:
        left: after how many more records it is killed; 0: it is not.
        is_over: it is dead, and writes nothing any more.
        most: where its memory ends, because the system has no more; 0: it has.
    """

    left = 0
    is_over = False
    most = 0

    def append(self, kind: int, session: int, body: bytes | bytearray, spare: int = 0) -> None:
        if self.is_over:
            return
        super().append(kind, session, body, spare)
        self.count()

    def choke(self, end: int) -> None:
        """From now on it has no more memory than up to here; 0: it has."""
        self.most = end
        if end:
            self._is_ready_to(min(self._ready, end))

    def make_ready(self) -> None:
        if not self._memory.closed:  # another one has taken its place, and did so at once
            super().make_ready()

    def _populate(self, begin: int, nbytes: int) -> None:
        """Pages come when they are written to: most of them never are."""

    def _provide(self, end: int) -> None:
        if not self.most:
            super()._provide(end)
        elif end > self.most:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            self._is_ready_to(end)

    def count(self) -> None:
        """It has done something that outlives it.

        Raises:
            Killed: it was the last thing.
        """
        if self.left:
            self.left -= 1
            if not self.left:
                self.is_over = True
                raise Killed


class _Link(KeeperLink):
    """The connection of one life to the keeper, which reads at once what it is told."""

    def __init__(self, held: dict[str, Any], facts: dict[str, str], life: int) -> None:
        self.life = life
        self.opened: _Log | None = None
        self.facts = facts
        self._held = held
        self._kept = dict(held)

    def log(self) -> _Log:
        self.opened = _Log(self.kept("log"))
        return self.opened

    def keep(self, name: str, fd: Any, **facts: str) -> None:
        self.facts.update(facts)
        if isinstance(fd, int):
            self._held[name] = os.dup(fd)
        elif name not in self._held:
            self._held[name] = fd
            if self.opened is not None:
                self.opened.count()

    def note(self, **facts: str) -> None:
        self.facts.update(facts)

    def drop(self, name: str) -> None:
        connection = self._held.pop(name, None)
        if connection is not None:
            connection.dropped()


class Lives:
    """The server of a run; after a death the next one, of what the keeper has.

    Attributes:
        server: the one that lives.
        deaths: at which steps it was killed.
        connections: all that it has, in the order in which they were made; if it comes back.
        is_dying: it is dead, and nobody hears what is left on its loop.
    """

    server: Server

    def __init__(self, world: World) -> None:
        self._world = world
        kind = MappedMemory if world.plan.pages else Memory
        self._memories = [kind(lines * LINE) for lines in world.plan.capacities]
        self.memories = self._memories
        self.deaths: list[int] = []
        self.connections: dict[Lasting, None] = {}
        self.is_dying = False
        self._held: dict[str, Any] = {}
        self._facts: dict[str, str] = {}
        self._life = 0
        self._log: _Log | None = None
        self._spilling: Spilling | None = None
        self._accepts = False  # connections of which nothing was read are lost, too
        self._after_a_message = self._is_writing = False
        self._most = 0  # where the log's memory ends
        self._chokes = 0  # how many of these last

    def begin(self) -> None:
        """The next life."""
        world = self._world
        self._life += 1
        link = _Link(self._held, self._facts, self._life) if world.plan.kept else None
        plan = world.plan
        place = "" if world.disk is None else world.disk.place
        where = self._memories, world.halves, plan.copies, place, plan.pages * PAGE
        self.server = server_on(world.loop, *where, link)
        controller = self.server.controller
        controller.repairs.copiers.start = world.copier.start
        self._spilling = controller.spilling
        parts = controller.catalog, controller.spilling, controller.holds, controller.detached
        world.ending += self.server, controller, *parts
        if link is not None:
            self._log = self.controller.log  # type: ignore[assignment]
            link.opened.choke(self._most)  # type: ignore[union-attr]
            self._take(link)

    @property
    def controller(self) -> RecordedController:
        """Of the server that lives, which comes back."""
        controller = self.server.controller
        assert isinstance(controller, RecordedController)
        return controller

    def close(self) -> None:
        """Nothing is left of them."""
        if self._log is not None:
            self._log.close()
        if self._spilling is not None:
            self._spilling.close()
        if self._world.disk is not None:
            self._world.disk.close()
        for fd in self._held.values():
            if isinstance(fd, int):
                os.close(fd)
        for memory in self._memories:
            memory.close()

    # ---- death ----------------------------------------------------------------------------

    def kill(self, fault: Fault) -> None:
        """Kill it now; or later, in the midst of something.

        Raises:
            Killed: now.
        """
        if self._log is None:
            return
        self._accepts = fault.broken
        if not fault.keep:
            raise Killed
        if fault.broken:
            self._after_a_message = True
        else:
            self._log.left = fault.keep

    def handled(self) -> None:
        """A message was handled that is still to be taken out of the kernel's buffer.

        Raises:
            Killed: before that.
        """
        if self._after_a_message:
            self._after_a_message = False
            raise Killed

    def write_anew(self, fault: Fault) -> None:
        """Write the state of now into a new log, which takes the place of the old one later: see
        ``Compaction``, whose child does this.
        """
        old = self._log
        if old is None or self._is_writing or self._most:
            return
        self._is_writing = True
        new, mark, life = _Log(), old.end, self._life
        self.controller.write_state(new)

        def written() -> None:
            self._is_writing = False
            if life != self._life or self._most:  # its server is dead, or has no memory for it
                new.close()
                return
            new.refresh()
            new.append_from(old, mark)
            new.left = old.left
            os.close(self._held["log"])
            self._held["log"] = os.dup(new.fd)
            self.controller.log = self._log = new
            old.close()

        self._world.once(("written", fault.number), written)

    def choke(self, fault: Fault) -> None:
        """The system has no more memory for the log, for so many turns; and the log has little left
        of what is kept for what cannot be refused, or all of it.
        """
        if self._log is None:
            return
        left = (0, 40, 120)[fault.keep % 3] if fault.broken else SPARE + 200
        if not self._most:
            self._most = self._log.end + left
            self._log.choke(self._most)
        self._chokes += 1
        turns = fault.keep

        def turn() -> None:
            nonlocal turns
            turns -= 1
            if turns > 0:
                self._world.once(("choked", fault.number, turns), turn)
                return
            self._chokes -= 1
            if not self._chokes and self._log is not None:
                self._world.tell("the log can grow again")
                self._world.touched = True
                self._most = 0
                self._log.choke(0)
                self.controller.catch_up()

        self._world.once(("choked", fault.number, turns), turn)

    def when_recorded(self, call: Callable[[], None]) -> bool:
        """See ``Controller.when_recorded``."""
        return self.server.controller.when_recorded(call)

    def spare(self) -> None:
        """It is not killed any more."""
        self._after_a_message = False
        if self._log is not None:
            self._log.left = 0

    def end(self) -> None:
        """The server is dead, and comes back."""
        world, log = self._world, self._log
        assert log is not None
        world.tell("the server is killed, and comes back")
        world.touched = True
        self.deaths.append(world.step)
        # What it was doing when it died is done again in part.
        before = None if log.is_over else state_of(self.controller, OF_A_LIFE)
        log.is_over = True
        self.is_dying = True
        world.loop.end()
        self.is_dying = False
        world.processes.nobody_watches()
        for halves in world.halves:
            halves.restart()
        dead, self.connections = self.connections, {}
        handled = [
            (one, number in connection.late)
            for connection in dead
            for number, one in connection.handled.items()
        ]
        log.close()
        self._log = None
        if self._spilling is not None:
            if world.disk is not None:
                world.disk.leave(self.server)
            self._spilling.close()
            self._spilling = None
        world.loop.now += _PAUSE_S
        self.connections = {one: None for one in dead if one.is_kept}
        self.begin()
        world.copier.server_died()
        if before is not None and state_of(self.controller, OF_A_LIFE) != before:
            raise Violation("restart", "the server comes back with another state than it had")
        for connection in dead:
            if not connection.is_kept:
                connection.server_died(queued=not self._accepts)
        for one, is_late in handled:
            self._learn(one, is_late=is_late)

    def _take(self, link: _Link) -> None:
        """As ``Server._take_connections``, without sockets."""
        returning = self.server.returning
        assert returning is not None
        for name in link.names():
            connection = link.kept(name) if name.startswith("session ") else None
            if connection is None:
                continue
            found = returning.of(int(name.removeprefix("session ")))
            if found is None:
                link.drop(name)
                connection.closed_by_keeper()
                continue
            session, _, is_there = found
            connection.go_on(session, is_there=is_there)

    # ---- what became of what it was asked ---------------------------------------------------

    def result_of(self, token: bytes, request: m.Message) -> m.Message | None:
        """The answer to a request that was executed in an earlier life, and that has a number."""
        number = number_of(request)
        known = self.controller.results.get(token, {})
        return known.get((type(request).__name__, number)) if number else None

    def _learn(self, handled: Handled, *, is_late: bool) -> None:
        """A request has had an effect if its repetition has, also if nobody ever asks again.

        ``is_late``: it was delayed, so if it had one, it was that in which the server was killed.
        """
        request, call = handled.request, handled.call
        done = self.result_of(handled.token, request)
        if done is not None:
            if is_late:
                call.happened(self._world.point + 0.25)
                self._world.point += 1
            call.never_heard(done, call.at)
        elif type(request) in _PUTS and not call.known:
            # It has not been executed. (Of a session that has ended since, no answers are kept.)
            call.begun = 0
