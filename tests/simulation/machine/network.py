"""Connections whose messages arrive when the simulation says so: in order on each of them, and in
any order across several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

import msgspec
from tests.simulation.machine.scheduling import Action
from tests.simulation.machine.telling import brief

from torchstore_core.server.serving.conversation import Conversation
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import HEADER, decode_reply

if TYPE_CHECKING:
    from tests.simulation.acting.clients import Client, Task
    from tests.simulation.promises.histories import Call
    from tests.simulation.world import World

__all__ = ["Connection", "Direct", "Sent"]

_encode = msgspec.msgpack.Encoder().encode


class Sent(msgspec.Struct, frozen=True):
    """A message of a client that has not arrived yet.

    Args:
        body: the message as bytes; empty: the end of the connection.
        message: None: the end.
        at: when it was sent, if time counts.
    """

    body: bytes
    message: m.Message | None
    call: Call | None
    at: float


class Connection(ABC):
    """One connection of a client, at its own end.

    Args:
        lane: 0 is the liveness connection, the others are channels.
        name: who it is, for the schedule.
    """

    def __init__(self, world: World, client: Client, lane: int, name: tuple[int, ...]) -> None:
        world.ending.append(self)
        self._world = world
        self.client = client
        self.lane = lane
        self.opened = False  # the server has welcomed it
        self.closed = False  # the client does not use it any more
        self._ended = False  # whoever is at the other end does not
        self._broken = False
        self.waiting: dict[int, Task | None] = {}
        self._up: deque[Sent] = deque()
        # Answers, and the points at which they were sent; None: the end.
        self._down: deque[tuple[m.Message | None, int]] = deque()
        self._arrive = Action(("up", *name), self._up_arrives)
        self._answer = Action(("down", *name), self._down_arrives)

    def __repr__(self) -> str:
        lane = f"channel {self.lane}" if self.lane else "liveness"
        return f"client {self.client.index} ({lane})"

    def _tell(self, how: str, message: m.Message | None) -> None:
        if message is not None and type(message) not in (m.Hello, m.Welcome):
            self._world.tell(f"{how} {brief(message)}")

    # ---- the client's end -----------------------------------------------------------------

    @property
    def oldest(self) -> float | None:
        """When the message was sent that arrives next; None: there is none."""
        return self._up[0].at if self._up else None

    @property
    def quiet(self) -> bool:
        """Whether nothing is on its way to the client."""
        return not self._down

    def send(self, message: m.Message, call: Call | None = None) -> None:
        """Send a message that belongs to a call."""
        if not self.closed:
            world = self._world
            self._up.append(Sent(_encode(message), message, call, world.loop.now))
            if self._arrive.at < 0:
                world.schedule.enable(self._arrive)

    def ask(self, message: m.Message, number: int, task: Task | None, call: Call | None) -> None:
        """Send a request, for whose answer a task waits."""
        self.waiting[number] = task
        self.send(message, call)

    def close(self) -> None:
        """The client closes it, or is dead. What it has sent arrives before the end does."""
        if self.closed:
            return
        self.closed = True
        self._send_end()
        self._forget()

    def _send_end(self) -> None:
        """What was sent is followed by the end."""
        self._up.append(Sent(b"", None, None, self._world.loop.now))
        self._world.schedule.enable(self._arrive)

    def cut(self, keep: int, *, broken: bool = False) -> None:
        """As :meth:`close`, but only the first ``keep`` of the messages under way arrive.

        ``broken``: the other end learns of it when it writes, and what has not been read by then
        are last words.
        """
        while len(self._up) > keep:
            self._up.pop()
        self._broken = broken
        self.close()

    def _forget(self) -> None:
        """Nobody reads the answers that are under way; the calls have taken effect, though."""
        while self._down:
            reply, point = self._down.popleft()
            if reply is not None:
                self.unread(reply, point)
        self._world.schedule.disable(self._answer)

    def unread(self, reply: m.Message, point: int) -> None:
        """The client will never hear this."""
        if type(reply) is m.Delayed:
            return
        task = self.waiting.pop(getattr(reply, "id", 0), None)
        if task is not None:
            task.call.never_heard(reply, point)

    def _down_arrives(self) -> None:
        down, world = self._down, self._world
        reply, point = down.popleft()
        if not down:
            world.schedule.disable(self._answer)
        if reply is None:
            self._hung_up()
            return
        if world.telling:
            self._tell(f"{self} hears", reply)
        if type(reply) is m.Delayed:
            return
        number: int = getattr(reply, "id", 0)
        if number in self.waiting:
            task = self.waiting.pop(number)
            if task is None:
                self.client.answered(self, reply)
            else:
                task.answered(reply, number, self.point_of(number, point))
        elif type(reply) is m.Welcome:
            self.client.came_back(reply)

    def _hung_up(self) -> None:
        """The other end has closed it."""
        self.closed = True
        self._forget()
        self.client.connection_lost(self)

    def point_of(self, number: int, point: int) -> int:
        """The point at which the server has sent the answer to a request."""
        return point

    # ---- the other end --------------------------------------------------------------------

    def _up_arrives(self) -> None:
        world = self._world
        sent = self._up.popleft()
        if not self._up:
            world.schedule.disable(self._arrive)
        if self._ended:
            return
        world.touched = True
        if self._broken:
            self._ended = True
            self._breaks([sent, *self._up])
        elif sent.message is not None:
            self._receive(sent)
        else:
            self._ended = True
            if world.telling:
                world.tell(f"server <- {self} closes")
            self._end()

    @abstractmethod
    def _receive(self, sent: Sent) -> None:
        """A message has arrived."""

    @abstractmethod
    def _end(self) -> None:
        """Everything has arrived, and the connection is closed."""

    @abstractmethod
    def _breaks(self, left: list[Sent]) -> None:
        """The connection is closed, and these were not read."""

    @abstractmethod
    def died(self) -> None:
        """The process at the client's end is dead."""

    def reply(self, reply: m.Message | None) -> None:
        """The other end sends an answer; None: the end."""
        world = self._world
        if not self.closed:
            self._down.append((reply, world.point))
            if self._answer.at < 0:
                world.schedule.enable(self._answer)
        elif reply is not None:
            self.unread(reply, world.point)

    def hang_up(self) -> None:
        """The other end closes it."""
        self.reply(None)
        self._world.loop.call_soon(self._lost)

    def _lost(self) -> None:
        if not self._ended:
            self._ended = True
            self._end()


