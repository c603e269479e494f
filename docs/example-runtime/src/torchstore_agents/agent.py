"""The agent: starts a server, and ends it when its standard input ends. Torch-free."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from torchstore_agents.messages import Start, Started
from torchstore_core.errors import TorchStoreError
from torchstore_core.plugins.registry import Registry
from torchstore_core.plugins.strategy_data import decode_strategy
from torchstore_core.runtimes.local import LocalRuntime

_STOP_S = 10.0


async def main() -> None:
    """Serve one program. Its end, also by ``kill -9``, closes the pipe that this process reads."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    options = order.options
    runtime = LocalRuntime()
    try:
        if order.strategy is not None:
            strategy = decode_strategy(*order.strategy, Registry(block=options.block))
            options = msgspec.structs.replace(options, strategy=strategy)
        answer = Started(await runtime.start(options, None))
    except TorchStoreError as error:
        answer = Started(code=error.code, message=error.message)
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)
    await runtime.stop(_STOP_S)


if __name__ == "__main__":
    asyncio.run(main())
