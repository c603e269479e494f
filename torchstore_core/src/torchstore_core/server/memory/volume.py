"""A volume: one segment, and the server halves of the transports that give clients access to it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec

from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer
from torchstore_core.errors import (
    ConfigurationError,
    PluginError,
    TransportError,
    TransportUnavailableError,
)
from torchstore_core.machine import networks, topology
from torchstore_core.machine.tasks import begin
from torchstore_core.plugins.registry import Registry, load_class
from torchstore_core.server.memory.isolated import IsolatedServer, failure_of_half
from torchstore_core.server.memory.segment import SegmentMemory
from torchstore_core.wire import messages as m

log = logging.getLogger(__name__)

_GIB = 1 << 30
# How long a half may take to disconnect a client before there is a warning, and how long to close.
_DISCONNECT_S = 10.0
# The same for its start, before whoever starts the store gives it up, by default.
_START_S = 10.0
# A broken transport must end neither the others nor the server, whatever its library calls.
_FAULTS = (Exception, SystemExit)
_CLOSE_S = 4.0
# Longest reason for which clients are told that a transport is not served.
_REASON_CHARACTERS = 500


class Volume:
    """A volume in this process, served by every transport that can be served here.

    Args:
        store_name: the store that the volume belongs to.
        index: its position in the store's list of volumes.
        capacity: its size in bytes.
        registry: the plug-ins of this process.
        directory: a private directory for the sockets of transports.
        fd: the memory, if there is some already; None: make it.
        told: the addresses at which other hosts of the job reach this one, as the engine says.
            Those that this host does not have are ignored.

    Raises:
        ConfigurationError: the capacity is less than a page.
        StoreFullError: the system does not provide that much shared memory.
    """

    def __init__(
        self,
        store_name: str,
        index: int,
        capacity: int,
        registry: Registry,
        directory: str,
        fd: int | None = None,
        *,
        told: Sequence[str] = (),
    ) -> None:
        if capacity < 4096:
            raise ConfigurationError(f"a capacity of {capacity} bytes a volume is too small")
        self.id = f"{store_name}-{index}"
        self.index = index
        self.capacity = capacity
        self.memory = SegmentMemory(self.id, capacity, fd)
        # What the halves are given; the conformance kit adds another one.
        self.segments = [Segment(0, self.memory.fd, capacity)]
        self._registry = registry
        self._context = _context(store_name, self.id, directory, told)
        self._halves: dict[str, TransportServer] = {}
        self._closing: set[asyncio.Task[None]] = set()  # tasks that close halves
        # The handshakes that halves are answering, by client and transport; and those of them that
        # were cancelled because the client disconnected.
        self._handshakes: dict[tuple[bytes, str], set[asyncio.Task[Any]]] = {}
        self._dropped: set[asyncio.Task[Any]] = set()
        self.memory.registered = self._registered

    async def start(self) -> m.VolumeInfo:
        """Start the server halves of the transports, skipping any that do not work here. Returns
        what clients need to know about the volume.

        Raises:
            ConfigurationError: ``TORCHSTORE_BIND`` names what is no address of a host, and there is
                a transport that listens there.
        """
        transports = self._registry.transports()
        if any(spec.listens and spec.server is not None for spec in transports):
            self._check_addresses()
        offers: dict[str, bytes] = {}
        refused: dict[str, str] = {}
        for spec in transports:
            if spec.server is None:
                continue
            try:
                reason = spec.probe() if spec.probe is not None else None
                if reason is not None:
                    refused[spec.name] = reason[:_REASON_CHARACTERS]
                    continue
                half: TransportServer = (
                    IsolatedServer(spec.server, spec.offer)
                    if spec.isolated
                    else load_class(spec.server)()
                )
                offer = await self._offer(spec.name, half)
                self._halves[spec.name] = half
                if not isinstance(offer, bytes):
                    raise PluginError(f"its offer is a {type(offer).__qualname__}, not bytes")
                offers[spec.name] = offer
            except TransportUnavailableError as error:
                log.debug("transport %s is not served here: %s", spec.name, error)
                refused[spec.name] = error.message[:_REASON_CHARACTERS]
            except ConfigurationError as error:
                log.warning(
                    "transport %s is NOT served, other transports carry the bytes: %s",
                    spec.name,
                    error.message,
                )
                refused[spec.name] = error.message[:_REASON_CHARACTERS]
            except _FAULTS as error:
                log.warning("transport %s is not served: %r", spec.name, error)
                refused[spec.name] = repr(error)[:_REASON_CHARACTERS]
        here = self._context.topology
        return m.VolumeInfo(
            self.id, self.index, os.getpid(), here, self.capacity, offers, refused=refused
        )

    async def _offer(self, name: str, half: TransportServer) -> object:
        """Start a half. The store cannot start without its answer, and says whose that is."""
        slow = asyncio.get_running_loop().call_later(
            _START_S, log.warning, "transport %s is slow to start; the store waits for it", name
        )
        try:
            return await half.start(self._context, self.segments)
        finally:
            slow.cancel()

    def _check_addresses(self) -> None:
        try:
            strange = networks.foreign()
        except OSError as error:
            log.warning("the addresses of this host cannot be listed: %s", error)
            return
        if strange:
            log.warning(
                "%s names %s, which this host does not have: transports over networks cannot "
                "listen there. Name its own addresses or interfaces",
                networks.BIND,
                ", ".join(strange),
            )

    async def close(self) -> None:
        """Stop serving and release the memory; clients' mappings remain valid. Idempotent."""
        halves, self._halves = self._halves, {}
        for name, half in halves.items():
            self._close_half(name, half)
        if self._closing:
            _, late = await asyncio.wait(self._closing, timeout=_CLOSE_S)
            if late:
                log.warning("volume %s: not every transport has closed", self.id)
        self.memory.close()

    async def handshake(self, peer: bytes, transport: str, request: bytes) -> bytes:
        """Return a server half's answer to a client's handshake; see ``contracts.transport``.

        Raises:
            TransportUnavailableError: there is no such half.
            TransportError: the half failed; any exception that it raises becomes this error.
        """
        if not transport:  # the volume itself is asked
            from torchstore_core.plugins.surroundings import surroundings

            around = await asyncio.to_thread(surroundings, self._registry)
            return msgspec.msgpack.encode(around)
        half = self._halves.get(transport)
        if half is None:
            raise TransportUnavailableError(f"volume {self.id} does not serve {transport!r}")
        try:
            answer: object = await self._unless_disconnected(
                (peer, transport), half.handshake(peer, request)
            )
        except TransportError:
            raise
        except _FAULTS as error:
            log.warning("transport %s failed in a handshake", transport, exc_info=True)
            raise failure_of_half(error) from error
        if not isinstance(answer, bytes) or len(answer) > m.MAX_HANDSHAKE:
            kind = type(answer).__qualname__
            raise TransportError(
                f"its server half answered a handshake with a {kind}, not with at most "
                f"{m.MAX_HANDSHAKE} bytes"
            )
        return answer

    async def disconnect(self, peer: bytes, transport: str = "") -> None:
        """Return once the transport's half (all halves if ``transport`` is empty) has nothing under
        way for ``peer``, however long that takes: it serves other clients meanwhile. A half that
        fails to disconnect the client is closed.
        """
        under_way = [
            (at, task)
            for at, tasks in self._handshakes.items()
            if at[0] == peer and transport in ("", at[1])
            for task in tasks
        ]
        await asyncio.gather(
            *[
                self._end_in_half(name, half, peer)
                for name, half in self._halves.items()
                if transport in ("", name)
            ]
        )
        if self._closing:  # until they have closed, these halves may write for any client
            await asyncio.wait(list(self._closing))
        for at, task in under_way:
            if task in self._handshakes.get(at, ()):  # nothing waits for its answer any more
                self._dropped.add(task)
                task.cancel()

    async def _end_in_half(self, name: str, half: TransportServer, peer: bytes) -> None:
        """Return once a half has disconnected a client, or is closing because it cannot."""
        slow = asyncio.get_running_loop().call_later(
            _DISCONNECT_S,
            log.warning,
            "transport %s is slow to disconnect a client; memory that it may write to is kept back",
            name,
        )
        try:
            await half.disconnect(peer)
        except _FAULTS as error:  # it may still write, so it must be closed
            log.warning("transport %s is not served any more: %r", name, error)
            if self._halves.get(name) is half:
                del self._halves[name]
                self._close_half(name, half)
        finally:
            slow.cancel()

    async def _unless_disconnected(self, at: tuple[bytes, str], answer: Awaitable[bytes]) -> bytes:
        """Await a half's answer to a handshake; raise TransportError if the client disconnects."""
        task = asyncio.current_task()
        if task is None:
            return await answer
        mine = self._handshakes.setdefault(at, set())
        mine.add(task)
        try:
            return await answer
        except asyncio.CancelledError:
            if task in self._dropped and not task.uncancel():
                raise TransportError("this client has disconnected") from None
            if not task.cancelling():
                raise TransportError("its server half has cancelled itself") from None
            raise
        finally:
            self._dropped.discard(task)
            mine.discard(task)
            if not mine and self._handshakes.get(at) is mine:
                del self._handshakes[at]

    def _close_half(self, name: str, half: TransportServer) -> None:
        async def close() -> None:
            try:
                await half.close()
            except _FAULTS:
                log.exception("transport %s failed to close", name)

        begin(close(), self._closing)

    def _registered(self) -> int:
        try:
            return max([half.registered(0) for half in self._halves.values()], default=0)
        except _FAULTS:
            log.warning("volume %s: a transport does not say what it uses", self.id, exc_info=True)
            return self.capacity


def default_capacity() -> int:
    """Return half of the memory that this process may use, in bytes."""
    return topology.memory_limit_bytes() // 2


def default_prefault(capacity: int) -> int:
    """Return how many bytes to warm at the start: up to 1 GiB, but at most half of the capacity and
    an eighth of the memory limit.
    """
    return min(_GIB, capacity // 2, topology.memory_limit_bytes() // 8)


def _context(store_name: str, volume_id: str, directory: str, told: Sequence[str]) -> ServerContext:
    here = topology.probe()
    try:
        usable = networks.own(told)
    except OSError as error:
        log.warning("the addresses of this host cannot be listed: %s", error)
        usable = ()
    if usable:
        here = msgspec.structs.replace(here, networks=networks.reachable(usable))
    return ServerContext(store_name, volume_id, directory, here, usable)
