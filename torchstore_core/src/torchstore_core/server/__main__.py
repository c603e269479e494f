"""``python -m torchstore_core.server JSON``: one server process; prints a JSON line when ready."""

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
#: New objects before the first collection. A put of 18,000 entries makes and drops that many pairs.
_COLLECT_EVERY = 100_000


class ProcessOptions(ServerOptions, frozen=True):
    """Options of a server in a process of its own.

    Args:
        members: ``owner`` only starts it; it ends with the last of its members, or with the owner
            if none has joined until then.
    """

    members: bool = False


def run(
    options: ServerOptions,
    say: Callable[[Ready | dict[str, str]], None] | None = None,
    keeper: KeeperLink | None = None,
) -> int:
    """Run one server in this process until it is told to stop; the exit status.

    Args:
        options: what to run.
        say: told once: that it is ready, or ``error`` (a code) and ``message`` if it cannot start.
            By default that is a line of JSON on stdout.
        keeper: starts it again if it dies; None: nobody does.
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
    """Have glibc give freed message buffers back: its threshold for doing so grows with the first
    large one, and the server would keep tens of megabytes for ever.
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
    loop = asyncio.get_running_loop()
    # Before anything is made that would be left behind.
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
    """See to it that the server ends with the processes that it is for."""
    owner_ended = server.stop_soon
    if isinstance(options, ProcessOptions) and options.members:
        server.members = Members(server.stop_soon)
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
    """Entry point of the module."""
    try:
        log_to_stderr("WARNING", "torchstore server %(process)d")
    except ConfigurationError as error:
        _say({"error": error.code, "message": error.message})
        return 1
    options = msgspec.json.decode(sys.argv[1].encode(), type=ProcessOptions)
    keeper = None
    if len(sys.argv) > 2:  # the keeper's addition
        keeper = KeeperLink(msgspec.json.decode(sys.argv[2].encode(), type=Given))
    return run(options, None, keeper)


if __name__ == "__main__":
    sys.exit(main())
