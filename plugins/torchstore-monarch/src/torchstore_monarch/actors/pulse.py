"""Signs of life of a relay whose process cannot call anybody."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from typing import Any

from torchstore_core.machine.threads import start_thread
from torchstore_monarch.threads import is_torch_unfinished

log = logging.getLogger(__name__)

# As often as a relay polls.
_BEAT_S = 2.0
# For as long after the last sign of life what was waiting may still be on its way.
_RECENT_S = 2 * _BEAT_S


class Pulse:
    """Shows that a relay is alive while another thread of its process imports torch.

    Once there is an unfinished torch, the engine encodes no message before the import has ended,
    and a thread that sends one waits for that. On a busy machine, or where torch is read over a
    network, this takes longer than the server waits for a silent relay, and the volumes of the
    process would be lost. So one message is encoded beforehand, and a thread sends it again and
    again. The thread ends when torch is there, because it is imported only once.
    """

    def __init__(self) -> None:
        self._way: tuple[Any, Any] | None = None
        self._beaten = -math.inf
        self._closed = threading.Event()
        start_thread(self._run, "torchstore-pulse")

    @property
    def beats(self) -> bool:
        """Whether the relay's calls wait for an import, and it is shown to be alive instead; or did
        until a moment ago.
        """
        return time.monotonic() < self._beaten + _RECENT_S

    def lead(self, port: Any, message: object) -> None:
        """From now on send ``message`` through that port of the engine's."""
        # Neither function is public: `Port.send` would encode each message anew, and wait.
        self._way = port, port._pending_result(message).try_resolve_now()

    def close(self) -> None:
        """Send nothing more. Idempotent."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_BEAT_S):
            way = self._way
            if is_torch_unfinished():
                if way is not None:
                    self._send(*way)
            elif "torch" in sys.modules:
                return

    def _send(self, port: Any, encoded: Any) -> None:
        self._beaten = time.monotonic()
        try:
            port._send_message(encoded)
        except Exception as error:  # noqa: BLE001 - whatever the engine raises for a dead actor
            log.debug("a sign of life cannot be sent: %r", error)
