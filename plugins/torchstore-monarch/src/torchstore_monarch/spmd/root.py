"""``python -m torchstore_monarch.spmd.root JSON``: the Monarch root of a torchrun job's store.

Attaches to the hosts' workers, starts the store, and prints one line of JSON with its sockets. When
its standard input ends, rank 0 has left or died. The server ends with its last member, and then the
root ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from typing import Any

import msgspec
from monarch.actor import ChannelTransport, attach_to_workers, enable_transport

from torchstore_core.clients.session.channel import Channel
from torchstore_core.clients.session.handshake import handshake
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.errors import (
    StoreTimeoutError,
    TorchStoreError,
    in_seconds,
)
from torchstore_core.machine import topology
from torchstore_core.wire import messages as m
from torchstore_monarch import job
from torchstore_monarch.protocol import FoundStore, StoreRequest, result
from torchstore_monarch.spmd.orders import RootOrder, StoreReport

_LOOK_S = 0.5
_END_S = 5.0
_DETACH_S = 3.0

log = logging.getLogger(__name__)


async def _main(order: RootOrder) -> int:
    request = msgspec.json.decode(order.request, type=StoreRequest)
    loop = asyncio.get_running_loop()
    starter_gone = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), _read_stdin, loop, starter_gone)
    enable_transport(ChannelTransport.TcpWithLocalhost if order.loopback else order.address)
    hosts = attach_to_workers(ca="trust_all_connections", workers=order.workers)
    try:
        async with asyncio.timeout(request.timeout):
            await hosts.initialized
            directory = await job.directory()
            made = result(await directory.create.call_one(msgspec.msgpack.encode(request), hosts))
            found = msgspec.msgpack.decode(made, type=FoundStore)
            sockets = {host: relays[0] for host, relays in found.relays.items()}
            sockets[found.host_id] = found.address
            server = _Server(found)
            await server.status()
    except TorchStoreError as error:
        _report(StoreReport(error=error.code, message=error.message))
        return 1
    except TimeoutError:
        _report(
            StoreReport(
                error=StoreTimeoutError.code,
                message=f"the hosts did not attach within {in_seconds(request.timeout)}",
            )
        )
        return 1
    _report(StoreReport(sockets=sockets))
    try:
        await _until_ended(server, directory, request.store_name, starter_gone)
    finally:
        server.close()
        await _end(directory, request.store_name, hosts)
    return 0


class _Server:
    """A connection for requests of the status, which requires no heavy imports."""

    def __init__(self, found: FoundStore) -> None:
        self._found = found
        self._channel: Channel | None = None

    async def status(self) -> None:
        """Return when the server has answered: if it has died, the next life of it.

        Raises:
            TorchStoreError: there is none.
        """
        if self._channel is not None:
            try:
                await self._ask(self._channel)
                return
            except TorchStoreError as error:
                log.info("the server does not answer: %s", error)
                self._channel.close()
        here = topology.probe()
        facts = ClientFacts(here.pid, here.host_id, here.hostname, role="root")
        sock, _ = await handshake(self._found.address, b"", facts, here, _END_S)
        gone = f"the server of {self._found.store_name!r} is gone"
        self._channel = Channel(sock, asyncio.get_running_loop(), gone)
        await self._ask(self._channel)

    async def _ask(self, channel: Channel) -> None:
        await channel.call(m.Status(channel.next_id()), m.StatusReply, _END_S)

    def close(self) -> None:
        """Disconnect."""
        if self._channel is not None:
            self._channel.close()


async def _until_ended(
    server: _Server, directory: Any, store_name: str, starter_gone: asyncio.Event
) -> None:
    """Wait until the server has ended, as it does with its last member."""
    reported = False
    try:
        while True:
            await server.status()
            if starter_gone.is_set():
                if not reported:  # without members, the server ends now
                    reported = await _report_starter(directory, store_name)
                await asyncio.sleep(_LOOK_S)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(starter_gone.wait(), _LOOK_S)
    except TorchStoreError as error:
        log.info("the store ends: %s", error)


async def _report_starter(directory: Any, store_name: str) -> bool:
    """Tell the controller that the starter has ended; whether it knows: it may have died."""
    try:
        _, controller, _ = await directory.find.call_one(store_name, True)
        if controller is not None:
            await controller.starter_ended.call_one()
    except Exception as error:  # noqa: BLE001 - whatever the engine raises for a dead actor
        log.info("the controller is not told: %s", type(error).__name__)
        return False
    return True


async def _end(directory: Any, store_name: str, hosts: Any) -> None:
    """End the store, then the workers, each in bounded time."""
    ends = (directory.finish.call_one(store_name), 2 * _END_S), (hosts.shutdown(), _DETACH_S)
    for end, timeout in ends:
        try:
            await asyncio.wait_for(end, timeout)
        except Exception as error:  # noqa: BLE001 - some of it may be dead already
            log.info("while ending: %s", type(error).__name__)


def _read_stdin(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        ended.set()


def _report(report: StoreReport) -> None:
    with contextlib.suppress(OSError):  # rank 0 may be dead
        os.write(sys.stdout.fileno(), msgspec.json.encode(report) + b"\n")


def main() -> int:
    """Entry point of the module."""
    return asyncio.run(_main(msgspec.json.decode(sys.argv[1], type=RootOrder)))


if __name__ == "__main__":
    sys.exit(main())
