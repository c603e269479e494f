"""How requests of clients on other hosts reach the switchboard, and answers them.

The requests travel through ports, which are the engine's channels for plain messages, and not as
calls of endpoints. A call makes a port for its answer, and is received by the event loop of the
actor; a message through a port that stays arrives in the thread of the relay or the server at once.
Nothing is told about a message that cannot be delivered: that the other end is dead shows in
``poll``, which is a call. Everything else that the server says comes through one port, in order,
with the number of the last request that the server has received.

When the actor that carries all this has died, the relay goes on with the next one; see
:mod:`torchstore_monarch.switchboard.wire` for what is kept for that.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import msgspec
from monarch.actor import Channel

from torchstore_core.errors import ProtocolError, StoreClosedError, TorchStoreError
from torchstore_core.machine.sockets.unix import connect, unix_socket
from torchstore_core.server.serving.frames import FrameProtocol
from torchstore_core.wire.framing import framed
from torchstore_monarch.actors.pulse import Pulse
from torchstore_monarch.protocol import result
from torchstore_monarch.switchboard import wire

log = logging.getLogger(__name__)

T = TypeVar("T")
# No replies, encoded.
_NOTHING = msgspec.msgpack.encode([])
# A poll is answered within 2 s. One that is not makes the relay ask for the actor that leads.
_SILENT_S = 3.0
# How often that is asked while another one is being started.
_ASK_AGAIN_S = 0.2
# How long a call of the directory, or of an actor that it has just named, may take.
_CALL_S = 5.0
# How often the directory may say that an actor leads whose calls fail.
_TRIES = 10


class _Request(NamedTuple):
    """What a relay has asked, until it has arrived."""

    number: int
    requests: bytes
    arrived: asyncio.Future[bytes]


class RelayUplink:
    """A relay's end, an :class:`~torchstore_core.contracts.engine.Uplink`. All calls are made in
    the thread of the relay.

    Args:
        controller: the actor that leads to the server.
        find: asks the directory which actor that is now: see ``Directory.leader``.

    Attributes:
        controller: the actor that leads to the server now, as far as is known.
    """

    def __init__(
        self, controller: Any, find: Callable[[], Awaitable[tuple[int, Any] | None]]
    ) -> None:
        self.controller = controller
        self._find = find
        self._generation = 0
        self._here, self._agent = b"", ""
        self._token = b""
        self._there: Any = None
        self._numbers = itertools.count(1)
        self._got = 0
        self._waiting: deque[_Request] = deque()
        self._arrived: deque[bytes] = deque()
        self._error: Exception | None = None
        self._wanted: asyncio.Future[None] | None = None  # by the poll that waits
        self._suspect = asyncio.Event()
        self._unsent: Exception | None = None
        self._over: TorchStoreError | None = None  # why the store has ended
        self._living: asyncio.Task[None] | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Future[Any]] = set()
        self._pulse = Pulse()

    async def open(self, here: bytes, agent: str) -> None:
        """Introduce the relay to the server.

        Args:
            here: the encoded Topology of its host.
            agent: the path there of the socket of the ``Forwarder`` beside it.
        """
        self._here, self._agent = here, agent
        await self._open(self.controller)
        self._living = asyncio.ensure_future(self._show_life())

    async def _open(self, controller: Any) -> None:
        """Introduce the relay through this actor, and send what has not arrived through another."""
        back, answers = Channel.open()
        asked = self._here, self._agent, back, self._token, self._got
        self._token, received, there = result(await controller.open_uplink.call_one(*asked))
        there.return_undeliverable = False
        self.controller, self._there = controller, there
        self._pulse.lead(there, (self._token, 0, 0, _NOTHING))
        self._has_arrived(received)
        self._unsent = None
        for request in self._waiting:
            self._send(request)
        if self._receiving is not None:
            self._receiving.cancel()
        self._receiving = asyncio.ensure_future(self._receive(answers))

    def exchange(self, requests: bytes) -> Awaitable[bytes]:
        """Call ``RelayServer.exchange``."""
        waiting = asyncio.get_running_loop().create_future()
        request = _Request(next(self._numbers), requests, waiting)
        self._waiting.append(request)
        self._send(request)
        return waiting

    def _send(self, request: _Request) -> None:
        try:
            self._there.send((self._token, request.number, self._got, request.requests))
        except Exception as error:  # noqa: BLE001 - whatever the engine raises
            self._unsent = error  # unless another actor carries it
            self._suspect.set()

    async def poll(self) -> bytes:
        """Return what has come from the server; if nothing has, wait until something does, or until
        the server has answered a ``RelayServer.poll``.
        """
        if not (self._arrived or self._error):
            self._wanted = asyncio.get_running_loop().create_future()
            await self._wanted
        if self._arrived:
            return self._arrived.popleft()
        raise self._error or StoreClosedError("the server does not say anything any more")

    @property
    def paused(self) -> bool:
        """See :class:`Pulse`."""
        return self._pulse.beats

    def led(self, generation: int) -> None:
        """The controller of that generation leads now, see ``Directory.leader``."""
        if generation != self._generation:
            self._suspect.set()

    def close(self) -> None:
        """Receive nothing more. Idempotent."""
        self._pulse.close()
        for task in (self._living, self._receiving):
            if task is not None:
                task.cancel()

    # ---- signs of life --------------------------------------------------------------------

    async def _show_life(self) -> None:
        tries = 0
        try:
            while True:
                failed = await self._poll()
                if failed is not None:
                    tries += 1
                    if tries > _TRIES:
                        raise failed
                    if not isinstance(failed, TimeoutError):
                        await asyncio.sleep(_ASK_AGAIN_S)
                else:
                    tries = 0
                if failed is not None or self._suspect.is_set():
                    self._suspect.clear()
                    await self._follow()
        except Exception as error:  # noqa: BLE001 - whatever the engine raises, it ends the relay
            self._fail(error)

    async def _poll(self) -> Exception | None:
        """Show life, unless there is reason to look for another actor; why that has failed.

        Raises:
            TorchStoreError: the store has ended.
        """
        failed: Exception | None = None
        try:
            await self._bounded(self._show_once(), _SILENT_S, self._suspect)
        except Exception as error:  # noqa: BLE001 - whatever the engine raises for a dead actor
            failed = error
        if self._over is not None:
            raise self._over
        return failed

    async def _show_once(self) -> None:
        """Show life. An answer that comes late, as through a cable that was pulled, counts, too."""
        polled = await self.controller.poll.call_one(self._token, self._got)
        try:
            received = result(polled)
        except TorchStoreError as error:
            self._over = error
            self._suspect.set()
            raise
        self._has_arrived(received)
        self._arrive(_NOTHING)

    async def _follow(self) -> None:
        """Go on with the actor that leads now; wait for it while it is being started.

        Raises:
            TorchStoreError: the store has ended, or has given this relay up.
        """
        while True:
            try:
                found = await self._bounded(self._find(), _CALL_S)
            except Exception as error:  # noqa: BLE001 - whatever the engine raises
                # As slow as the actor, or as far away: how long that is borne, the relay decides.
                log.info("the directory does not say who leads to the server: %r", error)
                return
            if self._over is not None:
                raise self._over
            if found is None:
                raise StoreClosedError("the store has ended")
            generation, controller = found
            if controller is None:
                # As good as an answer of the server: no relay is given up before another actor is
                # there, and has been for a while.
                self._arrive(_NOTHING)
                await asyncio.sleep(_ASK_AGAIN_S)
            elif generation == self._generation:
                if self._unsent is not None:
                    raise self._unsent
                return
            else:
                try:
                    await self._bounded(self._open(controller), _CALL_S)
                except TorchStoreError:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever the engine raises
                    log.info("the actor that leads to the server does not answer: %r", error)
                    await asyncio.sleep(_ASK_AGAIN_S)
                else:
                    self._generation = generation
                    return

    async def _bounded(
        self, call: Awaitable[T], timeout: float, unless: asyncio.Event | None = None
    ) -> T | None:
        """Wait for a call, which goes on if it takes longer: its answer must find somebody. None if
        the event comes first.

        Raises:
            TimeoutError: it takes longer.
        """
        calling = asyncio.ensure_future(call)
        self._calls.add(calling)
        calling.add_done_callback(self._called)
        event = None if unless is None else asyncio.ensure_future(unless.wait())
        try:
            waited = {calling} if event is None else {calling, event}
            await asyncio.wait(waited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if event is not None:
                event.cancel()
        if calling.done():
            return calling.result()
        if unless is not None and unless.is_set():
            return None
        raise TimeoutError(f"no answer within {timeout:g} s")

    def _called(self, call: asyncio.Future[Any]) -> None:
        self._calls.discard(call)
        if not call.cancelled() and (error := call.exception()) is not None:
            log.debug("a call of a relay has failed: %r", error)

    # ---- what comes -----------------------------------------------------------------------

    async def _receive(self, answers: Any) -> None:
        try:
            while True:
                number, received, failure, replies = await answers.recv()
                if number <= self._got:  # the actor before has brought it
                    continue
                self._got = number
                said = result((failure, replies))
                self._has_arrived(received)
                self._arrive(said)
        except Exception as error:  # noqa: BLE001 - whatever the engine raises, it ends the relay
            self._fail(error)

    def _has_arrived(self, number: int) -> None:
        while self._waiting and self._waiting[0].number <= number:
            waiting = self._waiting.popleft().arrived
            if not waiting.done():
                waiting.set_result(_NOTHING)

    def _arrive(self, replies: bytes) -> None:
        self._arrived.append(replies)
        self._wake()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)


class SwitchboardLink(FrameProtocol):
    """An actor's connection to the switchboard. Everything runs in one thread of the actor's.

    Args:
        ended: called once when the store has ended: whether with the last of its members.
    """

    def __init__(self, ended: Callable[[bool], None]) -> None:
        super().__init__(wire.MAX_FRAME)
        self._ended = ended
        self._has_ended = False
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[wire.Answer]] = {}
        self._opening: dict[int, Any] = {}  # the ways back to relays, by the number of the message
        self._back: dict[bytes, Any] = {}
        self._here, self._requests = Channel.open()
        self._receiving = asyncio.ensure_future(self._receive())

    @classmethod
    async def open(cls, path: str, ended: Callable[[bool], None]) -> SwitchboardLink:
        """Connect.

        Raises:
            StoreClosedError: there is no switchboard.
        """
        made = cls(ended)
        try:
            with unix_socket() as sock:
                await connect(sock, path)
                await asyncio.get_running_loop().create_unix_connection(lambda: made, sock=sock)
        except OSError as error:
            made._has_ended = True
            made.close()
            raise StoreClosedError(f"the owner of the server is gone: {error}") from error
        made.write(framed(wire.Carry()))
        return made

    def led(self) -> None:
        """The directory knows the actor."""
        self.write(framed(wire.Led()))

    def agent_failed(self) -> None:
        """The engine reports that an agent died some seconds ago."""
        self.write(framed(wire.AgentFailed()))

    async def open_uplink(
        self, here: bytes, agent: str, back: Any, token: bytes, got: int
    ) -> tuple[bytes, int, Any]:
        """See ``wire.OpenUplink``; return the token, how many requests have arrived, and the port
        for requests. ``back``: the port for the answers.
        """
        back.return_undeliverable = False
        number = next(self._ids)
        self._opening[number] = back
        answer = await self._ask(wire.OpenUplink(number, token, here, agent, got))
        return answer.token, answer.received, self._here

    async def poll(self, token: bytes, got: int) -> int:
        """Call ``RelayServer.poll``; return how many requests have arrived."""
        try:
            return (await self._ask(wire.Poll(next(self._ids), token, got))).received
        except StoreClosedError:
            self._back.pop(token, None)
            raise

    async def agent_of(self, peer: bytes) -> str:
        """See ``wire.AgentOf``."""
        return (await self._ask(wire.AgentOf(next(self._ids), peer))).agent

    async def end(self, why: str) -> None:
        """End the server and the switchboard."""
        self._has_ended = True
        await self._ask(wire.End(next(self._ids), why))

    def close(self) -> None:
        self._receiving.cancel()
        super().close()

    async def _ask(self, message: Any) -> wire.Answer:
        if not self.is_open:
            raise StoreClosedError("this store has ended")
        answer = self._asked[message.id] = asyncio.get_running_loop().create_future()
        self.write(framed(message))
        return await answer

    async def _receive(self) -> None:
        while True:
            self.write(framed(wire.Ask(*await self._requests.recv())))

    def received(self, bodies: list[bytes]) -> None:
        for body in bodies:
            try:
                self._handle(wire.to_actor(body))
            except ProtocolError as error:
                log.warning("%s", error)
                self.close()
                return

    def _handle(self, message: wire.ToActor) -> None:
        if isinstance(message, wire.Say):
            back = self._back.get(message.token)
            if back is None:
                return
            said = message.number, message.received, message.failure, message.replies
            try:
                back.send(said)
            except Exception as error:  # noqa: BLE001 - whatever the engine raises, others go on
                log.warning("a relay cannot be answered: %s", error)
        elif isinstance(message, wire.Answer):
            back = self._opening.pop(message.id, None)
            if back is not None and not message.failure:  # what it is told may follow at once
                self._back[message.token] = back
            asked = self._asked.pop(message.id, None)
            if asked is None or asked.done():
                return
            try:
                result((message.failure, message))
            except TorchStoreError as error:
                asked.set_exception(error)
            else:
                asked.set_result(message)
        else:
            self._over(message.good)

    def _over(self, good: bool) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._ended(good)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(StoreClosedError("this store has ended"))
        self._asked.clear()
        self._over(good=False)
