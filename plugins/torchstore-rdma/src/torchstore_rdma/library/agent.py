"""NIXL, as this package uses it: agents without threads, with one UCX backend each.

Three properties of the library decide how it is used here; all were measured.

* Its own progress thread polls without a pause and takes a whole processor for each agent. So it is
  switched off, and whoever waits for something calls the library again and again (``pacing``).
* To deregister memory, to remove a remote agent, or to release a transfer that is under way stops
  nothing: the bytes still arrive. Only when the agent is destroyed nothing moves through it.
* It is not safe for threads: an agent belongs to one thread at a time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_rdma.library import ucx
from torchstore_rdma.library.lists import Lists, Prepared
from torchstore_rdma.plugin import LIBRARY
from torchstore_transports.listeners import listeners

if TYPE_CHECKING:
    import numpy as np

    from torchstore_rdma.layout import Part

__all__ = ["EVERYTHING", "Agent", "Transfer", "check_not_forked"]

#: All addresses of a process, as ``(address, nbytes)``: where registering costs nothing.
EVERYTHING = 1 << 16, (1 << 48) - (1 << 17)

_HOST = "DRAM"
# What precedes a port in the address of a worker of UCX: it is the device's last, of two bytes.
_PORT = b"\x82"
_loading = threading.Lock()
_loaded_by = 0
# The libraries read these when they are loaded. They would write warnings to the standard output.
_QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "error", "UCX_LOG_FILE": "stderr"}


@contextmanager
def _quietly() -> Iterator[None]:
    added = [name for name in _QUIET if name not in os.environ]
    os.environ.update({name: _QUIET[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def check_not_forked() -> None:
    """NIXL has threads and sockets that a forked process does not have, or shares.

    Raises:
        TransportUnavailableError: this process was forked from one that had loaded NIXL.
    """
    if _loaded_by not in (0, os.getpid()):
        raise TransportUnavailableError("NIXL was loaded before this process was forked")


def _load() -> Any:
    global _loaded_by
    check_not_forked()
    try:
        loaded = import_module(LIBRARY[0])
    except (ImportError, OSError) as error:
        raise TransportUnavailableError(f"NIXL cannot be loaded: {error}") from error
    _loaded_by = os.getpid()
    return loaded


def _errors() -> tuple[type[Exception], ...]:
    bindings = import_module(f"{LIBRARY[0]}._bindings")
    return tuple(
        one
        for name, one in vars(bindings).items()
        if name.endswith("Error") and isinstance(one, type) and issubclass(one, Exception)
    )


def _described(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, int, str]]:
    return [(address, nbytes, 0, "") for address, nbytes in ranges]


class Transfer:
    """Some bytes that are under way. Released when it is done, or with its agent."""

    __slots__ = ("_agent", "_handle", "_used")

    def __init__(self, agent: Agent, handle: Any, used: Sequence[Prepared]) -> None:
        self._agent = agent
        self._handle = handle
        self._used = used

    def start(self) -> bool:
        """Begin; whether it is done already. Between processes of one host UCX copies right here,
        without holding the interpreter's lock.

        Raises:
            TransportError: it failed.
        """
        return self._agent.state(lambda nixl: nixl.transfer(self._handle))

    def is_done(self) -> bool:
        """Have the library go on with what is under way.

        Raises:
            TransportError: it failed; the peer may have died.
        """
        return self._agent.state(lambda nixl: nixl.check_xfer_state(self._handle))

    def release(self) -> None:
        """Only when it is done."""
        self._handle.release()
        self._agent.give_back(self._used)


class Agent:
    """An agent of the library. It must be used by one thread at a time.

    Attributes:
        listening: the sockets at which peers may connect to it over TCP, by their inodes.

    Args:
        name: unique among all agents that may meet it; short, and without a slash.
        options: of its UCX backend.

    Raises:
        TransportUnavailableError: the library cannot be loaded, or finds no way to communicate.
    """

    def __init__(self, name: str, options: Mapping[str, str]) -> None:
        self._name = name
        with _loading, _quietly():
            library = _load()
            self._errors = _errors()
            config = library.nixl_agent_config(enable_prog_thread=False, backends=[])
            before = {one.inode for one in listeners()}
            self._agent: Any = library.nixl_agent(name, config)
            self._lists = Lists(self._prepared)
            try:
                self._agent.create_backend("UCX", dict(options))
            except self._errors as error:
                raise TransportUnavailableError(f"UCX cannot start: {error}") from error
            self._to_itself = ucx.endpoints(name)
            told = self.metadata()
            self.listening = frozenset(
                one.inode
                for one in listeners()
                if one.inode not in before and _PORT + one.port.to_bytes(2, "big") in told
            )

    def metadata(self) -> bytes:
        """What a peer needs to reach this agent and the memory registered with it."""
        return bytes(self._agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        """Learn of a peer; its name.

        Raises:
            TransportError: this is no metadata of the same library.
        """
        try:
            name = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise TransportError(f"the peer's metadata cannot be used: {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def route(self) -> str:
        """Over what UCX has connected to the peer, in words; empty if it does not tell. A transfer
        has ended before.
        """
        to_peer = ucx.endpoints(self._name) - self._to_itself
        return ucx.words(lane for one in sorted(to_peer) for lane in ucx.lanes(one))

    def register(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Register host memory, given as ``(address, nbytes)``: all of it or, if this raises, none.

        Raises:
            TorchStoreError: the system refuses (a limit of locked memory, for example).
        """
        try:
            self._agent.register_memory(_described(ranges), _HOST)
        except self._errors as error:
            total = sum(nbytes for _, nbytes in ranges)
            raise TransportError(f"{total} bytes cannot be registered: {error}") from error

    def deregister(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Forget what was registered. Peers may still reach the memory for a while. A destroyed
        agent has forgotten everything.
        """
        if self._agent is not None and ranges:
            self._lists.forget(ranges)  # they refer to what is registered
            self._agent.deregister_memory(self._agent.get_reg_descs(_described(ranges), _HOST))

    def progress(self) -> None:
        """Have the library do what peers want of it."""
        with contextlib.suppress(*self._errors):  # a peer that has gone
            self._agent.get_new_notifs()

    def prepare(
        self,
        peer: str,
        part: Part,
        *,
        write: bool,
    ) -> Transfer:
        """Prepare to move memory of this process to the peer's, or the other way round.

        Raises:
            TransportError: a range is not registered.
        """
        used: list[Prepared] = []
        try:
            for whose, rows in (("", part.local), (peer, part.remote)):
                used.append(self._lists.take(whose, rows, len(part.indices)))
            handle = self._agent.make_prepped_xfer(
                "WRITE" if write else "READ",
                used[0].handle,
                part.indices,
                used[1].handle,
                part.indices,
            )
        except self._errors as error:
            self.give_back(used)
            raise TransportError(f"NIXL refuses the transfer: {error}") from error
        return Transfer(self, handle, used)

    def _prepared(self, whose: str, rows: np.ndarray[Any, Any]) -> Any:
        return self._agent.prep_xfer_dlist(whose, rows, _HOST)

    def give_back(self, used: Sequence[Prepared]) -> None:
        """A transfer needs these lists no more."""
        self._lists.give_back(used)

    def state(self, ask: Any) -> bool:
        """Whether a transfer is done.

        Raises:
            TransportError: it failed.
        """
        try:
            state = ask(self._agent)
        except self._errors as error:
            raise TransportError(f"the transfer failed: {type(error).__name__}") from error
        if state == "ERR":
            raise TransportError("the transfer failed")
        return bool(state == "DONE")

    def close(self) -> bool:
        """Destroy it: afterwards nothing moves. All of its transfers must have been dropped.

        Returns:
            Whether it has been destroyed. False if something still refers to it.
        """
        left = weakref.ref(self._agent.agent)
        self._lists.clear()
        self._agent = None
        if left() is not None:
            gc.collect()
        return left() is None
