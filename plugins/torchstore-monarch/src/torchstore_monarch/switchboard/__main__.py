"""``python -m torchstore_monarch.switchboard JSON`` starts a server, and says so as that would."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import msgspec

from torchstore_core.errors import ConfigurationError, TorchStoreError
from torchstore_core.server.serving.journal import log_to_stderr
from torchstore_core.server.serving.listening import raise_descriptor_limit
from torchstore_monarch.actors.core_thread import new_loop
from torchstore_monarch.switchboard.board import Switchboard
from torchstore_monarch.switchboard.wire import Options


async def _main(options: Options) -> int:
    board = Switchboard(options)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, board.end_soon)
    try:
        address = await asyncio.ensure_future(board.start())
    except asyncio.CancelledError:
        await board.close()
        return 0
    except (TorchStoreError, OSError) as error:
        await board.close()
        code = error.code if isinstance(error, TorchStoreError) else "error"
        _say({"error": code, "message": str(error)})
        return 1
    _say({"address": address, "pid": board.server_pid})
    await board.ended()
    await board.close()
    return 0


def _say(line: object) -> None:
    """Say it, and that nothing follows, to whoever reads until the end."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()
    except OSError:
        pass  # nobody reads it
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def main() -> int:
    """Entry point of the module."""
    try:
        log_to_stderr("WARNING", "torchstore switchboard %(process)d")
    except ConfigurationError as error:
        _say({"error": error.code, "message": error.message})
        return 1
    raise_descriptor_limit()
    options = msgspec.json.decode(sys.argv[1].encode(), type=Options)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(_main(options))


if __name__ == "__main__":
    sys.exit(main())
