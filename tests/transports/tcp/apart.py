"""A server half of ``tcp`` in another process, in another network if you like."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.transports.tcp.halves import PEER

from torchstore_core.contracts.transport import LinkContext
from torchstore_core.errors import from_wire
from torchstore_core.machine.topology import probe
from torchstore_transports.tcp.link import TcpLink


class Apart:
    """A context manager: the process does not outlive it.

    Args:
        wrapper: a command that runs the process, given as its last arguments.
        variables: added to its environment.
    """

    def __init__(
        self, nbytes: int, wrapper: Sequence[str] = (), variables: dict[str, str] | None = None
    ) -> None:
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), root])
        self._process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "tests.transports.tcp.volume_main", str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **(variables or {})},
        )
        self._lock = asyncio.Lock()
        self.offer = bytes.fromhex(self._line())

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    async def ask(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        async with self._lock:
            print(json.dumps([name, *arguments]), file=self._process.stdin, flush=True)
            answer = json.loads(await asyncio.to_thread(self._line))
        if isinstance(answer, dict):
            raise from_wire(answer["code"], answer["message"], None, {})
        return answer

    async def connect(self) -> TcpLink:
        async def handshake(request: bytes) -> bytes:
            return bytes.fromhex(await self.ask("handshake", PEER.hex(), request.hex()))

        here = probe()
        context = LinkContext(here, here, False, True, offer=self.offer, handshake=handshake)
        return await TcpLink.connect(self.offer, context)
