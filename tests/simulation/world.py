"""One run: a real server, simulated clients, and a schedule that decides what happens next."""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import random
from collections import deque
from collections.abc import Callable
from typing import Literal

from tests.simulation.acting.clients import Client
from tests.simulation.acting.copiers import Copier
from tests.simulation.acting.operations import Cancelled
from tests.simulation.acting.references import References
from tests.simulation.machine.disks import Disk
from tests.simulation.machine.halves import TravellingHalves
from tests.simulation.machine.lives import Killed, Lives
from tests.simulation.machine.loop import SimulatedLoop
from tests.simulation.machine.memory import Owners
from tests.simulation.machine.processes import Processes
from tests.simulation.machine.relays import Uplink
from tests.simulation.machine.scheduling import Action, Name, Schedule
from tests.simulation.machine.servers import here, running
from tests.simulation.plans import STATE_DICT, Fault, Operation, Plan, plan_of
from tests.simulation.promises.accounts import Accounts
from tests.simulation.promises.checking import check
from tests.simulation.promises.histories import History
from tests.simulation.promises.violations import Violation

from torchstore_core.errors import DrainError
from torchstore_core.server.controller import Controller
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.server import Server
from torchstore_core.wire import messages as m

__all__ = ["World", "run_seed"]

_MOST_STEPS = 20_000
_AUDIT = 1_000_000
# The longest time that a message takes to the server.
_MOST_DELAY_S = 0.2


