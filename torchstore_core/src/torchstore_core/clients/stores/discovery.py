"""Which stores run on this host for this user, for Python and the command line. Torch-free."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import msgspec

from torchstore_core.clients.calls.arguments import check_timeout
from torchstore_core.clients.session.handshake import client_facts, handshake, running_loop
from torchstore_core.errors import ConfigurationError, StoreClosedError, TorchStoreError
from torchstore_core.machine import topology
from torchstore_core.machine.directories import (
    CONTROL,
    find_files,
    is_abandoned,
    runtime_directory,
)
from torchstore_core.machine.sockets.unix import check_descriptors
from torchstore_core.wire import messages as m

#: ``ClientFacts.role`` of sessions that ask what there is, and leave.
TOOL = "tool"
#: Seconds that a store may take to say who it is.
ANSWER_S = 2.0
_MOST_NAMED = 3


class RunningStore(msgspec.Struct, frozen=True):
    """A store that listens on this host, or why it does not answer.

    Args:
        address: what ``connect`` takes.
        store_name: the name that it was started with.
        pid: of its controller, on the host ``hostname``; 0: it did not answer.
        owner_pid: the process that it ends with; None: it ends with no single process (`torchstore
            serve`, the ranks of torchrun, a job of an engine).
        num_storage_volumes, capacity_bytes: its volumes that live, and their memory.
        error: why it does not answer, or cannot be talked to; None: it can.
    """

    address: str
    store_name: str = ""
    pid: int = 0
    hostname: str = ""
    owner_pid: int | None = None
    num_storage_volumes: int = 0
    capacity_bytes: int = 0
    error: str | None = None


async def stores(*, timeout: float | None = ANSWER_S) -> list[RunningStore]:
    """The stores that run on this host for this user, by address.

    They are those whose sockets lie in the user's runtime directory: not those of other hosts, of
    other users, of another ``XDG_RUNTIME_DIR``, or of ``torchstore serve --directory``.

    Args:
        timeout: seconds that each of them may take to answer. One that does not answer in time, or
            is of another protocol version, is in the list, with its ``error``.

    Raises:
        ConfigurationError: the directory is not safe to use, ``timeout`` is no time, or no event
            loop runs the call.
        TransportNotReadyError: this process has no file descriptor left.
    """
    running_loop()
    timeout = check_timeout(timeout)
    check_descriptors("the list of stores")
    sockets = find_files(runtime_directory(), CONTROL)
    found = await asyncio.gather(*(probe(f"unix:{path}", timeout) for path in sockets))
    return [store for store in found if store is not None]


def where_else() -> str:
    """What to say to somebody who has found no store at an address."""
    found: list[str] = []
    with contextlib.suppress(ConfigurationError, OSError):
        sockets = find_files(runtime_directory(), CONTROL)
        found = [repr(f"unix:{path}") for path in sockets if not is_abandoned(path)]
    if not found:
        return (
            "No store of this user runs on this host: start one with `torchstore serve`, which "
            "prints its address, or `await initialize()`"
        )
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return (
        f"The stores of this user that run on this host (see stores()) are at "
        f"{', '.join(found[:_MOST_NAMED])}{more}"
    )


async def look(address: str, timeout: float | None) -> tuple[socket.socket, m.Welcome]:
    """Open a session of a tool, which only looks: a server's log at INFO is about its users.

    Raises:
        StoreClosedError, StoreTimeoutError, ProtocolError: see ``handshake.handshake``.
    """
    here = topology.probe()
    facts = client_facts(os.environ, here, role=TOOL)
    return await handshake(address, b"", facts, here, timeout)


async def probe(address: str, timeout: float | None = ANSWER_S) -> RunningStore | None:
    """Who listens at an address; None: nobody does."""
    try:
        sock, welcome = await look(address, timeout)
    except StoreClosedError:  # killed, or just ending: nobody listens
        return None
    except TorchStoreError as error:
        return RunningStore(address, error=error.message)
    sock.close()
    living = [volume for volume in welcome.volumes if not volume.lost]
    return RunningStore(
        address,
        welcome.store_name,
        welcome.server.pid,
        welcome.server.hostname,
        welcome.owner or None,
        len(living),
        sum(volume.capacity_bytes for volume in living),
    )
