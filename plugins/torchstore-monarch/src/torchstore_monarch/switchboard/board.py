"""The switchboard: the server's owner, and its end of all relays."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections import deque
from collections.abc import Callable

import msgspec

from torchstore_core.errors import ProtocolError, StoreClosedError
from torchstore_core.machine.processes import ProcessWatch
from torchstore_core.machine.tasks import begin
from torchstore_core.runtimes.server_process import ServerProcess
from torchstore_core.server.remote.lines import Line
from torchstore_core.server.remote.relay_server import EXPIRE_S, RelayServer
from torchstore_core.server.serving.frames import FrameProtocol
from torchstore_core.server.serving.listening import Listener, speaking
from torchstore_core.wire.framing import framed
from torchstore_monarch.actors.swept_directory import SweptDirectory
from torchstore_monarch.protocol import encoded_error
from torchstore_monarch.switchboard import wire

# The fraction of an uplink's patience after which a silent uplink is dead, if an agent is known to
# have died: while a relay lives, it is never silent for so long.
_SILENT = 1 / 3
_END_S = 3.0
# How long it may take until each relay has polled, and so knows that the store has ended. None may
# poll after that: the engine ends an actor that calls one that has stopped.
_POLLED_S = 2.0
# How long the last words to an actor may take.
_CLOSE_S = 1.0
# No replies, encoded.
_NOTHING = msgspec.msgpack.encode([])

log = logging.getLogger(__name__)


class _Uplink:
    """What has to be known of a relay to go on with it through another actor.

    Attributes:
        agent: see ``wire.OpenUplink``.
        received: the number of the last requests that have arrived.
    """

    def __init__(self, agent: str, send: Callable[[wire.Say], None]) -> None:
        self.agent = agent
        self.received = 0
        self._send = send
        self._said = 0
        self._kept: deque[wire.Say] = deque()  # until the relay has it
        self.token = b""

    def say(self, replies: bytes, failure: bytes = b"") -> None:
        """Send the relay replies, or what ends it."""
        self._said += 1
        said = wire.Say(self.token, self._said, self.received, failure, replies)
        self._kept.append(said)
        self._send(said)

    def has(self, number: int) -> None:
        """The relay has what was said up to this number."""
        while self._kept and self._kept[0].number <= number:
            self._kept.popleft()

    def say_again(self) -> None:
        """Send what the relay does not have."""
        for said in self._kept:
            self._send(said)


class Switchboard:
    """Starts a server, and leads relays to it through one actor after the other.

    It ends with the server, or when it is told to; and when it has had no actor for some time, at
    once if the program is gone to which all this belongs, or if the directory does not know of the
    actor yet.
    """

    def __init__(self, options: wire.Options) -> None:
        self._options = options
        self._server = ServerProcess()
        self._directory = SweptDirectory()
        self._listener = Listener(speaking(functools.partial(_Carrier, self)))
        self._relay_server: RelayServer | None = None
        self._uplinks: dict[bytes, _Uplink] = {}
        self._carrier: _Carrier | None = None
        self._watches: list[ProcessWatch] = []
        self._starting: asyncio.Task[str] | None = None
        self._led = False
        self._follow_by = 0.0  # until then, living relays may be silent: they look for the actor
        self._root_ended = False
        self._grace: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: asyncio.Task[None] | None = None
        self._to_answer: list[tuple[_Carrier, int]] = []  # when all has ended
        self._over = asyncio.Event()

    # ---- life -----------------------------------------------------------------------------

    async def start(self) -> str:
        """Start the server, which then waits for its volumes; returns its address."""
        self._starting = asyncio.current_task()
        options = self._options
        starter = ProcessWatch(options.starter, self._starter_ended, is_parent=True)
        self._watches = [starter, ProcessWatch(options.root, self._root_has_ended)]
        config = {**options.server, "directory": self._directory.path, "owner": os.getpid()}
        address = await self._server.launch(config, options.timeout)
        self._watches.append(ProcessWatch(self._server.pid, self._server_ended))
        path = address.partition(":")[2]
        self._relay_server = RelayServer(functools.partial(Line, path))
        self._relay_server.suspend()
        self._listener.open(os.path.join(self._directory.path, wire.SOCKET))
        return address

    async def ended(self) -> None:
        """Wait until all has ended."""
        await self._over.wait()

    def end_soon(self, why: str = "the store was shut down") -> None:
        """End everything."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end(why))

    def _starter_ended(self) -> None:
        if self._carrier is None and not self._led:
            self.end_soon("the actor that has started the server has ended")

    def _root_has_ended(self) -> None:
        self._root_ended = True
        if self._carrier is None:
            self.end_soon("its program has ended")

    def _server_ended(self) -> None:
        """The server has ended, and nobody has asked for that but its members."""
        members = bool(self._options.server.get("members"))
        good = members and self._server.exit_status == 0
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end("its server has ended", good))

    async def _end(self, why: str, good: bool | None = None) -> None:
        """End everything, also what is being started.

        Args:
            good: the server has ended by itself, and whether as it should.
        """
        for watch in self._watches:
            watch.close()
        if self._grace is not None:
            self._grace.cancel()
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        try:
            # Before the relays: a server that saw its volumes leave would tell clients that their
            # values are lost, where the store has been shut down.
            await self._server.stop(_END_S)
            if self._relay_server is not None:
                polled_s = 0.0 if self._carrier is None else _POLLED_S
                await self._relay_server.end(why, polled_s)
            if good is not None:
                self._send(wire.Ended(good))
        finally:
            self._listener.close()
            self._directory.remove()
            for carrier, number in self._to_answer:
                carrier.send(wire.Answer(number))
            self._over.set()

    async def close(self) -> None:
        """End everything, and wait for it."""
        self.end_soon()
        await self.ended()
        if self._carrier is not None:
            self._carrier.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._carrier.gone.wait(), _CLOSE_S)

    @property
    def server_pid(self) -> int:
        """Of the server, or of its keeper."""
        return self._server.pid

    # ---- the actor ------------------------------------------------------------------------

    def _carried(self, carrier: _Carrier) -> None:
        self._carrier = carrier
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def not_carried(self, carrier: _Carrier) -> None:
        """An actor has ended."""
        if carrier is not self._carrier:
            return
        self._carrier = None
        if self._ending is not None:
            return
        if self._root_ended or not self._led:
            self.end_soon("its actor has ended")
            return
        if self._relay_server is not None:
            self._relay_server.suspend()
        why = "its actor has ended, and no other one has come"
        loop = asyncio.get_running_loop()
        self._grace = loop.call_later(self._options.grace_s, self.end_soon, why)

    def handle(self, carrier: _Carrier, message: wire.FromActor) -> None:
        """Do what an actor wants."""
        relays = self._relay_server
        if relays is None:
            return
        match message:
            case wire.Carry():
                self._carried(carrier)
            case wire.Ask(token, number, got, requests):
                self._ask(relays, token, number, got, requests)
            case wire.Poll(number, token, got):
                begin(self._poll(carrier, relays, number, token, got), self._tasks)
            case wire.OpenUplink():
                self._open(carrier, relays, message)
            case wire.AgentOf(number, peer):
                uplink = self._uplinks.get(relays.token_of(peer) or b"")
                carrier.send(wire.Answer(number, agent="" if uplink is None else uplink.agent))
            case wire.AgentFailed():
                if asyncio.get_running_loop().time() > self._follow_by:
                    relays.close_silent(_SILENT)
            case wire.Led():
                if self._led:
                    self._follow_by = asyncio.get_running_loop().time() + EXPIRE_S
                self._led = True
                relays.resume()
            case wire.End(number, why):
                self._to_answer.append((carrier, number))
                self.end_soon(why)

    def _ask(
        self, relays: RelayServer, token: bytes, number: int, got: int, requests: bytes
    ) -> None:
        uplink = self._uplinks.get(token)
        if uplink is None:
            return
        relays.heard(token)
        uplink.has(got)
        if number != uplink.received + 1:  # the actor before has brought it, too; or it is none
            return
        uplink.received = number
        try:
            replies = relays.exchange(token, requests)
        except Exception as error:  # noqa: BLE001 - passed to the relay
            uplink.say(b"", encoded_error(error))
        else:
            if replies != _NOTHING:
                uplink.say(replies)

    async def _poll(
        self, carrier: _Carrier, relays: RelayServer, number: int, token: bytes, got: int
    ) -> None:
        self._uplinks = {t: one for t, one in self._uplinks.items() if t in relays.tokens}
        uplink = self._uplinks.get(token)
        if uplink is not None:
            uplink.has(got)
        try:
            await relays.poll(token)
        except StoreClosedError as error:
            carrier.send(wire.Answer(number, encoded_error(error)))
        else:
            received = 0 if uplink is None else uplink.received
            carrier.send(wire.Answer(number, received=received))

    def _open(self, carrier: _Carrier, relays: RelayServer, wanted: wire.OpenUplink) -> None:
        if self._ending is not None or (wanted.token and wanted.token not in relays.tokens):
            gone = StoreClosedError("this relay is unknown here: the store has given it up")
            carrier.send(wire.Answer(wanted.id, encoded_error(gone)))
            return
        if wanted.token:
            uplink = self._uplinks[wanted.token]
            uplink.has(wanted.got)
        else:
            uplink = _Uplink(wanted.agent, self._send)
            uplink.token = relays.open(wanted.here, uplink.say)
            self._uplinks[uplink.token] = uplink
        carrier.send(wire.Answer(wanted.id, token=uplink.token, received=uplink.received))
        uplink.say_again()

    def _send(self, message: wire.Say | wire.Ended) -> None:
        if self._carrier is not None:
            self._carrier.send(message)


class _Carrier(FrameProtocol):
    """The connection of an actor, once it has said that it is one."""

    def __init__(self, board: Switchboard, pid: int) -> None:
        super().__init__(wire.MAX_FRAME)
        self._board = board
        self.gone = asyncio.Event()

    def send(self, message: wire.ToActor) -> None:
        """Send a message, if the actor is still there."""
        self.write(framed(message))

    def received(self, bodies: list[bytes]) -> None:
        for body in bodies:
            try:
                self._board.handle(self, wire.from_actor(body))
            except ProtocolError as error:
                log.warning("%s", error)
                self.close()
                return

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.gone.set()
        self._board.not_carried(self)
