"""Finds the store that a command is about, and communicates with it. Torch-free.

One connection is enough here: it opens a session, which holds nothing, and sends requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from torchstore_core.clients.session.channel import Channel
from torchstore_core.clients.stores import discovery
from torchstore_core.clients.stores.environment import (
    ADDRESS,
    DEFAULT_NAME,
    as_address,
    inherited_address,
    not_a_socket,
)
from torchstore_core.errors import ConfigurationError, StoreClosedError, TorchStoreError
from torchstore_core.machine.directories import runtime_directory
from torchstore_core.wire import messages as m

__all__ = ["StoreConnection", "choose_address", "given_address", "open_store"]

R = TypeVar("R", bound=m.Message)


class StoreConnection:
    """A connection to one store."""

    def __init__(self, address: str, welcome: m.Welcome, channel: Channel, timeout: float) -> None:
        self.address = address
        self.welcome = welcome
        self.channel = channel
        self._timeout = timeout

    async def call(self, expect: type[R], request: type[m.Message], *args: object) -> R:
        """Send ``request(id, *args)``; return the server's reply, or raise its error."""
        make: type = request
        return await self.channel.call(make(self.channel.next_id(), *args), expect, self._timeout)


def given_address(address: str | None) -> str | None:
    """Return the address from the option, or else from the environment, as ``unix:/path``."""
    return as_address(address) if address else inherited_address(DEFAULT_NAME)


async def choose_address(address: str | None) -> str:
    """Return the address to use: the given one, or else that of the only running server.

    Raises:
        StoreClosedError: no server is running.
        ConfigurationError: several servers are running, which ``details["stores"]`` lists; or the
            given address is not that of a socket.
    """
    given = given_address(address)
    if given is not None:
        if not given.startswith("unix:"):
            otherwise = "leave the address out" if address else f"unset {ADDRESS}"
            raise ConfigurationError(
                not_a_socket(
                    given,
                    f"{otherwise}, and the stores that run on this host are found; of several, "
                    "name one by its unix:/path",
                )
            )
        return given
    found = await discovery.stores()
    if not found:
        raise StoreClosedError(
            f"no store of yours is running on this host (looked in {runtime_directory()}); start "
            f"one with `torchstore serve`, or name one with --address or {ADDRESS}"
        )
    if len(found) > 1:
        raise ConfigurationError(
            f"{len(found)} stores are running; say which one with --address",
            details={"stores": [msgspec.to_builtins(server) for server in found]},
        )
    return found[0].address


@asynccontextmanager
async def open_store(address: str | None, timeout: float) -> AsyncIterator[StoreConnection]:
    """Connect to the chosen store; see :func:`choose_address`.

    Args:
        address: the value of the option; None: not given.
        timeout: time limit in seconds, for connecting and for each call.

    Raises:
        StoreClosedError, StoreTimeoutError, ProtocolError: see ``handshake.handshake``.
    """
    where = await choose_address(address)
    try:
        sock, welcome = await discovery.look(where, timeout)
    except TorchStoreError as error:
        if where == given_address(None):
            raise type(error)(f"{error.message} (the address is that of {ADDRESS})") from error
        raise
    gone = f"the server of store {welcome.store_name!r} (pid {welcome.server.pid}) is gone"
    channel = Channel(sock, asyncio.get_running_loop(), gone)
    try:
        yield StoreConnection(where, welcome, channel, timeout)
    finally:
        channel.close()
