"""``python keeper.py JSON``: starts a server, and starts it again when it has died.

The keeper is the server's parent. It holds what must outlive the server (the descriptors of its
memory, of its log and of its socket), and does nothing else, so that it has no reason to die
itself. It imports only the standard library, is run by its path, and needs some 10 MB.

The server says over a socket pair what to keep, and that it is ready; see :mod:`.link`. If it then
ends other than with status 0, it is started again and given what was kept. A client that connects
meanwhile waits in the queue of the listening socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import select
import shutil
import signal
import socket
import sys
import time

# How often a server may die before clients can connect, and in how many seconds once more, before
# it is given up. A death after that counts less, so little that a server that is killed again
# whenever it has come up, which takes it an eighth of a second at best, is never given up: all that
# it has would be lost.
_MOST_DEATHS = 30.0
_SECONDS_A_DEATH = 0.5
_DEATH_WHEN_READY = 0.25
# How long a server may take to end when it is told to.
_END_S = 2.0
_LARGEST = 1 << 16
_MOST_DESCRIPTORS = 64


class Keeper:
    """Starts one server again and again.

    Args:
        command: of the server; what it was given to keep is added as a last argument.
        owner: pid of the process that started the keeper, with which it all ends.
    """

    def __init__(self, command: list[str], owner: int) -> None:
        self._command = command
        self._owner = owner
        self._owner_fd = -1
        self._owner_ended = False
        self._kept: dict[str, int] = {}
        self._facts: dict[str, str] = {}
        self._ready = False
        self._stopping = False
        self._pid = 0
        self._lives = 0

    def run(self) -> int:
        """Keep the server until it ends by itself; the exit status."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._stop)
        # Sets of names must have the same order in every life of the server.
        os.environ.setdefault("PYTHONHASHSEED", str(secrets.randbelow(1 << 32)))
        # One for each client, besides what the server has.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        try:
            return self._run()
        finally:
            if self._facts.get("own_directory") and (directory := self._facts.get("directory")):
                shutil.rmtree(directory, ignore_errors=True)

    def _run(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            self._owner_fd = os.pidfd_open(self._owner)
        deaths, then = 0.0, time.monotonic()
        while True:
            status = self._live()
            if status == 0 or self._stopping or not (self._lives > 1 or self._ready):
                return 0 if self._stopping else status
            now = time.monotonic()
            deaths = max(0.0, deaths - (now - then) / _SECONDS_A_DEATH)
            deaths += _DEATH_WHEN_READY if self._ready else 1.0
            then = now
            if deaths >= _MOST_DEATHS:
                _say(f"the server {_ended(status)}, as too often before; it is not started again")
                return 1
            _say(f"the server {_ended(status)}; starting it again")

    def _live(self) -> int:
        """One life of the server; its exit status, negative for a signal."""
        self._ready = False
        self._lives += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                self._pid = self._start(theirs.fileno())
            watch = os.pidfd_open(self._pid)
            try:
                self._attend(ours, watch)
                while self._hear(ours):  # its last words
                    pass
            finally:
                os.close(watch)
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return os.waitstatus_to_exitcode(status)

    def _start(self, connection: int) -> int:
        given = {
            "connection": connection,
            "kept": self._kept,
            "facts": self._facts,
            "life": self._lives,
            "owner_ended": self._owner_ended,
        }
        # In memory rather than in an argument, whose length is limited.
        paper = os.memfd_create("given")
        os.write(paper, json.dumps(given).encode())
        for fd in (paper, connection, *self._kept.values()):
            os.set_inheritable(fd, True)
        actions = []
        if self._lives > 1:  # whoever started the first one reads its line no more
            actions = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
        command = [*self._command, str(paper)]
        try:
            return os.posix_spawn(command[0], command, os.environ, file_actions=actions)
        finally:
            os.close(paper)

    def _attend(self, connection: socket.socket, watch: int) -> None:
        """Return when the server has ended."""
        deadline: float | None = None
        if self._stopping:  # it was told while there was no server
            self._stop()
        poll = select.poll()
        for fd in (connection.fileno(), watch):
            poll.register(fd, select.POLLIN)
        if self._owner_fd >= 0:
            poll.register(self._owner_fd, select.POLLIN)
        elif not self._owner_ended:
            self._owner_has_ended(connection)
        listening = True
        while True:
            if self._stopping and deadline is None:
                deadline = time.monotonic() + _END_S
            # In slices: a signal between two of these calls must not wait for the next event.
            events = dict(poll.poll(250))
            if watch in events:
                return
            if listening and connection.fileno() in events and not self._hear(connection):
                poll.unregister(connection.fileno())
                listening = False
            if self._owner_fd in events:
                poll.unregister(self._owner_fd)
                self._owner_has_ended(connection)
            if deadline is not None and time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)

    def _owner_has_ended(self, connection: socket.socket) -> None:
        self._owner_ended = True
        if self._owner_fd >= 0:
            os.close(self._owner_fd)
            self._owner_fd = -1
        with contextlib.suppress(OSError):  # it has just died, and is told when it starts again
            connection.send(b"owner ended", socket.MSG_DONTWAIT)

    def _hear(self, connection: socket.socket) -> bool:
        """Handle what the server has said; whether it may say more."""
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            data, fds, _, _ = socket.recv_fds(connection, _LARGEST, _MOST_DESCRIPTORS, flags)
        except OSError:
            return False
        if not data:
            return False
        said = json.loads(data)
        for name, fd in zip(said.get("keep", ()), fds, strict=True):
            if name in self._kept:
                os.close(self._kept[name])
            self._kept[name] = fd
        if (dropped := self._kept.pop(said.get("drop", ""), None)) is not None:
            os.close(dropped)
        self._facts.update(said.get("facts", {}))
        if said.get("ready"):
            self._ready = True
            if self._lives == 1:  # so that its reader sees the end of it
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)
                os.close(null)
        return True

    def _stop(self, *_: object) -> None:
        self._stopping = True
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def _say(text: str) -> None:
    """Warn people, unless they want to see errors alone (see ``serving.journal.LOG_LEVEL``)."""
    if os.environ.get("TORCHSTORE_LOG_LEVEL", "").upper() in ("ERROR", "CRITICAL", "FATAL"):
        return
    with contextlib.suppress(OSError):
        sys.stderr.write(f"torchstore keeper {os.getpid()}: {text}\n")
        sys.stderr.flush()


def main() -> int:
    """Entry point."""
    order = json.loads(sys.argv[1])
    return Keeper(order["command"], order["owner"]).run()


if __name__ == "__main__":
    sys.exit(main())
