"""The copier beside the volumes of this process: a process that moves bytes for the store."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec

from torchstore_core.errors import TransportNotReadyError
from torchstore_core.machine.threads import start_thread

log = logging.getLogger(__name__)


class CopierProcess:
    """Starts ``python -m torchstore_core.clients.copying``, which loads the client halves of
    transports, whatever these need, and therefore must not be this process.

    Args:
        volumes: the indices of the volumes that it copies into.
        ended: called when it has ended, or could not be started, in any thread.
    """

    def __init__(self, volumes: Sequence[int], ended: Callable[[], None]) -> None:
        self._volumes = list(volumes)
        self._ended = ended
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, path: str, *, again: bool = False) -> None:
        """Start it, unless it runs.

        Args:
            path: of the socket of the server, or of a relay.
            again: end the one that runs first.
        """
        if again:
            self.stop()
        if self._process is not None and self._process.poll() is None:
            return
        order = msgspec.json.encode({"address": f"unix:{path}", "volumes": self._volumes})
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "torchstore_core.clients.copying", order.decode()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt at the terminal is not for it
            )
        except OSError as error:
            log.warning("no copier can be started: %s", error)
            self._ended()
            return
        self._process = process
        try:
            start_thread(functools.partial(self._wait, process), "torchstore-copier")
        except TransportNotReadyError as error:  # nobody would notice that it ends
            log.warning("no copier can be started: %s", error)
            self.stop()
            self._ended()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        if self._process is process:
            self._ended()

    def stop(self) -> None:
        """End it. What it was copying is undone by the server. Idempotent."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
