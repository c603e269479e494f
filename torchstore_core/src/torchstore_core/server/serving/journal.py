"""What a server says of itself, a line each: start, joins, leaves, full, lost, paused, stop.

Never a line for an operation: at INFO it is what a person who asks what happened wants to read.
"""

from __future__ import annotations

import logging
import os
import time

from torchstore_core.errors import ConfigurationError, StoreFullError
from torchstore_core.server.index.records import SessionRecord

__all__ = ["LOG_LEVEL", "Refusals", "journal", "log_to_stderr", "undone", "who"]

#: Its name does not change, so that a logging configuration can name it.
journal = logging.getLogger("torchstore.server")

#: The environment variable that sets a server's level.
LOG_LEVEL = "TORCHSTORE_LOG_LEVEL"

_KEYS = 3
_REFUSALS_EVERY_S = 10.0


def log_to_stderr(level: str, prefix: str) -> None:
    """Log from ``level`` on, or the one of :data:`LOG_LEVEL`.

    Raises:
        ConfigurationError: that is no level.
    """
    try:
        logging.basicConfig(
            level=os.environ.get(LOG_LEVEL, level).upper(),
            format=f"{prefix}: %(levelname)s %(name)s: %(message)s",
        )
    except ValueError as error:
        raise ConfigurationError(f"{LOG_LEVEL}: {error}") from error


def who(session: SessionRecord) -> str:
    """A client in words."""
    facts = session.facts
    rank = "" if facts.rank is None else f", rank {facts.rank}"
    role = f" ({facts.role})" if facts.role else ""
    return f"pid {facts.pid} on {facts.hostname}{rank}{role}"


def undone(session: SessionRecord) -> str:
    """In words, what a session that ends now leaves half done; empty if nothing."""
    puts = list(session.txns.values())
    if not puts:
        return ""
    names = {slot.key: None for put in puts for slot, _ in put.joined}
    names.update((value.key, None) for put in puts for value in put.plain)
    keys = ", ".join(map(repr, list(names)[:_KEYS])) + (", ..." if len(names) > _KEYS else "")
    count = "1 unfinished put" if len(puts) == 1 else f"{len(puts)} unfinished puts"
    return f"{count} of {sum(put.nbytes for put in puts):,} bytes ({keys})"


class Refusals:
    """Says that the store is full: a line every few seconds, however many puts are refused."""

    def __init__(self) -> None:
        self._silent_until = 0.0
        self._unsaid = 0

    def refused(self, session: SessionRecord, error: StoreFullError) -> None:
        """A put did not fit."""
        now = time.monotonic()
        if now < self._silent_until:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        self._silent_until, self._unsaid = now + _REFUSALS_EVERY_S, 0
        journal.info("full: refused %s%s: %s", who(session), more, error.message)
