"""How the two ends of a pair meet: through a small key-value store at the server half.

Libraries expect a ``torch.distributed`` store that both ends reach. Here, the server half holds the
values, and the calls of the link's end travel in handshakes, so that no port has to be opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any

from torchstore_core.errors import TransportError
from torchstore_transports.pairs.pair import TIMEOUT_S, Store
from torchstore_transports.pairs.protocol import StoreCall, encode
from torchstore_transports.pairs.threads import before_exit

__all__ = ["Board", "LocalStore", "PairStore", "RemoteStore"]

_MAX_KEYS = 1024


class Board:
    """The values of one rendezvous. Thread-safe."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def close(self) -> None:
        """Give up the rendezvous: all calls raise, including those that wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def call(self, call: StoreCall) -> bytes:
        """Execute a call of the other end. Blocks for at most :data:`TIMEOUT_S`.

        Raises:
            TransportError: the value was not set in time, or there is no such method.
        """
        match call.method:
            case "set":
                self.set(call.key, call.value)
                return b""
            case "wait":
                return self.wait(call.key)
            case "add":
                return str(self.add(call.key, call.amount)).encode()
        raise TransportError(f"a rendezvous has no method {call.method!r}")

    def set(self, key: str, value: bytes) -> None:
        """Store a value.

        Raises:
            TransportError: there are too many values already, or the rendezvous was given up.
        """
        with self._changed:
            if self._closed:
                raise TransportError("the rendezvous was given up")
            if len(self._values) >= _MAX_KEYS and key not in self._values:
                raise TransportError(f"a rendezvous has at most {_MAX_KEYS} keys")
            self._values[key] = value
            self._changed.notify_all()

    def wait(self, key: str, timeout_s: float = TIMEOUT_S) -> bytes:
        """Wait for a value, and return it.

        Raises:
            TransportError: the value was not set in time, or the rendezvous was given up.
        """
        with self._changed:
            known = self._changed.wait_for(lambda: self._closed or key in self._values, timeout_s)
            if self._closed:
                raise TransportError("the rendezvous was given up")
            if not known:
                raise TransportError(f"the other end has not set {key!r} within {timeout_s:g} s")
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return the sum.

        Raises:
            TransportError: there are too many values already, or the rendezvous was given up.
        """
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self.set(key, str(total).encode())
            return total


class PairStore(Store):
    """What both ends' stores have in common. Libraries call a store from their own threads.

    Attributes:
        before_call: called before each use of the store, when a library has already read its
            environment variables.
        told: the values that this end has set.
    """

    before_call: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bytes] = []

    @abstractmethod
    def _call(self, call: StoreCall) -> bytes:
        """Pass a call to the board: directly at the server half, by a handshake at the link."""

    def set(self, key: str, value: Any) -> None:  # it is bytes, whatever the base class says
        self.before_call()
        self.told.append(bytes(value))
        self._call(StoreCall(0, "set", key, value=self.told[-1]))

    def get(self, key: str) -> bytes:
        self.before_call()
        return self._call(StoreCall(0, "wait", key))

    def add(self, key: str, amount: int) -> int:
        self.before_call()
        return int(self._call(StoreCall(0, "add", key, amount=amount)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        for key in keys:
            self.get(key)
            if time.monotonic() > deadline:
                raise TransportError(f"{keys} were not all set within {TIMEOUT_S:g} s")


class LocalStore(PairStore):
    """The store of the server half's end."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self._board = board

    def _call(self, call: StoreCall) -> bytes:
        return self._board.call(call)


class RemoteStore(PairStore):
    """The store of the link's end: every call is a handshake on the event loop that is connecting.

    Args:
        pair: the number that the server half has given to the pair.
        handshake: see ``LinkContext.handshake``.
    """

    def __init__(self, pair: int, handshake: Callable[[bytes], Awaitable[bytes]]) -> None:
        super().__init__()
        self._pair = pair
        self._handshake = handshake
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: set[Future[bytes]] = set()
        self._tasks: set[asyncio.Future[bytes]] = set()
        self._closed = False
        before_exit(self, RemoteStore.close)

    def close(self) -> None:
        """Give up connecting: all calls raise, including those that wait."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, set()
        for one in waiting:
            _end(one, TransportError("the rendezvous was given up"))

    def _call(self, call: StoreCall) -> bytes:
        request = encode(StoreCall(self._pair, call.method, call.key, call.value, call.amount))
        answer: Future[bytes] = Future()
        with self._lock:
            if self._closed:
                raise TransportError("the rendezvous was given up")
            self._waiting.add(answer)
        try:
            self._loop.call_soon_threadsafe(self._ask, request, answer)
            return answer.result(2 * TIMEOUT_S)
        except RuntimeError as error:
            raise TransportError("the event loop that was connecting has ended") from error
        finally:
            with self._lock:
                self._waiting.discard(answer)

    def _ask(self, request: bytes, answer: Future[bytes]) -> None:
        """Start the handshake. Runs on the event loop."""
        if answer.done():
            return
        task = asyncio.ensure_future(self._handshake(request))
        self._tasks.add(task)

        def ended(task: asyncio.Future[bytes]) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                _end(answer, TransportError("the rendezvous was given up"))
            elif (error := task.exception()) is not None:
                _end(answer, error)
            else:
                _end(answer, task.result())

        task.add_done_callback(ended)


def _end(answer: Future[bytes], outcome: bytes | BaseException) -> None:
    """Set the outcome, unless another thread has already set one."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, bytes):
            answer.set_result(outcome)
        else:
            answer.set_exception(outcome)
