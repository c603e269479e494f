"""Simulated client processes: they send what real ones send, and crash as real ones do."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tests.simulation.acting.operations import Cancelled, Closed
from tests.simulation.acting.references import Bearer
from tests.simulation.acting.steps import steps_of
from tests.simulation.machine.halves import Packet
from tests.simulation.machine.lasting import Lasting
from tests.simulation.machine.memory import Range
from tests.simulation.machine.network import Connection, Direct
from tests.simulation.machine.relays import Relayed
from tests.simulation.machine.scheduling import Action
from tests.simulation.plans import Operation
from tests.simulation.promises.histories import Call
from tests.simulation.promises.violations import Violation

from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.wire import messages as m
from torchstore_core.wire.batches import resumes

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["Client", "Task"]

_LIVES = 1000


class Task:
    """One operation that is under way."""

    def __init__(self, client: Client, operation: Operation, connection: Connection) -> None:
        self.world = world = client.world
        world.ending.append(self)
        self.client = client
        self.operation = operation
        self.connection = connection
        self.liveness = client.lanes[0]
        self.call = Call(operation, client.index, world.step)
        world.history.calls.append(self.call)
        self.over = False
        self._asked = 0  # the number of the request whose answer it waits for
        self._sent = 0  # the number of the packet whose landing it waits for
        self._go = Action(("task", client.index, operation.number), self._step)
        self._steps = steps_of(self)

    def start(self) -> None:
        """Begin."""
        if self.world.telling:
            self.world.tell(f"client {self.client.index} begins {self.operation}")
        self._take(next(self._steps))

    def _step(self) -> None:
        self.world.schedule.disable(self._go)
        self._resume(None)

    def answered(self, reply: m.Message, number: int, point: int) -> None:
        """What it has asked for by this number is there."""
        self.call.answered_at(point)
        if not self.over and self._asked == number:
            self._resume(reply)
        elif not self.call.known:
            self.call.never_heard(reply, point)

    def awaits(self, number: int) -> bool:
        """Whether it waits for the answer to this request."""
        return not self.over and self._asked == number

    def _came(self, number: int, landed: bool) -> None:
        """What was sent to a volume has landed, or will not."""
        if not self.over and number == self._sent:
            self._resume(landed)

    def interrupt(self, error: Exception) -> None:
        """Raise an error where it is."""
        self._asked = 0
        self._sent += 1
        self.world.schedule.disable(self._go)
        try:
            self._take(self._steps.throw(error))
        except StopIteration:
            self._end()

    def _resume(self, reply: m.Message | bool | None) -> None:
        try:
            self._take(self._steps.send(reply))
        except StopIteration:
            self._end()

    def _take(self, wanted: m.Message | Packet | None) -> None:
        if wanted is None:
            self.world.schedule.enable(self._go)
        elif type(wanted) is Packet:
            self._sent += 1
            number = self._sent
            self.world.halves[wanted.volume].send(wanted, lambda landed: self._came(number, landed))
        elif self.connection.closed:
            self.interrupt(Closed())
        else:
            self._asked = number = wanted.id  # type: ignore[attr-defined]
            self.connection.ask(wanted, number, self, self.call)

    def _end(self) -> None:
        self.over = True
        self.client.task_ended(self)

    def stop(self) -> None:
        """Its process is dead."""
        self.over = True
        self.world.schedule.disable(self._go)

    # ---- what becomes of the call ---------------------------------------------------------

    def conclude(self, reply: m.Message) -> None:
        """The call ends with this answer."""
        conclude(self.call, reply, self.world.step)

    def give_up(self, error: Exception) -> None:
        """The call ends with an error of the client's own, unless it has ended."""
        call = self.call
        if call.ended is None and not call.sent:
            call.failed(type(error).__name__, self.world.step)


def conclude(call: Call, reply: m.Message, step: int) -> None:
    """A call has its last answer."""
    if type(reply) is m.Committed or type(reply) is m.CommittedIn:
        call.returned(reply.versions, step)
    elif type(reply) is m.Failure:
        call.failed(reply.code, step)
    elif type(reply) is m.Deleted:
        call.returned(reply.count, step)
    elif type(reply) is m.Flags:
        call.returned(reply.flags, step)


