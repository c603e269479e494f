"""The keeper: the parent of a server, which starts it again when it has died.

It holds what must outlive the server (the descriptors of its memory, of its log and of its socket),
and does nothing else, so that it has no reason to die itself. Each life of the server is a fork of
this process, which has imported all that a server needs and done nothing with it. So a start takes
no second interpreter, a start after a death imports nothing, and the memory of what was imported is
shared; sets of names have the same order in every life, because their hashes have the same seed.

The server says over a socket pair what to keep, and that it is ready; see :mod:`.link`. If it then
ends other than with status 0, it is started again and given what was kept. A client that connects
meanwhile waits in the queue of the listening socket.

Neither the keeper nor a server that starts again gives up for want of descriptors, or of processes:
it waits until there are some. For what the keeper cannot hold, the server is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import logging
import os
import select
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Container, Iterable
from typing import NoReturn

from torchstore_core.machine.processes import how_ended
from torchstore_core.machine.sockets.unix import OUT_OF_DESCRIPTORS
from torchstore_core.server.keeping.link import (
    OWNER_ENDED,
    OWNER_ENDED_HEARD,
    Given,
    KeeperLink,
)
from torchstore_core.server.serving.journal import write_to_stderr
from torchstore_core.server.serving.listening import raise_descriptor_limit

log = logging.getLogger(__name__)

# A server is given up when it has died so often before clients could connect; each half a second
# allows one death more. A death after clients could connect counts for so little that a server that
# comes up within some hundredths of a second is never given up, even if it is killed each time: all
# that it has would be lost.
_MOST_DEATHS = 30.0
_SECONDS_A_DEATH = 0.5
_DEATH_WHEN_READY = 1 / 32
#: How long a server may take to end when it is told to, if it leaves nothing elsewhere.
END_S = 2.0
# How long it may take to hear that the owner has ended, before it counts as one that hangs.
_HEAR_S = 15.0
# A message has at most what a volume says of itself, in base64 (``messages.MAX_HELLO_FRAME``).
_LARGEST = 1 << 17
_MOST_DESCRIPTORS = 64
_PR_SET_PDEATHSIG = 1  # of the kernel's include/uapi/linux/prctl.h
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Keeper:
    """Starts one server again and again. For a process without threads.

    Args:
        serve: runs the server, in a process of its own, with its connection to the keeper; returns
            the exit status.
        started: called once with what the server says when it has started, or why it cannot.
        owner: pid of the process with which it all ends; 0: no other process than this one.
        end_s: how many seconds the server may take to end when it is told to.
    """

    def __init__(
        self,
        serve: Callable[[KeeperLink], int],
        started: Callable[[dict[str, str | int]], None],
        owner: int = 0,
        end_s: float = END_S,
    ) -> None:
        self._end_s = end_s
        self._serve = serve
        self._started = started
        self._owner = owner
        self._owner_fd = -1
        self._owner_ended = False
        self._hear_by: float | None = None  # when the server must have heard that
        self._kept: dict[str, int] = {}
        self._facts: dict[str, str] = {}
        self._ready = False
        self._stopping = False
        self._failure: OSError | None = None  # why this life of the server ended at its start
        self._pid = 0
        self._lives = 0

    def run(self) -> int:
        """Keep the server until it ends by itself, or a signal says so; the exit status."""
        before = [signal.signal(signum, self._stop) for signum in _SIGNALS]
        raise_descriptor_limit()  # one for each client, besides what the server has
        gc.freeze()  # or the first collection would copy what this process and the server share
        try:
            return self._run()
        finally:
            for signum, handler in zip(_SIGNALS, before, strict=True):
                signal.signal(signum, handler)
            # Clients learn that this is the end. Memory and spill files, which may take the kernel
            # seconds, go with this process: then others see that it is exiting.
            for fd in self._kept.values():
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.close(fd)
            if self._facts.get("own_directory") and (directory := self._facts.get("directory")):
                shutil.rmtree(directory, ignore_errors=True)

    def _run(self) -> int:
        if self._owner:
            try:
                self._owner_fd = _pidfd(self._owner)
            except ProcessLookupError:
                self._owner_ended = True
        deaths, then = 0.0, time.monotonic()
        while True:
            self._failure = None
            status = self._live()
            if self._stopping:
                return 0
            if not (self._ready or self._lives > 1):
                if isinstance(status, OSError):
                    raise status
                return status
            if status == 0:
                return 0
            if isinstance(status, OSError) or status == os.EX_TEMPFAIL:
                deaths += self._pause()  # so this is given up only when the owner has ended
            now = time.monotonic()
            deaths = max(0.0, deaths - (now - then) / _SECONDS_A_DEATH)
            deaths += _DEATH_WHEN_READY if self._ready else 1.0
            then = now
            if deaths >= _MOST_DEATHS:
                _say(f"the server {_ended(status)}, as too often before; it is not started again")
                return 1
            _say(f"the server {_ended(status)}; starting it again")

    def _live(self) -> int | OSError:
        """One life of the server; its exit status, negative for a signal, or why there was none."""
        self._ready = False
        self._hear_by = None
        self._lives += 1
        with contextlib.ExitStack() as opened:
            try:
                pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                ours, theirs = map(opened.enter_context, pair)
                self._start(ours, theirs)
                theirs.close()
                watch = _pidfd(self._pid)
            except OSError as error:
                self._give_up_start(error)
            else:
                if watch >= 0:
                    opened.callback(os.close, watch)
                self._attend(ours, watch)
                while self._hear(ours):  # its last words
                    pass
        pid, self._pid = self._pid, 0
        status = os.waitpid(pid, 0)[1] if pid else 0
        return self._failure or os.waitstatus_to_exitcode(status)

    def _give_up_start(self, error: OSError) -> None:
        """At the moment, a server cannot be started, or not be kept."""
        self._failure = error
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)

    def _pause(self) -> float:
        """Wait while a server cannot be started. Returns 1 when the owner has ended: for those who
        may be left it is tried some 30 times more; 0 otherwise.
        """
        time.sleep(_SECONDS_A_DEATH)
        fds = () if self._owner_fd < 0 else (self._owner_fd,)
        if self._owner_is_over(select.select(fds, (), (), 0)[0]):
            self._let_owner_go()
        return float(self._owner_ended)

    def _owner_is_over(self, readable: Container[int]) -> bool:
        """Whether the owner has ended, which is not known to have. It is the parent."""
        if self._owner_fd >= 0:
            return self._owner_fd in readable
        return bool(self._owner) and not self._owner_ended and os.getppid() != self._owner

    def _let_owner_go(self) -> None:
        self._owner_ended = True
        if self._owner_fd >= 0:
            os.close(self._owner_fd)
            self._owner_fd = -1

    def _start(self, ours: socket.socket, theirs: socket.socket) -> None:
        """Fork. In the child, run the server.

        Raises:
            OSError: the system, or the limit of a container, allows no more processes.
        """
        # A signal that comes in between is handled by the process that it was sent to.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self._pid = os.fork()
            if not self._pid:
                for signum in _SIGNALS:
                    signal.signal(signum, signal.SIG_DFL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not self._pid:
            ours.close()
            self._be_server(theirs.detach())

    def _be_server(self, connection: int) -> NoReturn:
        """Run the server, and end."""
        status = 1
        try:
            os.setsid()  # Ctrl-C is for the keeper, which then stops the server
            # Without the keeper, nobody would end this server or start it again.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1):
                os.dup2(null, stream)
            os.close(null)
            if self._owner_fd >= 0:
                os.close(self._owner_fd)
            kept, facts = self._kept, self._facts
            given = Given(connection, kept, facts, self._lives, self._owner_ended)
            status = self._serve(KeeperLink(given))
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in OUT_OF_DESCRIPTORS:
                status = os.EX_TEMPFAIL
                log.error("the server has no file descriptor left: %s", error)
            else:
                log.exception("the server has failed")
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _attend(self, connection: socket.socket, watch: int) -> None:
        """Return when the server has ended."""
        deadline: float | None = None
        if self._stopping:  # it was told while there was no server
            self._stop()
        poll = select.poll()
        for fd in (connection.fileno(), watch, self._owner_fd):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        listening = True
        while True:
            if self._stopping and deadline is None:
                deadline = time.monotonic() + self._end_s
            # In slices: a signal between two of these calls must not wait for the next event.
            events = dict(poll.poll(250 if listening or watch >= 0 else 10))
            if watch in events or (watch < 0 and self._server_is_over()):
                return
            if listening and connection.fileno() in events and not self._hear(connection):
                poll.unregister(connection.fileno())
                listening = False
            if self._owner_is_over(events):
                if self._owner_fd >= 0:
                    poll.unregister(self._owner_fd)
                self._owner_has_ended(connection)
            if deadline is not None and time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
            self._end_if_it_hangs()

    def _server_is_over(self) -> bool:
        ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended is not None

    def _end_if_it_hangs(self) -> None:
        """Kill a server that does not hear that its owner has ended: a plug-in may keep it busy for
        ever, and then nobody else would end it. Its next life knows from the start.
        """
        if self._hear_by is not None and time.monotonic() > self._hear_by:
            self._hear_by = None
            _say(f"the server has been busy for {_HEAR_S:.0f} s since its owner ended; killing it")
            os.kill(self._pid, signal.SIGKILL)

    def _owner_has_ended(self, connection: socket.socket) -> None:
        self._let_owner_go()
        self._hear_by = time.monotonic() + _HEAR_S
        self._tell(connection, OWNER_ENDED)  # or when it starts again, if it has just died

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
        names = said.get("keep", ())
        if len(fds) < len(names):  # there are no descriptors left: the system keeps back the rest
            for fd in fds:
                os.close(fd)
            self._tell_unkept(connection, names)
            return True
        for name, fd in zip(names, fds, strict=True):
            self._let_go(name)
            self._kept[name] = fd
            if said.get("answer"):
                self._tell(connection, f"kept {name}")
        for before, name in said.get("rename", {}).items():
            if before in self._kept:
                self._let_go(name)
                self._kept[name] = self._kept.pop(before)
        self._let_go(said.get("drop", ""))
        self._facts.update(said.get("facts", {}))
        if said.get("ready"):
            self._ready = True
        if said.get(OWNER_ENDED_HEARD):
            self._hear_by = None
        if "outcome" in said:
            self._started(said["outcome"])
        return True

    def _let_go(self, name: str) -> None:
        if (fd := self._kept.pop(name, None)) is not None:
            os.close(fd)

    def _tell_unkept(self, connection: socket.socket, names: Iterable[str]) -> None:
        """These descriptors do not outlive the server. One that is starting cannot do without."""
        if not self._ready:
            self._give_up_start(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        for name in names:
            self._tell(connection, f"unkept {name}")

    def _tell(self, connection: socket.socket, what: str) -> None:
        with contextlib.suppress(OSError):  # it has just died
            connection.send(what.encode(), socket.MSG_DONTWAIT)

    def _stop(self, *_: object) -> None:
        self._stopping = True
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)


def _pidfd(pid: int) -> int:
    """A descriptor that becomes readable when a process ends; -1 where there are none: in gVisor,
    for example, or where a container's filter of system calls is older than they are.

    Raises:
        OSError: there is no such process, or no descriptor left.
    """
    try:
        return os.pidfd_open(pid)
    except AttributeError:
        return -1
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        return -1


def _ended(status: int | OSError) -> str:
    return f"cannot be started: {status}" if isinstance(status, OSError) else how_ended(status)


def _say(text: str) -> None:
    """Warn people, unless they want to see errors alone (see ``serving.journal.LOG_LEVEL``)."""
    if os.environ.get("TORCHSTORE_LOG_LEVEL", "").upper() in ("ERROR", "CRITICAL", "FATAL"):
        return
    with contextlib.suppress(OSError):
        write_to_stderr(f"torchstore keeper {os.getpid()}: {text}")
