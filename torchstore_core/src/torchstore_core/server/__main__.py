"""``python -m torchstore_core.server JSON`` runs a server, which prints a JSON line when ready."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until all is imported: none of that is garbage

import asyncio
import ctypes
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from torchstore_core.contracts.when_full import SPILL_URL, URL_END_S, is_url
from torchstore_core.errors import (
    ConfigurationError,
    StoreFullError,
    TorchStoreError,
    TransportNotReadyError,
)
from torchstore_core.machine.processes import ProcessWatch
from torchstore_core.machine.sockets.unix import check_descriptors, descriptors, open_standard
from torchstore_core.server.keeping.link import KeeperLink
from torchstore_core.server.server import Ready, Server, ServerOptions
from torchstore_core.server.serving.journal import log_to_stderr
from torchstore_core.server.serving.listening import raise_descriptor_limit
from torchstore_core.server.serving.members import Members
from torchstore_core.server.stalled_loop import LoopWatch

_M_MMAP_THRESHOLD = -3
# Other C libraries have neither.
_MALLOPT = getattr(ctypes.CDLL(None), "mallopt", None)
_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)
# So many descriptors a server needs besides those that it was started with, before a client can use
# it; and a later life, which has some already, besides what its sessions need.
_DESCRIPTORS, _DESCRIPTORS_AGAIN = 20, 11
#: How many new objects trigger a garbage collection: more than a put of 18,000 entries creates.
_COLLECT_EVERY = 100_000


class ProcessOptions(ServerOptions, frozen=True):
    """The options of a server in a process of its own.

    Args:
        members: whether the server ends with the last of its members. ``owner`` then only starts
            it; the server still ends with the owner if no member has joined until then, or if its
            volumes are in other processes, which the owner leads to.
        keeper: whether the process is a keeper, and the server a process of its own below it.
    """

    members: bool = False
    keeper: bool = False


def run(
    options: ServerOptions,
    say: Callable[[Ready | dict[str, str]], None] | None = None,
    keeper: KeeperLink | None = None,
) -> int:
    """Run one server in this process until it is told to stop; returns the exit status.

    Args:
        options: the options of the server.
        say: called once, with ``Ready``, or with ``error`` (a code) and ``message`` if the server
            cannot start. The default prints a line of JSON on stdout, or tells the keeper.
        keeper: starts the server again if it dies; None: nobody does.
    """
    _take_signals()
    open_standard()
    _return_large_blocks()
    gc.set_threshold(_COLLECT_EVERY, *gc.get_threshold()[1:])
    raise_descriptor_limit()
    if say is None:
        say = _say if keeper is None else keeper.started
    try:
        is_first = keeper is None or keeper.life == 1
        check_descriptors("a store", _DESCRIPTORS if is_first else _DESCRIPTORS_AGAIN)
    except TorchStoreError as error:
        return _cannot_start(error, say, keeper)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_main(options, say, keeper))


def keep(
    options: ServerOptions, started: Callable[[dict[str, str | int]], None], owner: int = 0
) -> int:
    """Make this process the keeper of a server, until that is told to stop; returns the exit
    status. See ``keeping.keeper.Keeper``.
    """
    _take_signals()
    open_standard()
    # Here is imported, once, what all lives of the server need; one without a keeper does not.
    from torchstore_core.server.keeping import compaction, recorded, returning  # noqa: F401
    from torchstore_core.server.keeping.keeper import END_S, Keeper

    _loop_factory()
    serve = functools.partial(run, options, None)
    try:
        with descriptors("the keeper of a store"):
            more_s = URL_END_S if options.spill is not None and is_url(options.spill) else 0.0
            return Keeper(serve, started, owner, END_S + more_s).run()
    except (TorchStoreError, OSError) as error:
        return _cannot_start(error, started)


def _take_signals() -> None:
    """Undo what this process may have inherited: whoever has started it may ignore the end of its
    own children, of which the system then keeps no status, or block the signals that end a server.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the fastest event loop that is installed; None: the one of Python."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _return_large_blocks() -> None:
    """Make glibc return freed message buffers to the system. By default, its threshold for doing so
    grows with the first large buffer, and the server would keep tens of megabytes for ever.
    """
    if _MALLOPT is not None:
        _MALLOPT(_M_MMAP_THRESHOLD, 128 << 10)


def _return_heap() -> None:
    """Make glibc return what its heap has free: the search for plug-ins left half a megabyte."""
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


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
    watch = LoopWatch()
    try:
        with descriptors("a store"):
            address = await server.start()
    except (TorchStoreError, OSError) as error:
        return _cannot_start(error, say, keeper)
    try:
        _end_with_others(options, server, keeper)
        say(Ready(address, os.getpid()))
        _return_heap()
        await server.serve()
    finally:
        await server.close()
        watch.close()
    return 0


def _cannot_start(
    error: TorchStoreError | OSError,
    say: Callable[[Any], object],
    keeper: KeeperLink | None = None,
) -> int:
    """Say why a server cannot start, to whoever waits for it; returns the exit status."""
    code = error.code if isinstance(error, TorchStoreError) else "error"
    say({"error": code, "message": str(error)})
    if keeper is None or keeper.life == 1:
        return 1
    # Nobody has read that.
    logging.getLogger(__name__).error("cannot start again: %s: %s", code, error)
    may_pass = isinstance(error, TransportNotReadyError | StoreFullError)
    return os.EX_TEMPFAIL if may_pass else 1


def _end_with_others(options: ServerOptions, server: Server, keeper: KeeperLink | None) -> None:
    """Make the server end with its owner, or with its last member."""
    owner_ended = server.stop_soon
    if options.attached:  # the owner is part of the store, and not its user
        pass
    elif server.members is not None:
        owner_ended = server.members.starter_ended
    else:
        server.owner = options.owner
    if keeper is not None:
        keeper.watch(owner_ended, server.stop_soon)
        if options.owner:  # of which only the keeper tells, and somebody may have stopped that
            ProcessWatch(options.owner, _continue_keeper)
    elif options.owner:
        ProcessWatch(options.owner, owner_ended, is_parent=True)


def _continue_keeper() -> None:
    """What it is told by this, if it runs, is nothing."""
    os.kill(os.getppid(), signal.SIGCONT)


def _say(line: object) -> None:
    try:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()
    except OSError:
        logging.getLogger(__name__).debug("nobody reads the ready line")


def _say_last(line: object) -> None:
    """Say it, and that nothing follows, to whoever reads until the end."""
    null = os.open(os.devnull, os.O_WRONLY)  # before: then nothing may fail
    _say(line)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def main() -> int:
    """Run the server whose options are on the command line; returns the exit status."""
    gc.freeze()
    gc.enable()
    try:
        log_to_stderr("WARNING", "torchstore server %(process)d")
    except ConfigurationError as error:
        _say({"error": error.code, "message": error.message})
        return 1
    options = msgspec.json.decode(sys.argv[1].encode(), type=ProcessOptions)
    spill = os.environ.pop(SPILL_URL, None)
    if spill and options.spill and is_url(options.spill):
        options = msgspec.structs.replace(options, spill=spill)
    return keep(options, _say_last, options.owner) if options.keeper else run(options)


if __name__ == "__main__":
    status = main()
    # All is closed: taking down the interpreter would be a sixth of all that a short-lived server
    # does, and whoever ends the store waits for it.
    os._exit(status)
