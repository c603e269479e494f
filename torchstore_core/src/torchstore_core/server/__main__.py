"""``python -m torchstore_core.server JSON``: one server process; prints a JSON line when ready."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable

import msgspec

from torchstore_core.errors import TorchStoreError
from torchstore_core.server.app import Ready, Server, ServerOptions

_M_MMAP_THRESHOLD = -3
_OWNER_POLL_S = 0.2


def run(options: ServerOptions, say: Callable[[Ready | dict[str, str]], None] | None = None) -> int:
    """Run one server in this process until it is told to stop; the exit status.

    Args:
        options: what to run.
        say: told once: that it is ready, or ``error`` (a code) and ``message`` if it cannot start.
            By default that is a line of JSON on stdout.
    """
    _return_large_blocks()
    try:
        import uvloop
    except ImportError:
        runner = asyncio.Runner()
    else:
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with runner:
        return runner.run(_main(options, say or _say))


def _return_large_blocks() -> None:
    """Have glibc give freed message buffers back: its threshold for doing so grows with the first
    large one, and the server would keep tens of megabytes for ever.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 128 << 10)


async def _main(options: ServerOptions, say: Callable[[Ready | dict[str, str]], None]) -> int:
    server = Server(options)
    loop = asyncio.get_running_loop()
    # Before anything is made that would be left behind.
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, server.stop_soon)
    try:
        address = await server.start()
    except (TorchStoreError, OSError) as error:
        code = error.code if isinstance(error, TorchStoreError) else "error"
        say({"error": code, "message": str(error)})
        return 1
    if options.owner:
        _end_with(options.owner, server)
    say(Ready(address, os.getpid()))
    try:
        await server.serve()
    finally:
        await server.close()
    return 0


def _say(line: object) -> None:
    try:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()
    except OSError:
        logging.getLogger(__name__).debug("nobody reads the ready line")


def _end_with(owner: int, server: Server) -> None:
    """Stop when ``owner`` ends, however it ends: the kernel tells through a pidfd."""
    loop = asyncio.get_running_loop()
    try:
        pidfd = os.pidfd_open(owner)
    except ProcessLookupError:
        server.stop_soon()
        return
    except (OSError, AttributeError):  # an old kernel: look every now and then
        _poll_owner(owner, server)
        return
    loop.add_reader(pidfd, server.stop_soon)
    if os.getppid() != owner:  # it died before the pidfd was open, or its pid is another's now
        server.stop_soon()


def _poll_owner(owner: int, server: Server) -> None:
    if os.getppid() != owner:
        server.stop_soon()
        return
    asyncio.get_running_loop().call_later(_OWNER_POLL_S, _poll_owner, owner, server)


def main() -> int:
    """Entry point of the module."""
    logging.basicConfig(
        level=os.environ.get("TORCHSTORE_LOG_LEVEL", "WARNING").upper(),
        format="torchstore server %(process)d: %(levelname)s %(name)s: %(message)s",
    )
    return run(msgspec.json.decode(sys.argv[1].encode(), type=ServerOptions))


if __name__ == "__main__":
    sys.exit(main())
