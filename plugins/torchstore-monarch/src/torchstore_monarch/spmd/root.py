"""``python -m torchstore_monarch.spmd.root JSON``: the Monarch root of a torchrun job's store.

Attaches to the hosts' workers, starts the store, and prints one line of JSON: where it is. When its
standard input ends, rank 0 has left: from then on the store ends as soon as nobody uses it.
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

from torchstore_core.clients.session.handshake import handshake
from torchstore_core.clients.session.lane import Lane
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.errors import (
    StoreTimeoutError,
    TorchStoreError,
    in_seconds,
)
from torchstore_core.machine import topology
from torchstore_core.wire import messages as m
from torchstore_monarch import finding
from torchstore_monarch.protocol import Asked, FoundStore, result
from torchstore_monarch.spmd.orders import MEMBER, RootOrder, Where

_POLL_S = 0.2
_LOOK_S = 1.0
_END_S = 5.0
_DETACH_S = 3.0

log = logging.getLogger(__name__)


async def _main(order: RootOrder) -> int:
    asked = msgspec.json.decode(order.asked, type=Asked)
    loop = asyncio.get_running_loop()
    left = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), _read_stdin, loop, left)
    enable_transport(ChannelTransport.TcpWithLocalhost if order.loopback else order.address)
    hosts = attach_to_workers(ca="trust_all_connections", workers=order.workers)
    try:
        async with asyncio.timeout(asked.timeout):
            await hosts.initialized
            directory = await finding.directory()
            made = result(await directory.create.call_one(msgspec.msgpack.encode(asked), hosts))
            found = msgspec.msgpack.decode(made, type=FoundStore)
            sockets = {host: relays[0] for host, relays in found.relays.items()}
            sockets[found.host_id] = found.address
            lane = await _connect(found)
    except TorchStoreError as error:
        _say(Where(error=error.code, message=error.message))
        return 1
    except TimeoutError:
        _say(
            Where(
                error=StoreTimeoutError.code,
                message=f"the hosts did not attach within {in_seconds(asked.timeout)}",
            )
        )
        return 1
    _say(Where(sockets=sockets))
    try:
        await _until_unused(lane, left)
    finally:
        lane.close()
        await _end(directory, asked.store_name, hosts)
    return 0


async def _connect(found: FoundStore) -> Lane:
    """A connection that only asks for the status, so that nothing heavy is imported here."""
    here = topology.probe()
    facts = ClientFacts(here.pid, here.host_id, here.hostname, role="root")
    sock, _ = await handshake(found.address, b"", facts, here, _END_S)
    return Lane(sock, asyncio.get_running_loop(), f"the server of {found.store_name!r} is gone")


async def _members(lane: Lane) -> int:
    """Ranks that hold the store."""
    reply = await lane.call(m.Status(lane.next_id()), m.StatusReply, _END_S)
    return sum(session.role == MEMBER for session in reply.status.sessions)


async def _until_unused(lane: Lane, left: asyncio.Event) -> None:
    """Wait until rank 0 has left, and all others have."""
    try:
        while not left.is_set():
            try:
                await asyncio.wait_for(left.wait(), _LOOK_S)
            except TimeoutError:
                await _members(lane)  # the server may be gone
        others = await _members(lane)
        _say("shared" if others else "alone")
        while others:
            await asyncio.sleep(_POLL_S)
            others = await _members(lane)
    except TorchStoreError as error:
        log.error("the store is given up: %s", error)


async def _end(directory: Any, store_name: str, hosts: Any) -> None:
    """End the store, then the workers; each in bounded time."""
    ends = (directory.finish.call_one(store_name), 2 * _END_S), (hosts.shutdown(), _DETACH_S)
    for end, timeout in ends:
        try:
            await asyncio.wait_for(end, timeout)
        except Exception as error:  # noqa: BLE001 - some of it may be dead already
            log.info("while ending: %s", type(error).__name__)


def _read_stdin(loop: asyncio.AbstractEventLoop, left: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        left.set()


def _say(line: Where | str) -> None:
    text = line.encode() if isinstance(line, str) else msgspec.json.encode(line)
    with contextlib.suppress(OSError):  # rank 0 may be dead
        os.write(sys.stdout.fileno(), text + b"\n")


def main() -> int:
    """Entry point of the module."""
    return asyncio.run(_main(msgspec.json.decode(sys.argv[1], type=RootOrder)))


if __name__ == "__main__":
    sys.exit(main())