class Client:
    """One process after the other, which do what one script says."""

    def __init__(self, world: World, index: int, script: tuple[Operation, ...]) -> None:
        self.world = world
        self.index = index
        self.life = 0
        self.lanes: list[Connection] = []
        self.bearer: Bearer | None = None  # the process that it is now
        self.tasks: dict[int, Task] = {}
        self.kept: list[tuple[list[Range], list[bytes]]] = []  # what it has got, and keeps
        self.links: dict[int, bytes] = {}  # tickets of the volumes that it has met
        self.unfinished: set[int] = set()  # its puts
        self.leases: dict[int, list[int] | None] = {}  # with the positions; None: all
        self._joining: dict[int, Lasting] = {}  # channels to the next life of the server
        self._probes: dict[int, list[Lasting]] = {}
        self._script = deque(script)
        self._slots = world.plan.slots
        self._token = b""
        self._serial = 0
        self.relayed = index in world.plan.relayed  # where it would like to connect
        self._relayed = False  # where it is connected
        self._numbers = 0
        self._start: Action | None = None
        self._next: Operation | None = None

    def number(self) -> int:
        """A number that nothing else of this process has."""
        self._numbers += 1
        return self._numbers

    def serial(self) -> int:
        """A number for a new connection."""
        self._serial += 1
        return self._serial

    # ---- life -----------------------------------------------------------------------------

    def begin(self) -> None:
        """A process starts, and opens a session; but not if it has nothing to do."""
        if not (self._script or self._next):
            return
        self.life += 1
        self.world.tell(f"client {self.index} starts")
        self._numbers = 100
        self._token = b""
        self.links = {}
        self.unfinished, self.leases, self._probes = set(), {}, {}
        self.lanes = [self._open(0)]
        if self.world.plan.refers:
            self.bearer = Bearer(self.world, self.lanes[0])

    @property
    def pid(self) -> int:
        """Of the process that it is now."""
        return _LIVES * self.index + self.life

    def _connection(self, lane: int, name: tuple[int, ...]) -> Connection:
        uplink = self.world.uplink
        if lane == 0:
            self._relayed = uplink is not None and self.relayed and uplink.usable
        if self._relayed and uplink is not None:
            return Relayed(self.world, self, lane, name, uplink)
        if self.world.plan.kept:
            return Lasting(self.world, self, lane, name)
        return Direct(self.world, self, lane, name)

    def _open(self, lane: int) -> Connection:
        connection = self._connection(lane, (self.index, self.serial()))
        here = self.world.here
        facts = ClientFacts(self.pid, here.host_id, "host", self.index)
        number = self.number()
        hello = m.Hello(number, m.PROTOCOL_VERSION, self._token, here, facts)
        connection.ask(hello, number, None, None)
        return connection

    def answered(self, connection: Connection, reply: m.Message) -> None:
        """A connection was welcomed, or not."""
        if type(reply) is m.Flags:
            for channel in self._probes.pop(reply.id, ()):
                if channel in self.lanes and channel.lane not in self._joining:
                    channel.give_up()
        if type(reply) is not m.Welcome:
            return
        connection.opened = True
        if type(connection) is Lasting:
            connection.life = reply.life
        if self._joining.get(connection.lane) is connection:
            self._adopt(connection)
        elif connection.lane == 0:
            self._token = reply.session
            self.lanes += [self._open(at + 1) for at in range(self.world.plan.channels)]
        self._offer()

    def crash(self, keep: int, *, broken: bool = False) -> None:
        """The process is killed, and another one starts some time later."""
        if not self.lanes:
            return
        liveness = self.lanes[0]
        self.leave(keep, broken=broken)
        self.world.once(("died", self.index, self.life), liveness.died)
        self.world.once(("restart", self.index, self.life), self.begin)

    def leave(self, keep: int = 99, *, broken: bool = False) -> None:
        """The process ends."""
        lanes, self.lanes = [*self.lanes, *self._joining.values()], []
        self._joining.clear()
        read = self.world.owners.read
        for ranges, seen in self.kept:
            if seen != [read(volume, start, end - start) for volume, start, end in ranges]:
                raise Violation("lease", f"what client {self.index} keeps has changed")
        self.kept = []
        for task in self.tasks.values():
            task.stop()
        self.tasks.clear()
        self.world.owners.forget(self.index)
        self.world.process_ended(self.pid)
        if self.bearer is not None:
            self.bearer.die()
        for connection in lanes:
            # A process that sends a reference has written to the liveness connection before.
            kept = 99 if self.bearer is not None and connection.lane == 0 else keep
            connection.cut(kept, broken=broken)
        self._offer()

    def cut(self, keep: int, *, broken: bool = False) -> None:
        """A channel breaks, and is opened again."""
        for connection in self.lanes[1:]:
            if connection.opened and not connection.closed:
                if type(connection) is Lasting:
                    connection.close_at_the_server(keep)
                else:
                    connection.cut(keep, broken=broken)
                    self.connection_lost(connection)
                return

    def connection_lost(self, connection: Connection) -> None:
        """A connection has closed, at this end or at the other one."""
        if self._joining.get(connection.lane) is connection:  # to a life that is over
            del self._joining[connection.lane]
            self._probe()
        if connection not in self.lanes:
            return
        if connection.lane == 0:
            if self.world.plan.kept and not self._token:
                self._connect_again()
            else:
                self._orphaned()
            return
        if not self.lanes[0].closed:
            self.lanes[connection.lane] = self._open(connection.lane)
        for task in list(self.tasks.values()):
            if task.connection is connection and task.call.ended is None:
                task.interrupt(Closed())
        self._offer()

    # ---- a server that comes back ---------------------------------------------------------

    def _connect_again(self) -> None:
        """The server has died before it has answered."""
        self.lanes = [self._open(0)]
        if self.bearer is not None:
            self.bearer.lane = self.lanes[0]

    def channel_lost(self, channel: Lasting) -> None:
        """A channel is down: either the server has died, or it has closed it and lives."""
        if channel in self.lanes:
            self._probe()

    def _probe(self) -> None:
        down = [one for one in self.lanes if type(one) is Lasting and one.down]
        if down and not self.lanes[0].closed:
            number = self.number()
            self._probes[number] = down
            self.lanes[0].ask(m.Exists(number, []), number, None, None)

    def came_back(self, welcome: m.Welcome) -> None:
        """The server says on the liveness connection that it was dead: say what there is, and
        connect the channels again.
        """
        if not self._token:  # it has died before it has answered
            self._resume(welcome)
            self.answered(self.lanes[0], welcome)
            return
        self._probes.clear()
        self.links.clear()
        self._resume(welcome)
        for channel in self.lanes[1:]:
            before = self._joining.pop(channel.lane, None)
            if before is not None:
                before.close()
            if type(channel) is Lasting and 0 < channel.life < welcome.life:
                self._joining[channel.lane] = self._open(channel.lane)  # type: ignore[assignment]

    def _resume(self, welcome: m.Welcome) -> None:
        channels = [one for one in self.lanes[1:] if type(one) is Lasting]
        asks = [number for channel in channels for number in channel.unanswered()]
        unfinished, leases = list(self.unfinished), list(self.leases.items())
        for told in resumes(welcome.life, unfinished, leases, asks, most=2):
            self.lanes[0].send(told)

    def _adopt(self, connection: Connection) -> None:
        """A channel has a connection to the server of now."""
        lane = connection.lane
        new, old = self._joining.pop(lane), self.lanes[lane]
        for task in self.tasks.values():
            if task.connection is old:
                task.connection = new
        self.lanes[lane] = new
        old.adopt(new)  # type: ignore[attr-defined]
        self._offer()

    def _orphaned(self) -> None:
        """The session is over, though the process lives: it gives up everything but what it has
        got already, which it may still look at, until it ends, too.
        """
        lanes, self.lanes = [*self.lanes, *self._joining.values()], []
        self._joining.clear()
        if self.bearer is not None:
            self.bearer.die()
        for task in list(self.tasks.values()):
            if task.call.ended is None:
                task.interrupt(Closed())
        for connection in lanes:
            connection.close()
        self._token = b""
        if self.index % 2:
            self._may_exit()
        else:  # it lives for as long as the others do anything
            self.world.at_rest.append(self._may_exit)

    def _may_exit(self) -> None:
        self.world.once(("exit", self.index, self.life), self._exit)

    def _exit(self) -> None:
        self.leave()
        self.begin()

    def cancel(self) -> None:
        """The user gives up the oldest operation under way."""
        for task in self.tasks.values():
            task.interrupt(Cancelled())
            return

    # ---- operations -----------------------------------------------------------------------

    def _channel(self, number: int) -> Connection | None:
        if len(self.lanes) == 2:
            (_, only) = self.lanes
            return only if only.opened and not only.closed else None
        usable = [one for one in self.lanes[1:] if one.opened and not one.closed]
        return usable[number % len(usable)] if usable else None

    def _offer(self) -> None:
        """Let the next operation begin, if one can."""
        if self._next is None:
            if not self._script:
                return
            self._next = self._script.popleft()
            self._start = Action(("start", self.index, self._next.number), self._begin_next)
        start = self._start
        if start is None:
            return
        if len(self.tasks) < self._slots and self._channel(0) is not None:
            if start.at < 0:
                self.world.schedule.enable(start)
        elif start.at >= 0:
            self.world.schedule.disable(start)

    def _begin_next(self) -> None:
        operation, start = self._next, self._start
        if operation is None or start is None:
            return
        self.world.schedule.disable(start)
        self._next = self._start = None
        channel = self._channel(operation.number)
        if channel is not None:
            task = self.tasks[operation.number] = Task(self, operation, channel)
            task.start()
        self._offer()

    def task_ended(self, task: Task) -> None:
        """There is room for another one."""
        self.tasks.pop(task.operation.number, None)
        self._offer()
