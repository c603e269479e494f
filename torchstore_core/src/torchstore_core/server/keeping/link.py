"""The server's connection to its keeper."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from torchstore_core.errors import StoreFullError

if TYPE_CHECKING:
    from torchstore_core.server.keeping.log import Log


#: What a keeper says to a server besides ``kept NAME`` and ``unkept NAME``.
OWNER_ENDED = "owner ended"
#: What a server says when it has heard that, besides what it leaves with the keeper.
OWNER_ENDED_HEARD = "owner_ended_heard"

_LARGEST = 1 << 12
# A keeper that has taken nothing for so long is not merely late.
_LATE_S = 5.0
#: The name of the log that the next life repeats, and of the one that is to take its place.
LOG, NEXT_LOG = "log", "next log"


class Given(msgspec.Struct, frozen=True):
    """What a keeper gives a server that it starts.

    Args:
        connection: a descriptor, of the socket to the keeper.
        kept: descriptors that an earlier life of the server left with the keeper, by name.
        facts: texts that it left there.
        life: which one this is, from 1.
        owner_ended: whether the process that started the keeper has ended.
    """

    connection: int
    kept: dict[str, int]
    facts: dict[str, str]
    life: int
    owner_ended: bool


class KeeperLink:
    """Leaves things with the keeper, for the next life of this server. On its event loop.

    A keeper may be stopped (Ctrl-Z is for it alone), and clients are not to wait for it. So what it
    does not take waits here, in its order.

    Attributes:
        late: called on the event loop when the keeper has taken nothing for some seconds.
        unkept: called on the event loop with the name of a descriptor that the keeper could not
            hold, because it has none left: what it has under that name is what it had before. A
            server that is not ready yet is started anew instead.
    """

    def __init__(self, given: Given) -> None:
        self.life = given.life
        self.facts = given.facts
        self._kept = given.kept
        self._owner_ended = given.owner_ended
        self._socket = socket.socket(fileno=given.connection)
        self._socket.set_inheritable(False)
        self._socket.setblocking(False)
        self.unkept: Callable[[str], None] = _do_nothing
        self.late: Callable[[], None] = _do_nothing
        self._asked: dict[str, Callable[[bool], None]] = {}
        # Messages with copies of their descriptors; what is to be kept, by its name.
        self._unsaid: OrderedDict[object, tuple[bytes, list[int]]] = OrderedDict()
        self._late_timer: asyncio.TimerHandle | None = None

    def kept(self, name: str) -> int | None:
        """The descriptor of that name that an earlier life has left; from now on the caller's."""
        return self._kept.pop(name, None)

    def keep(self, name: str, fd: int, **facts: str) -> None:
        """Have the keeper hold a copy of a descriptor, and ``facts``, in place of what it has under
        that name. From then on it survives the server, unless :attr:`unkept` is called.
        """
        self._say({"keep": [name], "facts": facts}, name, fd)

    def ask_to_keep(self, name: str, fd: int, answered: Callable[[bool], None]) -> None:
        """The same; ``answered`` is called with whether the keeper holds it."""
        self._asked[name] = answered
        self._say({"keep": [name], "answer": True}, name, fd)

    def rename(self, name: str, to: str) -> None:
        """What the keeper has under one name takes the place of what it has under another.

        Raises:
            StoreFullError: the keeper takes nothing at this moment, so it does not.
        """
        if self._unsaid or not self._send(msgspec.json.encode({"rename": {name: to}}), ()):
            raise StoreFullError("the keeper takes nothing: it is stopped, or busy")

    def note(self, **facts: str) -> None:
        """Leave only texts there."""
        self._say({"facts": facts})

    def log(self) -> Log:
        """The log that an earlier life has left, or a new one."""
        from torchstore_core.server.keeping.log import Log  # which a client does not need

        if (unfinished := self.kept(NEXT_LOG)) is not None:
            os.close(unfinished)
            self.drop(NEXT_LOG)
        return Log(self.kept(LOG))

    def names(self) -> list[str]:
        """The names of what an earlier life has left, and nobody has taken yet."""
        return list(self._kept)

    def drop(self, name: str) -> None:
        """What has that name need not be held any more."""
        if (unsaid := self._unsaid.pop(name, None)) is not None:
            _close_all(unsaid[1])
        self._say({"drop": name})  # it may have one that was sent before

    def ready(self) -> None:
        """Clients can connect: from now on the server is started again if it dies."""
        self._say({"ready": True})

    def started(self, outcome: object) -> None:
        """Say once, to whoever has started all this, that the server has started, or why it
        cannot; as plain data.
        """
        if self.life == 1:
            self._say({"outcome": msgspec.to_builtins(outcome)})

    def _say(self, what: dict[str, object], name: str = "", *fds: int) -> None:
        """Say it, or have it wait, as what the keeper is to hold under ``name``."""
        said = msgspec.json.encode(what)
        if not self._unsaid and self._send(said, fds):
            return
        try:
            copies = list(map(os.dup, fds))
        except OSError:  # this server has no descriptor left
            self._heard("unkept", name)
            return
        if self._late_timer is None:
            loop = asyncio.get_running_loop()
            loop.add_writer(self._socket.fileno(), self._say_rest)
            self._late_timer = loop.call_later(_LATE_S, self.late)
        self._unsaid[object() if name in self._unsaid else name or object()] = said, copies

    def _send(self, said: bytes, fds: Sequence[int]) -> bool:
        """Send a message, if the keeper takes it now; whether nothing is left to be done."""
        try:
            socket.send_fds(self._socket, [said], fds)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            return True  # it has ended, and so will this server
        return True

    def _say_rest(self) -> None:
        """The keeper takes something again."""
        while self._unsaid:
            key, (said, fds) = next(iter(self._unsaid.items()))
            if not self._send(said, fds):
                return
            del self._unsaid[key]
            _close_all(fds)
        if self._late_timer is not None:
            self._late_timer.cancel()
            self._late_timer = None
            asyncio.get_running_loop().remove_writer(self._socket.fileno())

    def watch(self, owner_ended: Callable[[], None], keeper_ended: Callable[[], None]) -> None:
        """Call one of these, on the running event loop, when it has happened. From now on what the
        keeper answers is heard.
        """
        loop = asyncio.get_running_loop()

        def readable() -> None:
            try:
                data = self._socket.recv(_LARGEST)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data.decode() == OWNER_ENDED:
                self._say({OWNER_ENDED_HEARD: True})
                owner_ended()
            elif data:
                self._heard(*data.decode().split(" ", 1))
            else:
                loop.remove_reader(self._socket.fileno())
                keeper_ended()

        loop.add_reader(self._socket.fileno(), readable)
        if self._owner_ended:
            loop.call_soon(owner_ended)

    def _heard(self, answer: str, name: str) -> None:
        is_kept = answer == "kept"
        if (answered := self._asked.pop(name, None)) is not None:
            answered(is_kept)
        elif not is_kept:
            self.unkept(name)


def _do_nothing(*_: object) -> None:
    """Nobody wants to know."""


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
