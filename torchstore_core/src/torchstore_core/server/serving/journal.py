"""The server's log for operators, one line per event: start, join, leave, full, lost, stop.

Operations on values are not logged: at level INFO, the log shows what has happened to the store.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import time
from collections.abc import Sequence

from torchstore_core.errors import ConfigurationError, StoreFullError
from torchstore_core.machine import topology
from torchstore_core.server.index.records import SessionRecord
from torchstore_core.server.memory.volume_record import VolumeRecord

#: The logger. Its name never changes, so that a logging configuration can refer to it.
journal = logging.getLogger("torchstore.server")

#: The environment variable that sets a server's log level.
LOG_LEVEL = "TORCHSTORE_LOG_LEVEL"

_KEYS = 3
_REFUSALS_EVERY_S = 10.0


def log_to_stderr(level: str, prefix: str) -> None:
    """Log to stderr, from the level in :data:`LOG_LEVEL` on, by default from ``level`` on.

    Raises:
        ConfigurationError: the environment variable does not name a level.
    """
    try:
        logging.basicConfig(
            level=os.environ.get(LOG_LEVEL, level).upper(),
            format=f"{prefix}: %(levelname)s %(name)s: %(message)s",
            handlers=[_ToStderr()],
        )
    except ValueError as error:
        raise ConfigurationError(f"{LOG_LEVEL}: {error}") from error


class _ToStderr(logging.Handler):
    """Leaves lines out while nobody reads them, and says how many once somebody does."""

    _unread = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            left_out = f"[{self._unread} lines that nobody read are left out]\n"
            text = f"{left_out if self._unread else ''}{self.format(record)}"
            self._unread = 0 if write_to_stderr(text) else self._unread + 1
        except (OSError, ValueError, TypeError):
            self.handleError(record)


def write_to_stderr(text: str) -> bool:
    """Write a line, or what of it can be written at once; returns whether that was all.

    A pipe may be full that nobody reads, or the terminal stopped (Ctrl-S). A server that waited for
    its reader would keep all clients waiting, too, and a keeper would start no server again.

    Raises:
        OSError: it is closed at the other end, for example.
    """
    if sys.stderr is None:
        return False
    poll = select.poll()
    poll.register(sys.stderr.fileno(), select.POLLOUT)
    left = f"{text}\n".encode(errors="backslashreplace")
    while left:
        if not poll.poll(0):
            return False
        left = left[os.write(sys.stderr.fileno(), left[: select.PIPE_BUF]) :]
    return True


def started(store: str, address: str, strategy: str, volumes: Sequence[VolumeRecord]) -> None:
    """Log that a server accepts connections."""
    journal.info(
        "started: store %r at %s, pid %d; %d volume(s), %s bytes; strategy %s",
        *(store, address, os.getpid(), len(volumes)),
        f"{sum(volume.info.capacity_bytes for volume in volumes):,}",
        strategy,
    )


def restored(keys: int, sessions: int, took_s: float) -> None:
    """A server has taken over from one that has died."""
    journal.info(
        "restored: %d key(s), %d session(s), in %.3f s, from a server that has died",
        *(keys, sessions, took_s),
    )


def stopped(store: str, ran_s: float) -> None:
    """Log that a server has ended."""
    journal.info("stopped: store %r, after %.0f s", store, ran_s)


def more_than_memory(volumes: Sequence[VolumeRecord]) -> None:
    """Warn if the volumes of a host may grow larger than its memory."""
    hosts = {volume.info.topology.host_id: volume.info.topology for volume in volumes}
    for ident, host in hosts.items():
        there = [v.info for v in volumes if v.info.topology.host_id == ident]
        capacity = sum(info.capacity_bytes for info in there)
        if text := topology.capacity_warning(capacity, host.memory_bytes, host.hostname):
            journal.warning("%s", text)


def client_joined(session: SessionRecord, count: int) -> None:
    """Log that a client has opened a session; there are ``count`` sessions now."""
    level = logging.DEBUG if session.facts.role else logging.INFO  # tools join only briefly
    journal.log(level, "joined: %s; now %d", _client(session), count)


def client_left(session: SessionRecord, why: str, count: int) -> None:
    """Log that a session is about to end, what is undone, and that ``count`` others remain."""
    undone = _undone(session)
    level = logging.DEBUG if session.facts.role and not undone else logging.INFO
    more = f". Undone: {undone}" if undone else ""
    journal.log(level, "left: %s (%s); now %d%s", _client(session), why, count, more)


def process_died(session: SessionRecord) -> None:
    """Log that a session's process has died, if it has unfinished puts, which will be undone."""
    if undone := _undone(session):
        journal.info("died: %s. Undone: %s", _client(session), undone)


def volume_lost(volume: VolumeRecord, why: str) -> None:
    """Log that the memory of a volume is lost."""
    journal.warning(
        "lost: volume %s on %s is gone (%s), with what was there alone",
        *(volume.info.id, volume.info.topology.hostname, why),
    )


def keeper_is_full() -> None:
    """Log that the keeper cannot hold what is to outlive this server."""
    journal.warning(
        "the keeper, process %d, has no file descriptor left for what is to outlive this server; "
        "it is asked again every second. For more, raise its limit: LimitNOFILE= of a systemd "
        "unit, or `ulimit -n`",
        os.getppid(),
    )


def keeper_is_late() -> None:
    """Log that the keeper does not take what is to outlive this server."""
    journal.warning(
        "the keeper, process %d, takes nothing: it is stopped, or busy. Until it goes on, this "
        "server does not come back if it dies, and then nobody who has joined since has a session",
        os.getppid(),
    )


def _client(session: SessionRecord) -> str:
    """Describe a client in words."""
    facts = session.facts
    rank = "" if facts.rank is None else f", rank {facts.rank}"
    role = f" ({facts.role})" if facts.role else ""
    return f"pid {facts.pid} on {facts.hostname}{rank}{role}"


def _undone(session: SessionRecord) -> str:
    """Describe the unfinished puts of a session that is about to end; empty if it has none."""
    puts = list(session.txns.values())
    if not puts:
        return ""
    names = {target.key: None for put in puts for target, _ in put.contributions}
    names.update((value.key, None) for put in puts for value in put.plain)
    keys = ", ".join(map(repr, list(names)[:_KEYS])) + (", ..." if len(names) > _KEYS else "")
    count = "1 unfinished put" if len(puts) == 1 else f"{len(puts)} unfinished puts"
    return f"{count} of {sum(put.nbytes for put in puts):,} bytes ({keys})"


class Refusals:
    """Logs refused puts to a full store, at most once every few seconds however many there are."""

    def __init__(self) -> None:
        self._silent_until = 0.0
        self._unsaid = 0

    def refused(self, session: SessionRecord, error: StoreFullError) -> None:
        """Log that a put did not fit, or count it for the next line."""
        now = time.monotonic()
        if now < self._silent_until:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        self._silent_until, self._unsaid = now + _REFUSALS_EVERY_S, 0
        journal.info("full: refused %s%s: %s", _client(session), more, error.message)
