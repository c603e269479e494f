"""``python -m torchstore_core.server JSON`` runs a server, which prints a JSON line when ready."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable

import msgspec

from torchstore_core.errors import ConfigurationError, TorchStoreError
from torchstore_core.machine.processes import ProcessWatch
from torchstore_core.server.keeping.link import Given, KeeperLink
from torchstore_core.server.server import Ready, Server, ServerOptions
from torchstore_core.server.serving.journal import log_to_stderr
from torchstore_core.server.serving.listening import raise_descriptor_limit
from torchstore_core.server.serving.members import Members

_M_MMAP_THRESHOLD = -3
#: How many new objects trigger a garbage collection: more than a put of 18,000 entries creates.
_COLLECT_EVERY = 100_000


class ProcessOptions(ServerOptions, frozen=True):
    """The options of a server in a process of its own.

    Args:
        members: whether the server ends with the last of its members. ``owner`` then only starts
            it; the server still ends with the owner if no member has joined until then.
    """

    members: bool = False


def run(
    options: ServerOptions,
    say: Callable[[Ready | dict[str, str]], None] | None = None,
    keeper: KeeperLink | None = None,
) -> int:
    """Run one server in this process until it is told to stop; returns the exit status.

    Args:
        options: the options of the server.
        say: called once, with ``Ready``, or with ``error`` (a code) and ``message`` if the server
            cannot start. The default prints a line of JSON on stdout.
        keeper: starts the server again if it dies; None: nobody does.
    """
    _return_large_blocks()
    gc.set_threshold(_COLLECT_EVERY, *gc.get_threshold()[1:])
    raise_descriptor_limit()
    try:
        import uvloop
    except ImportError:
        runner = asyncio.Runner()
    else:
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with runner:
        return runner.run(_main(options, say or _say, keeper))


def _return_large_blocks() -> None:
    """Make glibc return freed message buffers to the system. By default, its threshold for doing so
    grows with the first large buffer, and the server would keep tens of megabytes for ever.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 128 << 10)


async def _main(
    options: ServerOptions,
    say: Callable[[Ready | dict[str, str]], None],
    keeper: KeeperLink | None,
) -> int:
    server = Server(options, keeper)
    if isinstance(options, ProcessOptions) and options.members:
        server.members = Members(server.stop_soon)
    loop = asyncio.get_running_loop()
    # Set before anything is created that a signal could leave behind.
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, server.stop_soon)
    try:
        address = await server.start()
    except (TorchStoreError, OSError) as error:
        code = error.code if isinstance(error, TorchStoreError) else "error"
        if keeper is not None and keeper.life > 1:  # nobody reads what it says
            logging.getLogger(__name__).error("cannot start again: %s: %s", code, error)
        say({"error": code, "message": str(error)})
        return 1
    try:
        _end_with_others(options, server, keeper)
        say(Ready(address, os.getpid()))
        await server.serve()
    finally:
        await server.close()
    return 0


def _end_with_others(options: ServerOptions, server: Server, keeper: KeeperLink | None) -> None:
    """Make the server end with its owner, or with its last member."""
    owner_ended = server.stop_soon
    if server.members is not None:
        owner_ended = server.members.starter_ended
    else:
        server.owner = options.owner
    if keeper is not None:
        keeper.watch(owner_ended, server.stop_soon)
    elif options.owner:
        ProcessWatch(options.owner, owner_ended, is_parent=True)


def _say(line: object) -> None:
    try:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()
    except OSError:
        logging.getLogger(__name__).debug("nobody reads the ready line")


def main() -> int:
    """Run the server whose options are on the command line; returns the exit status."""
    try:
        log_to_stderr("WARNING", "torchstore server %(process)d")
    except ConfigurationError as error:
        _say({"error": error.code, "message": error.message})
        return 1
    options = msgspec.json.decode(sys.argv[1].encode(), type=ProcessOptions)
    keeper = None
    if len(sys.argv) > 2:  # the keeper's addition
        with open(int(sys.argv[2]), "rb") as paper:
            paper.seek(0)
            keeper = KeeperLink(msgspec.json.decode(paper.read(), type=Given))
    return run(options, None, keeper)


if __name__ == "__main__":
    sys.exit(main())