class Direct(Connection):
    """A connection to the server's own socket: the server's real conversation is at its end.

    Attributes:
        late: the ids of the requests of which the client was told that they are delayed.
    """

    def __init__(self, world: World, client: Client, lane: int, name: tuple[int, ...]) -> None:
        super().__init__(world, client, lane, name)
        self._unanswered: dict[int, Call] = {}  # by the ids of the requests, if time counts
        self.late: set[int] = set()
        self._conversation = self._converse()

    def _converse(self) -> Conversation:
        return Conversation(self._world.server, self._answers, self.hang_up)

    def _receive(self, sent: Sent) -> None:
        world, call = self._world, sent.call
        world.point += 1
        if call is not None:
            call.reached(world.point)
            if world.is_timed:
                self._unanswered[getattr(sent.message, "id", 0)] = call
        if world.telling:
            self._tell(f"server <- {self}", sent.message)
        self._conversation.handle(sent.body)

    def _answers(self, frame: bytearray) -> None:
        world, reply = self._world, decode_reply(frame[HEADER:])
        if world.telling:
            self._tell(f"server -> {self}", reply)
        if world.is_timed:
            self._answers_later(reply)
        self.reply(reply)

    def _answers_later(self, reply: m.Message) -> None:
        """What was delayed happens when it is answered."""
        number = getattr(reply, "id", 0)
        if type(reply) is m.Delayed:
            self.late.add(number)
            return
        call = self._unanswered.pop(number, None)
        if number in self.late:
            self.late.discard(number)
            if call is not None:
                call.happened(self._world.point + 0.25)  # before the waits that it has answered
                self._world.point += 1

    def _end(self) -> None:
        self._conversation.ended()

    def _breaks(self, left: list[Sent]) -> None:
        if not self._conversation.greeted:  # it breaks when the server has something to write
            first = left.pop(0)
            if first.message is not None:
                self._receive(first)
        for sent in left:
            if sent.message is not None:
                self._world.point += 1
                if self._world.telling:
                    self._tell(f"server <- {self}, as last words,", sent.message)
                self._hear_last(sent.body)
        self._conversation.ended()

    def _hear_last(self, body: bytes) -> None:
        self._conversation.hear_last(body)

    def died(self) -> None:
        if not self._ended:
            self._world.touched = True
            self._world.point += 1
            self._conversation.process_died()
