"""References of simulated processes: they are sent, received, inherited and dropped; time counts.

What is known here is what the processes know: which references they have, and which are on their
way. A reference is *sure* as long as the store has promised that its version is there: not if it
has arrived when the grace was over, or if somebody has freed the version.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING

from tests.simulation.machine.lasting import Lasting
from tests.simulation.machine.network import Connection, Direct
from tests.simulation.promises.violations import Violation

from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    from tests.simulation.acting.clients import Client
    from tests.simulation.world import World

__all__ = ["GRACE_S", "Bearer", "Local", "References"]

GRACE_S = 10.0
# What arrives so much before the end of the grace is in time: nothing takes longer than this from
# the kernel of the one process to the server.
_SLACK_S = 1.0
_CHILD = 500

#: Key, version and timeline.
Name = tuple[str, int, int]


class Local:
    """A reference that a process has.

    Attributes:
        users: how many operations use it at the moment, so that it is not dropped.
    """

    __slots__ = ("ident", "name", "sure", "users")

    def __init__(self, name: Name, ident: int, *, sure: bool) -> None:
        self.name = name
        self.ident = ident
        self.sure = sure
        self.users = 0


class Bearer:
    """A process as the one that has references.

    Attributes:
        dropped: what it referred to once.
        died: when it has; None: it lives.
    """

    def __init__(self, world: World, lane: Connection) -> None:
        self.lane = lane
        self.refs: dict[int, Local] = {}
        self.dropped: list[Name] = []
        self.died: float | None = None
        self._world = world
        world.references.bearers.append(self)

    def die(self) -> None:
        """Nobody has its references any more."""
        if self.died is None:
            self.died = self._world.loop.now
        self.refs.clear()

    def choose(self, which: int) -> Local | None:
        """One of those that it has."""
        there = list(self.refs.values())
        return there[which % len(there)] if there else None

    def drop(self, which: int) -> None:
        """Drop one that is not in use."""
        local = self.choose(which)
        if local is not None and not local.users:
            del self.refs[local.ident]
            self.dropped.append(local.name)
            self.lane.send(m.Unhold([local.ident]))


class Copy:
    """A reference on its way: bytes that somebody decodes once, twice or never."""

    def __init__(self, name: Name, ticket: int, sender: Bearer, *, sure: bool) -> None:
        self.name = name
        self.ticket = ticket
        self.sender = sender
        self.sure = sure
        self.received: float | None = None

    def is_in_time(self, now: float) -> bool:
        """Whether it is promised that the version is there for who decodes it now."""
        since = self.sender.died if self.received is None else self.received
        return since is None or now < since + GRACE_S - _SLACK_S


class References:
    """All references of a run.

    Attributes:
        bearers: all processes that there ever were.
        freed: what somebody has freed, or tried to.
    """

    def __init__(self, world: World) -> None:
        self.bearers: list[Bearer] = []
        self.freed: set[Name] = set()
        self._copies: list[Copy] = []
        self._world = world
        self._tickets = itertools.count(1)
        self._forks = itertools.count(_CHILD)

    def send(
        self,
        sender: Bearer,
        local: Local,
        number: int,
        to: int,
        *,
        twice: bool = False,
        kills: bool = False,
    ) -> None:
        """Encode a reference; it arrives some time.

        Args:
            number: of the operation.
            twice: it is decoded twice.
            kills: and then whoever has decoded it is dead.
        """
        sent = Copy(local.name, next(self._tickets), sender, sure=local.sure)
        self._copies.append(sent)
        sender.lane.send(m.Lend(local.ident, sent.ticket))
        for again in range(1 + twice):
            self._world.once(("ref", number, again), lambda: self._arrives(sent, to, kills))

    def _arrives(self, sent: Copy, to: int, kills: bool) -> None:
        client = self._world.clients[to]
        bearer = client.bearer
        if bearer is None or bearer.died is not None or bearer.lane.closed:
            return  # nobody decodes it
        if self._world.plan.kept and not bearer.lane.opened:
            return  # nobody can before it has a session that lasts
        now, ident = self._world.loop.now, client.number()
        sure = sent.sure and sent.is_in_time(now)
        if self._world.telling:
            self._world.tell(f"a reference to {sent.name} arrives at client {to}")
        sent.received, sent.sure = now, sure
        bearer.refs[ident] = Local(sent.name, ident, sure=sure)
        bearer.lane.send(m.Claim(ident, sent.ticket, *sent.name))
        if kills:
            client.crash(99)

    def fork(self, client: Client, number: int, which: int) -> None:
        """A client forks a child that drops and sends some of what it inherits, and ends."""
        parent = client.bearer
        if parent is not None and parent.refs and not parent.lane.closed:
            _Child(self._world, client, parent, number, which, next(self._tickets))

    def check(self) -> None:
        """Now that all is quiet: what is referred to is held, and nothing else is.

        Raises:
            Violation: of the kind ``references``.
        """
        living = [one for one in self.bearers if one.died is None]
        refs = [ref for one in living for ref in one.refs.values()]
        unread = [c for c in self._copies if c.received is None and c.sender.died is None]
        some = {ref.name for ref in refs} | {sent.name for sent in unread}
        sure = {r.name for r in refs if r.sure} | {sent.name for sent in unread if sent.sure}
        held = set(self._world.server.controller.catalog.held)
        if early := sure - self.freed - held:
            raise Violation("references", f"{sorted(early)} are referred to, and not held")
        if late := held - some:
            raise Violation("references", f"{sorted(late)} are held, and nobody refers to them")
        if waiting := len(self._world.server.controller.holds._adopting):
            raise Violation("references", f"{waiting} children wait in vain for what they inherit")


class _Child:
    """A forked child. What it needs of a client is there: its connection is for holds alone."""

    def __init__(
        self,
        world: World,
        client: Client,
        parent: Bearer,
        number: int,
        which: int,
        ticket: int,
    ) -> None:
        self.index = client.index
        self._world = world
        self._number = number
        self._which = which
        self.pid = client.pid  # of the process that opens its connection
        self._client = client
        self._parent = parent
        self._ticket = ticket
        self._connect()

    def _connect(self) -> None:
        """Open a connection. Where the server comes back, it lasts once the server has answered."""
        world, client = self._world, self._client
        kind = Lasting if world.plan.kept else Direct
        self._lane = lane = kind(world, client, 0, (client.index, client.serial()))
        lane.client = self  # type: ignore[assignment]
        facts = ClientFacts(1, world.here.host_id, "host", client.index, role=m.HOLDER_ROLE)
        hello = m.Hello(1, m.PROTOCOL_VERSION, b"", world.here, facts)
        if world.plan.kept:
            lane.ask(hello, 1, None, None)
        else:
            lane.send(hello)
            self._fork()

    def _fork(self) -> None:
        """Inherit what the parent has now."""
        world, parent, lane = self._world, self._parent, self._lane
        if parent.died is not None:
            lane.cut(99)
            return
        lane.send(m.Adopt(self._ticket))
        parent.lane.send(m.LendAll(self._ticket))
        self.bearer = Bearer(world, lane)
        self.bearer.refs = {ident: copy.copy(ref) for ident, ref in parent.refs.items()}
        for ref in self.bearer.refs.values():
            ref.users = 0
        lane.send(m.Adopt(0, 1))
        self._then("drops", self._drops)

    def answered(self, connection: Connection, reply: m.Message) -> None:
        """It reads the answer to its hello, if any, and nothing else."""
        if type(reply) is not m.Failure:  # it is not let in, and tries again
            self._fork()

    def came_back(self, welcome: m.Welcome) -> None:
        """What it is told without having asked answers its hello, if anything does."""
        if not hasattr(self, "bearer"):
            self._fork()

    def connection_lost(self, connection: Connection) -> None:
        """It does not notice, unless it still waits for an answer."""
        if not hasattr(self, "bearer"):
            self._connect()

    def _then(self, what: str, happens: object) -> None:
        self._world.once(("child", self._number, what), happens)  # type: ignore[arg-type]

    def _drops(self) -> None:
        self.bearer.drop(self._which)
        self._then("sends", self._sends)

    def _sends(self) -> None:
        local = self.bearer.choose(self._which + 1)
        if local is not None and self._which % 2:
            to = self._which % len(self._world.plan.scripts)
            references = self._world.references
            references.send(self.bearer, local, -self._number, to)
        self._then("ends", self._ends)

    def _ends(self) -> None:
        self.bearer.die()
        self.bearer.lane.cut(99, broken=self._which % 3 == 0)