class World:
    """All that there is in one run.

    Args:
        recorded: faults happen when the schedule says so, not at the steps that are planned.
        say: is told what happens, in lines for people.

    Attributes:
        telling: whether anybody wants to be told what happens.
        is_timed: see the plan.
        step: how many actions have happened.
        point: how many messages the server has handled, and how often its loop has gone on.
        touched: whether the last action changed anything at the server.
        names: of the actions, in order.
        copied: how many values were copied to other volumes.
        drained: how often a volume was empty when it was put back in service.
        ending: what is of no use when the run is over, and refers to others of its kind.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        *,
        recorded: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._say = say
        self.telling = say is not None
        self.plan = plan
        self.is_timed = plan.is_timed
        self.schedule = schedule
        self.step = 0
        self.point = 0
        self.touched = False
        self.names: list[Name] = []
        self.copied = self.drained = 0
        self.ending: list[object] = []
        self.history = History()
        self.loop = SimulatedLoop()  # type: ignore[abstract]  # nothing else of a loop is used
        self.lives = Lives(self)
        self.copier = Copier(self)
        self.owners = Owners(self.lives.memories)
        self.halves = [TravellingHalves(self, at) for at in range(len(plan.capacities))]
        self.processes = Processes(self)
        self.disk = Disk(self, at_a_url=plan.at_a_url) if plan.pages else None
        self.references = References(self)
        self.here = here()
        self.uplink: Uplink | None = None
        self.at_rest: list[Callable[[], None]] = []  # what happens when all is quiet
        self._dead: set[int] = set()
        self._asked: set[int] = set()
        self._watched: dict[int, list[m.WatchProcess]] = {}
        self._accounts = Accounts()
        self._recorded = recorded
        self._timed = deque(() if recorded else plan.faults)
        self._callback = Action(("loop",), self._turn)
        self._time = Action(("time",), self._pass)
        self.clients = [Client(self, at, script) for at, script in enumerate(plan.scripts)]
        if recorded:
            for fault in plan.faults:
                self.once(("fault", fault.number), functools.partial(self._fail, fault))

    def tell(self, what: str) -> None:
        """Something has happened."""
        if self._say is not None:
            self._say(f"{self.step:5}  {what}")

    def _watch(self, volume: VolumeRecord, wanted: m.WatchProcess) -> None:
        """A volume is to say when a process has ended."""
        self._asked.add(wanted.pid)
        self._watched.setdefault(wanted.pid, []).append(wanted)
        if wanted.pid in self._dead:
            self.process_ended(wanted.pid)

    def process_ended(self, pid: int) -> None:
        """A process is no more."""
        self._dead.add(pid)
        self.processes.ended(pid)
        for wanted in self._watched.pop(pid, ()):
            message = m.ProcessDied(wanted.session)
            self.once(("ended", pid), functools.partial(self.server.process_ended, message))

    def once(self, name: Name, run: Callable[[], None]) -> None:
        """Let something happen once, some time."""

        def happen() -> None:
            self.schedule.disable(action)
            run()

        action = Action(name, happen)
        self.schedule.enable(action)

    def run(self) -> None:
        """Until nothing can happen any more.

        Raises:
            Violation: the store has broken a promise.
        """
        try:
            with running(self.loop, self.processes, self.disk):
                self.lives.begin()
                self.server._watch = self._watch  # type: ignore[method-assign]
                if self.plan.relayed:
                    self.uplink = Uplink(self)
                for client in self.clients:
                    client.begin()
                self._rest()
                self.references.check()
                self._audit()
                self._leave()
        except Violation:
            raise
        except (Exception, Killed) as error:
            raise Violation("failure", f"{type(error).__name__}: {error}") from error
        finally:
            self.lives.close()
        check(self.history, self.plan, self.references.freed)
        self._let_go()

    def _let_go(self) -> None:
        """Free everything but what has happened. It all refers to each other, and who collects
        garbage takes long to find out that nobody else does.
        """
        self.ending += (
            *self.clients,
            self.copier,
            *self.halves,
            self.owners,
            self.processes,
            self.references,
        )
        for one in self.ending:
            vars(one).clear()
        self.ending.clear()

    def _rest(self) -> None:
        """Go on until all is quiet: then only waits are left, for what nobody has put."""
        self._go()
        while any(client.tasks for client in self.clients):
            for client in self.clients:
                for task in list(client.tasks.values()):
                    if task.operation.kind != "wait":
                        raise Violation("stuck", f"{task.call} at the end")
                    task.call.unanswered = self.point
                    task.interrupt(Cancelled())
            self._go()

    def _audit(self) -> None:
        """Somebody looks at everything, and replaces it."""
        self.tell("all is quiet; somebody looks at what there is")
        looks: list[Operation] = []
        for key in self.plan.keys:
            get = "fetch" if key == STATE_DICT else "get"
            looks.append(Operation(_AUDIT + len(looks), get, (key,)))
            looks.append(Operation(_AUDIT + len(looks), "versions", (key,)))
            for _ in range(3):
                looks.append(Operation(_AUDIT + len(looks), "put", (key,), (2,)))
            last = "exists" if key == STATE_DICT else "get"
            looks.append(Operation(_AUDIT + len(looks), last, (key,)))
        auditor = Client(self, len(self.clients), tuple(looks))
        auditor.begin()
        self.clients.append(auditor)
        self._go()
        exits, self.at_rest = self.at_rest, []
        for leave in exits:
            leave()
        self._rest()

    def _leave(self) -> None:
        """Everybody leaves, and nothing is left of them."""
        self.tell("everybody leaves")
        self.lives.spare()
        self.telling = False
        for client in self.clients:
            client.leave()
        self.copier.leave()
        self._go()
        controller = self._controller
        for token, left in list(controller.detached.sessions.items()):
            # The server knew of the death of its process, and then its relay was lost. A forked
            # child may have inherited the connection, so nothing tells that nobody reads any more:
            # what such a session leased stays for good, and nobody is asked to watch its process.
            if left.facts.pid not in self._asked:
                controller.detached.process_ended(token)
        controller.delete([*controller.catalog.newest, *controller.catalog.histories], strict=False)
        Accounts().check(controller)  # which does not know that anything was right before
        self.references.check()
        used = [(v.used, v.leased, v.unfinished) for v in controller.volumes]
        sessions = [*controller.sessions, *controller.detached.sessions]
        used.append((controller.spilling.status().disk_bytes,) * 3)
        if any(map(any, used)) or sessions or self.server.conversations:
            counts = f"{len(sessions)} sessions, {len(self.server.conversations)} connections"
            raise Violation("leak", f"everybody has left, and there is {used} of {counts}")

    def _go(self) -> None:
        schedule, loop, callback, time = self.schedule, self.loop, self._callback, self._time
        ready, faults, note = loop.ready, self._timed, self.names.append
        choose, check, is_timed = schedule.choose, self._accounts.check, self.is_timed
        step = self.step
        while step <= _MOST_STEPS:
            if faults and step >= faults[0].after:
                fault = faults.popleft()
                action = Action(("fault", fault.number), functools.partial(self._fail, fault))
            elif (chosen := choose()) is not None:
                action = chosen
            elif faults:
                self.step = step = faults[0].after
                continue
            else:
                return
            self.step = step = step + 1
            note(action.name)
            try:
                action.run()
            except Killed:  # in the midst of it
                self.lives.end()
            if ready:
                if callback.at < 0:
                    schedule.enable(callback)
            elif callback.at >= 0:
                schedule.disable(callback)
            if is_timed:
                if loop.timers:
                    if time.at < 0:
                        schedule.enable(time)
                elif time.at >= 0:
                    schedule.disable(time)
            if self.touched:
                self.touched = False
                check(self.lives.server.controller)
                if loop.failed:
                    raise Violation("server", str(loop.failed))
        raise Violation("endless", "the clients never come to an end")

    def digest(self) -> str:
        """The same for runs in which the same has happened."""
        told = repr((self.names, self.history.calls)).encode()
        return hashlib.sha256(told).hexdigest()

    def _turn(self) -> None:
        """The server's event loop goes on."""
        self.touched = True
        self.point += 1
        self.loop.run_one()

    def _pass(self) -> None:
        """Time passes, until something is due; but no message takes very long to arrive."""
        due = self.loop.next_timer
        if self.loop.ready or due is None:
            return
        lanes = [one.lane.oldest for one in self.references.bearers]
        oldest = min([sent for sent in lanes if sent is not None], default=due)
        now = min(due, oldest + _MOST_DELAY_S)
        if now > self.loop.now or due <= self.loop.now:
            self.touched = True
            self.loop.advance(max(0.0, now - self.loop.now))

    def _fail(self, fault: Fault) -> None:
        if fault.kind == "lose":
            self._lose(fault.client)
            return
        if fault.kind == "kill":
            self.lives.kill(fault)
            return
        if fault.kind == "fill":
            self._fill(fault.keep)
            return
        if fault.kind in ("drain", "undo"):
            self._drain(fault)
            return
        if fault.kind == "fail":
            self._fail_disk(fault.keep)
            return
        if fault.kind == "choke":
            self.tell("the log cannot grow")
            self.lives.choke(fault)
            return
        if fault.kind == "compact":
            self.tell("the log is written anew")
            self.lives.write_anew(fault)
            return
        client = self.clients[fault.client]
        self.tell(f"client {fault.client}: {fault.kind}")
        match fault.kind:
            case "crash":
                client.crash(fault.keep, broken=fault.broken)
            case "cut":
                client.cut(fault.keep, broken=fault.broken)
            case "sever":
                if self.uplink is not None:
                    self.uplink.sever()
            case _:
                client.cancel()

    def _drain(self, fault: Fault) -> None:
        """A volume is drained, or put back in service, which will happen once for each drain."""
        drains, volume = self._controller.drains, self._controller.volumes[fault.client]
        is_begin = fault.kind == "drain"
        self.tell(f"volume {volume.index} is {'drained' if is_begin else 'in service again'}")
        self.touched = True
        self.drained += not is_begin and drains.report(volume).done
        what: Literal["begin", "undo"] = "begin" if is_begin else "undo"
        if is_begin:
            undo = Fault(-fault.number, "undo", volume.index, self.step + fault.keep)
            if self._recorded:
                self.once(("fault", undo.number), functools.partial(self._fail, undo))
            else:
                bisect.insort(self._timed, undo, key=lambda one: one.after)
        with contextlib.suppress(DrainError):
            drains.drain(m.Drain(0, str(volume.index), what))

    def _fill(self, writes: int) -> None:
        """Others fill the disk, for so many writes."""
        if self.disk is not None:
            self.tell(f"the disk is full for {writes} writes")
            self.disk.refusals += writes

    def _fail_disk(self, times: int) -> None:
        """Reads and writes fail, so many of them."""
        if self.disk is not None:
            self.tell(f"the disk fails {times} times")
            self.disk.failures += times

    def _lose(self, volume: int) -> None:
        """The memory of a volume is gone, except for those who have mapped it."""
        self.tell(f"volume {volume} is lost")
        self.touched = True
        self.point += 1
        self.history.lost = self.history.lost or self.point
        self.halves[volume].lose()
        self._controller.lose_volume(volume, "it was killed")
        self.server._to_liveness_connections(m.Lost(volume, "it was killed"))

    @property
    def server(self) -> Server:
        """The server in the life that it has now."""
        return self.lives.server

    @property
    def _controller(self) -> Controller:
        return self.lives.server.controller


def run_seed(seed: int) -> World:
    """The run of a seed.

    Raises:
        Violation: as :meth:`World.run`.
    """
    source = random.Random(seed)
    world = World(plan_of(source, seed), Schedule(source))
    world.run()
    return world
