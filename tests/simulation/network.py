"""Connections whose messages arrive when the simulation says so: in order on each of them, and in
any order across several.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec
from tests.simulation.scheduling import Action

from torchstore_core.server.serving.conversation import Conversation
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import HEADER, decode_reply, decode_request

if TYPE_CHECKING:
    from tests.simulation.clients import Client, Task
    from tests.simulation.histories import Call
    from tests.simulation.world import World

__all__ = ["Connection"]

_encode = msgspec.msgpack.Encoder().encode


class Connection:
    """One connection of a client, with the server's real conversation at its other end.

    Args:
        lane: 0 is the liveness connection, the others are channels.
        name: who it is, for the schedule.
    """

    def __init__(self, world: World, client: Client, lane: int, name: tuple[int, ...]) -> None:
        self._world = world
        self.client = client
        self.lane = lane
        self.opened = False  # the server has welcomed it
        self.closed = False  # the client does not use it any more
        self._ended = False  # the server does not
        self.waiting: dict[int, Task | None] = {}
        self._up: deque[tuple[bytes, Call | None]] = deque()
        self._down: deque[tuple[bytearray, int]] = deque()
        self._arrive = Action(("up", *name), self._up_arrives)
        self._answer = Action(("down", *name), self._down_arrives)
        self._conversation = Conversation(world.server, self._write, self._close)

    def __repr__(self) -> str:
        lane = f"channel {self.lane}" if self.lane else "liveness"
        return f"client {self.client.index} ({lane})"

    def _tell(self, how: str, message: m.Message) -> None:
        if not isinstance(message, m.Hello | m.Welcome):
            self._world.tell(f"{how} {_brief(message)}")

    # ---- the client's end -----------------------------------------------------------------

    def send(self, message: m.Message, call: Call | None = None) -> None:
        """Send a message that belongs to a call."""
        if not self.closed:
            self._up.append((_encode(message), call))
            self._world.schedule.enable(self._arrive)

    def ask(self, message: m.Message, number: int, task: Task | None, call: Call | None) -> None:
        """Send a request, for whose answer a task waits."""
        self.waiting[number] = task
        self.send(message, call)

    def close(self) -> None:
        """The client closes it, or is dead. What it has sent arrives before the end does."""
        if self.closed:
            return
        self.closed = True
        self._up.append((b"", None))
        self._world.schedule.enable(self._arrive)
        self._forget()

    def cut(self, keep: int) -> None:
        """As :meth:`close`, but only the first ``keep`` of the messages under way arrive."""
        while len(self._up) > keep:
            self._up.pop()
        self.close()

    def _forget(self) -> None:
        """Nobody reads the answers that are under way; the calls have taken effect, though."""
        while self._down:
            self._unread(*self._down.popleft())
        self._world.schedule.disable(self._answer)

    def _unread(self, frame: bytearray, point: int) -> None:
        reply = decode_reply(memoryview(frame)[HEADER:])
        task = self.waiting.pop(getattr(reply, "id", 0), None)
        if task is not None:
            task.call.never_heard(reply, point)

    def _down_arrives(self) -> None:
        frame, point = self._down.popleft()
        if not self._down:
            self._world.schedule.disable(self._answer)
        if not frame:
            self.closed = True
            self.client.connection_lost(self)
            return
        reply = decode_reply(memoryview(frame)[HEADER:])
        if self._world.telling:
            self._tell(f"{self} hears", reply)
        number = getattr(reply, "id", 0)
        if number in self.waiting:
            task = self.waiting.pop(number)
            if task is None:
                self.client.answered(self, reply)
            else:
                task.answered(reply, point)

    # ---- the server's end -----------------------------------------------------------------

    def _up_arrives(self) -> None:
        body, call = self._up.popleft()
        if not self._up:
            self._world.schedule.disable(self._arrive)
        self._world.touched = True
        if self._ended:
            return
        if not body:
            self._ended = True
            if self._world.telling:
                self._world.tell(f"server <- {self} closes")
            self._conversation.ended()
            return
        self._world.point += 1
        if call is not None:
            call.reached(self._world.point)
        if self._world.telling:
            self._tell(f"server <- {self}", decode_request(body))
        self._conversation.handle(body)

    def died(self) -> None:
        """The server learns that the process at the other end is dead."""
        if not self._ended:
            self._world.touched = True
            self._world.point += 1
            self._conversation.process_died()

    def _write(self, frame: bytearray) -> None:
        if self._world.telling and frame:
            self._tell(f"server -> {self}", decode_reply(memoryview(frame)[HEADER:]))
        if self.closed:
            self._unread(frame, self._world.point)
            return
        self._down.append((frame, self._world.point))
        self._world.schedule.enable(self._answer)

    def _close(self) -> None:
        """The server closes it."""
        self._write(bytearray()) if not self.closed else None
        self._world.loop.call_soon(self._lost)

    def _lost(self) -> None:
        if not self._ended:
            self._ended = True
            self._conversation.ended()


def _brief(message: m.Message) -> str:
    """A message for people, without what is as usual."""
    fields = []
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(message, m.Failure) and name not in ("id", "code"):
            continue
        if value not in (0, None, False, b"", []):
            fields.append(f"{name}={_plain(value)}")
    return f"{type(message).__name__}({', '.join(fields)})"


def _plain(value: object) -> str:
    match value:
        case m.PutItem():
            return f"{value.key}[{value.nbytes}{'' if value.data is None else ' inline'}]"
        case m.Want():
            return f"{value.key}" + (f"@{value.version}" if value.version else "")
        case m.Grant():
            return f"{value.volume}:{value.offset}"
        case m.Entry():
            where = "inline" if value.grant is None else _plain(value.grant)
            parts = "" if value.parts is None else f" {len(value.parts)} parts"
            return f"version {value.version} {where}{parts}"
        case list() | tuple():
            return f"[{' '.join(map(_plain, value))}]"
    return str(value)
