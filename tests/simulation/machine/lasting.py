"""Connections to a server that comes back when it dies, with both ends' ways to go on."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from msgspec.structs import replace
from tests.simulation.machine.lives import Handled
from tests.simulation.machine.network import Connection, Direct, Sent

from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.serving.conversation import Conversation
from torchstore_core.wire import messages as m
from torchstore_core.wire.repeating import number_of

if TYPE_CHECKING:
    from tests.simulation.acting.clients import Client, Task
    from tests.simulation.promises.histories import Call
    from tests.simulation.world import World

__all__ = ["Lasting"]

# So many answers fit into the kernel's buffer. The others stay in that of the server.
_FIT = 1


class Lasting(Direct):
    """A connection to such a server.

    The keeper holds liveness connections. What has come on one of them is taken out of the kernel's
    buffer when it was handled, so the next life may handle it again. A channel is *down* when the
    other end has closed it: its client waits for the next life, and then asks again on another
    connection, which takes its place. What the kernel has, the client hears, whatever becomes of
    the server; what it has no room for is lost with the server, which reads nothing meanwhile.

    Attributes:
        handled: what the server has not answered yet, as far as the kernel knows, by the ids of the
            requests.
        is_kept: whether the keeper holds it.
        down: see above.
        life: the one of the server that it leads to; 0: that has not answered.
    """

    def __init__(self, world: World, client: Client, lane: int, name: tuple[int, ...]) -> None:
        self.handled: dict[int, Handled] = {}
        self.is_kept = False
        self.down = False
        self.life = 0
        self._next: Lasting | None = None  # what has taken its place
        self._was_read = False
        self._is_first = False
        self._unsent: deque[tuple[m.Message | None, int]] = deque()  # answers, as in `_down`
        self._is_stalled = False  # because there were some
        self._untaken: deque[Sent] = deque()  # what is handled, and waits for room in the log
        self._is_closing = False  # the server does, for whatever reason
        self._asked: dict[int, tuple[m.Message, Call | None]] = {}
        self._postponed: list[tuple[m.Message, Call | None]] = []
        self._pid = client.pid
        super().__init__(world, client, lane, name)
        world.lives.connections[self] = None

    # ---- the client's end -----------------------------------------------------------------

    def send(self, message: m.Message, call: Call | None = None) -> None:
        if self._next is not None:
            self._next.send(message, call)
        elif not self.down:
            super().send(message, call)
        elif type(message) is not m.Cancel:
            self._postponed.append((message, call))

    def ask(self, message: m.Message, number: int, task: Task | None, call: Call | None) -> None:
        if self._next is not None:
            self._next.ask(message, number, task, call)
            return
        self._asked[number] = message, call
        self.waiting[number] = task
        if not self.down:
            super().send(message, call)

    def close_at_the_server(self, keep: int) -> None:
        """The server, which lives, closes it when it has handled so many more messages."""
        self._is_closing = True
        while len(self._up) > keep:
            self._up.pop()
        self._send_end()

    def _forget(self) -> None:
        self._down.extend(self._unsent)
        self._unsent.clear()
        super()._forget()

    def _down_arrives(self) -> None:
        super()._down_arrives()
        if self._unsent and not self._down:
            self._send(*self._unsent.popleft())
            if not self._unsent:
                self._world.touched = True
                self._goes_on()
                self._conversation.resume()

    def _goes_on(self) -> None:
        """It is read again."""
        self._is_stalled = False
        if self._up:
            self._world.schedule.enable(self._arrive)

    def _hung_up(self) -> None:
        if self.lane == 0 or not self.opened:
            super()._hung_up()
        elif not self.down:
            self.fall()

    def fall(self) -> None:
        """The client finds a channel closed."""
        self.closed, self.down = False, True
        self.client.channel_lost(self)

    def unread(self, reply: m.Message, point: int) -> None:
        task = self.waiting.get(getattr(reply, "id", 0))
        if task is not None:
            task.call.never_heard(reply, point)

    def unanswered(self) -> list[int]:
        """See ``Channel.unanswered``."""
        there = [number for number, task in self.waiting.items() if task and task.awaits(number)]
        return [number_of(self._asked[number][0]) for number in there]

    def adopt(self, other: Lasting) -> None:
        """Another connection, to a later life, takes its place."""
        self.down = True  # what came before the end counts
        while not self.quiet:
            self._down_arrives()
        self._next = other
        for message, call in self._postponed:
            other.send(message, call)
        for number, task in list(self.waiting.items()):
            if task is None or task.awaits(number):
                message, call = self._asked.pop(number)
                other._asked[number] = message, call
                other.waiting[number] = task
                Connection.send(other, m.Again(number, message), call)  # type: ignore[arg-type]
        self.closed = False
        self.close()

    def give_up(self) -> None:
        """The server lives, and has closed this channel: it stays closed."""
        self.closed = True
        self.client.connection_lost(self)

    # ---- the other end --------------------------------------------------------------------

    def _converse(self) -> Conversation:
        server, pid = self._world.server, self._pid
        return Conversation(server, self._answers, self.hang_up, pid=pid, keep=self._keep)

    def _keep(self, session: SessionRecord) -> None:
        self.is_kept = self._world.server.keep_connection(session, self)  # type: ignore[arg-type]

    def _receive(self, sent: Sent) -> None:
        world, call = self._world, sent.call
        request: m.Message = sent.message  # type: ignore[assignment]  # not the end
        world.point += 1
        self._was_read = True
        number = getattr(request, "id", 0)
        again = type(request) is m.Again
        if again:
            request = request.request  # type: ignore[attr-defined]
        if call is not None:
            session = self._conversation._session
            token = b"" if session is None else session.token
            done = number_of(request) and call.known  # as far as the server is concerned
            if not again or not (done or world.lives.result_of(token, request)):
                call.reached(world.point)
            self.handled[number] = Handled(token, request, call)
            if world.is_timed:
                self._unanswered[number] = call
        if world.telling:
            self._tell(f"server <- {self}{' again' if again else ''}", request)
        if not self.is_kept:
            self._conversation.handle(sent.body)
            return
        self._put_back(sent)
        if self._is_first:
            self._is_first = False
            self._conversation.handle_first(sent.body)
        else:
            self._conversation.handle(sent.body)
        world.lives.handled()
        self._take_out_when_recorded()

    def _take_out_when_recorded(self) -> None:
        """Take out a message that was handled; nothing else is read until it can be."""
        if not self._world.lives.when_recorded(self._recorded):
            self._take_out()
        else:
            self._untaken.append(self._up[len(self._untaken)])
            self._world.schedule.disable(self._arrive)

    def _recorded(self) -> None:
        if self._untaken:
            one = self._untaken.popleft()
            if self._up and self._up[0] is one:  # its client may have lost it
                self._take_out()
            if self._up and not self._untaken:
                self._world.schedule.enable(self._arrive)

    def _up_arrives(self) -> None:
        if self._untaken:
            self._world.schedule.disable(self._arrive)
            return
        if self._is_stalled:
            if not self.closed:
                self._world.schedule.disable(self._arrive)
                return
            self._is_stalled, self._broken = False, True  # that is seen when it is written to
        super()._up_arrives()

    def _put_back(self, sent: Sent) -> None:
        """It stays in the kernel's buffer until it is handled."""
        self._up.appendleft(replace(sent, at=self._world.loop.now))
        self._world.schedule.enable(self._arrive)

    def _take_out(self) -> None:
        self._up.popleft()
        if not self._up:
            self._world.schedule.disable(self._arrive)

    def _answers(self, frame: bytearray) -> None:
        if not self._world.lives.is_dying:
            super()._answers(frame)

    def reply(self, reply: m.Message | None) -> None:
        if self.closed:
            super().reply(reply)
        elif self._unsent or len(self._down) >= _FIT:
            self._unsent.append((reply, self._world.point))
            self._is_stalled = True
            self._conversation.pause()
        else:
            self._send(reply, self._world.point)

    def _send(self, reply: m.Message | None, point: int) -> None:
        """The kernel takes an answer, or the end."""
        if reply is not None and type(reply) is not m.Delayed:
            self.handled.pop(getattr(reply, "id", 0), None)
        self._down.append((reply, point))
        self._world.schedule.enable(self._answer)

    def hang_up(self) -> None:
        if self.is_kept:  # the keeper has it open as long as the server has not
            self._world.loop.call_soon(self._lost)
        else:
            super().hang_up()

    def _lost(self) -> None:
        super()._lost()
        if self.is_kept:
            self.reply(None)

    def _end(self) -> None:
        super()._end()
        if self._is_closing:
            self.reply(None)
        self._not_kept()

    def _breaks(self, left: list[Sent]) -> None:
        if self.is_kept:
            self._put_back(left[0])
        super()._breaks(left)
        if not (self._untaken and self._world.lives.when_recorded(self._forget_sent)):
            self._forget_sent()
        self._not_kept()

    def _hear_last(self, body: bytes) -> None:
        if self._is_first:
            self._is_first = False
            self._conversation.handle_first(body, is_last=True)
        else:
            super()._hear_last(body)
        if self.is_kept:
            self._take_out_when_recorded()

    def _forget_sent(self) -> None:
        """Nobody reads any more what was sent."""
        self._up.clear()
        self._world.schedule.disable(self._arrive)

    def dropped(self) -> None:
        """The keeper does not have it any more."""
        self.is_kept = False
        self._not_kept()

    def _not_kept(self) -> None:
        if self._ended and not self.is_kept:
            self._world.lives.connections.pop(self, None)

    # ---- the next life --------------------------------------------------------------------

    def go_on(self, session: SessionRecord, *, is_there: bool) -> None:
        """It is the liveness connection of a session, as before."""
        self._forget_handled()
        self._untaken.clear()
        self._goes_on()
        self._is_first = True
        if self._ended:  # whoever reads it is told so again
            self._ended = False
            if not self._up:
                self._send_end()
        self._conversation = self._converse()
        self._keep(session)
        self._conversation.go_on(session)
        if not is_there:
            self._world.loop.call_soon(self._conversation.process_died)

    def closed_by_keeper(self) -> None:
        """It is of no session any more."""
        self._lose()

    def server_died(self, *, queued: bool) -> None:
        """It was not kept. ``queued``: what had not been accepted waits for the next life."""
        if self._ended:
            return
        if queued and not self._was_read:
            self._world.lives.connections[self] = None
            self._conversation = self._converse()
        else:
            self._lose()

    def _lose(self) -> None:
        self.is_kept = False
        self._ended = True
        self._forget_sent()
        self._forget_handled()
        self._is_stalled = False
        if self.closed:
            self.reply(None)
        else:
            self._send(None, self._world.point)

    def _forget_handled(self) -> None:
        self.handled.clear()
        self._unsent.clear()
        self._unanswered.clear()
        self.late.clear()
