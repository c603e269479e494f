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
import time
from typing import Any

import msgspec
from monarch.actor import ChannelTransport, attach_to_workers, enable_transport

import torchstore_core as ts
from torchstore_core.errors import StoreClosedError, StoreTimeoutError, TorchStoreError
from torchstore_monarch import finding
from torchstore_monarch.protocol import Asked, FoundStore, result
from torchstore_monarch.spmd.orders import RootOrder, Where

_POLL_S = 0.2
_LOOK_S = 1.0
_END_S = 5.0

log = logging.getLogger(__name__)


async def _main(order: RootOrder) -> int:
    asked = msgspec.json.decode(order.asked, type=Asked)
    deadline = time.monotonic() + asked.timeout
    loop = asyncio.get_running_loop()
    left = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), _read_stdin, loop, left)
    transport = ChannelTransport.TcpWithLocalhost if order.loopback else ChannelTransport.Tcp
    enable_transport(transport)
    hosts = attach_to_workers(ca="trust_all_connections", workers=order.workers)
    try:
        async with asyncio.timeout(asked.timeout):
            await hosts.initialized
            directory = await finding.directory()
            made = result(await directory.create.call_one(msgspec.msgpack.encode(asked), hosts))
            found = msgspec.msgpack.decode(made, type=FoundStore)
            sockets = {found.host_id: found.address, **found.relays}
            client = await ts.connect(found.address, store_name=asked.store_name)
    except TorchStoreError as error:
        _say(Where(error=error.code, message=error.message))
        return 1
    except TimeoutError:
        _say(
            Where(
                error=StoreTimeoutError.code,
                message=f"the hosts did not attach within {asked.timeout} s",
            )
        )
        return 1
    _say(Where(sockets=sockets))
    try:
        await _until_unused(client, left, order.ranks, deadline)
    finally:
        await ts.shutdown(asked.store_name)
        await _end(directory, asked.store_name, hosts)
    return 0


async def _until_unused(client: Any, left: asyncio.Event, ranks: int, deadline: float) -> None:
    """Wait until rank 0 has left, every rank has come (or is late), and all have gone."""
    try:
        while not left.is_set():
            try:
                await asyncio.wait_for(left.wait(), _LOOK_S)
            except TimeoutError:
                await client.status(timeout=_END_S)
        said = False
        while True:
            status = await client.status(timeout=_END_S)
            come = status.sessions_opened > ranks or time.monotonic() > deadline
            alone = come and len(status.sessions) == 1
            if not said:
                said = True
                _say("alone" if alone else "shared")
            if alone:
                return
            await asyncio.sleep(_POLL_S)
    except StoreClosedError:
        log.error("the store's server is gone")


async def _end(directory: Any, store_name: str, hosts: Any) -> None:
    """End the store, then the workers; each in bounded time."""
    for end in (directory.finish.call_one(store_name), hosts.shutdown()):
        try:
            await asyncio.wait_for(end, 2 * _END_S)
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
