"""A real relay on another host, real on both sides of its uplink; only the uplink is simulated, and
the sockets of its clients.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
from tests.simulation.machine.network import Connection, Sent
from tests.simulation.machine.scheduling import Action

from torchstore_core.errors import TorchStoreError
from torchstore_core.machine.directories import PrivateDirectory
from torchstore_core.machine.processes import Process
from torchstore_core.machine.tasks import begin
from torchstore_core.server.remote.relay import Relay, _Client
from torchstore_core.server.remote.relay_server import RelayServer
from torchstore_core.server.serving.conversation import Conversation
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import HEADER, decode_reply, decode_request

if TYPE_CHECKING:
    from tests.simulation.acting.clients import Client
    from tests.simulation.promises.histories import Call
    from tests.simulation.world import World

__all__ = ["Relayed", "Uplink"]

_TICK_S = 5.0


class Uplink:
    """The way of one relay to the server. What goes up arrives in order; answers come back in any.

    Attributes:
        severed: nothing gets through any more, in either direction, and nobody is told.
    """

    def __init__(self, world: World) -> None:
        self.severed = False
        self._world = world
        self._server = RelayServer(partial(Conversation, world.server), clock=world.loop.time)
        self._token = self._server.open(msgspec.msgpack.encode(world.here))
        self._calls: deque[tuple[int, bytes | None, asyncio.Future[bytes]]] = deque()
        self._number = 0
        self._arrive = Action(("uplink",), self._arrives)
        self._tick = Action(("tick",), self._ticks)
        self._connections: dict[int, Relayed] = {}
        self._known: set[Conversation] = set()
        nowhere = cast(PrivateDirectory, None)  # it never listens
        self.relay = Relay(self, nowhere, lost=self._lost, clock=world.loop.time)
        begin(self.relay._poll(), self.relay._tasks)

    @property
    def usable(self) -> bool:
        """Whether clients can connect to the relay."""
        return not (self.severed or self.relay._closed)

    def connected(self, number: int, connection: Relayed) -> None:
        """A client has connected to the relay, which calls that connection ``number``."""
        self._connections[number] = connection

    # ---- contracts.engine.Uplink ----------------------------------------------------------

    def exchange(self, requests: bytes) -> Awaitable[bytes]:
        return self._call(requests)

    def poll(self) -> Awaitable[bytes]:
        return self._call(None)

    @property
    def paused(self) -> bool:
        return False

    def _call(self, requests: bytes | None) -> asyncio.Future[bytes]:
        answer = self._world.loop.create_future()
        self._number += 1
        if not self.severed:
            self._calls.append((self._number, requests, answer))
            self._world.schedule.enable(self._arrive)
        return answer

    def _arrives(self) -> None:
        number, requests, answer = self._calls.popleft()
        if not self._calls:
            self._world.schedule.disable(self._arrive)
        self._world.touched = True
        if requests is None:
            polled = self._world.loop.create_task(self._server.poll(self._token))
            polled.add_done_callback(lambda done: self._returns(number, answer, done))
            return
        self._hook()
        replies: asyncio.Future[bytes] = self._world.loop.create_future()
        try:
            replies.set_result(self._server.exchange(self._token, requests))
        except TorchStoreError as error:
            replies.set_exception(error)
        self._hook()
        self._returns(number, answer, replies)

    def _returns(
        self, number: int, answer: asyncio.Future[bytes], done: asyncio.Future[bytes]
    ) -> None:
        if done.cancelled():
            return
        error = done.exception()

        def arrive() -> None:
            if answer.done() or self.severed:
                return
            if error is None:
                answer.set_result(done.result())
            else:
                answer.set_exception(error)

        self._world.once(("returns", number), arrive)

    # ---- what goes wrong ------------------------------------------------------------------

    def sever(self) -> None:
        """From now on neither side hears the other."""
        if self.usable:
            self.severed = True
            self._calls.clear()
            self._world.schedule.disable(self._arrive)
            self._world.schedule.enable(self._tick)

    def _ticks(self) -> None:
        """Time passes, until both sides have given up the other. Between the two, all clients of
        the relay have heard of it: that is what the time between is for.
        """
        if self._world.loop.ready:  # what is due happens before more time passes
            return
        if self.relay._closed and any(not one.closed for one in self._connections.values()):
            self._world.schedule.disable(self._tick)
            return
        self._world.touched = True
        self._world.loop.advance(_TICK_S)
        if self.relay._closed and not self._server._relays:
            self._world.schedule.disable(self._tick)

    def heard(self) -> None:
        """A client has heard that the relay is gone."""
        if self.severed and self._server._relays:
            self._world.schedule.enable(self._tick)

    def _lost(self) -> None:
        self._world.tell("the relay gives up")

    # ---- watching the server's end --------------------------------------------------------

    def _hook(self) -> None:
        """Learn what new conversations hear and say. The first message of each is a Hello."""
        remote = self._server._relays.get(self._token)
        conversations = {} if remote is None else remote._conversations
        for number, conversation in conversations.items():
            if conversation not in self._known:
                self._known.add(conversation)
                self._connections[number].watch(conversation)


class _Socket:
    """The relay's end of a client's socket: what it needs of an asyncio transport."""

    def __init__(self, connection: Relayed) -> None:
        self._connection = connection
        self._closing = False

    def is_closing(self) -> bool:
        return self._closing

    def write(self, frame: bytes) -> None:
        self._connection.reply(decode_reply(memoryview(frame)[HEADER:]))

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._connection.hang_up()

    def get_extra_info(self, name: str) -> None:
        return None


class Relayed(Connection):
    """A connection to a relay."""

    def __init__(
        self, world: World, client: Client, lane: int, name: tuple[int, ...], uplink: Uplink
    ) -> None:
        super().__init__(world, client, lane, name)
        self._uplink = uplink
        self._under_way: deque[Call | None] = deque()  # calls of what the server has not handled
        self._said: dict[int, tuple[m.Message, int]] = {}  # answers, until they are heard
        self._there = _Client(uplink.relay, 0)
        self._there.connection_made(cast(Any, _Socket(self)))
        self._there._process = Process(client.pid, 1)
        uplink.connected(self._there._conn, self)

    def watch(self, conversation: Conversation) -> None:
        """That is the server's end: see what it is told, and what it says."""
        world, handle, send = self._world, conversation.handle, conversation.send
        self._under_way.popleft()  # the Hello

        def handles(body: bytes) -> None:
            world.point += 1
            call = self._under_way.popleft()
            if call is not None:
                call.reached(world.point)
            if world.telling:
                self._tell(f"server <- {self} by the relay", decode_request(body))
            handle(body)

        def sends(message: m.Message) -> None:
            if world.telling:
                self._tell(f"server -> {self} by the relay", message)
            if self.closed:
                self.unread(message, world.point)
            else:
                self._said[getattr(message, "id", 0)] = message, world.point
            send(message)

        conversation.handle = handles  # type: ignore[method-assign]
        conversation.send = sends

    def point_of(self, number: int, point: int) -> int:
        said = self._said.pop(number, None)
        return point if said is None else said[1]

    def _forget(self) -> None:
        self._down.clear()
        self._world.schedule.disable(self._answer)
        for reply, point in self._said.values():
            self.unread(reply, point)
        self._said.clear()
        self._uplink.heard()

    def _receive(self, sent: Sent) -> None:
        self._under_way.append(sent.call)
        body = sent.body
        self._there.data_received(len(body).to_bytes(HEADER, "little") + body)

    def _end(self) -> None:
        self._there.connection_lost(None)

    def _breaks(self, left: list[Sent]) -> None:
        left = [one for one in left if one.message is not None]
        self._under_way += [one.call for one in left]
        self._there.left_behind([one.body for one in left])
        self._there.connection_lost(None)

    def died(self) -> None:
        if not self._ended:
            self._there.process_died()
