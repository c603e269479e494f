"""Starts a store in another process, through its runtime's factory, so that it can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import msgspec
import pytest

from torchstore_core.testing.leftovers import MARK

__all__ = ["plain_environment", "start_owner"]

_OWNER = """
import asyncio, json, sys
import torch
import torchstore_core as ts
from torchstore_core.contracts.runtime import StoreOptions
from torchstore_core.plugins.registry import load_class
factory, options = json.loads(sys.stdin.readline())
async def main():
    runtime = load_class(factory)()
    address = await runtime.start(StoreOptions(**options), None)
    client = await ts.connect(address, store_name=options["store_name"])
    await client.put("large", torch.ones(1 << 20))
    print("ready", flush=True)
    sys.stdin.read()
asyncio.run(main())
"""


def plain_environment() -> dict[str, str]:
    """Return the environment of this process without the variables that configure stores."""
    return {name: value for name, value in os.environ.items() if name[:10] != "TORCHSTORE"}


def start_owner(
    factory: str, options: dict[str, Any], mark: str, timeout: float
) -> subprocess.Popen[bytes]:
    """Start a process that starts a store, puts a tensor into it, and then waits.

    Args:
        factory: the runtime, as ``"module:Class"``.
        options: the fields of the ``StoreOptions``, as plain data.
        mark: the value of ``leftovers.MARK`` in the process's environment, which its descendants
            inherit.
        timeout: seconds after which the process is killed and the test fails.
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={
            **plain_environment(),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            MARK: mark,
        },
    )
    line = b""
    if owner.stdin is not None and owner.stdout is not None:
        owner.stdin.write(msgspec.json.encode([factory, options]) + b"\n")
        owner.stdin.flush()
        timer = threading.Timer(timeout, owner.kill)
        timer.start()
        line = owner.stdout.readline()
        timer.cancel()
    if line != b"ready\n":
        owner.kill()
        owner.communicate()
        pytest.fail(
            f"another process could not start the store; its standard error says why: {line!r}"
        )
    return owner
