"""The agent's side of ``monarch-rpc``: forwards requests of this host's clients to other hosts."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec

from torchstore_core.errors import TorchStoreError
from torchstore_core.server.serving.listening import Listener, speaking
from torchstore_core.wire.framing import HEADER, framed
from torchstore_monarch.chunks import PIECES
from torchstore_monarch.protocol import result
from torchstore_monarch.rpc.wire import CHUNK, RpcRequest, RpcResponse
from torchstore_monarch.threads import where_it_fits

log = logging.getLogger(__name__)

_SOCKET = "agent.sock"
_IN_FLIGHT = 2
_END_S = 1.0
# A call to a host that has died may never return.
_CALL_S = 20.0
_MAX_FRAME = 1 << 20
# Bytes that are copied on the event loop at a time, or twice as many.
_PART = 256 << 10
_Answer = tuple[RpcResponse, bytes]


class Forwarder:
    """Listens to the clients of a server or of a relay, whose volumes tell them where.

    Args:
        directory: a private directory, for its socket.
        valid: whether the server surely still keeps what clients of this host hold. Bytes move only
            while it does.

    Attributes:
        path: that of the socket.
        volumes: the actors that have the volumes, by volume id.
    """

    def __init__(self, directory: str, valid: Callable[[], bool] = lambda: True) -> None:
        self.path = os.path.join(directory, _SOCKET)
        self._valid = valid
        self.volumes: dict[str, Any] = {}
        self._listener = Listener(speaking(self._protocol))
        self._connections: set[asyncio.Task[None]] = set()
        self._writing: dict[int, set[asyncio.Task[_Answer]]] = {}

    async def start(self) -> None:
        """Begin to listen."""
        self._listener.open(self.path)

    async def close(self) -> None:
        """Stop listening, and end every connection. Idempotent."""
        self._listener.close()
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        if connections:
            await asyncio.wait(connections, timeout=_END_S)

    async def idle(self, pid: int) -> None:
        """Wait until no write that the process has requested is under way any more."""
        while writing := self._writing.get(pid):
            await asyncio.wait(writing)

    # ---- one client -----------------------------------------------------------------------

    def _protocol(self, pid: int) -> asyncio.BaseProtocol:
        reader = asyncio.StreamReader(limit=_PART)
        return asyncio.StreamReaderProtocol(reader, functools.partial(self._serve, pid))

    async def _serve(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        self._connections.add(task)
        answers: asyncio.Queue[asyncio.Task[_Answer] | None] = asyncio.Queue(_IN_FLIGHT)
        answering = asyncio.ensure_future(_answer(answers, writer))
        try:
            while not answering.done():
                request = await _request(reader)
                data = await _received(reader, request.nbytes) if request.write else b""
                await answers.put(self._start(pid, request, data))
        except (asyncio.IncompleteReadError, asyncio.CancelledError):
            log.debug("a client has left, or this agent ends")
        except (msgspec.DecodeError, ValueError, OSError) as error:
            log.warning("a client's request cannot be forwarded: %s", error)
        finally:
            self._connections.discard(task)
            answering.cancel()
            while not answers.empty():
                reading = answers.get_nowait()
                if reading is not None and reading not in self._writing.get(pid, ()):
                    reading.cancel()
            writer.close()
            self._listener.freed()

    def _start(
        self, pid: int, request: RpcRequest, data: bytes | bytearray
    ) -> asyncio.Task[_Answer]:
        task = asyncio.ensure_future(self._forward(request, data))
        if request.write:
            writing = self._writing.setdefault(pid, set())
            writing.add(task)

            def done(task: asyncio.Task[_Answer]) -> None:
                writing.discard(task)
                if not writing and self._writing.get(pid) is writing:
                    del self._writing[pid]

            task.add_done_callback(done)
        return task

    async def _forward(self, request: RpcRequest, data: bytes | bytearray) -> _Answer:
        try:
            actor = self.volumes[request.volume]
            if not self._valid():
                return RpcResponse("this host has lost the server"), b""
            if request.write:
                asked = request.volume, request.ticket, request.places, data
                call = await where_it_fits(len(data), lambda: actor.write.call_one(*asked))
                result(await asyncio.wait_for(call, _CALL_S))
                return RpcResponse(), b""
            call = actor.read.call_one(request.volume, request.ticket, request.places)
            got = result(await asyncio.wait_for(call, _CALL_S))
            if not self._valid():
                return RpcResponse("this host has lost the server"), b""
            return RpcResponse(), bytes(got)
        except TimeoutError:
            return RpcResponse(
                f"volume {request.volume} did not answer within {_CALL_S:.0f} s"
            ), b""
        except KeyError:
            return RpcResponse(f"there is no volume {request.volume}"), b""
        except TorchStoreError as error:
            return RpcResponse(error.message), b""
        except Exception as error:  # noqa: BLE001 - whatever the engine raises, the link has failed
            return RpcResponse(f"{type(error).__name__}: {str(error)[:500]}"), b""


async def _request(reader: asyncio.StreamReader) -> RpcRequest:
    size = int.from_bytes(await reader.readexactly(HEADER), "little")
    if size > _MAX_FRAME:
        raise ValueError(f"a request of {size} bytes is over the limit of {_MAX_FRAME}")
    request = msgspec.msgpack.decode(await reader.readexactly(size), type=RpcRequest)
    total = sum(nbytes for _, _, nbytes in request.places)
    if not 0 <= request.nbytes == total <= CHUNK or len(request.places) > PIECES:
        raise ValueError(f"a request of {request.nbytes} bytes in {len(request.places)} places")
    return request


async def _received(reader: asyncio.StreamReader, nbytes: int) -> bytes | bytearray:
    """Receive that many bytes. Those of a large request are copied as they come: all at once would
    keep the event loop from its other clients.

    Raises:
        IncompleteReadError: the client has left.
    """
    if nbytes <= _PART:
        return await reader.readexactly(nbytes)
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        part = await reader.readexactly(min(len(view), _PART))
        view[: len(part)] = part
        view = view[len(part) :]
    return data


async def _answer(
    answers: asyncio.Queue[asyncio.Task[_Answer] | None], writer: asyncio.StreamWriter
) -> None:
    while (task := await answers.get()) is not None:
        response, data = await asyncio.shield(task)
        writer.write(framed(response))
        if data:
            writer.write(data)
        await writer.drain()
